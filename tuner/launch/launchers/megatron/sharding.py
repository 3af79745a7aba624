"""What data-parallel ranks share, as settings of Megatron-Core: the distributed optimizer, Megatron-FSDP, and FSDP2 of PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.megatron.degrees import DEGREES
from tuner.launch.launchers.tables.settings import Aspect, Meaning, refusal
from tuner.plan import OFFLOADS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.errors import Problem
    from tuner.job import Job
    from tuner.launch.launchers.tables.settings import Ask, Kind, Values
    from tuner.plan import Plan

KINDS: Mapping[str, Kind] = {
    "use_distributed_optimizer": "flag",
    "use_megatron_fsdp": "flag",
    "data_parallel_sharding_strategy": "text",
    "num_distributed_optimizer_instances": "count",
    "use_torch_fsdp2": "flag",
    "torch_fsdp2_reshard_after_forward": "flag",
    "ckpt_format": "text",
    "overlap_grad_reduce": "flag",
    "overlap_param_gather": "flag",
}

OPTIMIZER, ACTIVATIONS = OFFLOADS["optimizer"], OFFLOADS["activations"]

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def is_fsdp(plan: Plan) -> bool:
    """Whether gradients or weights are sharded."""
    return int(plan.zero) >= 2


def shares_nothing(job: Job, plan: Plan) -> bool:
    """Whether no rank holds the same weights as another one: there is nothing to shard, and sharding it is free."""
    return int(plan.dp(job.gpus)) * int(plan.cp) == 1 and (job.model.moe is None or int(plan.edp(job.gpus)) == 1)


def _put_sharding(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    zero = int(plan.zero)
    found: dict[str, Any] = {"overlap_grad_reduce": bool(plan.dp_overlap)}
    offloaded = bool(int(plan.offload) & OPTIMIZER)
    sharded = zero >= 1 or (offloaded and shares_nothing(job, plan))
    if offloaded and not sharded:
        raise refusal(
            dialect, "offload", "optimizer", "optimizer_cpu_offload needs the distributed optimizer (optimizer_config.py)", "zero = 1"
        )
    found |= {"use_distributed_optimizer": sharded, "overlap_param_gather": bool(plan.dp_overlap) and sharded}
    if zero >= 2:
        strategy = next(name for name, stage in _STRATEGIES.items() if stage == zero)
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy, "ckpt_format": "fsdp_dtensor"}
    if plan.shard_group:
        instances = int(plan.dp(job.gpus)) * int(plan.cp) // int(plan.shard_group)
        if job.model.moe and int(plan.edp(job.gpus)) % instances:
            why = f"{instances} instances of the optimizer must divide the experts' data-parallel degree {int(plan.edp(job.gpus))}"
            raise refusal(dialect, "shard_group", int(plan.shard_group), why)
        found["num_distributed_optimizer_instances"] = instances
    return found


def _take_sharding(values: Values) -> Meaning:
    plan: dict[str, Any] = {}
    problems: list[Problem] = []
    assumed: dict[str, str] = {}
    unknown: list[Unknown] = []
    fsdp, torch = bool(values.get("use_megatron_fsdp")), bool(values.get("use_torch_fsdp2"))
    shards = bool(values.get("use_distributed_optimizer"))
    if torch and shards and values.has("use_distributed_optimizer"):
        problems.append(values.problem("use_torch_fsdp2", "cannot stand together with use_distributed_optimizer"))
    if fsdp:
        strategy = values.get("data_parallel_sharding_strategy") or "optim_grads_params"
        if strategy not in _STRATEGIES:
            raise SpecError([values.problem("data_parallel_sharding_strategy", f"must be one of {', '.join(_STRATEGIES)}")])
        plan["zero"] = _STRATEGIES[strategy]
    elif torch:
        keeps = values.get("torch_fsdp2_reshard_after_forward") is False
        plan["zero"] = 2 if keeps else 3
    elif values.get("use_distributed_optimizer") is not None:
        plan["zero"] = int(shards)
    if values.has("overlap_grad_reduce") and values.get("overlap_grad_reduce") is not None:
        plan["dp_overlap"] = values.get("overlap_grad_reduce")
    if values.get("overlap_param_gather"):
        if not (shards or fsdp) and values.has("overlap_param_gather"):
            problems.append(values.problem("overlap_param_gather", "needs use_distributed_optimizer or use_megatron_fsdp"))
        elif not plan.get("dp_overlap") and values.has("overlap_param_gather") and not torch:
            problems.append(values.problem("overlap_param_gather", "needs overlap_grad_reduce"))
    elif shards and not fsdp and plan.get("dp_overlap"):
        assumed["dp_overlap"] = "on: gradients overlap; weights are gathered without overlap, for which a plan has no knob"
    plan, found = _shard_group(values, plan)
    return Meaning(plan=plan, problems=tuple(problems), assumed=assumed, unknown=(*unknown, *found))


def _shard_group(values: Values, plan: dict[str, Any]) -> tuple[dict[str, Any], list[Unknown]]:
    """Return the plan with its shard group, and zero 0 where there is nothing to share (which needs the number of GPUs)."""
    ranks = [values.get(name) or 1 for _, name in DEGREES]
    shared = values.gpus // (ranks[0] * ranks[1]) if values.gpus else 0
    instances = values.get("num_distributed_optimizer_instances") or 1
    if instances > 1 and (not shared or shared % instances or not plan.get("zero")):
        return plan, [values.unknown("num_distributed_optimizer_instances")]
    if instances > 1:
        plan = {**plan, "shard_group": shared // instances} if shared > instances else {**plan, "zero": 0}
    experts = (values.get("expert_tensor_parallel_size") or ranks[0]) * (values.get("expert_model_parallel_size") or 1) * ranks[1]
    alone = shared == 1 and (not values.get("num_experts") or values.gpus == experts)
    return ({**plan, "zero": 0} if alone and plan.get("zero") else plan), []


SHARDING = Aspect(
    group="parallel",
    keys=(
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
        "use_torch_fsdp2",
        "torch_fsdp2_reshard_after_forward",
        "ckpt_format",
        "overlap_grad_reduce",
        "overlap_param_gather",
    ),
    put=_put_sharding,
    take=_take_sharding,
)
