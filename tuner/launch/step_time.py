"""What a trial's log says of a step of its job's global batch: the median of whole steps, or a line through steps of two shorter ones."""

from __future__ import annotations

import statistics
from math import sqrt
from typing import TYPE_CHECKING

from tuner.launch.logs.timing import Timing, timed
from tuner.launch.short_steps import ShortStep, at_pinned_batch

if TYPE_CHECKING:
    from tuner.launch.logs import Parsed
    from tuner.launch.trial import Trial

# Standard error of a median over that of a mean (Gauss), and standard deviations from the middle to a quartile.
MEDIAN, QUARTILE = 1.25, 0.6745
LEAST = 4  # timed steps that a line is worth something from: two of each count


def step_time(trial: Trial, parsed: Parsed) -> Timing | None:
    """Return the time of a step of the trial, None where the log holds too few."""
    if trial.short is None:
        return timed(parsed, trial.job, warmup=trial.warmup, sequences=_sequences(trial))
    pinned = int(trial.plan.microbatches(trial.job.gpus, trial.job.global_batch))
    return fitted(parsed, trial.short, pinned, trial.warmup)


def fitted(parsed: Parsed, counts: tuple[int, int], pinned: int, warmup: int) -> Timing | None:
    """Return the time of a step of `pinned` micro batches by the steps of two counts behind the first `warmup`, None without some of each.

    The line goes through the medians, so that a step that was disturbed does not tilt it. spread_s is what a median of as many steps would
    need for the standard error that the line has at `pinned`; None where a count has a single step.
    """
    settled = [step for step in parsed.steps if step.number > warmup]
    times = [[step.seconds for step in settled if step.microbatches == count and step.seconds is not None] for count in counts]
    if not all(times):
        return None
    points = [
        ShortStep(microbatches=count, seconds=statistics.median(of), spread_s=_error(of)) for count, of in zip(counts, times, strict=True)
    ]
    found, steps = at_pinned_batch(points, pinned), sum(map(len, times))
    known = min(map(len, times)) > 1
    return Timing(
        step_s=found.seconds,
        spread_s=found.spread_s * sqrt(steps) * QUARTILE / MEDIAN if known else None,
        steps=steps,
        basis=f"steps of {counts[0]} and {counts[1]} of {pinned} micro batches",
    )


def _error(times: list[float]) -> float:
    """Return the standard error of the median of some times, 0 of a single one."""
    if len(times) == 1:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return MEDIAN * (high - low) / 2 / QUARTILE / sqrt(len(times))


def _sequences(trial: Trial) -> int | None:
    """Return the sequences of one step of the run, None for the job's global batch."""
    plan = trial.plan
    return trial.microbatches * int(plan.micro_batch) * int(plan.dp(trial.job.gpus)) if trial.microbatches else None
