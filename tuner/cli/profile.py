"""tuner profile: run or resume the measured trials of a search."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import MeasureOptions, Show, given, unpacks
from tuner.errors import Problem, SpecError, one_problem

if TYPE_CHECKING:
    from pathlib import Path

NTP = "Nonuniform tensor parallelism"
TAKEN = ("steps", "trial_time")  # what --ntp takes of the options of measured trials

SHORT = "Run, resume or extend the measured trials of a search"
HELP = """\
Run, resume or extend the measured trials of a search in the folder that `tuner search --profile N -o DIR` wrote.

Runs that ended are not repeated; those that a kill left behind are ended, taken over or repeated. Options given here replace those of
DIR/job.yaml, so --profile 16 after 8 runs makes 8 more.

With --ntp, and no DIR, replicas of different tensor-parallel degree (nonuniform tensor parallelism) are trained on this machine for a few
steps, beside uniform ones: step times, how long resharding takes and how much of it the backward hides, what it moves. With --lose, that
rank is killed (SIGKILL) in the midst of a step instead, and the others go on without it, in place: how long that takes.

\b
Examples:
  tuner profile out
  tuner profile out --profile 16
  tuner profile --ntp --degrees 4,3
  tuner profile --ntp --degrees 4,4 --lose 6
"""


@unpacks
def profile(
    folder: Annotated[str | None, typer.Argument(metavar="[DIR]", help="What --out was", show_default=False)] = None,
    ntp: Annotated[bool, typer.Option("--ntp", help="Run a nonuniform tensor-parallel step", rich_help_panel=NTP)] = False,
    degrees: Annotated[
        str | None, typer.Option("--degrees", metavar="N,N", help="tp of each, the healthy first (4,3)", rich_help_panel=NTP)
    ] = None,
    lose: Annotated[str | None, typer.Option("--lose", metavar="RANK", help="Kill it, and go on without it", rich_help_panel=NTP)] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="Of the run (tiny)", rich_help_panel=NTP)] = None,
    seq: Annotated[str | None, typer.Option("--seq", "-s", metavar="N", help="Tokens of a sequence (128)", rich_help_panel=NTP)] = None,
    batch: Annotated[
        str | None, typer.Option("--global-batch", "-b", metavar="N", help="Sequences of a step (16)", rich_help_panel=NTP)
    ] = None,
    micro_batch: Annotated[
        str | None, typer.Option("--micro-batch", metavar="N", help="Sequences of a micro batch (1)", rich_help_panel=NTP)
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", metavar="NAME", help="fp32 or bf16 (fp32)", rich_help_panel=NTP)] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Cut sequences over tensor-parallel ranks", rich_help_panel=NTP)
    ] = False,
    *,
    measure: MeasureOptions,
    show: Show,
) -> None:
    """Resume a measured search, or run nonuniform steps."""
    question = {"degrees": degrees, "lose": lose, "model": model, "seq_len": seq, "global_batch": batch}
    question |= {"micro_batch": micro_batch, "precision": precision}
    asked: dict[str, Any] = {name: value for name, value in question.items() if value is not None}
    if sequence_parallel:
        asked["sequence_parallel"] = True
    guarded(lambda: _nonuniform(folder, asked, given(measure), show) if ntp else _resume(folder, asked, measure, show), show)


def _nonuniform(folder: str | None, asked: dict[str, Any], measure: dict[str, Any], show: Show) -> int:
    from tuner import workflow
    from tuner.cli.output import Progress, out_path
    from tuner.cli.publish import publish
    from tuner.report.nonuniform import nonuniform_text

    problems = [
        Problem(where=name, path="", value=str(value), rule="means nothing to --ntp")
        for name, value in measure.items()
        if name not in TAKEN
    ]
    if folder is not None:
        problems.append(Problem(where="DIR", path="", value=folder, rule="means nothing to --ntp", hint="-o DIR keeps its log"))
    if problems:
        raise SpecError(problems)
    kept = None if show.out is None or show.out.endswith(".json") else out_path(show.out)
    with Progress(show.quiet) as progress:
        answer = workflow.profile_ntp(progress=progress, folder=kept, **{name: measure.get(name) for name in TAKEN}, **asked)
    record = answer.record()
    publish(record, nonuniform_text, show, None if kept is None else partial(_write, record))
    return 0


def _write(record: dict[str, Any], folder: Path) -> list[str]:
    from tuner.cli.output import json_text, write_file

    write_file(folder / "profile.json", json_text(record))
    return ["profile.json", "log.txt", "ntp.json"]


def _resume(folder: str | None, asked: dict[str, Any], measure: MeasureOptions, show: Show) -> int:
    from pathlib import Path

    from tuner import workflow
    from tuner.cli.search import run

    problems = [Problem(where=name, path="", value=str(value), rule="concerns --ntp alone") for name, value in asked.items()]
    if folder is None:
        hint = "the folder that `tuner search --profile N -o DIR` wrote, or --ntp"
        problems.append(Problem(where="DIR", path="", value="", rule="is missing", hint=hint))
    if problems or folder is None:
        raise SpecError(problems)
    job = Path(folder) / "job.yaml"
    if not job.is_file():
        raise one_problem("DIR", "", folder, "has no job.yaml", "the folder that `tuner search --profile N -o DIR` wrote")
    question = {"job": str(job), **given(measure)}
    if not workflow.measures(**question):
        raise one_problem("DIR", "", folder, "is of a search that asks for no runs", "--profile N or --budget 12gpu-h")
    return run(question, dataclasses.replace(show, out=show.out or folder))


VERB = profile
