"""Cheap trials: which runs of a measured search hold steps of a few micro batches, and what a run costs then."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.launch.short_steps import short_counts
from tuner.launch.step_time import LEAST
from tuner.profiling.limits import STARTUP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.arrays import Floats
    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.profiling.limits import Limits
    from tuner.search.candidates import Candidates

SAVED = 0.5  # of a whole run, its start included, before steps are made short: their time is less sure


def counts_of(job: Job, plan: Plan, step_s: float, limits: Limits) -> tuple[int, int] | None:
    """Return the two counts of micro batches of a run's steps; None where steps are whole. step_s: of a whole one, as predicted."""
    if not limits.short or limits.steps - limits.warmup < LEAST:
        return None
    counts = short_counts(job, plan)
    if counts is None:
        return None
    whole = limits.steps * step_s
    saved = whole * (1.0 - _share(job, plan, counts))
    return counts if saved >= SAVED * (STARTUP_S + whole) else None


def limits_of(limits: Limits, *, short: bool, proxy: bool) -> Limits:
    """Return the limits of a search by cheap trials. By proxies no plan is run again to see drift (it would answer from the ledger), and no
    run is stopped for its steps' time, which is not the plan's.
    """
    if proxy:
        return replace(limits, worse=math.inf, reference_every=0)
    return replace(limits, short=short)


def _share(job: Job, plan: Plan, counts: tuple[int, int]) -> float:
    """Return how long steps of two counts in turn take, as a share of whole ones: by micro batches, of which what is fixed is a few."""
    return sum(counts) / 2 / int(plan.microbatches(job.gpus, job.global_batch))


def cost_of(candidates: Candidates, limits: Limits) -> Callable[[Floats], Floats]:
    """Return the seconds of a run of each candidate by the step times that are believed of them, (n,) to (n,)."""
    job, shares = candidates.job, np.ones(len(candidates))
    for i, plan in enumerate(candidates.plans):
        if (counts := counts_of(job, plan, float(candidates.step_s[i]), limits)) is not None:
            shares[i] = _share(job, plan, counts)
    return lambda step_s: STARTUP_S + limits.steps * step_s * shares
