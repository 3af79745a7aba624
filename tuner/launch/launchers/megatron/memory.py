"""What keeps memory down, as settings of Megatron-Core: recomputed activations, and what is kept on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.megatron.degrees import take_pipeline
from tuner.launch.launchers.megatron.sharding import ACTIVATIONS, OPTIMIZER, is_fsdp
from tuner.launch.launchers.tables.settings import Aspect, Meaning, refusal
from tuner.plan import ALL_LAYERS, FULL, RECOMPUTE_MODULES
from tuner.plan_text import parse_layout as parse_layout_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.errors import Problem
    from tuner.launch.launchers.tables.settings import Ask, Kind, Values

KINDS: Mapping[str, Kind] = {
    "recompute_granularity": "text",
    "recompute_method": "text",
    "recompute_num_layers": "count",
    "recompute_modules": "words",
    "recompute_activations": "flag",
    "moe_layer_recompute": "flag",
    "optimizer_cpu_offload": "flag",
    "optimizer_offload_fraction": "number",
    "use_precision_aware_optimizer": "flag",
    "cpu_offloading": "flag",
    "cpu_offloading_num_layers": "count",
}


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
    if method == "block" and count == 0:
        return Meaning(plan={"recompute": "none"}, assumed={"recompute": "none: full recompute of a block of 0 layers keeps everything"})
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
    pipeline = take_pipeline(values).plan
    dealt = parse_layout_text(str(pipeline.get("pipeline_layout", "even")))
    some = count * pipeline.get("vpp", 1)
    layers, pp = values.get("num_layers"), values.get("pipeline_model_parallel_size") or 1
    every = layers and some * pp >= layers + sum(dealt.values())
    return Meaning(plan={"recompute": "full" if every else f"full:{some}"})


# -- offload


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


RECOMPUTE = Aspect(
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
)

OFFLOAD = Aspect(
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
)
