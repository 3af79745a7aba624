"""tuner estimate: what does this plan cost?"""

from __future__ import annotations

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, PlanOptions, Show, given, unpacks

SHORT = "What one plan costs"
HELP = """\
What one plan costs: time, memory by stage, MFU, days and money.

Knobs that --plan leaves out take the framework's default; the answer names them. An illegal plan, or one that does not fit, be it
only at its fallback_tp, is priced all the same: what is wrong is listed and the exit code is 3.

\b
Examples:
  tuner estimate -m gpt3-175b -c a100x1024 -s 2048 -b 1536 -p tp=8,pp=8,sp=true
  tuner estimate -m config.json -c h100x64 -s 8k -b 512 -p tp=4,pp=4 --json
"""


@unpacks
def estimate(job: JobOptions, plan: PlanOptions, show: Show) -> None:
    """Price one plan."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.publish import publish
        from tuner.report.estimate import estimate_text

        answer = workflow.estimate(**given(job, plan))
        publish(answer.record(), estimate_text, show)
        return 0 if answer.runs else 3

    guarded(run, show)


VERB = estimate
