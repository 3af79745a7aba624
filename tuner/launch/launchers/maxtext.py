"""MaxText on GPUs: train.yml over base.yml, its mesh split into axes inside the NVLink domain (ici_) and between domains (dcn_).

Read at: maxtext 0.2.5 configs/base.yml, configs/types.py (batch and pipeline arithmetic, context_parallel_strategy, quantization),
configs/pyconfig.py (base_config, key=value overrides), layers/nnx_decoders.py get_remat_policy, configs/models/*.yml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import DERIVED, Found, Launcher, Unknown, Written, refuse_unspelled
from tuner.launch.launchers.tables.vocabulary import (
    SHOWN,
    Key,
    Said,
    Told,
    number,
    one_of,
    refusal,
    spelled,
    text,
    truth,
    understand,
    whole,
    whole_from,
)
from tuner.launch.launchers.texts.scripts import exported, header, nodes_of
from tuner.launch.launchers.texts.sources import from_script, from_yaml
from tuner.load import load_spec
from tuner.model import Model
from tuner.plan import CP_KINDS, FULL, OFFLOADS
from tuner.plan_text import parse_recompute, recompute_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.launch.launchers.texts.sources import Script
    from tuner.plan import Plan

NAME = "maxtext"
CONFIG, SCRIPT = "train.yml", "train.sh"
STEPS = 30
# Axes in the order in which they take a domain's links: those that talk most come first.
AXES = ("tensor", "tensor_sequence", "context", "expert", "fsdp", "data", "pipeline")
_REST = {"ici_fsdp": -1, "dcn_data": -1}  # base.yml: what an axis is unless told; the others are 1
_LHS = "--xla_gpu_enable_latency_hiding_scheduler"


def _axis(value: Any) -> int:
    found = whole(value, -1)
    if found == 0:
        raise ValueError("must be -1 or at least 1")
    return found


def _activations(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list of activations")
    return [str(item) for item in value]


_MESH = tuple(Key(path=f"{net}_{axis}_parallelism", name=f"{net}_{axis}", take=_axis) for net in ("ici", "dcn") for axis in AXES)
_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj")
_TENSORS = ("context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", *_PROJECTIONS)
_KEEPING = tuple(Key(path=name, name=f"keep_{name}", take=one_of("remat", "device", "offload")) for name in _TENSORS)
_PLAN = (
    Key(path="per_device_batch_size", name="per_device", take=number),
    Key(path="gradient_accumulation_steps", name="accumulation", take=whole),
    Key(path="max_target_length", name="seq_len", take=whole),
    *_MESH,
    Key(path="num_slices", name="slices", take=_axis),
    Key(path="num_pipeline_microbatches", name="microbatches", take=_axis),
    Key(path="num_layers_per_pipeline_stage", name="stage_layers", take=whole),
    Key(path="num_pipeline_repeats", name="repeats", take=_axis),
    Key(path="pipeline_fsdp_ag_once", name="gathered_once", take=truth),
    Key(path="context_parallel_strategy", name="strategy", take=one_of("all_gather", "ring", "ulysses", "usp")),
    Key(path="remat_policy", name="policy", take=text),
    *_KEEPING,
    Key(path="optimizer_memory_host_offload", name="offload", take=truth),
    Key(path="dtype", name="dtype", take=text),
    Key(path="weight_dtype", name="weight_dtype", take=text),
    Key(path="quantization", name="quantization", take=text),
    Key(path="attention", name="attention", take=text),
)
# Architecture: the setting is the field of Model.
_MODEL = (
    Key(path="model_name", name="model_name", take=text),
    Key(path="decoder_block", name="decoder", take=text),
    Key(path="base_emb_dim", name="hidden", take=whole),
    Key(path="base_num_query_heads", name="heads", take=whole),
    Key(path="base_num_kv_heads", name="kv_heads", take=whole),
    Key(path="base_mlp_dim", name="ffn_hidden", take=whole),
    Key(path="base_num_decoder_layers", name="layers", take=whole),
    Key(path="head_dim", name="head_dim", take=whole),
    Key(path="vocab_size", name="vocab", take=whole),
    Key(path="mlp_activations", name="activations", take=_activations),
    Key(path="logits_via_embedding", name="tied_embeddings", take=truth),
    Key(path="use_qk_norm", name="qk_norm", take=truth),
    Key(path="attention_bias", name="qkv_bias", take=truth),
    Key(path="trainable_position_size", name="max_positions", take=lambda value: whole(value, -1)),
    Key(path="num_experts", name="experts", take=whole),
    Key(path="num_experts_per_tok", name="top_k", take=whole),
    Key(path="base_moe_mlp_dim", name="expert_ffn_hidden", take=lambda value: whole(value, -1)),
    Key(path="shared_experts", name="shared_experts", take=whole_from(0)),
    Key(path="first_num_dense_layers", name="first_dense_layers", take=whole_from(0)),
    Key(path="routed_bias", name="router_bias", take=truth),
    Key(path="attention_type", name="attention_type", take=text),
    Key(path="q_lora_rank", name="q_lora_rank", take=whole_from(0)),
    Key(path="kv_lora_rank", name="kv_lora_rank", take=whole_from(0)),
    Key(path="qk_nope_head_dim", name="qk_nope_head_dim", take=whole_from(0)),
    Key(path="qk_rope_head_dim", name="qk_rope_head_dim", take=whole_from(0)),
    Key(path="v_head_dim", name="v_head_dim", take=whole_from(0)),
    Key(path="mtp_num_layers", name="mtp_layers", take=whole_from(0)),
)
KEYS = (*_MODEL, *_PLAN)
_QUIET = frozenset(
    {
        "base_config",
        "run_name",
        "hardware",
        "steps",
        "dataset_type",
        "enable_checkpointing",
        "packing",
        "reuse_example_batch",
        "enable_dropout",
        "routed_score_func",
        "norm_topk_prob",
        "base_output_directory",
    }
)
# What a named policy saves of a layer (nnx_decoders.py get_remat_policy).
_DENSE_MLP = ("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")
POLICIES: Mapping[str, tuple[str, ...]] = {
    "minimal_with_context": (*_PROJECTIONS, *_DENSE_MLP, "context"),
    "minimal": (*_PROJECTIONS, *_DENSE_MLP),
    "save_dot_with_context_except_mlp": (*_PROJECTIONS, "context"),
    "save_dot_except_mlp": _PROJECTIONS,
    "save_dot_except_mlpwi": (*_PROJECTIONS, "mlpwo"),
    "save_qkv_proj": _PROJECTIONS[:-1],
    "save_out_proj": ("out_proj",),
    "minimal_flash": (*_PROJECTIONS, *_DENSE_MLP, "context"),
    "minimal_offloaded": (*_PROJECTIONS, *_DENSE_MLP),
    "qkv_proj_offloaded": _PROJECTIONS[:-1],
}
_OFFLOADED = ("minimal_offloaded", "qkv_proj_offloaded")
_QUANTISED = {"fp8": "te_fp8_currentscaling", "mxfp8": "te_mxfp8", "nvfp4": "te_nvfp4"}
_RECIPES = {name: precision for precision, name in _QUANTISED.items()} | {
    "fp8": "fp8",
    "fp8_gpu": "fp8",
    "fp8_full": "fp8",
    "te_fp8_delayedscaling": "fp8",
    "te_nvfp4_no_rht": "nvfp4",
}
# configs/models/NAME.yml whose sizes are those of our preset.
MODELS: Mapping[str, str] = {
    "llama2-7b": "llama2-7b",
    "llama2-13b": "llama2-13b",
    "llama2-70b": "llama2-70b",
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "llama3-405b": "llama3-405b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama3.3-70b": "llama3-70b",
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "qwen2.5-7b": "qwen2.5-7b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-1.7b": "qwen3-1.7b",
    "qwen3-4b": "qwen3-4b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-14b": "qwen3-14b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "qwen3-480b-a35b": "qwen3-480b-a35b",
    "deepseek2-16b": "deepseek-v2-lite",
    "deepseek2-236b": "deepseek-v2",
    "deepseek3-671b": "deepseek-v3",
    "kimi-k2-1t": "kimi-k2",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
}
# What a decoder block fixes, as fields of Model.
_DECODERS: Mapping[str, Mapping[str, Any]] = {
    "llama2": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek": {},
    "gpt3": {"norm": "layer", "biases": True, "positions": "learned", "dropout": False},
}

SAYS: Mapping[str, str] = {
    "tp": "ici_/dcn_tensor_parallelism; with sequence parallelism ici_/dcn_tensor_sequence_parallelism",
    "pp": "ici_/dcn_pipeline_parallelism",
    "vpp": "num_pipeline_repeats, with num_layers_per_pipeline_stage",
    "cp": "ici_/dcn_context_parallelism",
    "ep": "ici_/dcn_expert_parallelism",
    "etp": "experts are split by the tensor axes: etp is tp",
    "micro_batch": "per_device_batch_size, with gradient_accumulation_steps or num_pipeline_microbatches",
    "sequence_parallel": "the tensor_sequence axis in place of the tensor axis",
    "recompute": "remat_policy, custom with a place for each tensor where no named policy keeps the same",
    "zero": "ici_/dcn_fsdp_parallelism (0: the data axis alone; 2: pipeline_fsdp_ag_once)",
    "shard_group": "ici_/dcn_fsdp_parallelism beside ici_/dcn_data_parallelism",
    "offload": "optimizer_memory_host_offload",
    "dp_overlap": f"XLA_FLAGS {_LHS}",
    "cp_kind": "context_parallel_strategy all_gather or ring (ulysses needs TPUs)",
}
CANNOT: Mapping[str, str] = {
    "recompute_layers": "a remat policy is of every layer; take recompute=full",
    "embedding_layers": "stages hold equal counts of layers",
    "loss_layers": "stages hold equal counts of layers",
    "schedule": "its one schedule is circular, all forwards before the backwards, and cannot be chosen",
    "tp_overlap": "collective matrix products are XLA's choice or need a process for each GPU with Transformer Engine",
    "ep_overlap": "XLA schedules the all-to-all; no option splits a batch for it",
    "cuda_graphs": "a step is one XLA program, whose command buffers XLA chooses",
    "fallback_tp": "a replica that loses a GPU is not rebuilt with fewer tensor-parallel ranks",
    **dict.fromkeys(DERIVED, "a plan that is launched has no idle ranks"),
}


@dataclass(frozen=True, slots=True)
class MaxText:
    """train.yml and train.sh, a process for each node."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """How each knob is spelled."""
        return SAYS

    @property
    def cannot(self) -> Mapping[str, str]:
        """Why a knob has no spelling."""
        return CANNOT

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return train.yml and train.sh."""
        del version
        refuse_unspelled(self, plan)
        settings = _settings(job, plan)
        document = {
            "base_config": "base.yml",
            "run_name": "tuner",
            "hardware": "gpu",
            "steps": STEPS,
            "dataset_type": "synthetic",
            "packing": False,
            "enable_checkpointing": False,
            "reuse_example_batch": 1,
            **spelled(KEYS, settings),
        }
        files = {CONFIG: yaml.safe_dump(document, sort_keys=False, allow_unicode=True), SCRIPT: _script(job, plan)}
        return Written(files=files, programs=(SCRIPT,), start=f"./{SCRIPT}", notes=_notes(job, plan))

    def reads(self, name: str, text: str) -> bool:
        """Whether the file is a MaxText configuration or a script that starts MaxText."""
        start = text[:200_000]
        if name.endswith((".yml", ".yaml")):
            return any(
                word in start for word in ("per_device_batch_size", "base_emb_dim", "ici_fsdp_parallelism", "ici_tensor_parallelism")
            )
        return "maxtext" in start.lower()

    def read(self, files: Mapping[str, str]) -> Found:
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
        return _found(understand(KEYS, {key: _worded(item) for key, item in told.items()}, _QUIET), scripts)


def _worded(item: Told) -> Told:
    """Return a list that a command line spells as text as a list."""
    value = item.value
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return Told(value=[part.strip(" '\"") for part in value[1:-1].split(",") if part.strip()], where=item.where)
    return item


def split_axes(degrees: Mapping[str, int], domain: int) -> dict[str, tuple[int, int]]:
    """Return {axis: (ici, dcn)} with the product of the first being `domain`, filled in the order of AXES. The product of the degrees
    must be a multiple of the domain.
    """
    left, found = domain, {}
    for axis in AXES:
        inside = math.gcd(degrees.get(axis, 1), left)
        left //= inside
        found[axis] = (inside, degrees.get(axis, 1) // inside)
    return found


def per_device(batch: int, gpus: int) -> float:
    """Return per_device_batch_size so that MaxText's int(gpus * per_device_batch_size) is `batch` sequences (types.py)."""
    value = batch / gpus
    while int(gpus * value) < batch:
        value = math.nextafter(value, math.inf)
    return value


def _settings(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan. Raises SpecError listing what cannot be spelled."""
    gpus, model = job.gpus, job.model
    dp, count = max(int(plan.dp(gpus)), 1), int(plan.microbatches(gpus, job.global_batch))
    tp, pp, cp, vpp, ep, mb = (int(n) for n in (plan.tp, plan.pp, plan.cp, plan.vpp, plan.ep, plan.micro_batch))
    refused: dict[str, tuple[Any, str]] = {}
    data, fsdp = _data_axes(plan, dp, refused)
    decoder = _decoder(model, refused)
    _check_stages(job, plan, count, refused)
    _check_rest(job, plan, refused)
    remat = _remat(job, plan, refused)
    domain = min(job.cluster.sizes[0], gpus)
    if gpus % domain:
        refused["tp"] = (tp, f"{gpus} GPUs are no whole number of domains of {domain}: MaxText's mesh has equal slices")
    if refused:
        raise refusal(NAME, refused)
    axis = "tensor_sequence" if plan.sequence_parallel else "tensor"
    degrees = {axis: tp, "context": cp, "expert": ep, "fsdp": fsdp, "data": data, "pipeline": pp}
    settings: dict[str, Any] = _architecture(model, decoder) | remat
    for name, (inside, outside) in split_axes(degrees, domain).items():
        settings |= {f"ici_{name}": inside, f"dcn_{name}": outside}
    settings |= {
        "slices": gpus // domain,
        "per_device": per_device(mb * dp * (count if pp > 1 else 1), gpus),
        "accumulation": 1 if pp > 1 else count,
        "seq_len": job.seq_len,
        "strategy": ("ring" if plan.cp_kind == CP_KINDS["p2p"] else "all_gather") if cp > 1 else None,
        "offload": bool(plan.offload),
        "dtype": "float32" if job.precision == "fp32" else "bfloat16",
        "weight_dtype": "float32",
        "quantization": _QUANTISED.get(job.precision),
        "attention": "cudnn_flash_te" if job.attention == "flash" else "dot_product",
    }
    if pp > 1:
        settings |= {
            "microbatches": count,
            "stage_layers": model.layers // (pp * vpp),
            "repeats": vpp,
            "gathered_once": plan.zero == 2,
        }
    return settings


def _data_axes(plan: Plan, dp: int, refused: dict[str, tuple[Any, str]]) -> tuple[int, int]:
    """Return (data, fsdp): dp = data x fsdp x expert, and weights are sharded over fsdp x expert x context."""
    ep, cp, group = int(plan.ep), int(plan.cp), int(plan.shard_group)
    if dp % ep:
        refused["ep"] = (ep, f"must divide dp = {dp}: the expert axis is part of the batch's")
        return dp, 1
    if plan.zero == 0:
        if ep * cp > 1:
            refused["zero"] = (0, "weights are always sharded over the context and expert axes; take zero=3")
        return dp // ep, 1
    if plan.zero == 1:
        refused["zero"] = (1, "the fsdp axis shards weights, gradients and optimizer together; take zero=3")
    if plan.zero == 2 and plan.pp == 1:
        refused["zero"] = (2, "gathered weights are kept only by pipelines (pipeline_fsdp_ag_once); take zero=3")
    if dp * cp == 1:
        refused["zero"] = (plan.zero, "there are no data- or context-parallel ranks to shard over")
    group = group or dp * cp
    if group % (ep * cp) or (dp * cp) % group:
        refused["shard_group"] = (group, f"must be ep*cp = {ep}*{cp} times the fsdp axis, and divide dp*cp = {dp}*{cp}")
        return dp // ep, 1
    return dp * cp // group, group // (ep * cp)


def _check_stages(job: Job, plan: Plan, count: int, refused: dict[str, tuple[Any, str]]) -> None:
    if plan.pp == 1:
        return
    model, chunks = job.model, int(plan.pp * plan.vpp)
    if model.layers % chunks:
        refused["vpp" if plan.vpp > 1 else "pp"] = (
            plan.vpp if plan.vpp > 1 else plan.pp,
            f"pp*vpp = {plan.pp}*{plan.vpp} must divide {model.layers} layers: stages are equal (types.py)",
        )
    if model.leading_dense_layers:
        refused["pp"] = (plan.pp, "only the layers with experts are put into a pipeline (types.py pipeline_parallel_layers)")
    if count % plan.pp:
        refused["micro_batch"] = (plan.micro_batch, f"pp = {plan.pp} must divide {count} micro batches (types.py)")


def _check_rest(job: Job, plan: Plan, refused: dict[str, tuple[Any, str]]) -> None:
    if plan.offload & OFFLOADS["activations"]:
        refused["offload"] = ("activations", "a policy offloads single tensors, not all; take offload=optimizer")
    if job.model.moe and plan.etp != plan.tp:
        refused["etp"] = (plan.etp, f"the tensor axes split experts too: must be tp = {plan.tp}")
    if plan.cp > 1 and plan.cp_kind == CP_KINDS["a2a"]:
        refused["cp_kind"] = ("a2a", "ulysses needs TPUs; take p2p (ring) or all_gather")
    if job.precision not in ("bf16", "fp32", *_QUANTISED):
        refused["precision"] = (job.precision, f"MaxText trains in bf16, fp32, {', '.join(_QUANTISED)}")
    if job.task != "pretrain":
        refused["task"] = (job.task, "only pre-training is written")


def _modules(kept: frozenset[str], model: Model | None) -> frozenset[str]:
    """Return the modules that are recomputed when these tensors are kept. Norms and activations have no name, so they always are."""
    moe = model.moe if model else None
    dense = moe is None or moe.first_dense_layers > 0 or moe.every > 1
    found = {"layernorm"}
    found |= {"core_attn"} - ({"core_attn"} if "context" in kept else set())
    found |= {"mlp"} if dense and not {"mlpwi_0", "mlpwi_1", "mlpwo"} <= kept else set()
    found |= {"moe"} if moe and not {"moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"} <= kept else set()
    return frozenset(found)


def _remat(job: Job, plan: Plan, refused: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the settings of a recompute set: a named policy, or a place for each tensor."""
    told = recompute_text(int(plan.recompute))
    if plan.recompute == 0 or plan.recompute & FULL:
        return {"policy": "full" if plan.recompute & FULL else "none"}
    wanted = frozenset(told.split("+"))
    for name, kept in POLICIES.items():
        if frozenset(_PROJECTIONS) <= set(kept) and name not in _OFFLOADED and _modules(frozenset(kept), job.model) == wanted:
            return {"policy": name}
    keep = [*_PROJECTIONS]
    keep += [] if "core_attn" in wanted else ["context"]
    keep += [] if "mlp" in wanted else ["mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"]
    keep += [] if "moe" in wanted else ["moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"]
    if _modules(frozenset(keep), job.model) != wanted:
        refused["recompute"] = (told, "a policy keeps named tensors and recomputes norms always: layernorm with core_attn, mlp, moe")
    return {"policy": "custom"} | {f"keep_{name}": "device" if name in keep else "remat" for name in _TENSORS}


def _decoder(model: Model, refused: dict[str, tuple[Any, str]]) -> str:
    """Return the decoder block that is this architecture."""
    moe = model.moe
    common = model.norms_per_layer == 2 and not (
        model.embedding_norm or model.attention_sinks or model.output_bias or model.mlp_bias or model.qk_norm_whole or model.sliding_window
    )
    llama = common and model.norm == "rms" and model.gated_mlp and model.positions == "rotary" and not (model.biases or model.dropout)
    plain = moe is None or not (
        moe.shared_expert_ffn_hidden or moe.first_dense_layers or moe.every > 1 or moe.expert_bias or moe.router_bias
    )
    if llama and model.mla and moe and moe.every == 1 and not (moe.expert_bias or model.qk_norm or model.qkv_bias):
        return "deepseek"
    if llama and not model.mla and plain and not model.mtp_layers:
        if moe and not model.qkv_bias:
            return "qwen3_moe" if model.qk_norm else "mixtral"
        if not moe and not (model.qk_norm and model.qkv_bias):
            return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama2"
    gpt = common and model.norm == "layer" and not model.gated_mlp and model.biases and model.positions == "learned"
    if gpt and moe is None and model.heads == model.kv_heads:
        return "gpt3"
    refused["model"] = (model.name, "no decoder block of MaxText that the tuner knows is this architecture")
    return ""


def _architecture(model: Model, decoder: str) -> dict[str, Any]:
    moe, mla = model.moe, model.mla
    settings: dict[str, Any] = {name: getattr(model, name) for name in ("hidden", "heads", "kv_heads", "layers", "head_dim", "vocab")}
    settings |= {
        "decoder": decoder,
        "ffn_hidden": model.ffn_hidden if moe is None or moe.first_dense_layers else moe.expert_ffn_hidden,
        "activations": ["silu", "linear"] if model.gated_mlp else ["gelu"],
        "tied_embeddings": model.tied_embeddings,
        "qk_norm": True if model.qk_norm else None,
        "qkv_bias": True if model.qkv_bias else None,
        "max_positions": model.max_positions or None,
        "mtp_layers": model.mtp_layers or None,
    }
    if moe:
        settings |= {"experts": moe.experts, "top_k": moe.top_k, "expert_ffn_hidden": moe.expert_ffn_hidden}
        if decoder == "deepseek":
            shared = moe.shared_expert_ffn_hidden // moe.expert_ffn_hidden
            settings |= {"shared_experts": shared, "first_dense_layers": moe.first_dense_layers, "router_bias": moe.router_bias}
    if mla:
        settings |= {"attention_type": "mla"} | mla.model_dump()
    return settings


def _script(job: Job, plan: Plan) -> str:
    nodes, _ = nodes_of(job)
    shared = int(plan.dp(job.gpus)) * int(plan.cp) > 1
    hidden = "true" if plan.dp_overlap or not shared else "false"
    variables = [
        ("XLA_FLAGS", f"{_LHS}={hidden}", "whether collectives of the fsdp and data axes run beside compute"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95", "JAX takes three quarters of a GPU's memory unless told"),
    ]
    lines = [
        *header(job, "MaxText, written by tuner"),
        'here="$(cd "$(dirname "$0")" && pwd)"',
        *exported(variables),
        "# One process for each node: JAX finds the others through these.",
        f'export NNODES="${{NNODES:-{nodes}}}"',
        'export NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}"',
        'export JAX_COORDINATOR_IP="${MASTER_ADDR:-127.0.0.1}"',
        'export JAX_COORDINATOR_PORT="${MASTER_PORT:-1234}"',
        f'exec python3 -m maxtext.trainers.pre_train.train "$here/{CONFIG}"',
    ]
    return "\n".join(lines) + "\n"


def _notes(job: Job, plan: Plan) -> tuple[str, ...]:
    domain = job.cluster.domains[0]
    notes = [
        "checkpoints are Orbax: MaxText restores one that was written on another mesh and reshards it",
        f"ici_ axes fill the {domain.name} domain of {min(job.cluster.sizes[0], job.gpus)} GPUs; dcn_ axes are between domains",
    ]
    if plan.pp > 1:
        notes.append("the pipeline runs all forwards before the backwards: it keeps more activations than the priced 1F1B")
    if job.ramp_up:
        notes.append("the batch ramp-up is not written: MaxText's own keys count sequences a device (enable_rampup_batch_size)")
    return tuple(notes)


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
    return [word for word in words if word.startswith(_LHS)]


def _degrees(said: Said) -> tuple[dict[str, int | None], int | None]:
    """Return ({axis: degree, None where it is the rest of an unknown count}, GPUs where every axis is told)."""
    degrees: dict[str, int | None] = {}
    for axis in AXES:
        parts = [said.get(f"{net}_{axis}", _REST.get(f"{net}_{axis}", 1)) for net in ("ici", "dcn")]
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
            return plan | {"zero": 0}
        plan["shard_group"] = 0 if data == 1 else group
    elif data is None and "ici_data" not in said.settings and gpus is None:
        assumed["shard_group"] = "weights sharded over all data-parallel ranks: how many domains there are is not told"
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
    places = {name: said.get(f"keep_{name}", "remat") for name in _TENSORS}
    if policy is None:
        return {}
    if policy in ("none", "full"):
        return {"recompute": policy}
    if policy == "custom":
        kept = frozenset(name for name, place in places.items() if place != "remat")
        moved = [name for name, place in places.items() if place == "offload"]
    elif policy in POLICIES:
        kept = frozenset(POLICIES[policy])
        moved = [policy] if policy in _OFFLOADED else []
    else:
        said.contradict("policy", "is no policy that is known", ", ".join(["none", "full", "custom", *POLICIES]))
        return {}
    if moved:
        assumed["offload"] = f"{', '.join(moved)}: tensors that go to the host are counted as kept on the GPU"
    if not {"query_proj", "key_proj", "value_proj", "out_proj"} <= kept and "qkv_proj" not in kept:
        assumed["recompute"] = f"{policy} also recomputes projections of attention; the nearest set of modules is taken"
    mask = parse_recompute("+".join(sorted(_modules(kept, model))))
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
        if recipe not in _RECIPES:
            said.contradict("quantization", "is no precision that the tuner prices", ", ".join(_RECIPES))
        return _RECIPES.get(recipe, "")
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
        if decoder in _DECODERS:
            fields |= _DECODERS[decoder]
        elif name not in MODELS:
            said.unknown.append(Unknown(name="decoder_block", value=decoder[:SHOWN], where=said.places.get("decoder", "")))
    if "activations" in said.settings:
        fields["gated_mlp"] = len(said.settings["activations"]) > 1
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


def open_launcher() -> Launcher:
    """Return the launcher."""
    return MaxText()
