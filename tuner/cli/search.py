"""tuner search: what is the best configuration?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, SearchOptions, Show, given, unpacks

if TYPE_CHECKING:
    from tuner.found import SearchAnswer

SHORT = "The best plans for a job, ranked"
HELP = """\
The best plans for a job: every plan is checked against the framework's rules and priced; those that fit are ranked.

Sequence length and global batch stay as they are. With --gpus A..B, --tokens and --deadline it is the cheapest count of GPUs that
is asked for. With --out DIR the answer is written as search.json, ranking.csv and job.yaml (which --job takes). The exit code is
1 when nothing is feasible; the answer says why.

\b
Examples:
  tuner search -m llama3-70b -c h100x64 -s 8192 -b 512
  tuner search -m llama3-70b -c h100x64 -s 8k -b 512 --current tp=8,pp=4
  tuner search -m mixtral-8x7b -c h100x64 -s 4k -b 256 --fix tp=2 --limit "ep<=8"
  tuner search --job llama3-70b-h100x64 --max-memory "70 GB" --max-p-oom 20%
  tuner search --job llama3-70b-30-days --gpus 256..1024 --price 2.5
"""


@unpacks
def search(job: JobOptions, find: SearchOptions, show: Show) -> None:
    """Search the best plans."""

    def run() -> int:
        from functools import partial

        from tuner import workflow
        from tuner.cli.output import Progress
        from tuner.cli.publish import note, publish
        from tuner.report.search import search_text

        question = given(job, find)
        with Progress(show.quiet) as progress:
            answer = workflow.search(progress=progress, **question)
        write = None if show.out is None else partial(_write, answer, question)
        publish(answer.record(), partial(search_text, detail=show.verbose), show, write)
        if not answer.feasible:
            note("tuner: nothing feasible", show)
        return 0 if answer.feasible else 1

    guarded(run, show)


def _write(answer: SearchAnswer, question: dict[str, Any], folder: Any) -> list[str]:
    """Write the files of a search into a folder; return their names."""
    import yaml

    from tuner import workflow
    from tuner.cli.output import json_text, write_file
    from tuner.report.sheet import ranking_csv

    record = answer.record()
    files = {
        "search.json": json_text(record),
        "ranking.csv": ranking_csv(record),
        "job.yaml": yaml.safe_dump(workflow.question(**question), sort_keys=False, allow_unicode=True),
    }
    for name, text in files.items():
        write_file(folder / name, text)
    return list(files)


VERB = search
