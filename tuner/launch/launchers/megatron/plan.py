"""A plan and a batch as settings of Megatron-Core, under the names that its command line gives them (megatron/training/arguments.py).

Megatron-LM, Megatron-Bridge, NeMo and Primus share them; each spells them in its own way. Where a rule is meant, it is the framework's own
(Megatron-LM 0.19: arguments.py, transformer_config.py, optimizer_config.py, parallel_state.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.megatron.layout import counted, layout_of, parse_layout
from tuner.launch.launchers.tables.settings import Aspect, Kind, Meaning, refusal
from tuner.plan import ALL_LAYERS, CP_KINDS, FULL, OFFLOADS, RECOMPUTE_MODULES
from tuner.plan_text import layout_text
from tuner.plan_text import parse_layout as parse_layout_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.errors import Problem
    from tuner.job import Job
    from tuner.launch.launchers.tables.settings import Ask, Dialect, Values
    from tuner.plan import Plan

OPTIMIZER, ACTIVATIONS = OFFLOADS["optimizer"], OFFLOADS["activations"]
# Knobs by the launchers of this family: how they are spelled on Megatron-LM's command line, or why they are not.
SAYS: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank, or what pipeline_model_parallel_layout holds",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
    "recompute": "recompute_granularity, recompute_modules",
    "recompute_layers": "recompute_method block, recompute_num_layers",
    "zero": "1: use_distributed_optimizer; 2 and 3: use_megatron_fsdp with data_parallel_sharding_strategy",
    "shard_group": "num_distributed_optimizer_instances",
    "embedding_layers": "account_for_embedding_in_pipeline_split; pipeline_model_parallel_layout for more than one",
    "loss_layers": "account_for_loss_in_pipeline_split; pipeline_model_parallel_layout for more than one",
    "offload": "optimizer_cpu_offload, cpu_offloading_num_layers",
    "tp_overlap": "tp_comm_overlap",
    "dp_overlap": "overlap_grad_reduce, overlap_param_gather",
    "ep_overlap": "overlap_moe_expert_parallel_comm",
    "cuda_graphs": "cuda_graph_impl",
    "cp_kind": "cp_comm_type",
}
CANNOT: Mapping[str, str] = {
    "schedule": "it runs 1F1B, interleaved where vpp > 1, and nothing names another schedule",
    "fallback_tp": "no release goes on at a lower tensor-parallel degree (`tuner export megatron-lm-ntp` writes for the dev branch)",
    "idle_tp": "a plan that is launched has no idle ranks",
}
KINDS: Mapping[str, Kind] = {
    "tensor_model_parallel_size": "count", "pipeline_model_parallel_size": "count", "context_parallel_size": "count",
    "expert_model_parallel_size": "count", "expert_tensor_parallel_size": "count", "cp_comm_type": "words",
    "sequence_parallel": "flag", "micro_batch_size": "count", "global_batch_size": "count", "rampup_batch_size": "words",
    "num_virtual_stages_per_pipeline_rank": "count", "virtual_pipeline_model_parallel_size": "count",
    "num_layers_per_virtual_pipeline_stage": "count", "pipeline_model_parallel_layout": "text",
    "account_for_embedding_in_pipeline_split": "flag", "account_for_loss_in_pipeline_split": "flag",
    "decoder_first_pipeline_num_layers": "count", "decoder_last_pipeline_num_layers": "count",
    "recompute_granularity": "text", "recompute_method": "text", "recompute_num_layers": "count", "recompute_modules": "words",
    "recompute_activations": "flag", "moe_layer_recompute": "flag",
    "use_distributed_optimizer": "flag", "use_megatron_fsdp": "flag", "data_parallel_sharding_strategy": "text",
    "num_distributed_optimizer_instances": "count", "use_torch_fsdp2": "flag", "torch_fsdp2_reshard_after_forward": "flag",
    "ckpt_format": "text", "overlap_grad_reduce": "flag", "overlap_param_gather": "flag",
    "optimizer_cpu_offload": "flag", "optimizer_offload_fraction": "number", "use_precision_aware_optimizer": "flag",
    "cpu_offloading": "flag", "cpu_offloading_num_layers": "count",
    "tp_comm_overlap": "flag", "overlap_moe_expert_parallel_comm": "flag",
    "cuda_graph_impl": "text", "cuda_graph_scope": "words", "cuda_graph_modules": "words", "enable_cuda_graph": "flag",
    "external_cuda_graph": "flag", "check_for_nan_in_loss_and_grad": "flag",
}  # fmt: skip
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_KINDS_OF_CP = {**CP_KINDS, "allgather": CP_KINDS["all_gather"]}
_DEGREES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
)


def is_fsdp(plan: Plan) -> bool:
    """Whether gradients or weights are sharded."""
    return int(plan.zero) >= 2


def shares_nothing(job: Job, plan: Plan) -> bool:
    """Whether no rank holds the same weights as another one: there is nothing to shard, and sharding it is free."""
    return int(plan.dp(job.gpus)) * int(plan.cp) == 1 and (job.model.moe is None or int(plan.edp(job.gpus)) == 1)


# -- degrees and batch


def _put_degrees(ask: Ask) -> dict[str, Any]:
    job, plan = ask.job, ask.plan
    found: dict[str, Any] = {name: int(getattr(plan, knob)) for knob, name in _DEGREES}
    found["sequence_parallel"] = bool(plan.sequence_parallel)
    if plan.cp > 1:
        found["cp_comm_type"] = [next(name for name, code in CP_KINDS.items() if code == plan.cp_kind)]
    if job.model.moe:
        found |= {"expert_model_parallel_size": int(plan.ep), "expert_tensor_parallel_size": int(plan.etp)}
    return found


def _take_degrees(values: Values) -> Meaning:
    named = (*_DEGREES, ("ep", "expert_model_parallel_size"), ("etp", "expert_tensor_parallel_size"))
    plan: dict[str, Any] = {knob: values.get(name) for knob, name in named if values.get(name) is not None}
    problems = [values.problem(name, "must be at least 1") for knob, name in named if plan.get(knob) == 0]
    plan = {knob: value for knob, value in plan.items() if value}
    unknown: list[Unknown] = []
    tp = plan.get("tp", 1)
    if values.get("sequence_parallel") is not None:
        plan["sequence_parallel"] = values.get("sequence_parallel") and tp > 1
    if values.has("sequence_parallel") and values.get("sequence_parallel") and tp == 1 and "etp" not in plan:
        why = {"sequence_parallel": "off: at tensor_model_parallel_size 1 it is switched off with a warning"}
    else:
        why = {}
    kinds = set(values.get("cp_comm_type") or [])
    if len(kinds) == 1 and (kind := kinds.copy().pop()) in _KINDS_OF_CP:
        if plan.get("cp", 1) > 1:
            plan["cp_kind"] = next(name for name, code in CP_KINDS.items() if code == _KINDS_OF_CP[kind])
    elif kinds:
        unknown.append(values.unknown("cp_comm_type"))
    return Meaning(plan=plan, problems=tuple(problems), unknown=tuple(unknown), assumed=why)


def _put_batch(ask: Ask) -> dict[str, Any]:
    job, plan = ask.job, ask.plan
    found: dict[str, Any] = {"micro_batch_size": int(plan.micro_batch), "global_batch_size": job.global_batch}
    if job.ramp_up:
        found["rampup_batch_size"] = [str(n) for n in (job.ramp_up.start, job.ramp_up.increment, job.ramp_up.samples)]
    return found


def _take_batch(values: Values) -> Meaning:
    plan, job, unknown = {}, {}, []
    if values.get("micro_batch_size"):
        plan["micro_batch"] = values.get("micro_batch_size")
    if values.get("global_batch_size"):
        job["global_batch"] = values.get("global_batch_size")
    elif values.get("micro_batch_size") and values.gpus:
        ranks = [values.get(name) or 1 for _, name in _DEGREES]
        dp = values.gpus // (ranks[0] * ranks[1] * ranks[2])
        if dp:
            job["global_batch"] = values.get("micro_batch_size") * dp
            why = f"micro_batch_size x data-parallel degree {dp}, as nothing tells global_batch_size"
            return Meaning(plan=plan, job=job, assumed={"global_batch": why})
    words = values.get("rampup_batch_size")
    if words and len(words) == 1:
        words = words[0].strip("[]() ").replace(",", " ").split()
    if words and len(words) == 3 and all(word.isdigit() for word in words):
        job["ramp_up"] = dict(zip(("start", "increment", "samples"), map(int, words), strict=True))
    elif words:
        unknown.append(values.unknown("rampup_batch_size"))
    return Meaning(plan=plan, job=job, unknown=tuple(unknown))


# -- pipeline


def _put_pipeline(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    first, last, vpp = int(plan.embedding_layers), int(plan.loss_layers), int(plan.vpp)
    named = "virtual_pipeline_model_parallel_size" if "vpp" in dialect.traits else "num_virtual_stages_per_pipeline_rank"
    found: dict[str, Any] = {named: vpp if vpp > 1 else None}
    if int(plan.pp) == 1:
        return found
    if max(first, last) > 1:
        layout = layout_of(job.model.layers, job.model.mtp_layers, int(plan.pp) * vpp, first, last)
        kept = found if "vpp" in dialect.traits else {}  # the command line takes vpp from the layout, and refuses both
        return {**kept, "pipeline_model_parallel_layout": layout}
    flags = {"account_for_embedding_in_pipeline_split": bool(first), "account_for_loss_in_pipeline_split": bool(last)}
    return found | flags


_VPP = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")


def _take_pipeline(values: Values) -> Meaning:
    told = [name for name in _VPP if values.has(name) and values.get(name)]
    if len(told) > 1:
        return Meaning(problems=(values.problem(told[1], f"cannot stand together with {values.told[told[0]].spelled}"),))
    if told == ["pipeline_model_parallel_layout"]:
        return _take_layout(values)
    first, last = (bool(values.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    plan: dict[str, Any] = {}
    if values.has("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        plan["pipeline_layout"] = layout_text(int(first), int(last))
    vpp = values.get("num_virtual_stages_per_pipeline_rank") or values.get("virtual_pipeline_model_parallel_size")
    if vpp or values.has("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"):
        plan["vpp"] = vpp or 1
    pp, layers = values.get("pipeline_model_parallel_size") or 1, values.get("num_layers")
    meaning = Meaning(plan=plan)
    if told == ["num_layers_per_virtual_pipeline_stage"]:
        each, units = values.get(told[0]), (layers or 0) + first + last
        if not layers:
            return Meaning(plan=plan, unknown=(values.unknown(told[0]),))
        if units % (pp * each):
            rule = f"x pipeline_model_parallel_size {pp} must divide the {units} layers"
            return Meaning(plan=plan, problems=(values.problem(told[0], rule),))
        plan["vpp"] = units // pp // each
    return _with_uneven(values, meaning, pp, layers)


def _with_uneven(values: Values, meaning: Meaning, pp: int, layers: int | None) -> Meaning:
    """Return the meaning with layers of the first and last stage that are told as counts."""
    names = [f"decoder_{which}_pipeline_num_layers" for which in ("first", "last")]
    if not any(values.get(name) for name in names) or pp == 1:
        return meaning
    first, last = (values.get(name) for name in names)
    middle = pp - sum(count is not None for count in (first, last))
    rest = (layers or 0) - (first or 0) - (last or 0)
    each = rest // middle if middle > 0 and rest > 0 and rest % middle == 0 else 0
    missing = [each - count if count is not None else 0 for count in (first, last)]
    if not layers or meaning.plan.get("vpp", 1) > 1 or not each or min(missing) < 0:
        return Meaning(plan=meaning.plan, unknown=tuple(values.unknown(name) for name in names if values.has(name)))
    return Meaning(plan={**meaning.plan, "pipeline_layout": layout_text(*missing)})


def _take_layout(values: Values) -> Meaning:
    name = "pipeline_model_parallel_layout"
    try:
        chunks = parse_layout(values.get(name))
    except ValueError as error:
        raise SpecError([values.problem(name, str(error))]) from None
    pp, layers, problems = values.get("pipeline_model_parallel_size") or 1, values.get("num_layers"), []
    if len(chunks) % pp:
        problems.append(values.problem(name, f"its {len(chunks)} stages must be a multiple of pipeline_model_parallel_size {pp}"))
    total = sum(chunk.count("t") for chunk in chunks)
    if layers and total != layers:
        problems.append(values.problem(name, f"deals {total} layers, and num_layers is {layers}"))
    if problems:
        return Meaning(problems=tuple(problems))
    vpp = len(chunks) // pp
    told = values.get("virtual_pipeline_model_parallel_size")
    if told and told != vpp:
        rule = f"deals {vpp} chunks to a stage, and virtual_pipeline_model_parallel_size is {told}"
        problems.append(values.problem(name, rule))
    counts = counted(chunks)
    if counts is None:
        return Meaning(plan={"vpp": vpp}, unknown=(values.unknown(name),), problems=tuple(problems))
    return Meaning(plan={"vpp": vpp, "pipeline_layout": layout_text(*counts)}, problems=tuple(problems))


# -- recompute


def _put_recompute(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    modules, layers = int(plan.recompute), int(plan.recompute_layers)
    if modules & FULL:
        # block: so many layers of each model chunk (transformer_block.py _checkpointed_forward); uniform 1: each layer by itself
        some = layers < ALL_LAYERS
        method, count = ("block", layers // int(plan.vpp)) if some else ("uniform", 1)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    names = [name for name, bit in RECOMPUTE_MODULES.items() if modules & bit]
    if not names:
        return {}
    if job.precision == "fp8" and "delayed" in dialect.traits and {"layernorm", "moe_act"} & set(names):
        raise refusal(dialect, "recompute", "+".join(names), "delayed scaling of fp8 does not recompute layernorm or moe_act")
    return {"recompute_granularity": "selective", "recompute_modules": names}


def _take_recompute(values: Values) -> Meaning:
    granularity = values.get("recompute_granularity")
    if values.get("recompute_activations"):
        granularity = "selective"
    if values.get("moe_layer_recompute"):
        if granularity == "full":
            return Meaning(problems=(values.problem("moe_layer_recompute", "cannot stand together with full recompute"),))
        granularity = "selective"
    if granularity not in (None, "full", "selective"):
        raise SpecError([values.problem("recompute_granularity", "must be full or selective")])
    if granularity == "full":
        return _take_full(values)
    forbidden = [name for name in ("recompute_method", "recompute_num_layers") if values.has(name) and values.get(name)]
    if granularity is None:
        told = values.has("recompute_granularity", "recompute_activations")
        idle = [name for name in (*forbidden, "recompute_modules") if values.has(name) and values.get(name)]
        why = {"recompute": "none: nothing is recomputed without recompute_granularity"} if idle else {}
        return Meaning(plan={"recompute": "none"} if told or idle else {}, assumed=why)
    problems = [values.problem(name, "cannot stand together with selective recompute") for name in forbidden]
    modules = list(values.get("recompute_modules") or ["core_attn"])
    if len(modules) == 1:
        modules = modules[0].strip("[]").replace("'", "").replace('"', "").replace(",", " ").split()
    if values.get("moe_layer_recompute") and "moe" not in modules:
        modules.append("moe")
    known = [name for name in RECOMPUTE_MODULES if name in modules]
    strange = [name for name in modules if name not in RECOMPUTE_MODULES]
    where = values.told.get("recompute_modules")
    unknown = [Unknown(name=where.spelled, value=name, where=where.where) for name in strange if where]
    assumed = {} if where else {"recompute": "core_attn: what selective recompute takes where no modules are named"}
    plan = {"recompute": "+".join(known) or "none"}
    return Meaning(plan=plan, problems=tuple(problems), unknown=tuple(unknown), assumed=assumed)


def _take_full(values: Values) -> Meaning:
    method, count = values.get("recompute_method"), values.get("recompute_num_layers")
    problems: list[Problem] = []
    if method not in ("uniform", "block"):
        told = "recompute_method" if values.has("recompute_method") else "recompute_granularity"
        problems.append(values.problem(told, "full recompute needs recompute_method uniform or block"))
    if not count:
        told = "recompute_num_layers" if values.has("recompute_num_layers") else "recompute_granularity"
        problems.append(values.problem(told, "full recompute needs recompute_num_layers of at least 1"))
    if problems:
        return Meaning(problems=tuple(problems), plan={"recompute": "full"})
    if method == "uniform":
        why = f"full: it keeps the input of every {count}. layer, and a plan counts each layer's"
        return Meaning(plan={"recompute": "full"}, assumed={"recompute": why} if count > 1 else {})
    pipeline = _take_pipeline(values).plan
    dealt = parse_layout_text(str(pipeline.get("pipeline_layout", "even")))
    some = count * pipeline.get("vpp", 1)
    layers, pp = values.get("num_layers"), values.get("pipeline_model_parallel_size") or 1
    every = layers and some * pp >= layers + sum(dealt.values())
    return Meaning(plan={"recompute": "full" if every else f"full:{some}"})


# -- what data-parallel ranks share


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
    ranks = [values.get(name) or 1 for _, name in _DEGREES]
    shared = values.gpus // (ranks[0] * ranks[1]) if values.gpus else 0
    instances = values.get("num_distributed_optimizer_instances") or 1
    if instances > 1 and (not shared or shared % instances or not plan.get("zero")):
        return plan, [values.unknown("num_distributed_optimizer_instances")]
    if instances > 1:
        plan = {**plan, "shard_group": shared // instances} if shared > instances else {**plan, "zero": 0}
    experts = (values.get("expert_tensor_parallel_size") or ranks[0]) * (values.get("expert_model_parallel_size") or 1) * ranks[1]
    alone = shared == 1 and (not values.get("num_experts") or values.gpus == experts)
    return ({**plan, "zero": 0} if alone and plan.get("zero") else plan), []


# -- offload, overlap, graphs


def _put_offload(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    found: dict[str, Any] = {}
    if int(plan.offload) & OPTIMIZER:
        if "no-optimizer-offload" in dialect.traits:
            raise refusal(dialect, "offload", "optimizer", "that its release offloads the optimizer was not found in its source", "none")
        if is_fsdp(plan):
            raise refusal(dialect, "offload", "optimizer", "nothing tells that Megatron-FSDP runs with an offloaded optimizer", "zero = 1")
        found |= {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
    if int(plan.offload) & ACTIVATIONS:
        # all layers but one: cpu_offloading_num_layers must be below the number of layers
        found |= {"cpu_offloading": True, "cpu_offloading_num_layers": job.model.layers - 1}
    return found


def _take_offload(values: Values) -> Meaning:
    optimizer = bool(values.get("optimizer_cpu_offload")) and values.get("optimizer_offload_fraction") != 0
    layers = values.get("cpu_offloading_num_layers") or 0
    activations = bool(layers) or bool(values.get("cpu_offloading"))
    told = [name for name, on in (("optimizer", optimizer), ("activations", activations)) if on]
    problems: list[Problem] = []
    assumed: dict[str, str] = {}
    if optimizer and not values.get("use_precision_aware_optimizer"):
        problems.append(values.problem("optimizer_cpu_offload", "needs use_precision_aware_optimizer"))
    fraction = values.get("optimizer_offload_fraction")
    if optimizer and fraction not in (None, 1):
        assumed["offload"] = f"all of the optimizer: optimizer_offload_fraction is {fraction}, and a plan offloads all or nothing"
    total = values.get("num_layers")
    if activations and total and layers and layers < total - 1:
        assumed["offload"] = f"activations of all layers: {layers} of {total} are told, and a plan counts none"
    names = ("optimizer_cpu_offload", "cpu_offloading", "cpu_offloading_num_layers")
    plan = {"offload": "+".join(told) or "none"} if values.has(*names) else {}
    return Meaning(plan=plan, problems=tuple(problems), assumed=assumed)


def _put_overlap(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    found: dict[str, Any] = {"tp_comm_overlap": bool(plan.tp_overlap)}
    if job.model.moe:
        found["overlap_moe_expert_parallel_comm"] = bool(plan.ep_overlap)
    if plan.ep_overlap and job.precision == "fp32":
        raise refusal(dialect, "ep_overlap", 1, "it needs 16-bit weights, and the precision is fp32")
    return found


def _take_overlap(values: Values) -> Meaning:
    named = (("tp_overlap", "tp_comm_overlap"), ("ep_overlap", "overlap_moe_expert_parallel_comm"))
    plan = {knob: values.get(name) for knob, name in named if values.has(name) and values.get(name) is not None}
    problems = []
    tp = values.get("tensor_model_parallel_size") or 1
    if plan.get("tp_overlap") and not values.get("sequence_parallel"):
        problems.append(values.problem("tp_comm_overlap", "needs sequence_parallel"))
    if plan.get("tp_overlap") and tp == 1:
        plan["tp_overlap"] = False
    return Meaning(plan=plan, problems=tuple(problems))


def _put_graphs(ask: Ask) -> dict[str, Any]:
    """CUDA graphs of a whole iteration, or of what a mixture of experts allows: its dispatch waits for counts on the host."""
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    if not plan.cuda_graphs:
        return {}
    full, moe = bool(int(plan.recompute) & FULL), job.model.moe is not None
    if moe and full:
        raise refusal(dialect, "cuda_graphs", 1, "full recompute needs a graph of the whole iteration, which dropless experts do not allow")
    if "graphs-flag" in dialect.traits:
        if plan.recompute:
            raise refusal(dialect, "cuda_graphs", 1, "its release captures no layer that is recomputed", "recompute = none")
        if moe:
            raise refusal(dialect, "cuda_graphs", 1, "what its release captures of a mixture of experts was not checked")
        return {"enable_cuda_graph": True}
    if moe:
        recomputed = bool(int(plan.recompute) & RECOMPUTE_MODULES["moe"])
        parts = ["attn"] if recomputed else ["attn", "moe_router", "moe_preprocess"]
        return {"cuda_graph_impl": "transformer_engine", _modules(dialect): parts}
    if "scope" in dialect.traits:
        return {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"], "check_for_nan_in_loss_and_grad": False}
    return {"cuda_graph_impl": "full_iteration", "check_for_nan_in_loss_and_grad": False}


def _modules(dialect: Dialect) -> str:
    return "cuda_graph_scope" if "scope" in dialect.traits else "cuda_graph_modules"


def _take_graphs(values: Values) -> Meaning:
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    if not values.has(*names):
        idle = [values.unknown(name) for name in ("cuda_graph_scope", "cuda_graph_modules") if values.has(name) and values.get(name)]
        return Meaning(unknown=tuple(idle))
    impl = values.get("cuda_graph_impl") or "none"
    if impl not in ("none", "local", "transformer_engine", "full_iteration"):
        raise SpecError([values.problem("cuda_graph_impl", "must be none, local, transformer_engine or full_iteration")])
    flags = [name for name in names[1:] if values.get(name)]
    problems = []
    if flags and impl != "none":
        problems.append(values.problem(flags[0], "cannot stand together with cuda_graph_impl"))
    scopes = values.get("cuda_graph_scope") or values.get("cuda_graph_modules") or []
    whole = impl == "full_iteration" or any("full_iteration" in scope for scope in scopes)
    if values.get("recompute_granularity") == "full" and (impl != "none" or flags) and not whole:
        problems.append(
            values.problem((["cuda_graph_impl"] if impl != "none" else flags)[0], "full recompute needs a full-iteration graph")
        )
    return Meaning(plan={"cuda_graphs": bool(flags) or impl != "none"}, problems=tuple(problems))


PLAN = (
    Aspect(
        group="parallel",
        keys=(
            *(name for _, name in _DEGREES),
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "cp_comm_type",
        ),
        put=_put_degrees,
        take=_take_degrees,
    ),
    Aspect(
        group="parallel",
        keys=(
            *_VPP,
            "virtual_pipeline_model_parallel_size",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ),
        put=_put_pipeline,
        take=_take_pipeline,
    ),
    Aspect(
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
    ),
    Aspect(
        group="parallel",
        keys=("tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
        put=_put_overlap,
        take=_take_overlap,
    ),
    Aspect(
        group="memory",
        keys=(
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "recompute_activations",
            "moe_layer_recompute",
        ),
        put=_put_recompute,
        take=_take_recompute,
    ),
    Aspect(
        group="memory",
        keys=(
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "use_precision_aware_optimizer",
            "cpu_offloading",
            "cpu_offloading_num_layers",
        ),
        put=_put_offload,
        take=_take_offload,
    ),
    Aspect(
        group="memory",
        keys=(
            "cuda_graph_impl",
            "cuda_graph_scope",
            "cuda_graph_modules",
            "enable_cuda_graph",
            "external_cuda_graph",
            "check_for_nan_in_loss_and_grad",
        ),
        put=_put_graphs,
        take=_take_graphs,
    ),
    Aspect(
        group="training",
        keys=("micro_batch_size", "global_batch_size", "rampup_batch_size"),
        put=_put_batch,
        take=_take_batch,
    ),
)
