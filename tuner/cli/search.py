"""tuner search: what is the best configuration?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tuner.cli.export import say_wrong, write_files
from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, MeasureOptions, SearchOptions, Show, given, unpacks
from tuner.errors import one_problem

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.found import SearchAnswer

BEST = "best"
SHORT = "The best plans for a job, ranked"
HELP = """\
The best plans for a job: every plan is checked against the framework's rules and priced; those that fit are ranked.

Sequence length and global batch stay as they are. With --gpus A..B, --tokens and --deadline it is the cheapest count of GPUs that
is asked for. With --out DIR the answer is written as search.json, ranking.csv and job.yaml (which --job takes). The exit code is
1 when nothing is feasible; the answer says why.

With --export FORMATS the files that launch the best plan are written under --out/best (see `tuner export`). Where a format cannot spell
it, or its framework refuses it, the best plan that it can run is written, with its rank and cost; the exit code is 2 where there is none.

With --profile N or --budget plans are also run, a few steps each: those that teach most about which is best. What was measured is
in the ranking and in --out; killed at any moment, `tuner profile DIR` goes on from there. The exit code is 5 when the budget ended
before the search's own rule, 4 when machines failed.

\b
Examples:
  tuner search -m llama3-70b -c h100x64 -s 8192 -b 512
  tuner search -m llama3-70b -c h100x64 -s 8k -b 512 --current tp=8,pp=4
  tuner search -m mixtral-8x7b -c h100x64 -s 4k -b 256 --fix tp=2 --limit "ep<=8"
  tuner search --job llama3-70b-h100x64 --max-memory "70 GB" --max-p-oom 20%
  tuner search --job llama3-70b-30-days --gpus 256..1024 --price 2.5
  tuner search -m llama3-70b -c h100x64 -s 8k -b 512 --export megatron,bridge,torchtitan,maxtext,deepspeed,slurm -o out
  tuner search -m tiny -c local --profile 8 -o out
  tuner search -m llama3-8b -c h100x64 -s 8k -b 512 --budget 12gpu-h --runner slurm --site site.yaml -o out
"""


@unpacks
def search(job: JobOptions, find: SearchOptions, measure: MeasureOptions, show: Show) -> None:
    """Search the best plans."""
    guarded(lambda: run(given(job, find, measure), show), show)


def run(question: dict[str, Any], show: Show) -> int:
    """Search, print, write; return the exit code."""
    from functools import partial

    from tuner import workflow
    from tuner.cli.output import Progress, out_path, write_file
    from tuner.cli.publish import note, publish
    from tuner.report.search import search_text

    if question.get("export") is not None and (show.out is None or show.out.lower().endswith(".json")) and not show.json:
        raise one_problem("export", "", question["export"], "needs a folder to write to", "-o DIR, or --json")
    folder: dict[str, Any] = {}
    if workflow.measures(**question):
        show = dataclasses.replace(show, out=show.out or workflow.folder_name(**question))
        path = out_path(show.out or "")
        folder = {"folder": path, "started": lambda: write_file(path / "job.yaml", _job_text(question))}
    if show.out is not None:
        workflow.same_job(out_path(show.out), **question)
    with Progress(show.quiet) as progress:
        answer = workflow.search(progress=progress, **question, **folder)
    publish(answer.record(), partial(search_text, detail=show.verbose), show, partial(_write, answer, question) if show.out else None)
    if not answer.feasible:
        note("tuner: nothing feasible", show)
        return 1
    code = 0 if answer.measured is None else answer.measured.exit_code
    if answer.exported is not None:
        if (show.out is None or show.out.lower().endswith(".json")) and not show.json:  # a job file asked for them
            note("tuner: the best plan's files are not written: -o DIR", show)
        say_wrong(answer.exported, details=show.json)
        code = code or (2 if answer.exported.refused else 0)
    return code


def _job_text(question: dict[str, Any]) -> str:
    import yaml

    from tuner import workflow

    return yaml.safe_dump(workflow.question(**question), sort_keys=False, allow_unicode=True)


def _write(answer: SearchAnswer, question: dict[str, Any], folder: Path) -> list[str]:
    """Write the files of a search into a folder; return their names."""
    from tuner.cli.output import json_text, write_file
    from tuner.report.sheet import ranking_csv

    record = answer.record()
    files = {"search.json": json_text(record), "ranking.csv": ranking_csv(record), "job.yaml": _job_text(question)}
    if answer.measured is not None and answer.measured.calibration:
        files["calibration.yaml"] = answer.measured.calibration
    for name, text in files.items():
        write_file(folder / name, text)
    written = [] if answer.exported is None else write_files(answer.exported, folder / BEST)
    return [*files, *(f"{BEST}/{name}" for name in written)]


VERB = search
