"""tuner profile: run or resume the measured trials of a search."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import MeasureOptions, Show, given, unpacks
from tuner.errors import one_problem

SHORT = "Run, resume or extend the measured trials of a search"
HELP = """\
Run, resume or extend the measured trials of a search in the folder that `tuner search --profile N -o DIR` wrote.

Runs that ended are not repeated; those that a kill left behind are ended, taken over or repeated. Options given here replace those of
DIR/job.yaml, so --profile 16 after 8 runs makes 8 more.

\b
Examples:
  tuner profile out
  tuner profile out --profile 16
"""


@unpacks
def profile(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="What --out was", show_default=False)],
    *,
    measure: MeasureOptions,
    show: Show,
) -> None:
    """Resume a measured search."""

    def go() -> int:
        from pathlib import Path

        from tuner.cli.search import run

        job = Path(folder) / "job.yaml"
        if not job.is_file():
            raise one_problem("DIR", "", folder, "has no job.yaml", "the folder that `tuner search --profile N -o DIR` wrote")
        from tuner import workflow

        question = {"job": str(job), **given(measure)}
        if not workflow.measures(**question):
            raise one_problem("DIR", "", folder, "is of a search that asks for no runs", "--profile N or --budget 12gpu-h")
        return run(question, dataclasses.replace(show, out=show.out or folder))

    guarded(go, show)


VERB = profile
