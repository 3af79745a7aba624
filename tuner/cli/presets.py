"""tuner presets: what is known."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import KINDS, Show, unpacks

SHORT = "What is known"
HELP = """\
What is known: accelerators, clusters, models, frameworks, calibrations, worked examples.

A model's NAME may also be a YAML file or a Hugging Face config.json: its parameters are counted.

\b
Examples:
  tuner presets
  tuner presets models
  tuner presets gpu h100-sxm-80gb
  tuner presets model ./config.json --json
"""


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    from tuner import presets
    from tuner.shelf import kind_of

    return [name for name in presets.names(kind_of(str(ctx.params.get("kind")))) if name.startswith(incomplete)]


@unpacks
def presets(
    kind: Annotated[Optional[str], typer.Argument(metavar="[KIND]", help=", ".join(KINDS), autocompletion=_kinds)] = None,  # noqa: UP045
    name: Annotated[Optional[str], typer.Argument(metavar="[NAME]", help="One of them, or a file", autocompletion=_names)] = None,  # noqa: UP045
    *,
    show: Show,
) -> None:
    """List presets, or show one."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.publish import publish
        from tuner.report.presets import kinds_text, list_text, one_text

        answer = workflow.presets(kind, name)
        publish(answer.record(), kinds_text if kind is None else list_text if name is None else one_text, show)
        return 0

    guarded(run, show)


VERB = presets
