"""Words of NeMo 2.0: keywords of its classes, functions that set a precision, and names by which classes are reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tuner.launch.launchers.megatron.layout import parse_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """A keyword of a class and the setting it spells. kind: "not" says the opposite; "pattern": a list of layers; "first": the one element
    of a list; "fsdp": fsdp="megatron".
    """

    owner: str
    keyword: str
    name: str
    kind: Literal["same", "not", "pattern", "first", "fsdp"] = "same"

    def put(self, value: Any) -> Any:
        """Return the keyword's value; None: it is left out."""
        if self.kind == "not":
            return not value
        if self.kind == "pattern":
            return parse_pattern(value)
        if self.kind == "fsdp":
            return "megatron" if value else None
        return value[0] if self.kind == "first" else value

    def take(self, value: Any) -> Any:
        """Return the setting's value. Raises ValueError."""
        if self.kind == "not" and isinstance(value, bool):
            return not value
        if self.kind == "pattern" and isinstance(value, list):
            return "[" + ",".join(str(item) for item in value) + "]"
        if self.kind == "fsdp":
            if value not in (None, "megatron", "pytorch"):
                raise ValueError("must be megatron or pytorch")
            return value == "megatron"
        return value


def _keywords(owner: str, *names: str) -> tuple[Keyword, ...]:
    return tuple(Keyword(owner=owner, keyword=name, name=name) for name in names)


MODEL, STRATEGY, DDP = "GPTConfig", "MegatronStrategy", "DistributedDataParallelConfig"
OPTIMIZER, DATA, OVERLAP = "OptimizerConfig", "MockDataModule", "MegatronCommOverlapCallback"
# One entry a keyword; all of a setting are written, each is read.
KEYWORDS: tuple[Keyword, ...] = (
    *_keywords(MODEL, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *_keywords(MODEL, "vocab_size", "seq_length", "position_embedding_type", "normalization", "add_bias_linear", "add_qkv_bias"),
    *_keywords(MODEL, "qk_layernorm", "hidden_dropout", "attention_dropout", "mtp_num_layers"),
    Keyword(owner=MODEL, keyword="gated_linear_unit", name="swiglu"),
    Keyword(owner=MODEL, keyword="share_embeddings_and_output_weights", name="untie_embeddings_and_output_weights", kind="not"),
    Keyword(owner=MODEL, keyword="num_moe_experts", name="num_experts"),
    *_keywords(MODEL, "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_grouped_gemm"),
    *_keywords(MODEL, "moe_router_enable_expert_bias", "moe_router_score_function", "moe_token_dispatcher_type"),
    Keyword(owner=MODEL, keyword="moe_layer_freq", name="moe_layer_freq", kind="pattern"),
    Keyword(owner=MODEL, keyword="cp_comm_type", name="cp_comm_type", kind="first"),
    *_keywords(MODEL, "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *_keywords(MODEL, "cpu_offloading", "cpu_offloading_num_layers", "enable_cuda_graph"),
    *_keywords(STRATEGY, "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *_keywords(STRATEGY, "context_parallel_size", "sequence_parallel", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *_keywords(STRATEGY, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *_keywords(STRATEGY, "pipeline_model_parallel_layout", "num_distributed_optimizer_instances"),
    Keyword(owner=STRATEGY, keyword="num_layers_in_first_pipeline_stage", name="decoder_first_pipeline_num_layers"),
    Keyword(owner=STRATEGY, keyword="num_layers_in_last_pipeline_stage", name="decoder_last_pipeline_num_layers"),
    Keyword(owner=STRATEGY, keyword="fsdp", name="use_megatron_fsdp", kind="fsdp"),
    *_keywords(DDP, "use_distributed_optimizer", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"),
    *_keywords(DDP, "overlap_grad_reduce", "overlap_param_gather"),
    *_keywords(OPTIMIZER, "use_distributed_optimizer"),
    *_keywords(OVERLAP, "tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather"),
    *_keywords(DATA, "seq_length", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
)
BY_PLACE: Mapping[tuple[str, str], Keyword] = {(entry.owner, entry.keyword): entry for entry in KEYWORDS}

# Settings that need no keyword: they follow from others, stand in the plugin of precision, or are off where they have none.
UNSAID = frozenset(
    (
        "overlap_moe_expert_parallel_comm",
        "group_query_attention",
        "max_position_embeddings",
        "ckpt_format",
        "bf16",
        "fp16",
        "fp8",
        "fp8_recipe",
        "fp4",
        "fp4_recipe",
    )
)

# nemo/collections/llm/recipes/optim/adam.py: its OptimizerConfig says use_distributed_optimizer=True.
DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam_with_cosine_annealing",)
# nemo/collections/llm/recipes/precision/mixed_precision.py, functions by the precision they set.
PRECISIONS: Mapping[str, str] = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_mixed": "fp8",
    "fp16_with_fp8_mixed": "fp8",
    "fp16_with_fp8_current_scaling_mixed": "fp8",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "fp16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "fp16_with_mxfp8_mixed": "mxfp8",
}

PLUGIN: Mapping[str, Mapping[str, str]] = {
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed"},
    "fp8": {"precision": "bf16-mixed", "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-blockwise": {"precision": "bf16-mixed", "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {"precision": "bf16-mixed", "fp8": "hybrid", "fp8_recipe": "mxfp8"},
}

RECIPES = {"delayed": "fp8", "tensorwise": "fp8", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}

# Classes by the last name of a path that is assigned to, and by what they are called where there are several.
PATHS = {"strategy": STRATEGY, "ddp": DDP, "data": DATA, "trainer": "Trainer", "plugins": "MegatronMixedPrecision"}

CLASSES = {"PreTrainingDataModule": DATA, "FineTuningDataModule": DATA, "SquadDataModule": DATA}

MODEL_CLASS = re.compile(
    r"(?:GPT|Llama|Mixtral|Mistral|Nemotron|Qwen|DeepSeek|Gemma|Falcon|Phi|Starcoder|Baichuan|ChatGLM)\w{0,40}Config\w{0,40}"
)

IDLE_KEYWORDS: Mapping[str, frozenset[str]] = {
    MODEL: frozenset(
        ("activation_func", "make_vocab_size_divisible_by", "rotary_base", "rotary_percent", "init_method_std", "layernorm_epsilon")
    ),
    STRATEGY: frozenset(
        (
            *("pipeline_dtype", "ddp", "gradient_as_bucket_view", "use_te_rng_tracker", "ckpt_async_save", "ckpt_parallel_load"),
            *("ckpt_parallel_save", "save_ckpt_format", "progress_interval", "ckpt_load_optimizer", "ckpt_save_optimizer"),
        )
    ),
    DDP: frozenset(("check_for_nan_in_grad", "average_in_collective", "bucket_size")),
    OPTIMIZER: frozenset(
        ("optimizer", "lr", "min_lr", "weight_decay", "bf16", "fp16", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "params_dtype")
    ),
    DATA: frozenset(
        ("tokenizer", "num_workers", "num_train_samples", "num_val_samples", "num_test_samples", "paths", "split", "pin_memory")
    ),
    "Trainer": frozenset(
        (
            *("accelerator", "max_steps", "limit_val_batches", "limit_test_batches", "val_check_interval", "log_every_n_steps"),
            *("accumulate_grad_batches", "use_distributed_sampler", "strategy", "plugins", "callbacks", "logger", "num_sanity_val_steps"),
            "enable_checkpointing",
        )
    ),
    "MegatronMixedPrecision": frozenset(
        (
            *("params_dtype", "pipeline_dtype", "autocast_enabled", "grad_reduce_in_fp32", "fp8_margin", "fp8_amax_history_len"),
            *("fp8_amax_compute_algo", "fp8_param_gather", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
            "num_layers_at_end_in_bf16",
        )
    ),
    "pretrain_recipe": frozenset(("name", "dir", "performance_mode", "fn")),
}
