"""What a single plan's fallback costs, item by item, as an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.cost_model.degraded import degraded
from tuner.cost_model.shard import shard

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.estimate import Estimate
    from tuner.job import Job
    from tuner.plan import Plan

UNITS = {"heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn_hidden"}  # of a rank, and of the model
ITEMS = ("healthy_s", "reduced_s", "resharding_before_s", "resharding_after_s", "before_s", "after_s", "reduce_s", "added_s")


def fallback_record(job: Job, plan: Plan, calibration: Calibration, healthy: Estimate) -> dict[str, Any] | None:
    """Return what it costs that a replica goes on at fallback_tp, None for a plan without one.

    imbalance: of each kind of shard, what the fullest rank holds over an even share of the healthy degree: n1 ceil(K / n2) / K, against
    n1 / n2 (`balanced`).
    """
    if not plan.fallback < plan.tp:
        return None
    cost = degraded(job, plan, calibration, healthy)
    held = shard(job, cost.plan)
    shares = {name: getattr(held, name) * plan.tp / getattr(job.model, whole) for name, whole in UNITS.items()}
    return {
        "tp": int(plan.tp),
        "to": int(plan.fallback),
        "balanced": plan.tp / plan.fallback,
        "imbalance": shares,
        **{name: float(getattr(cost, name)) for name in ITEMS},
        "overhead": float(cost.overhead),
        "moved_bytes": float(cost.moved_bytes),
        "microbatches": int(cost.microbatches),
        "of": int(cost.of),
        "pace": float(cost.pace),
        "power": float(cost.power()),
        "throughput": float(cost.throughput),
        "memory_bytes": float(cost.memory_bytes),
        "p_oom": float(cost.p_oom),
    }
