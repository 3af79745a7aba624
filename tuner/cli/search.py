"""tuner search: what is the best configuration?"""

from __future__ import annotations

from tuner.cli.options import JobOptions, SearchOptions, Show, unpacks

SHORT = "The best plans for a job, ranked"
HELP = """\
The best plans for a job: every legal plan is priced, those that fit are ranked.
"""


@unpacks
def search(job: JobOptions, find: SearchOptions, show: Show) -> None:
    """Search the best plans."""
    del job, find, show, guarded, given


VERB = search
