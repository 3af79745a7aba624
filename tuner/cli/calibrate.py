"""tuner calibrate: what do my own measured runs teach the model?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.guard import guarded
from tuner.cli.measure import HELP as MACHINE_HELP
from tuner.cli.measure import MachineOptions, calibrate_machine, only_runs
from tuner.cli.options import JobOptions, RunOptions, Show, Without, given, unpacks
from tuner.errors import one_problem

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,79}")

SHORT = "A calibration from your own measured runs, or of your own machine"
HELP = f"""\
A calibration from your own measured runs, all of one framework: logs of Megatron-LM, Megatron-Bridge, NeMo, torchtitan, MaxText,
DeepSpeed, nanotron, Primus; or JSONL files, one run a line.

What logs are of is said by the options, one plan for all logs given; or, for logs of several plans, in a YAML file with the same job
keys at its top and `runs: [{{log: FILE, current: {{tp: 8, pp: 4}}}}, ...]`, each with what differs.

Each run is foretold without itself: by the shipped calibration, by your runs beside the shipped ones, and by your runs alone. What is
clearly better than the shipped calibration is written to --out, for --calibration; if nothing is, nothing is written and the exit code
is 1. Three different layouts are the least. What is written goes to --calibration of any verb.

{MACHINE_HELP}
\b
Examples:
  tuner calibrate runs.jsonl -o ours.yaml
  tuner calibrate runs.yaml -m llama3-8b -c h100x64 -s 8192 -b 512 -o ours.yaml
  tuner calibrate a.log b.log -m llama3-8b -c h100x64 -s 8192 -b 512 -p tp=4,pp=2
  tuner calibrate --measure -o mine.yaml
  tuner calibrate --nccl-log all_reduce.log --cluster h100x16 -o mine.yaml
"""
UNUSED = Without(("calibration", "price", "tokens", "ramp_up", "task", "lora_rank"))


def calibration_path(path: Path, files: list[str]) -> Path:
    """Return where a calibration goes. Raises SpecError for a name that --calibration would not read, and for one of the inputs."""
    if path.suffix.lower() not in (".yaml", ".yml") or not NAME.fullmatch(path.stem):
        rule = "must be a .yaml file named with letters, digits, dots, dashes and underscores"
        raise one_problem("--out", "", str(path), rule, "ours.yaml")
    if path.is_dir() or any(path.resolve() == Path(name).resolve() for name in files):
        raise one_problem("--out", "", str(path), "is a folder or one of the rows' files", "another name")
    return path


@unpacks
def calibrate(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help="Trainers' logs, YAML files that name logs, JSONL files of runs", show_default=False),
    ] = None,
    *,
    job: Annotated[JobOptions, UNUSED],
    run_of: RunOptions,
    machine: MachineOptions,
    show: Show,
) -> None:
    """Fit a calibration to measured runs."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.output import Progress, out_path, write_file
        from tuner.cli.publish import note, publish
        from tuner.report.calibrate import calibrate_text

        rows = files or []
        path = None if show.out is None else calibration_path(out_path(show.out), rows)
        if machine.asked:
            return calibrate_machine(machine, given(job, run_of), rows, path, show)
        only_runs(machine)
        with Progress(show.quiet) as progress:
            named = {} if path is None else {"name": path.stem}
            answer = workflow.calibrate(rows, **named, **given(job, run_of), progress=progress)
        if path is not None and answer.text:
            write_file(path, answer.text)
            note(f"wrote {path}", show)
        publish(answer.record(), calibrate_text, dataclasses.replace(show, out=None))
        return 0 if answer.text else 1

    guarded(run, show)


VERB = calibrate
