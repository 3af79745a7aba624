"""tuner export: write the launcher's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, PlanOptions, Show, given, unpacks
from tuner.cli.streams import say

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.exporting import ExportAnswer

SHORT = "Write the files that launch a plan"
HELP = """\
Write the files that launch a plan, a folder for each format under --out; without --out they are printed.

Formats: megatron-lm, megatron-bridge, nemo, primus, torchtitan, maxtext, deepspeed, accelerate, nanotron; neutral (the tuner's own YAML,
which loses nothing); megatron-lm-ntp (replicas of two tensor-parallel degrees on Megatron-LM's dev branch, for GPUs that failed: --failed
REPLICA:SLOT, or --reduced N; experimental, its README lists what is wrong there).

Each format launches one framework: what the plan leaves out is as that framework has it, its rules are checked, and verify.sh beside
the files runs a few steps and holds them against what the tuner foretells. --wrap adds what starts the launch on a cluster: slurm,
kubernetes, skypilot, torchrun (by hand); a wrapper may stand among the formats.

Exit codes: 2 where a format cannot spell the plan (each knob is named with the reason and a way out; other formats are written all the
same), 3 where the plan breaks a rule of the framework or does not fit (the files are written), else 0.

\b
Examples:
  tuner export megatron-lm -m llama3-70b -c h100x64 -s 8k -b 512 -p tp=8,pp=4,recompute=full -o out
  tuner export megatron,bridge,torchtitan,slurm -m llama3-70b -c h100x64 -s 8k -b 512 -p tp=4,pp=8,recompute=full -o out
  tuner export deepspeed,accelerate -m llama3-8b -c h100x16 -s 8k -b 64 -p zero=3,recompute=full -o out
  tuner export torchtitan --framework-version 0.3 -m llama3-8b -c h100x64 -s 8k -b 64 -p zero=3,recompute=full
  tuner export deepspeed --wrap slurm --site site.yaml -m llama3-8b -c h100x16 -s 8k -b 64 -p zero=3,recompute=full -o out
  tuner export megatron-lm-ntp -m gpt-1.7b -c h100x64 -s 2k -b 64 -p tp=8 --failed 0:3,0:5 -o out
  tuner export megatron-lm-ntp -m gpt-1.7b -c h100x64 -s 2k -b 64 -p tp=8,fallback_tp=6 --reduced 2 --json
"""


@unpacks
def export(
    formats: Annotated[str, typer.Argument(metavar="FORMAT[,FORMAT]", help="What to write", show_default=False)],
    wrap: Annotated[
        str | None, typer.Option("--wrap", metavar="NAME[,NAME]", help="How it is started: slurm, kubernetes, skypilot, torchrun")
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", metavar="FILE", help="YAML: account, partition, container, environment, for --wrap")
    ] = None,
    version: Annotated[
        str, typer.Option("--framework-version", metavar="TEXT", help="Release whose spellings are written (the last)")
    ] = "",
    failed: Annotated[str | None, typer.Option("--failed", metavar="R:S[,R:S]", help="GPUs that failed: replica and its tp slot")] = None,
    reduced: Annotated[
        str | None, typer.Option("--reduced", metavar="N", help="Or: how many replicas go on at the plan's fallback_tp")
    ] = None,
    *,
    job: JobOptions,
    plan: PlanOptions,
    show: Show,
) -> None:
    """Write one plan's files."""

    def run() -> int:
        from functools import partial

        from tuner import workflow
        from tuner.cli.publish import publish
        from tuner.report.export import export_text

        options = {"wrap": wrap, "site": site, "failed": failed, "reduced": reduced, "version": version}
        answer = workflow.export(formats, **options, **given(job, plan))
        publish(answer.record(), partial(export_text, contents=show.out is None), show, partial(write_files, answer) if show.out else None)
        say_wrong(answer, details=show.json)
        return answer.exit_code

    guarded(run, show)


def write_files(answer: ExportAnswer, folder: Path) -> list[str]:
    """Write the files under a folder; return the folders of the formats."""
    from tuner.cli.output import write_file

    files = answer.files()
    for name, (text, program) in files.items():
        path = folder / name
        write_file(path, text)
        if program:
            path.chmod(path.stat().st_mode | 0o111)
    return [f"{name}/" for name in answer.formats]


def say_wrong(answer: ExportAnswer, *, details: bool) -> None:
    """Say on stderr which formats are not written, and which do not fit or break rules; details: why, where stdout does not say it."""
    from tuner.formats import grouped

    for name, problems in answer.refused.items():
        knobs = ", ".join(dict.fromkeys(problem.path for problem in problems if problem.path))
        say("\n".join(map(str, grouped(problems))) if details else f"{name} is not written" + (f": {knobs}" if knobs else ""))
    for name, one in answer.formats.items():
        if one.too_large:
            say(f"{name}: does not fit: {one.too_large}")
        for item in one.broken if details else ():
            say(f"{name}: {item.severity}: {item.text} [{item.rule}]")
        if one.place is not None and one.place.why:
            rank = "the best that it can run" if one.place.rank is None else f"rank {one.place.rank}"
            say(f"{name}: not the best plan but {rank}")


VERB = export
