"""tuner validate: how wrong is the model on these measured rows?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import Show, named_calibration, unpacks

SHORT = "How wrong the model is on measured runs"
HELP = """\
How wrong the model is on measured runs (JSONL files, one run a line) and on measured operators (Parquet tables).

Prints the errors of time and memory, fits against out of memory, and how well each series of layouts is ranked. Rows that do
not state enough are skipped, with the reason. --cross adds the scores where each row is foretold by a calibration that has not seen
its series, its model or its source. A table's name says operator and GPU (gemm_h100_sxm.parquet); reading one needs the extra
`operators`.

\b
Examples:
  tuner validate runs.jsonl
  tuner validate published/*.jsonl --calibration none --json
  tuner validate published/*.jsonl --cross
  tuner validate --operators gemm_h100_sxm.parquet nccl_h100_sxm.parquet
"""


@unpacks
def validate(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="JSONL files of measured runs, Parquet tables", show_default=False)
    ] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option("--operators", metavar="TABLE", help="Parquet tables of measured operators", show_default=False),
    ] = None,
    calibration: Annotated[str, named_calibration("auto (default), none for hardware figures alone, a preset or a file")] = "auto",
    cross: Annotated[bool, typer.Option("--cross", help="Also foretell each row without its series, its model, its source")] = False,
    *,
    show: Show,
) -> None:
    """Score the model on measured rows."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.output import Progress
        from tuner.cli.publish import publish
        from tuner.report.validate import validate_text

        with Progress(show.quiet) as progress:
            answer: Any = workflow.validate(files or (), operators=operators or (), calibration=calibration, cross=cross, progress=progress)
        publish(answer.record(), validate_text, show)
        return 0

    guarded(run, show)


VERB = validate
