"""tuner calibrate: what do my own measured runs teach the model?"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import Show, unpacks

SHORT = "A calibration from your own measured runs"
HELP = """\
A calibration from your own measured runs: JSONL files, one run a line, of one framework.

Each run is foretold without itself: by the shipped calibration, by your runs beside the shipped ones, and by your runs alone. What is
clearly better than the shipped calibration is written to --out, for --calibration; if nothing is, nothing is written and the exit code
is 1. Three different layouts are the least. What is written goes to --calibration of any verb.

\b
Examples:
  tuner calibrate runs.jsonl -o ours.yaml
"""


@unpacks
def calibrate(
    files: Annotated[list[str], typer.Argument(metavar="ROWS...", help="JSONL files of measured runs", show_default=False)],
    show: Show,
) -> None:
    """Fit a calibration to measured rows."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.output import out_path, write_file
        from tuner.cli.publish import note, publish
        from tuner.report.calibrate import calibrate_text

        path = None if show.out is None else out_path(show.out)
        answer = workflow.calibrate(files, **({} if path is None else {"name": path.stem}))
        if path is not None and answer.text:
            write_file(path, answer.text)
            note(f"wrote {path}", show)
        publish(answer.record(), calibrate_text, dataclasses.replace(show, out=None))
        return 0 if answer.text else 1

    guarded(run, show)


VERB = calibrate
