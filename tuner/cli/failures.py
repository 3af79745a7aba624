"""tuner failures: what happens when GPUs fail?"""

from __future__ import annotations

from typing import Annotated

from tuner.cli.guard import guarded
from tuner.cli.options import FailureOptions, JobOptions, PlanOptions, Show, Without, given, unpacks

SHORT = "What failing GPUs cost, and which policy helps"
HELP = """\
What failing GPUs cost a job: its goodput when it waits for repairs, keeps spare groups, drops the replica of a failed GPU, or lets the
failed group go on at a lower tensor-parallel degree (NTP: nonuniform tensor parallelism), with more power or without; and how many spares
each of these needs. Expert-parallel groups are the units of a mixture of experts.

Rates come from --failure-data (tuner presets failures) and from the options. Closed forms answer at once; --simulate checks them event by
event. The exit code is 3 when the plan, or a degree of --fallback-tp, does not fit.

\b
Examples:
  tuner failures -m llama3-70b -c h100x2048 -s 8192 -b 2048 -p tp=8,pp=4,sp=true,recompute=full --fallback-tp 7
  tuner failures --job ntp-paper --failed-fraction 0.4% --simulate
  tuner failures --job ntp-paper --fixed-batch --quantile 0.999
"""


@unpacks
def failures(
    job: Annotated[JobOptions, Without(("tokens", "ramp_up", "price"))], plan: PlanOptions, failing: FailureOptions, show: Show
) -> None:
    """Plan for failures."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.output import Progress
        from tuner.cli.publish import publish
        from tuner.report.failures import failures_text

        with Progress(show.quiet) as progress:
            answer = workflow.failures(progress=progress, **given(job, plan, failing))
        publish(answer.record(), failures_text, show)
        return 0 if answer.runs else 3

    guarded(run, show)


VERB = failures
