"""tuner calibrate --measure, --nccl-log, --timings: a calibration of a machine instead of a framework."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli.options import PRECISIONS, Text, Texts
from tuner.errors import one_problem

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.cli.options import Show

PANEL = "This machine"
MEASURED = PRECISIONS[:3]
HELP = """\
--measure times matrix products, attention, memory-bound kernels and collectives on this machine's accelerators, or on CPU processes where
there are none, in about --budget seconds; --nccl-log reads tables of nccl-tests, --timings what was measured elsewhere
(`torchrun ... -m tuner.launch.microbench -o FILE`). The calibration holds for any framework; the raw timings go to FILE.timings.jsonl.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Which timings of a machine are read or taken."""

    measure: Annotated[bool, typer.Option("--measure", help="Time this machine's operators and links", rich_help_panel=PANEL)] = False
    nccl_log: Annotated[
        Texts,
        typer.Option(
            "--nccl-log", metavar="FILE", help="Log of all_reduce_perf etc. (repeatable)", rich_help_panel=PANEL, show_default=False
        ),
    ] = None
    timings: Annotated[
        Texts,
        typer.Option("--timings", metavar="FILE", help="Timings taken before (repeatable)", rich_help_panel=PANEL, show_default=False),
    ] = None
    budget: Annotated[
        Text, typer.Option("--budget", metavar="SECONDS", help="Time to measure (60)", rich_help_panel=PANEL, show_default=False)
    ] = None

    @property
    def asked(self) -> bool:
        """Whether a machine is meant, not a framework's runs."""
        return bool(self.measure or self.nccl_log or self.timings)


def calibrate_machine(options: MachineOptions, job: dict[str, Any], rows: list[str], path: Path | None, show: Show) -> int:
    """Measure or read, print what it gave, and write the calibration and the timings. Raises SpecError beside a framework's runs."""
    if rows:
        rule = "are of a framework; --measure, --nccl-log and --timings are of a machine"
        raise one_problem("rows", "", rows[0], rule, "two calls of calibrate")
    for name in job:
        if name not in ("cluster", "precision"):
            rule = "is about runs; --measure, --nccl-log and --timings are of a machine"
            raise one_problem(name, "", job[name], rule, "leave it out")
    from tuner import workflow
    from tuner.cli.output import Progress, write_file
    from tuner.cli.publish import note, publish
    from tuner.report.machine import machine_text

    given: dict[str, Any] = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    given |= {name: job.get(name) for name in ("cluster", "precision")}
    with Progress(show.quiet) as progress:
        answer = workflow.calibrate_machine(**given, name=path.stem if path else "own", progress=progress)
    if path is not None:
        write_file(path, answer.text)
        raw = path.with_suffix(".timings.jsonl")
        write_file(raw, answer.lines)
        note(f"wrote {path} and {raw.name}", show)
    publish(answer.record(), machine_text, dataclasses.replace(show, out=None))
    return 0


def only_runs(options: MachineOptions) -> None:
    """Refuse options of a machine beside a framework's runs. Raises SpecError."""
    if options.budget is not None:
        raise one_problem("--budget", "", options.budget, "is about a machine", "--measure, --nccl-log FILE or --timings FILE")
