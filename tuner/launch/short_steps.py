"""What steps of a few micro batches say of the whole batch: a straight line t = a + b x microbatches.

Every further micro batch costs a pipeline stage the same; what is left (bubble, reduction of gradients, optimizer) does not depend on their
number once there are at least as many as stages (Narayanan 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, sqrt
from typing import TYPE_CHECKING

from tuner.errors import one_problem
from tuner.launch.limits import refusals
from tuner.plan import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.job import Job
    from tuner.plan import Plan

LONGER = 3  # a step is measured whole where it holds no more than so many times the larger count


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortStep:
    """Seconds of a step of this many micro batches; spread_s: how far a single measurement of it may be off (one standard error)."""

    microbatches: int
    seconds: float
    spread_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedStep:
    """Seconds of the step of the pinned batch, and its standard error; fixed_s, each_s: a and b of the line."""

    seconds: float
    spread_s: float
    fixed_s: float
    each_s: float


def at_pinned_batch(steps: Sequence[ShortStep], microbatches: int) -> PinnedStep:
    """Return the least-squares line's value at `microbatches`, from steps of two or more different counts.

    Var t(m) = s^2 (1/n + (m - mean)^2 / sum (m_i - mean)^2), with s^2 the larger of the mean square of the given spreads and, where there
    are more than two steps, the residual variance. A line that falls or starts below zero is one that noise made: b is then at least 0
    and a at least 0, through the point of means, which is between the two. Raises SpecError.
    """
    counts = [step.microbatches for step in steps]
    if len(set(counts)) < 2 or min(counts) < 1:
        raise one_problem("short steps", "microbatches", counts, "must hold two or more different counts of at least 1")
    n, mean = len(steps), fsum(counts) / len(counts)
    mean_s = fsum(step.seconds for step in steps) / n
    square = fsum((m - mean) ** 2 for m in counts)
    slope = fsum((step.microbatches - mean) * step.seconds for step in steps) / square
    slope = min(max(slope, 0.0), mean_s / mean)
    fixed = mean_s - slope * mean
    residual = fsum((step.seconds - fixed - slope * step.microbatches) ** 2 for step in steps) / max(n - 2, 1) if n > 2 else 0.0
    variance = max(fsum(step.spread_s**2 for step in steps) / n, residual)
    spread = sqrt(variance * (1 / n + (microbatches - mean) ** 2 / square))
    return PinnedStep(seconds=fixed + slope * microbatches, spread_s=spread, fixed_s=fixed, each_s=slope)


def short_counts(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Return the two counts of micro batches whose steps tell the whole batch's; None where that is too few times as long to be worth it.

    From `pp` micro batches on every stage is busy and a further one costs all of them the same; schedules with several chunks a stage or
    a split backward reach their steady state in the second round, which is also when the most activations are held. The larger count is
    twice the smaller: the standard error of the line, relative to the whole step's, is then 2.8 times that of a step at most.
    """
    rounds = 1 if plan.vpp == 1 and plan.schedule != SCHEDULES["zb-1p"] else 2
    least = max(rounds * int(plan.pp), 2)
    counts = (least, 2 * least)
    if int(plan.microbatches(job.gpus, job.global_batch)) <= LONGER * counts[1]:
        return None
    return None if any(refusals(job, plan, count) for count in counts) else counts
