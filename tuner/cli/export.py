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

Formats: accelerate, deepspeed, neutral (the tuner's own YAML, which loses nothing), and megatron-lm-ntp (replicas of two
tensor-parallel degrees on Megatron-LM's dev branch, for GPUs that failed: --failed REPLICA:SLOT, or --reduced N; experimental, its README
lists what is wrong there). A format launches its own framework: rules of it that the plan breaks are listed (exit code 3), and verify.sh
beside the files runs a few steps and holds them against what the tuner foretells. --wrap adds what starts the launch on a cluster: slurm,
kubernetes, skypilot, torchrun (by hand).

A plan that a format cannot spell is refused, naming each knob with the reason and a way out; other formats are written all the same
(exit code 2).

\b
Examples:
  tuner export neutral -m llama3-70b -c h100x64 -s 8k -b 512 -p tp=8,pp=4
  tuner export deepspeed,accelerate -m llama3-8b -c h100x16 -s 8k -b 64 -p zero=3 --framework deepspeed -o out
  tuner export deepspeed --wrap slurm --site site.yaml -m llama3-8b -c h100x16 -s 8k -b 64 -p zero=3 -o out
  tuner export megatron-lm-ntp -m gpt3-175b -c h100x64 -s 2k -b 64 -p tp=8 --failed 0:3,0:5 -o out
  tuner export megatron-lm-ntp -m gpt3-175b -c h100x64 -s 2k -b 64 -p tp=8,fallback_tp=4 --reduced 2 --json
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
        say_refused(answer)
        return answer.exit_code

    guarded(run, show)


def write_files(answer: ExportAnswer, folder: Path) -> list[str]:
    """Write the files under a folder; return their names."""
    from tuner.cli.output import write_file

    files = answer.files()
    for name, (text, program) in files.items():
        path = folder / name
        write_file(path, text)
        if program:
            path.chmod(path.stat().st_mode | 0o111)
    return list(files)


def say_refused(answer: ExportAnswer) -> None:
    """Say on stderr which formats cannot spell the plan, and why."""
    for problems in answer.refused.values():
        say("\n".join(map(str, problems)))


VERB = export
