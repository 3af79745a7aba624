"""tuner presets: what is known."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import KINDS, Show, unpacks

SHORT = "What is known"
HELP = """\
What is known: accelerators, clusters, models, frameworks, calibrations, worked examples.

A model's NAME may also be a YAML file or a Hugging Face config.json: its parameters are counted. A cluster's NAME may be "local": this
machine, as it was detected (local:N for N accelerators, or N CPU processes where there are none). With -o FILE.yaml a cluster is written
as a file for --cluster.

\b
Examples:
  tuner presets
  tuner presets models
  tuner presets gpu h100-sxm-80gb
  tuner presets model ./config.json --json
  tuner presets cluster local -o mine.yaml
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

        if kind in ("cluster", "clusters") and name is not None and str(show.out or "").lower().endswith((".yaml", ".yml")):
            return _write_cluster(name, show)
        answer = workflow.presets(kind, name)
        publish(answer.record(), kinds_text if kind is None else list_text if name is None else one_text, show)
        return 0

    guarded(run, show)


def _write_cluster(name: str, show: Show) -> int:
    """Write a cluster's file, and say what was seen, what was assumed and what is left to fill in."""
    from tuner import workflow
    from tuner.cli.output import out_path, write_file
    from tuner.cli.publish import note

    found = workflow.cluster_file(name)
    path = out_path(str(show.out))
    write_file(path, found.text)
    for line in (*(f"seen: {line}" for line in found.seen), *(f"assumed: {line}" for line in found.assumed)):
        note(line, show)
    note(f"wrote {path}" + (f"; fill in {', '.join(found.missing)}" if found.missing else ""), show)
    return 1 if found.missing else 0


VERB = presets
