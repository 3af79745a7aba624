"""What a single plan's fallback costs, item by item, as an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.cost_model.degraded import degraded, reduced_plan
from tuner.cost_model.estimate import estimate
from tuner.cost_model.explain import does_not_fit
from tuner.cost_model.shard import shard

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.estimate import Estimate
    from tuner.job import Job
    from tuner.plan import Plan

UNITS = {"heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn_hidden"}  # of a rank, and of the model
ITEMS = ("healthy_s", "reduced_s", "resharding_before_s", "resharding_after_s", "before_s", "after_s", "reduce_s", "added_s")


def sharded_note(zero: int) -> str:
    """Return what a ZeRO stage above 0 means for a fallback: who runs it."""
    return (
        f"zero {zero} shards the optimizer over replicas, so a lost GPU's shard is on no other: it comes back from a checkpoint. What goes "
        "on in place (`tuner profile --ntp`, `tuner failures --in-place`) and Megatron-LM's dev branch (megatron-lm-ntp) take zero 0 alone"
    )


def too_large_at(job: Job, plan: Plan, calibration: Calibration, degree: int) -> str:
    """Return why a replica that goes on at tensor-parallel degree `degree` runs out of memory, "" where it more likely fits: the rule by
    which a plan fits, for its GPUs that are left.
    """
    small = reduced_plan(plan, degree)
    return does_not_fit(job, small, calibration, estimate(job, small, calibration))


def fallback_notes(plan: Plan) -> tuple[str, ...]:
    """Return what to know of a plan with a fallback beyond its costs: what runs it, by its zero stage; () without a fallback."""
    return (sharded_note(int(plan.zero)),) if plan.fallback < plan.tp and plan.zero > 0 else ()


def fallback_record(job: Job, plan: Plan, calibration: Calibration, healthy: Estimate) -> dict[str, Any] | None:
    """Return what it costs that a replica goes on at fallback_tp, None for a plan without one.

    imbalance: of each kind of shard, what the fullest rank holds over an even share of the healthy degree: n1 ceil(K / n2) / K, against
    n1 / n2 (`balanced`). change, dropped: of the job's samples a second (-0.02: 2 % fewer) while one GPU is lost, going on so, or
    without the replica. why_not_fit: "" where the reduced replica more likely fits.
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
        "change": float(cost.throughput) - 1.0,
        "dropped": -1.0 / float(cost.replicas),
        "memory_bytes": float(cost.memory_bytes),
        "p_oom": float(cost.p_oom),
        "why_not_fit": too_large_at(job, plan, calibration, int(plan.fallback)),
        "notes": fallback_notes(plan),
    }
