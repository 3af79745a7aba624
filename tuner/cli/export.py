"""tuner export: write the launcher's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, PlanOptions, Show, given, unpacks

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.exporting import ExportAnswer

SHORT = "Write the files that launch a plan"
HELP = """\
Write the files that launch a plan, a folder for each format under --out; without --out they are printed.

Formats: neutral (the tuner's own YAML, which loses nothing) and megatron-lm-ntp (replicas of two tensor-parallel degrees on Megatron-LM's
dev branch, for GPUs that failed: --failed REPLICA:SLOT, or --reduced N; experimental, its README lists what is wrong there). A plan that a
format cannot spell is refused, naming each knob, and so is a job that this implementation cannot run, naming each rule (exit code 2).
Rules of the framework that the plan breaks are listed (exit code 3).

\b
Examples:
  tuner export neutral -m llama3-70b -c h100x64 -s 8k -b 512 -p tp=8,pp=4
  tuner export megatron-lm-ntp -m gpt3-175b -c h100x64 -s 2k -b 64 -p tp=8 --failed 0:3,0:5 -o out
  tuner export megatron-lm-ntp -m gpt3-175b -c h100x64 -s 2k -b 64 -p tp=8,fallback_tp=4 --reduced 2 --json
"""


@unpacks
def export(
    formats: Annotated[str, typer.Argument(metavar="FORMAT[,FORMAT]", help="What to write", show_default=False)],
    failed: Annotated[str | None, typer.Option("--failed", metavar="R:S[,R:S]", help="GPUs that failed: replica and its tp slot")] = None,
    reduced: Annotated[
        str | None, typer.Option("--reduced", metavar="N", help="Or: how many replicas go on at the plan's fallback_tp")
    ] = None,
    version: Annotated[
        str, typer.Option("--framework-version", metavar="TEXT", help="Release whose spellings are written (the last)")
    ] = "",
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

        answer = workflow.export(formats, failed=failed, reduced=reduced, version=version, **given(job, plan))
        publish(answer.record(), partial(export_text, contents=show.out is None), show, partial(_write, answer) if show.out else None)
        return 3 if any(item.severity == "error" for item in answer.broken) else 0

    guarded(run, show)


def _write(answer: ExportAnswer, folder: Path) -> list[str]:
    """Write the files under a folder; return their names."""
    from tuner.cli.output import write_file

    names: list[Any] = []
    for format_, written in answer.written.items():
        for name, text in written.files.items():
            path = folder / format_ / name
            write_file(path, text)
            if name in written.programs:
                path.chmod(path.stat().st_mode | 0o111)
            names.append(f"{format_}/{name}")
    return names


VERB = export
