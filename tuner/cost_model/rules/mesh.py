"""Rules of every framework: how ranks and the batch divide, and one spelling for each plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cost_model.rules.rule import ALWAYS, MEGATRON, Rule, divides, expert_replicas, full, implies, replicas
from tuner.plan import ALL_LAYERS, CP_KINDS, FULL, OFFLOADS, SCHEDULES

if TYPE_CHECKING:
    from tuner.arrays import Bools
    from tuner.job import Job
    from tuner.plan import Plan

_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch", "recompute_layers")
_LARGEST = {
    "sequence_parallel": 1,
    "tp_overlap": 1,
    "dp_overlap": 1,
    "ep_overlap": 1,
    "cuda_graphs": 1,
    "zero": 3,
    "recompute": 2 * FULL - 1,
    "schedule": len(SCHEDULES) - 1,
    "offload": len(OFFLOADS) - 1,
    "cp_kind": len(CP_KINDS) - 1,
    "shard_group": 10_000_000,
    "fallback_tp": 10_000_000,
    "idle_tp": 10_000_000,
    "embedding_layers": 10_000,
    "loss_layers": 10_000,
}


def _range_rule(name: str, lowest: int, largest: int) -> Rule:
    return Rule(
        id=f"range-{name}".replace("_", "-"),
        families=(ALWAYS,),
        source="tuner/plan.py: degrees count ranks or layers, the others are codes and flags",
        holds=lambda job, plan: (getattr(plan, name) >= lowest) & (getattr(plan, name) <= largest),
        says=lambda job, row: f"{name} = {getattr(row, name)} must be from {lowest} to {largest}",
    )


RANGES = (
    *(_range_rule(name, 1, 10_000_000) for name in _DEGREES),
    *(_range_rule(name, 0, largest) for name, largest in _LARGEST.items()),
)


def _mesh(job: Job, plan: Plan) -> Bools:
    ranks = plan.block * plan.pp * plan.cp
    return divides(ranks, job.gpus) & (ranks <= job.gpus)


def _expert_mesh(job: Job, plan: Plan) -> Bools:
    ranks = plan.etp * plan.ep * plan.pp
    return divides(ranks, job.gpus) & (ranks <= job.gpus)


def _dense(job: Job, plan: Plan) -> Bools:
    return True if job.model.moe else (plan.ep == 1) & (plan.etp == 1)


def _experts(job: Job, plan: Plan) -> Bools:
    return divides(plan.ep, job.model.moe.experts) if job.model.moe else True


def _batch(job: Job, plan: Plan) -> Bools:
    return divides(plan.micro_batch * replicas(job, plan), job.global_batch)


def _batch_says(job: Job, row: Plan) -> str:
    return f"micro_batch*dp = {row.micro_batch}*{row.dp(job.gpus)} must divide global_batch = {job.global_batch}"


def _ramp_up(job: Job, plan: Plan) -> Bools:
    if job.ramp_up is None:
        return True
    sequences = plan.micro_batch * replicas(job, plan)
    return divides(sequences, job.ramp_up.start) & divides(sequences, job.ramp_up.increment)


def _ramp_up_says(job: Job, row: Plan) -> str:
    sizes = f"start = {job.ramp_up.start} and increment = {job.ramp_up.increment}" if job.ramp_up else ""
    return f"micro_batch*dp = {row.micro_batch}*{row.dp(job.gpus)} must divide the batch ramp-up's {sizes}"


def _shard_group(job: Job, plan: Plan) -> Bools:
    ranks = replicas(job, plan) * plan.cp
    group = plan.shard_group + (plan.shard_group < 1)
    return implies(plan.shard_group > 0, divides(group, ranks) & (plan.zero > 0))


MESH = (
    Rule(
        id="mesh",
        families=(ALWAYS,),
        source="Megatron-LM parallel_state.py:823, arguments.py:432; torchtitan parallel_dims.py (product of degrees == world)",
        knobs=("tp", "pp", "cp"),
        holds=_mesh,
        says=lambda job, row: f"tp*pp*cp = {row.block}*{row.pp}*{row.cp} must divide gpus = {job.gpus}",
    ),
    Rule(
        id="expert-mesh",
        families=(ALWAYS,),
        source="Megatron-LM parallel_state.py:883; torchtitan parallel_dims.py (dp_shard*cp*tp == efsdp*ep)",
        knobs=("ep", "etp", "pp"),
        holds=_expert_mesh,
        says=lambda job, row: f"etp*ep*pp = {row.etp}*{row.ep}*{row.pp} must divide gpus = {job.gpus}",
    ),
    Rule(
        id="dense-experts",
        families=(ALWAYS,),
        source="Megatron-LM arguments.py:1656; torchtitan decoder.py:207",
        knobs=("ep", "etp"),
        holds=_dense,
        says=lambda job, row: f"ep = {row.ep}, etp = {row.etp}: {job.model.name} has no experts, so both must be 1",
    ),
    Rule(
        id="experts-ep",
        families=(ALWAYS,),
        source="Megatron-LM arguments.py:1656; torchtitan decoder.py:207",
        knobs=("ep",),
        holds=_experts,
        says=lambda job, row: f"ep = {row.ep} must divide experts = {job.model.moe.experts if job.model.moe else 0}",
    ),
    Rule(
        id="batch",
        families=(ALWAYS,),
        source="Megatron-LM num_microbatches_calculator.py:381, arguments.py:715; DeepSpeed config.py (train_batch_size)",
        knobs=("micro_batch", "tp", "pp", "cp"),
        holds=_batch,
        says=_batch_says,
    ),
    Rule(
        id="ramp-up",
        families=(ALWAYS,),
        source="Megatron-LM num_microbatches_calculator.py:381 (every ramp-up size)",
        knobs=("micro_batch",),
        holds=_ramp_up,
        says=_ramp_up_says,
    ),
    Rule(
        id="shard-group",
        families=(ALWAYS,),
        source="torchtitan parallel_dims.py (dp_replicate * dp_shard); Megatron-LM --num-distributed-optimizer-instances",
        knobs=("shard_group", "zero"),
        holds=_shard_group,
        says=lambda job, row: (
            f"shard_group = {row.shard_group} needs zero > 0 and must divide dp*cp = {row.dp(job.gpus)}*{row.cp} (zero = {row.zero})"
        ),
    ),
)


def _needs_group(flag: str, group: str) -> Rule:
    """A knob that acts on a group is spelled 0 where the group has one member."""
    spelled = f"pipeline_layout {flag.removesuffix('_layers')}=N" if flag.endswith("_layers") else flag
    return Rule(
        id=f"{flag}-alone".replace("_", "-"),
        families=(ALWAYS,),
        severity="duplicate",
        source=f"there is nothing to act on at {group} = 1",
        knobs=(flag, group),
        holds=lambda job, plan: implies(getattr(plan, flag) > 0, getattr(plan, group) > 1),
        says=lambda job, row: f"{spelled} does nothing at {group} = 1",
    )


def _state_is_shared(job: Job, plan: Plan) -> Bools:
    return (replicas(job, plan) * plan.cp > 1) | (expert_replicas(job, plan) * (1 if job.model.moe else 0) > 1)


ONE_SPELLING = (
    _needs_group("sequence_parallel", "tp"),
    _needs_group("tp_overlap", "tp"),
    _needs_group("ep_overlap", "ep"),
    _needs_group("cp_kind", "cp"),
    _needs_group("schedule", "pp"),
    _needs_group("embedding_layers", "pp"),
    _needs_group("loss_layers", "pp"),
    Rule(
        id="zero-alone",
        families=(ALWAYS,),
        severity="duplicate",
        source="there is nothing to shard over at dp*cp = 1",
        knobs=("zero",),
        holds=lambda job, plan: implies(plan.zero > 0, _state_is_shared(job, plan)),
        says=lambda job, row: f"zero = {row.zero} shards nothing at dp*cp = 1",
    ),
    Rule(
        id="dp-overlap-alone",
        families=(ALWAYS,),
        severity="duplicate",
        source="there is nothing to overlap at dp*cp = 1",
        knobs=("dp_overlap",),
        holds=lambda job, plan: implies(plan.dp_overlap > 0, _state_is_shared(job, plan)),
        says=lambda job, row: "dp_overlap does nothing at dp*cp = 1",
    ),
    Rule(
        id="shard-group-whole",
        families=(ALWAYS,),
        severity="duplicate",
        source="shard_group 0 is all data-parallel ranks; a group of one shards nothing, which is zero 0",
        knobs=("shard_group",),
        holds=lambda job, plan: (plan.shard_group == 0) | ((plan.shard_group > 1) & (plan.shard_group < replicas(job, plan) * plan.cp)),
        says=lambda job, row: f"shard_group = {row.shard_group} of dp*cp = {row.dp(job.gpus) * row.cp} ranks: all is spelled 0, one zero=0",
    ),
    Rule(
        id="layers-without-full",
        families=(ALWAYS,),
        severity="duplicate",
        source="only full recompute counts layers",
        knobs=("recompute_layers",),
        holds=lambda job, plan: full(plan) | (plan.recompute_layers == ALL_LAYERS),
        says=lambda job, row: f"recompute_layers = {row.recompute_layers} means nothing without full recompute",
    ),
    Rule(
        id="sequence-parallel-tp1",
        families=(MEGATRON,),
        severity="warning",
        source="Megatron-LM model_parallel_config.py:502 (refused by the config class), arguments.py:1432 (switched off by the launcher)",
        knobs=("sequence_parallel",),
        holds=lambda job, plan: implies(plan.sequence_parallel > 0, plan.tp > 1),
        says=lambda job, row: "sequence_parallel needs tp > 1: the config class refuses it, the launcher switches it off",
    ),
)
