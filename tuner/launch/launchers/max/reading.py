"""What MaxText's YAML files and command lines say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found, Unknown
from tuner.launch.launchers.max.keys import (
    AXES,
    DECODERS,
    KEYS,
    LATENCY_HIDING,
    MODELS,
    NAME,
    OFFLOADED,
    POLICIES,
    QUIET,
    RECIPES,
    REST,
    TENSORS,
    modules,
)
from tuner.launch.launchers.tables.vocabulary import SHOWN, Said, Told, understand
from tuner.launch.launchers.texts.documents import from_yaml
from tuner.launch.launchers.texts.overrides import from_script
from tuner.load import load_spec
from tuner.model import Model
from tuner.plan_text import parse_recompute, recompute_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.launch.launchers.texts.overrides import Script


def read(files: Mapping[str, str]) -> Found:
    """Return what these files say: YAML first, then key=value words of scripts, which override it."""
    told: dict[str, Told] = {}
    scripts: list[Script] = []
    for name, content in files.items():
        if name.endswith((".yml", ".yaml")):
            told |= from_yaml(content, name)
        else:
            scripts.append(from_script(content, name))
    for script in scripts:
        told |= {key: item for key, item in script.pairs().items() if key not in told or item.value != ""}
    return _found(understand(KEYS, {key: _worded(item) for key, item in told.items()}, QUIET), scripts)


def _worded(item: Told) -> Told:
    """Return a list that a command line spells as text as a list."""
    value = item.value
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return Told(value=[part.strip(" '\"") for part in value[1:-1].split(",") if part.strip()], where=item.where)
    return item


def _found(said: Said, scripts: list[Script]) -> Found:
    assumed: dict[str, str] = {}
    fields = _model_fields(said)
    model = _model_of(fields)
    degrees, gpus = _degrees(said)
    tp = (degrees["tensor"] or 1) * (degrees["tensor_sequence"] or 1)
    pp, cp, ep = (degrees[name] or 1 for name in ("pipeline", "context", "expert"))
    plan: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": bool(tp > 1 and degrees["tensor_sequence"] == tp)}
    if degrees["tensor"] != 1 and degrees["tensor_sequence"] != 1:
        said.contradict("ici_tensor_sequence", "the tuner shards sequences over all tensor-parallel ranks or none")
    if fields.get("moe") or (model and model.moe):
        plan["etp"] = tp
    plan |= _sharding(said, degrees, gpus, assumed)
    if cp > 1:
        kinds = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
        strategy = said.get("strategy", "all_gather")
        if strategy not in kinds:
            said.contradict("strategy", "is a mix of ring and all-to-all, which the tuner does not price")
        else:
            plan["cp_kind"] = kinds[strategy]
    if pp > 1:
        plan |= _stage_knobs(said, pp, model)
    plan |= _recompute(said, model, assumed)
    plan["offload"] = "optimizer" if said.get("offload") else "none"
    if any("false" in value for script in scripts for value in _latency_hiding(script)):
        plan["dp_overlap"] = False
    batch, job = _batch(said, tp, pp, cp, gpus, assumed)
    job |= {"precision": precision} if (precision := _precision(said)) else {}
    job |= {"attention": "unfused" if said.settings["attention"] == "dot_product" else "flash"} if "attention" in said.settings else {}
    return Found(
        framework=NAME,
        model=fields,
        job=job,
        plan=plan | batch,
        gpus=gpus,
        unknown=tuple(said.unknown),
        assumed=assumed,
        problems=tuple(said.problems),
    )


def _latency_hiding(script: Script) -> list[str]:
    value, _ = script.variables.get("XLA_FLAGS", ("", ""))
    words = [*value.split(), *(word for word, _ in script.words)]  # flags over several lines are words of their own
    return [word for word in words if word.startswith(LATENCY_HIDING)]


def _degrees(said: Said) -> tuple[dict[str, int | None], int | None]:
    """Return ({axis: degree, None where it is the rest of an unknown count}, GPUs where every axis is told)."""
    degrees: dict[str, int | None] = {}
    for axis in AXES:
        parts = [said.get(f"{net}_{axis}", REST.get(f"{net}_{axis}", 1)) for net in ("ici", "dcn")]
        degrees[axis] = None if -1 in parts else int(parts[0] * parts[1])
    # Between domains, the data axis is the rest unless told: of the slices, or of those that another dcn_ axis makes.
    others = math.prod(said.get(f"dcn_{axis}", 1) for axis in AXES if axis != "data")
    slices = said.get("slices", -1)
    if degrees["data"] is None and said.get("ici_data", 1) != -1 and others > 0:
        if slices > 0 and slices % others == 0:
            degrees["data"] = said.get("ici_data", 1) * (slices // others)
        elif slices < 0 and "dcn_data" not in said.settings and others > 1:
            degrees["data"] = said.get("ici_data", 1)
    known = [degree for degree in degrees.values() if degree is not None]
    return degrees, math.prod(known) if len(known) == len(AXES) else None


def _sharding(said: Said, degrees: Mapping[str, int | None], gpus: int | None, assumed: dict[str, str]) -> dict[str, Any]:
    data, fsdp = degrees["data"], degrees["fsdp"]
    expert, context = degrees["expert"] or 1, degrees["context"] or 1
    plan: dict[str, Any] = {}
    if data is not None and fsdp is not None:
        plan["dp"] = data * fsdp * expert
        group = fsdp * expert * context
        if group == 1:
            return plan | {"zero": 1 if said.get("optimizer_over_data") and data > 1 else 0}
        plan["shard_group"] = 0 if data == 1 else group
    elif data is None and "ici_data" not in said.settings and gpus is None:
        assumed["shard_group"] = "weights sharded over all data-parallel ranks: how many domains there are is not told"
    if said.get("optimizer_over_data"):
        said.ignore("optimizer_over_data", "shard_optimizer_over_data")
    plan["zero"] = 2 if said.get("gathered_once") and (degrees["pipeline"] or 1) > 1 else 3
    return plan


def _stage_knobs(said: Said, pp: int, model: Model | None) -> dict[str, Any]:
    repeats, layers = said.get("repeats", -1), said.get("stage_layers", 1)
    if repeats == -1:
        if model is None:
            said.contradict("stage_layers", "how often the pipeline repeats depends on the model's layers, which are not told")
            return {}
        if model.layers % (pp * layers):
            said.contradict("stage_layers", f"pp*layers a stage = {pp}*{layers} must divide {model.layers} layers (types.py)")
            return {}
        repeats = model.layers // (pp * layers)
    elif model and repeats * layers * pp != model.layers:
        said.contradict("repeats", f"pp*repeats*layers a stage = {pp}*{repeats}*{layers} must be {model.layers} layers (types.py)")
    return {"vpp": repeats}


def _recompute(said: Said, model: Model | None, assumed: dict[str, str]) -> dict[str, Any]:
    policy = said.get("policy")
    places = {name: said.get(f"keep_{name}", "remat") for name in TENSORS}
    if policy is None:
        return {}
    if policy in ("none", "full"):
        return {"recompute": policy}
    if policy == "custom":
        kept = frozenset(name for name, place in places.items() if place != "remat")
        moved = [name for name, place in places.items() if place == "offload"]
    elif policy in POLICIES:
        kept = frozenset(POLICIES[policy])
        moved = [policy] if policy in OFFLOADED else []
    else:
        said.contradict("policy", "is no policy that is known", ", ".join(["none", "full", "custom", *POLICIES]))
        return {}
    if moved:
        assumed["offload"] = f"{', '.join(moved)}: tensors that go to the host are counted as kept on the GPU"
    if not {"query_proj", "key_proj", "value_proj", "out_proj"} <= kept and "qkv_proj" not in kept:
        assumed["recompute"] = f"{policy} also recomputes projections of attention; the nearest set of modules is taken"
    mask = parse_recompute("+".join(sorted(modules(kept, model))))
    return {"recompute": recompute_text(mask["recompute"])}


def _batch(said: Said, tp: int, pp: int, cp: int, gpus: int | None, assumed: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (knobs, job fields): a step's batch is per_device_batch_size x GPUs, accumulated."""
    seq_len = said.get("seq_len", 2048)
    if "seq_len" not in said.settings:
        assumed["seq_len"] = "2048, MaxText's max_target_length"
    device, accumulated = said.get("per_device", 12.0), said.get("accumulation", 1)
    if "per_device" not in said.settings:
        assumed["micro_batch"] = "per_device_batch_size 12, MaxText's default"
    count = said.get("microbatches", -1) if pp > 1 else 1
    count = pp if count == -1 else count
    if count % pp:
        said.contradict("microbatches", f"must be a multiple of {pp} stages (types.py)")
    exact = device * tp * cp * pp / count
    micro = round(exact)
    job: dict[str, Any] = {"seq_len": seq_len}
    if micro < 1 or abs(exact - micro) > 1e-6 * exact:
        said.contradict("per_device", f"makes {exact:g} sequences of a micro batch a replica, which must be whole")
        return {}, job
    if gpus:
        job["global_batch"] = int(gpus * device) * accumulated
    if pp > 1 and accumulated > 1:
        assumed["bubble"] = f"the pipeline drains {accumulated} times a step; it is priced as once"
    return {"micro_batch": micro}, job


def _precision(said: Said) -> str:
    recipe = said.get("quantization", "")
    if recipe:
        if recipe not in RECIPES:
            said.contradict("quantization", "is no precision that the tuner prices", ", ".join(RECIPES))
        return RECIPES.get(recipe, "")
    dtype = said.get("dtype")
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(dtype, "") if dtype else ""


def _model_fields(said: Said) -> dict[str, Any]:
    """Return the fields of Model that the architecture keys tell."""
    name = said.settings.pop("model_name", "default").replace("-Instruct", "")
    fields: dict[str, Any] = {}
    if name != "default":
        if name in MODELS:
            fields["preset"] = MODELS[name]
        else:
            said.unknown.append(Unknown(name="model_name", value=name[:SHOWN], where=said.places.get("model_name", "")))
    plain = (
        "hidden",
        "heads",
        "kv_heads",
        "ffn_hidden",
        "layers",
        "head_dim",
        "vocab",
        "tied_embeddings",
        "qk_norm",
        "qkv_bias",
        "mtp_layers",
    )
    fields |= {key: said.settings[key] for key in plain if key in said.settings}
    decoder = said.settings.pop("decoder", None)
    if decoder is not None:
        if decoder in DECODERS:
            fields |= DECODERS[decoder]
        elif name not in MODELS:
            said.unknown.append(Unknown(name="decoder_block", value=decoder[:SHOWN], where=said.places.get("decoder", "")))
    if "activations" in said.settings:
        fields["gated_mlp"] = len(said.settings["activations"]) > 1
    if "dropout" in said.settings or decoder == "gpt3":
        fields["dropout"] = said.get("dropout", 0.0) > 0
    if said.get("max_positions", -1) > 0:
        fields["max_positions"] = said.settings["max_positions"]
    if said.get("experts", 1) > 1:
        width = said.get("expert_ffn_hidden", -1)
        width = said.get("ffn_hidden", 7168) if width < 1 else width
        moe = {"experts": said.settings["experts"], "top_k": said.get("top_k", 1), "expert_ffn_hidden": width}
        moe |= {"shared_expert_ffn_hidden": said.get("shared_experts", 0) * width} if said.get("shared_experts") else {}
        moe |= {key: said.settings[key] for key in ("first_dense_layers", "router_bias") if said.get(key)}
        fields["moe"] = moe
    if said.get("attention_type") == "mla":
        latent = {"q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # base.yml
        fields["mla"] = {key: said.get(key, value) for key, value in latent.items()}
    return fields


def _model_of(fields: Mapping[str, Any]) -> Model | None:
    told = dict(fields)
    try:
        if "preset" in told:
            model: Model = presets.model(told.pop("preset")).replace(**told)
            return model
        return load_spec(Model, {"name": "model"} | told, NAME)
    except SpecError:
        return None
