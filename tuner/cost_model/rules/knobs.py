"""Rules of recompute, sharding, offload and overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cost_model.rules.rule import (
    ACCELERATE,
    ALWAYS,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    NANOTRON,
    TORCHTITAN,
    Rule,
    divides,
    full,
    implies,
    module,
    replicas,
    stage_units,
)
from tuner.plan import ALL_LAYERS, FULL, OFFLOADS
from tuner.plan_text import recompute_text

if TYPE_CHECKING:
    from tuner.arrays import Bools, Ints
    from tuner.job import Job
    from tuner.plan import Plan

_ACTIVATIONS = OFFLOADS["activations"]
_OPTIMIZER = OFFLOADS["optimizer"]
_MOE_PARTS = ("moe_act", "moe", "shared_experts")


def _named(row: Plan) -> str:
    return f"recompute = {recompute_text(row.recompute, row.recompute_layers)}"


def _known_parts(job: Job, plan: Plan) -> Bools:
    """Modules exist in the model: experts, shared experts, MLA's up-projection, a dense MLP."""
    model, moe = job.model, job.model.moe
    good: Bools = True
    if moe is None:
        good = good & (module(plan, *_MOE_PARTS) == 0)
    elif not moe.shared_expert_ffn_hidden:
        good = good & (module(plan, "shared_experts") == 0)
    if moe is not None and not moe.first_dense_layers and moe.every == 1:
        good = good & (module(plan, "mlp") == 0)
    if model.mla is None:
        good = good & (module(plan, "mla_up_proj") == 0)
    return good


def _counted(job: Job, plan: Plan) -> Bools:
    """full:n means n of a stage's layers: fewer than it holds (all of them is spelled full)."""
    return implies(full(plan) & (plan.recompute_layers < ALL_LAYERS), plan.recompute_layers <= stage_units(job, plan))


def _counted_once(job: Job, plan: Plan) -> Bools:
    return implies(full(plan) & (plan.recompute_layers < ALL_LAYERS), plan.recompute_layers != stage_units(job, plan))


def _activations_offloaded(plan: Plan) -> Bools:
    return (plan.offload & _ACTIVATIONS) > 0


def _offload_allowed(job: Job, plan: Plan) -> Bools:
    del job
    return implies(_activations_offloaded(plan), (plan.pp == 1) & (plan.recompute == 0) & (plan.cuda_graphs == 0))


def _optimizer_sharded(job: Job, plan: Plan) -> Bools:
    """Where there is nothing to share, the distributed optimizer is free and no knob."""
    return implies(((plan.offload & _OPTIMIZER) > 0) & (plan.dp(job.gpus) * plan.cp > 1), plan.zero >= 1)


def _ep_overlap(job: Job, plan: Plan) -> Bools:
    allowed = (plan.ep > 1) & (full(plan) == 0) & (module(plan, "moe") == 0) & ((plan.pp == 1) | (plan.vpp > 1))
    return implies(plan.ep_overlap > 0, allowed & (job.model.mtp_layers <= 1))


def _sharing(job: Job, plan: Plan) -> Ints:
    """Ranks that share the weights, dp_shard*cp: the shard group, or all of the replica's data-parallel ranks, or none (zero 0)."""
    whole = plan.cp * (1 + (plan.zero > 0) * (replicas(job, plan) - 1))
    return plan.shard_group + (plan.shard_group < 1) * whole


RECOMPUTE = (
    Rule(
        id="recompute-mixed",
        families=(ALWAYS,),
        source="Megatron-LM transformer_config.py:1901-1931 (granularity is full or selective)",
        knobs=("recompute",),
        holds=lambda job, plan: (plan.recompute < FULL) | (plan.recompute == FULL),
        says=lambda job, row: "full recompute already drops every module of a layer",
    ),
    Rule(
        id="recompute-parts",
        families=(ALWAYS,),
        source="Megatron-LM transformer_config.py:1955-2018 (mla_up_proj needs MLA, moe_act needs experts)",
        knobs=("recompute",),
        holds=_known_parts,
        says=lambda job, row: f"{_named(row)} names a part that {job.model.name} does not have",
    ),
    Rule(
        id="recompute-nested",
        families=(ALWAYS,),
        severity="duplicate",
        source="Megatron-LM moe_layer.py: recomputing the mixture of experts recomputes its parts",
        knobs=("recompute",),
        holds=lambda job, plan: implies(module(plan, "moe"), module(plan, "moe_act", "shared_experts") == 0),
        says=lambda job, row: f"{_named(row)}: moe contains moe_act and shared_experts",
    ),
    Rule(
        id="full-layers",
        families=(ALWAYS,),
        source="Megatron-LM transformer_config.py:1901-1931 (1 <= recompute_num_layers <= layers/pp)",
        knobs=("recompute_layers", "pp"),
        holds=_counted,
        says=lambda job, row: f"{_named(row)}: a stage of pp = {row.pp} holds {stage_units(job, row)} layers",
    ),
    Rule(
        id="full-layers-all",
        families=(ALWAYS,),
        severity="duplicate",
        source="recomputing every layer of a stage is spelled full",
        knobs=("recompute_layers",),
        holds=_counted_once,
        says=lambda job, row: f"{_named(row)} is all layers of a stage, which is spelled full",
    ),
    Rule(
        id="full-layers-vpp",
        families=(MEGATRON,),
        source="Megatron-LM transformer_block.py _checkpointed_forward (block: the same number of layers in each model chunk)",
        knobs=("recompute_layers", "vpp"),
        holds=lambda job, plan: implies(full(plan) & (plan.recompute_layers < ALL_LAYERS), divides(plan.vpp, plan.recompute_layers)),
        says=lambda job, row: f"{_named(row)}: each of vpp = {row.vpp} chunks recomputes the same number of layers",
    ),
    Rule(
        id="recompute-whole",
        families=(DEEPSPEED, NANOTRON, ACCELERATE),
        source="DeepSpeed runtime/activation_checkpointing; nanotron config/parallelism_config.py; Accelerate's FSDP2: all layers or none",
        knobs=("recompute",),
        holds=lambda job, plan: (plan.recompute == 0) | ((plan.recompute == FULL) & (plan.recompute_layers >= ALL_LAYERS)),
        says=lambda job, row: f"{_named(row)}: {job.framework.name} recomputes all layers or nothing",
    ),
    Rule(
        id="core-attn-flash",
        families=(ALWAYS,),
        severity="warning",
        source="Megatron-LM transformer_config.py:1984; NVIDIA/Megatron-LM issue 1225",
        knobs=("recompute",),
        holds=lambda job, plan: module(plan, "core_attn") == 0 if job.attention == "flash" else True,
        says=lambda job, row: f"{_named(row)}: fused attention keeps no scores, so recomputing core_attn saves nothing",
    ),
)

SHARDING = (
    Rule(
        id="zero-pp-megatron",
        families=(MEGATRON,),
        source="Megatron-LM arguments.py:1032-1049 (FSDP needs pp == 1)",
        knobs=("zero", "pp"),
        holds=lambda job, plan: implies(plan.zero >= 2, plan.pp == 1),
        says=lambda job, row: f"zero = {row.zero} shards gradients or weights, which needs pp = 1 (pp = {row.pp})",
    ),
    Rule(
        id="zero-pp-deepspeed",
        families=(DEEPSPEED,),
        source="DeepSpeed runtime/pipe/engine.py (ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism)",
        knobs=("zero", "pp"),
        holds=lambda job, plan: implies(plan.zero >= 2, plan.pp == 1),
        says=lambda job, row: f"zero = {row.zero} needs pp = 1 (pp = {row.pp}): ZeRO-2 and 3 exclude pipelines",
    ),
    Rule(
        id="zero-nanotron",
        families=(NANOTRON,),
        source="nanotron config/config.py OptimizerArgs.zero_stage: 0 or 1",
        knobs=("zero",),
        holds=lambda job, plan: plan.zero <= 1,
        says=lambda job, row: f"zero = {row.zero}: {job.framework.name} shards the optimizer only (0 or 1)",
    ),
    Rule(
        id="zero-fsdp",
        families=(FSDP,),
        source="PyTorch FSDP (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD); torchtitan parallelize.py (replicate or fully_shard)",
        knobs=("zero",),
        holds=lambda job, plan: plan.zero != 1,
        says=lambda job, row: f"zero = {row.zero}: {job.framework.name} replicates (0), shards and keeps weights (2) or reshards them (3)",
    ),
    Rule(
        id="offload-activations",
        families=(MEGATRON,),
        source="Megatron-LM transformer_config.py:1884-1899; Megatron-Bridge pull 3107",
        knobs=("offload", "pp", "recompute", "cuda_graphs"),
        holds=_offload_allowed,
        says=lambda job, row: f"activation offload needs pp = 1, no recompute and no CUDA graphs (pp = {row.pp}, {_named(row)})",
    ),
    Rule(
        id="offload-optimizer",
        families=(MEGATRON,),
        source="Megatron-LM arguments.py (optimizer_cpu_offload needs use_precision_aware_optimizer), optimizer_config.py (which needs "
        "use_distributed_optimizer)",
        knobs=("offload", "zero"),
        holds=_optimizer_sharded,
        says=lambda job, row: "offload of the optimizer needs zero >= 1, the distributed optimizer (zero = 0)",
    ),
    Rule(
        id="offload-nanotron",
        families=(NANOTRON,),
        source="nanotron config/config.py (no offload)",
        knobs=("offload",),
        holds=lambda job, plan: plan.offload == 0,
        says=lambda job, row: f"{job.framework.name} offloads nothing",
    ),
)

OVERLAP = (
    Rule(
        id="tp-overlap-sp",
        families=(MEGATRON,),
        source="Megatron-LM arguments.py:1442",
        knobs=("tp_overlap", "sequence_parallel"),
        holds=lambda job, plan: implies(plan.tp_overlap > 0, plan.sequence_parallel > 0),
        says=lambda job, row: "tp_overlap needs sequence_parallel",
    ),
    Rule(
        id="ep-overlap",
        families=(MEGATRON,),
        source="Megatron-LM transformer_config.py:3002-3050",
        knobs=("ep_overlap", "vpp"),
        holds=_ep_overlap,
        says=lambda job, row: (
            f"ep_overlap needs ep > 1 ({row.ep}), neither full nor moe recompute ({_named(row)}), vpp > 1 where pp > 1 "
            f"({row.vpp}, {row.pp}) and at most one MTP layer ({job.model.mtp_layers})"
        ),
    ),
    Rule(
        id="moe-tp-sp",
        families=(MEGATRON,),
        source="Megatron-LM moe_layer.py:636",
        knobs=("sequence_parallel", "tp"),
        holds=lambda job, plan: implies(plan.tp > 1, plan.sequence_parallel > 0) if job.model.moe else True,
        says=lambda job, row: f"a mixture of experts at tp = {row.tp} needs sequence_parallel",
    ),
    Rule(
        id="ep-tp",
        families=(TORCHTITAN,),
        source="torchtitan pull 4794",
        knobs=("ep", "tp"),
        holds=lambda job, plan: implies(plan.ep > 1, plan.ep >= plan.tp),
        says=lambda job, row: f"ep = {row.ep} must be at least tp = {row.tp}",
    ),
    Rule(
        id="ep-mesh",
        families=(TORCHTITAN,),
        source="torchtitan parallel_dims.py (dp_shard*cp*tp == efsdp*ep; weights that are replicated have no dp_shard)",
        knobs=("ep",),
        holds=lambda job, plan: divides(plan.ep, _sharing(job, plan) * plan.tp),
        says=lambda job, row: (
            f"ep = {row.ep} must divide dp_shard*cp*tp = {_sharing(job, row) // row.cp}*{row.cp}*{row.tp} (zero = {row.zero}, "
            f"shard_group = {row.shard_group})"
        ),
    ),
    Rule(
        id="etp-torchtitan",
        families=(TORCHTITAN,),
        source="torchtitan pull 3167 (expert tensor parallelism removed)",
        knobs=("etp",),
        holds=lambda job, plan: plan.etp == 1,
        says=lambda job, row: f"etp = {row.etp}: {job.framework.name} has no expert tensor parallelism",
    ),
    Rule(
        id="fused-softmax",
        families=(MEGATRON, DEEPSPEED),
        severity="warning",
        source="Megatron-LM fused_softmax.py is_kernel_available; BigScience tr11-176B-ml chronicles-prequel",
        knobs=("micro_batch", "tp"),
        holds=lambda job, plan: divides(4, job.model.heads // plan.tp * plan.micro_batch) if job.attention == "unfused" else True,
        says=lambda job, row: (
            f"(heads/tp)*micro_batch = {job.model.heads // row.tp}*{row.micro_batch} is no multiple of 4: the fused softmax is not used"
        ),
    ),
)
