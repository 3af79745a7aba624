"""Words of Megatron-Bridge: keys of its configuration, recipes of precision, and the flags of scripts/performance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tuner.launch.launchers.megatron.layout import parse_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the configuration and the setting it spells. kind: "not" says the opposite; "pattern": a list of layers; "first": the one
    element of a list.
    """

    key: str
    name: str
    kind: Literal["same", "not", "pattern", "first"] = "same"

    def put(self, value: Any) -> str:
        """Return the value as an override has it."""
        if self.kind == "not":
            return hydra(not value)
        if self.kind == "pattern":
            return hydra(parse_pattern(value))
        return hydra(value[0] if self.kind == "first" else value)

    def take(self, value: Any) -> Any:
        """Return the setting's value of one that was read."""
        if self.kind == "not" and str(value).lower() in ("true", "false"):
            return str(value).lower() == "false"
        if self.kind == "pattern" and isinstance(value, list):
            return "[" + ",".join(value) + "]"
        return value


def _keys(section: str, *names: str) -> tuple[Key, ...]:
    return tuple(Key(key=f"{section}.{name}", name=name) for name in names)


# One entry a key; all keys of a setting are written, each is read.
KEYS: tuple[Key, ...] = (
    *_keys("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size"),
    *_keys("model", "seq_length"),
    Key(key="dataset.seq_length", name="seq_length"),
    Key(key="tokenizer.vocab_size", name="vocab_size"),
    *_keys("model", "position_embedding_type", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    Key(key="model.gated_linear_unit", name="swiglu"),
    Key(key="model.share_embeddings_and_output_weights", name="untie_embeddings_and_output_weights", kind="not"),
    *_keys("model", "hidden_dropout", "attention_dropout", "mtp_num_layers", "window_attn_skip_freq", "softmax_type"),
    Key(key="model.window_size", name="window_size"),
    Key(key="model.num_moe_experts", name="num_experts"),
    *_keys("model", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *_keys("model", "moe_router_enable_expert_bias", "moe_router_score_function", "moe_grouped_gemm", "moe_token_dispatcher_type"),
    *_keys("model", "moe_router_force_load_balancing"),
    Key(key="model.moe_layer_freq", name="moe_layer_freq", kind="pattern"),
    *_keys("model", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *_keys("model", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *_keys("model", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
    Key(key="model.cp_comm_type", name="cp_comm_type", kind="first"),
    *_keys("model", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    Key(key="model.num_layers_in_first_pipeline_stage", name="decoder_first_pipeline_num_layers"),
    Key(key="model.num_layers_in_last_pipeline_stage", name="decoder_last_pipeline_num_layers"),
    *_keys("model", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *_keys("model", "cpu_offloading", "cpu_offloading_num_layers", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"),
    *_keys("model", "tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
    *_keys("comm_overlap", "tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_grad_reduce", "overlap_param_gather"),
    *_keys("ddp", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp"),
    *_keys("ddp", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"),
    *_keys("dist", "use_megatron_fsdp", "use_torch_fsdp2"),
    *_keys("optimizer", "use_distributed_optimizer", "overlap_param_gather", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *_keys("optimizer", "use_precision_aware_optimizer"),
    *_keys("checkpoint", "ckpt_format"),
    Key(key="rerun_state_machine.check_for_nan_in_loss", name="check_for_nan_in_loss_and_grad"),
    Key(key="ddp.check_for_nan_in_grad", name="check_for_nan_in_loss_and_grad"),
    *_keys("train", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
)

BY_KEY: Mapping[str, Key] = {key.key: key for key in KEYS}

# The recipe has no section of overlaps, and sets ddp and model itself.
ONLY_READ = ("comm_overlap.", "dist.")

# Settings that need no key: the provider takes them from others.
UNSAID = frozenset({"group_query_attention", "max_position_embeddings", "bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe"})

# megatron/bridge/training/mixed_precision.py; the first of a precision is written.
PRECISIONS: Mapping[str, str] = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8",
    "fp16_with_fp8_current_scaling_mixed": "fp8",
    "fp16_with_fp8_delayed_scaling_mixed": "fp8",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "fp16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "fp16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}

# scripts/performance/argument_parser.py: flags of its line by the setting they spell.
PERFORMANCE: Mapping[str, str] = {
    "--num_layers": "num_layers", "--hidden_size": "hidden_size",
    "-gb": "global_batch_size", "--global_batch_size": "global_batch_size",
    "-mb": "micro_batch_size", "--micro_batch_size": "micro_batch_size", "-sl": "seq_length", "--seq_length": "seq_length",
    "-tp": "tensor_model_parallel_size", "--tensor_model_parallel_size": "tensor_model_parallel_size",
    "-pp": "pipeline_model_parallel_size", "--pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "-cp": "context_parallel_size", "--context_parallel_size": "context_parallel_size",
    "-vp": "virtual_pipeline_model_parallel_size", "--virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "-ep": "expert_model_parallel_size", "--expert_model_parallel_size": "expert_model_parallel_size",
    "-et": "expert_tensor_parallel_size", "--expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "--pipeline_model_parallel_layout": "pipeline_model_parallel_layout", "--use_megatron_fsdp": "use_megatron_fsdp",
    "--cuda_graph_impl": "cuda_graph_impl", "--cuda_graph_scope": "cuda_graph_scope",
    "--moe_a2a_overlap": "overlap_moe_expert_parallel_comm", "-rl": "recompute_num_layers",
    "--recompute_num_layers": "recompute_num_layers", "--recompute_modules": "recompute_modules",
    "-ol": "cpu_offloading_num_layers", "--activation_offload_layers": "cpu_offloading_num_layers",
}  # fmt: skip

DTYPES = {"bf16": "bf16", "fp8_cs": "fp8", "fp8_ds": "fp8", "fp8_sc": "fp8-blockwise", "fp8_mx": "mxfp8", "nvfp4": "nvfp4"}

GPUS_OF_NODE = {"h100": 8, "b200": 8, "b300": 8, "gb200": 4, "gb300": 4, "vr200": 4}

IDLE_FLAGS = frozenset(
    (
        *("-m", "--model_family_name", "-mr", "--model_recipe_name", "-g", "--gpu", "-ng", "--num_gpus", "-gn", "--gpus_per_node"),
        *("-c", "--compute_dtype", "-ms", "--max_steps", "-a", "--account", "-p", "--partition", "-t", "--time_limit", "-i"),
        *("--container_image", "-hf", "--hf_token", "-l", "--log_dir", "-nh", "--nemo_home", "--task", "--domain", "-d", "--dryrun"),
        *("--data", "-cm", "--custom_mounts", "-ce", "--custom_env_vars", "-E", "--env", "-wdk", "-wdp", "-wde", "-wdj", "--detach"),
        *("--recipe", "--dataset", "--step_func", "--mode", "--hf_path", "--tokenizer_type", "--offline", "--additional_slurm_params"),
    )
)

IDLE_KEYS = re.compile(
    r"(?:scheduler|logger|tokenizer|validation|profiling|rng|dataset|checkpoint)\.\w+|optimizer\.(?:lr|min_lr|adam_\w+|weight_decay|clip_grad)|"
    r"train\.(?:train_iters|train_samples|eval_\w+|exit_\w+|manual_gc\w*|log_interval)|model\.(?:activation_func|should_pad_vocab|rotary_\w+|"
    r"max_position_embeddings|init_method_std|layernorm_epsilon|make_vocab_size_divisible_by|attention_softmax_in_fp32)|mixed_precision"
)


def hydra(value: Any) -> str:
    """Return a value as Hydra's grammar has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra(item) for item in value) + "]"
    text = str(value)
    return text if re.fullmatch(r"[\w.+-]{1,200}|\d+,\d+", text) else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def plain(text: str) -> Any:
    """Return the text, or the texts of a list, of an override's value."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        items = inner[1:-1].split(",") if inner[1:-1].strip() else []
        return [str(plain(item)) for item in items]
    if len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\"":
        return inner[1:-1].replace("\\'", "'").replace("\\\\", "\\")
    return inner
