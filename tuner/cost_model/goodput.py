"""Samples a second that a job of failing GPUs keeps on average and that last: what a search for goodput ranks by.

Symbols: R replicas of m tensor-parallel groups of n1 GPUs; p1 probability that a group has a GPU down, p2 that it has more than its
fallback n2 allows (p1 where it has none); k(p) = E[ceil(K / m)], K of Binomial(R m, p): replicas hit, packed as closely as can be;
x share of its batch that a reduced replica keeps (degraded.py); eps what all spend more while one is reduced.
share = (1 - (k(p2) + (k(p1) - k(p2)) (1 - x)) / R) / (1 + eps P(K > 0)). Source: arXiv 2504.06095, sections 2 and 6; failures.py.
goodput = share A, with A the share of time whose work survives restarts (failures.effective_time), all N GPUs running: the same for all
plans. `tuner failures` counts by policy how many GPUs run, and restarts of repaired ones.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.cost_model.degraded import degraded
from tuner.cost_model.estimate import estimate
from tuner.cost_model.failures import at_least, best_interval, effective_time, expected_hit_replicas, failed_fraction, none_hit

TINY = 1e-12

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.estimate import Estimate
    from tuner.failure import FailureData
    from tuner.job import Job
    from tuner.plan import Plan


def down_of(data: FailureData) -> dict[int, float]:
    """Return {B: share of GPUs that are down in the long run, taken by events of B GPUs}."""
    events, repair_h = data.events_per_hour, data.mean_repair_hours
    return {each.gpus: failed_fraction(events * each.share.value, repair_h, each.gpus) for each in data.blast}


def lasting_of(data: FailureData, gpus: int) -> float:
    """Return A of a job that restarts from checkpoints written at the best interval: the share of time whose work lasts."""
    rate, write_h = gpus * data.events_per_hour, data.checkpoint_write.value / 3600.0
    restart_h = (data.detection.value + data.restart.value) / 3600.0
    return effective_time(rate, restart_h, write_h, best_interval(rate, write_h))


def unit_gpus(plan: Plan) -> Ints:
    """Return the GPUs that fall together when one fails and nothing falls back: a tensor-parallel group, or the expert-parallel group."""
    return np.where(plan.ep > 1, np.maximum(plan.ep * plan.etp, plan.block), plan.block)


def units_of_replica(plan: Plan) -> Ints:
    """Return m: how many such units are dropped together, with all replicas that share an expert-parallel group."""
    stage = plan.block * plan.cp
    return np.maximum(plan.ep * plan.etp // stage, 1) * stage * plan.pp // unit_gpus(plan)


def more_than_allowed(plan: Plan, unit: Ints, down: Mapping[int, float], allowances: Iterable[int]) -> Floats:
    """Return p2; allowances: the values of n1 - n2 that the plan's columns hold."""
    found = at_least(1, unit, down)
    for allowed in allowances:
        found = np.where(plan.tp - plan.fallback == allowed, at_least(allowed + 1, unit, down), found)
    return found


def goodput(
    job: Job, plan: Plan, calibration: Calibration, down: Mapping[int, float], allowances: Iterable[int], lasting: float = 1.0
) -> Estimate:
    """Return the plan's estimate with step_s as long as a step is on average over failures, per sample that lasts: step_s / (share A).

    down: {B: share of GPUs that events of B GPUs have taken}; allowances: the values of tp - fallback_tp in the plan's columns; lasting:
    A. p_oom is the larger one of the healthy and the reduced replica. Where nothing is left to run step_s is infinite.
    """
    whole = estimate(job, plan, calibration)
    cost = degraded(job, plan, calibration, whole)
    unit, per_replica = unit_gpus(plan), units_of_replica(plan)
    replicas = np.maximum(job.gpus // (unit * per_replica), 1)
    units = replicas * per_replica
    hit = at_least(1, unit, down)
    any_hit = expected_hit_replicas(units, hit, per_replica)
    dropped = expected_hit_replicas(units, more_than_allowed(plan, unit, down, allowances), per_replica)
    alone = np.minimum(1.0 - cost.kept, replicas * (1.0 - cost.pace))  # a batch is cut, or all wait, whichever loses less
    lost = (dropped + (any_hit - dropped) * alone) / replicas
    share = np.maximum(1.0 - lost, 0.0) / (1.0 + cost.overhead * (1.0 - none_hit(units, hit)))
    seconds = np.where(share > 0.0, whole.step_s / np.maximum(share, TINY) / max(lasting, TINY), np.inf)
    return dataclasses.replace(whole, step_s=seconds, p_oom=np.maximum(whole.p_oom, cost.p_oom))
