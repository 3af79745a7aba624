"""tuner explain: why does this plan cost what it costs, and what would be better?"""

from __future__ import annotations

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, PlanOptions, Show, given, unpacks

SHORT = "Why, and what would be better"
HELP = """\
Why a plan is slow, illegal or too large; the nearest plan that runs; what one step in each knob changes.

Every term of time and memory stands with its formula's source. The exit code is 0 whatever the plan is worth: estimate judges.

\b
Examples:
  tuner explain -m llama3-70b -c h100x64 -s 8k -b 512 -p tp=2,pp=4,zero=1
  tuner explain -m mixtral-8x7b -c h100x64 -s 4096 -b 256 -p tp=2,ep=8 --framework torchtitan
"""


@unpacks
def explain(job: JobOptions, plan: PlanOptions, show: Show) -> None:
    """Explain one plan."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.publish import publish
        from tuner.report.explain import explain_text

        publish(workflow.explain(**given(job, plan)).record(), explain_text, show)
        return 0

    guarded(run, show)


VERB = explain
