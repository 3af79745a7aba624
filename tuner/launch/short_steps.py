"""What steps of a few micro batches say of the whole batch: a straight line t = a + b x microbatches.

Every further micro batch costs a pipeline stage the same; what is left (bubble, reduction of gradients, optimizer) does not depend on their
number once there are at least as many as stages (Narayanan 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, sqrt
from typing import TYPE_CHECKING

from tuner.errors import one_problem

if TYPE_CHECKING:
    from collections.abc import Sequence


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
