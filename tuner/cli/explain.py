"""tuner explain: why does this plan cost what it costs, and what would be better?"""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, PlanOptions, Show, given, unpacks

SHORT = "Why, and what would be better"
HELP = """\
Why a plan is slow, illegal or too large; the nearest plan that runs; why a search does not choose it, compared with the best plan
term by term; what one step in each knob changes.

The best plan is the fastest while nothing fails; `tuner search --objective goodput --current PLAN` compares what failures leave.
Every term of time and memory stands with its formula's source. The exit code is 0 whatever the plan is worth: estimate judges.

\b
Examples:
  tuner explain -m llama3-70b -c h100x64 -s 8k -b 512 -p tp=2,pp=4,zero=1
  tuner explain -m mixtral-8x7b -c h100x64 -s 4k -b 256 -p tp=2,ep=8 --no-search
"""


@unpacks
def explain(
    job: JobOptions,
    plan: PlanOptions,
    no_search: Annotated[
        bool, typer.Option("--no-search", help="Do not search the best plan to compare with", rich_help_panel="Plan")
    ] = False,
    *,
    show: Show,
) -> None:
    """Explain one plan."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.output import Progress
        from tuner.cli.publish import publish
        from tuner.report.explain import explain_text

        with Progress(show.quiet) as progress:
            answer = workflow.explain(progress=progress, no_search=no_search, **given(job, plan))
        publish(answer.record(), explain_text, show)
        return 0

    guarded(run, show)


VERB = explain
