"""MaxText's keys as a table, and its names of models, policies and precisions (maxtext 0.2.5 configs/base.yml, configs/models/*.yml,
layers/nnx_decoders.py get_remat_policy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.launch.launchers.tables.vocabulary import Key, number, one_of, text, truth, whole, whole_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.model import Model

NAME = "maxtext"
# Axes in the order in which they take a domain's links: those that talk most come first.
AXES = ("tensor", "tensor_sequence", "context", "expert", "fsdp", "data", "pipeline")
REST = {"ici_fsdp": -1, "dcn_data": -1}  # base.yml: what an axis is unless told; the others are 1
LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler"


def _axis(value: Any) -> int:
    found = whole(value, -1)
    if found == 0:
        raise ValueError("must be -1 or at least 1")
    return found


def _rate(value: Any) -> float:
    return 0.0 if str(value) in ("0", "0.0") else number(value)


def _activations(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list of activations")
    return [str(item) for item in value]


_MESH = tuple(Key(path=f"{net}_{axis}_parallelism", name=f"{net}_{axis}", take=_axis) for net in ("ici", "dcn") for axis in AXES)
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj")
TENSORS = ("context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", *PROJECTIONS)
_KEEPING = tuple(Key(path=name, name=f"keep_{name}", take=one_of("remat", "device", "offload")) for name in TENSORS)
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
    Key(path="shard_optimizer_over_data", name="optimizer_over_data", take=truth),
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
    Key(path="dropout_rate", name="dropout", take=_rate),
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
QUIET = frozenset(
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
    "minimal_with_context": (*PROJECTIONS, *_DENSE_MLP, "context"),
    "minimal": (*PROJECTIONS, *_DENSE_MLP),
    "save_dot_with_context_except_mlp": (*PROJECTIONS, "context"),
    "save_dot_except_mlp": PROJECTIONS,
    "save_dot_except_mlpwi": (*PROJECTIONS, "mlpwo"),
    "save_qkv_proj": PROJECTIONS[:-1],
    "save_out_proj": ("out_proj",),
    "minimal_flash": (*PROJECTIONS, *_DENSE_MLP, "context"),
    "minimal_offloaded": (*PROJECTIONS, *_DENSE_MLP),
    "qkv_proj_offloaded": PROJECTIONS[:-1],
}
OFFLOADED = ("minimal_offloaded", "qkv_proj_offloaded")
QUANTISED = {"fp8": "te_fp8_currentscaling", "mxfp8": "te_mxfp8", "nvfp4": "te_nvfp4"}
RECIPES = {name: precision for precision, name in QUANTISED.items()} | {
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
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "llama2": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek": {},
    "gpt3": {"norm": "layer", "biases": True, "positions": "learned"},
}


def modules(kept: frozenset[str], model: Model | None) -> frozenset[str]:
    """Return the modules that are recomputed when these tensors are kept. Norms and activations have no name, so they always are."""
    moe = model.moe if model else None
    dense = moe is None or moe.first_dense_layers > 0 or moe.every > 1
    found = {"layernorm"}
    found |= {"core_attn"} - ({"core_attn"} if "context" in kept else set())
    found |= {"mlp"} if dense and not {"mlpwi_0", "mlpwi_1", "mlpwo"} <= kept else set()
    found |= {"moe"} if moe and not {"moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"} <= kept else set()
    return frozenset(found)
