"""What the model can not represent, by name; and the keys of a config.json that tell of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError

if TYPE_CHECKING:
    from tuner.hf_config.config import Config

_MAMBA = "Mamba (state-space) layers"
_LINEAR = "linear-attention layers"
_ENCODER = "encoder-decoder or bidirectional models"
_RECURRENT = "recurrent layers"

# model_type -> the part of the architecture that is not modelled.
UNMODELLED: dict[str, str] = {
    "qwen3_next": _LINEAR + " (gated delta net)",
    "qwen3_5": _LINEAR + " (gated delta net)",
    "qwen3_5_moe": _LINEAR + " (gated delta net)",
    "kimi_linear": _LINEAR + " (Kimi delta attention)",
    "minimax": _LINEAR + " (lightning attention)",
    "minimax_text_01": _LINEAR + " (lightning attention)",
    "minimax_m1": _LINEAR + " (lightning attention)",
    "bailing_moe_linear": _LINEAR,
    "minimax_m3": "sparse attention (block selection) layers",
    "deepseek_v32": "sparse attention (DSA indexer) layers",
    "glm_moe_dsa": "sparse attention (DSA indexer) layers",
    "deepseek_v4": "compressed sparse attention layers and hyper-connections",
    "deepseek_ref": "compressed sparse attention layers and hyper-connections",
    "mimo_v2_flash": "sliding-window layers with head counts of their own",
    "mimo_v2": "sliding-window layers with head counts of their own",
    "nemotron_h": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "falcon_mamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "jamba": _MAMBA,
    "bamba": _MAMBA,
    "zamba": _MAMBA,
    "zamba2": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "plamo2": _MAMBA,
    "hunyuan_mamba": _MAMBA,
    "lfm2": "convolution layers",
    "lfm2_moe": "convolution layers",
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "rwkv7": _RECURRENT,
    "xlstm": _RECURRENT,
    "retnet": _RECURRENT,
    "nemotron-nas": "heterogeneous layers (block_configs found by architecture search)",
    "deci": "heterogeneous layers (block_configs found by architecture search)",
    "decilm": "heterogeneous layers (block_configs found by architecture search)",
    "openelm": "heterogeneous layers",
    "llama4": "layers with chunked attention",
    "gemma3n": "per-layer embeddings, shared keys and alternating updates (AltUp)",
    "gemma4": "global layers with head sizes of their own and shared keys",
    "mllama": "cross-attention layers to a vision tower",
    "arctic": "dense MLPs beside the experts",
    "snowflake-arctic": "dense MLPs beside the experts",
    "longcat_flash": "two attention blocks for each layer and zero-computation experts",
    "step3": "multi-matrix factorised attention layers",
    "t5": _ENCODER,
    "mt5": _ENCODER,
    "umt5": _ENCODER,
    "bart": _ENCODER,
    "mbart": _ENCODER,
    "pegasus": _ENCODER,
    "marian": _ENCODER,
    "whisper": _ENCODER,
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "modernbert": _ENCODER,
    "deberta-v2": _ENCODER,
    "distilbert": _ENCODER,
    "electra": _ENCODER,
    "vit": "vision models",
    "clip": "vision models",
    "siglip": "vision models",
}

# Keys that tell of an unmodelled part, in any family. A null, false, zero or empty value says that the part is absent.
_MARKERS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"mamba|^ssm_|_ssm_|^time_step_|^conv_kernel|^use_conv_bias", _MAMBA),
        (r"^linear_(attn|num|key|value|conv)|^full_attention_(interval|idxs)|lightning|delta_net|^kda_|^gdn_", _LINEAR),
        (r"^index(er)?_|^index_topk|^dsa_", "sparse attention (DSA indexer) layers"),
        (r"sparse_attention|^nsa_|^moba_|block_sparse|sparsity", "sparse attention layers"),
        (r"attention_chunk_size|^attn_chunk|chunked_attention", "layers with chunked attention"),
        (r"^compress_|^o_lora_rank|^o_groups|^num_hash_layers", "compressed attention layers"),
        (r"^hc_|hyper_connection|altup|laurel|attn_res_|per_layer_input|kv_shared_layers", "other residual streams than one"),
        (
            r"attention_k_eq_v|^global_head_dim|^num_global_key_value_heads|^swa_|_swa_|num_kv_heads_per_layer",
            "layers with head counts of their own",
        ),
        (r"attn_output_gate|attention_output_gate|use_output_gate|output_gate_type|gated_attention", "gates of the attention output"),
        (r"moe_latent|latent_moe|routed_expert_hidden|zero_expert", "experts in a latent space"),
        (r"^hybrid_|block_configs|layers_block_type|^per_layer_config|double_wide", "heterogeneous layers"),
        (r"is_encoder_decoder|^encoder_layers|cross_attention|bidirectional", _ENCODER),
        (r"recurrent|rwkv|lru_width|retention|lstm", _RECURRENT),
        (r"packing|packed_seq", "packed sequences"),
        (r"^use_cla$|cross_layer_attention", "keys and values shared across layers"),
        (r"engram|ngram_embedding|n_gram_", "n-gram embeddings"),
    )
)
_TOWERS = re.compile(
    r"^(vision|visual|vit|audio|speech|image|video|mm_vision|projector|sound)\w*_(config|cfg|tower)$|^(visual|vision_tower|mm_vision_tower)$"
)

# Whole numbers behind such words may change cost; the second pattern lists those that are known not to.
_SIZES = re.compile(r"layer|head|expert|dim|size|rank|group|block|window|hidden|depth|width|kernel|latent|stream|branch|lora")
_NEUTRAL = re.compile(
    r"_id$|_ids$|_idx$|_index$|token|^max_|^min_|^n_positions|^original_max|^initial_context|rope|rotary|mrope|theta|^n_group|^topk_group"
    r"|^num_expert_group|^num_beam|^ep_size|^pretraining_tp|^num_return|^num_logits|^chunk_size_feed_forward|^init|_std$|^type_vocab|^model_max"
    r"|^mup_|^dim_model_base|^scale_|^summary_|^quant|^block_size$|^layer_norm|^layernorm|^embd_|^attn_pdrop|^router_|^routed_scaling|^aux_loss"
    r"|^first_k_|^max_window_layers|^attn_logit|^logit|^mscale|ngram_size$|^hidden_act|^group_size|^tensor_parallel|^loss_|^moe_loss"
    r"|^cla_share|^num_labels|^problem_type|^world_size|^batch_size|^seq_len|^context_len|^train|^moe_group|^moe_capacity|^moe_norm"
)


_TEXT_PARTS = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "minimax_m3_vl": "minimax_m3",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "mistral3": "mistral",
}


def canonical(kind: str) -> str:
    """Text parts of multimodal models are named after them: qwen3_vl_text has the architecture of qwen3."""
    name = kind.lower().removesuffix("_text").removesuffix("-text")
    return _TEXT_PARTS.get(name, name)


def check_towers(data: dict[str, Any], text: dict[str, Any] | None, where: str) -> None:
    """Refuse a model with a vision or audio tower, naming it and what else of its text part is not modelled."""
    towers = sorted(key for key, value in data.items() if _TOWERS.search(key) and value)
    if not towers:
        return
    kind = str(data.get("model_type", "model"))[:60]
    part = UNMODELLED.get(canonical(str((text or data).get("model_type", kind)))) or UNMODELLED.get(canonical(kind))
    what = f"a vision or audio tower ({towers[0]})" + (f" and {part}" if part else "")
    hint = "pass the text part alone, the content of text_config, to plan the language model" if text is not None and not part else ""
    rule = f"{kind}: {what}: not modelled, so this model is refused rather than guessed"
    raise SpecError([Problem(where=where, path=towers[0], value="", rule=rule, hint=hint)])


def check_rest(c: Config, layers: int) -> None:
    """Refuse what the keys that nobody read say: an unmodelled part, a pattern over the layers, a size of unknown meaning."""
    found = [problem for key in sorted(c.data) if key not in c.used and c.data[key] for problem in _suspicion(c, key, layers)]
    if found:
        raise SpecError(found)


def _suspicion(c: Config, key: str, layers: int) -> list[Problem]:
    value = c.data[key]
    for pattern, part in _MARKERS:
        if pattern.search(key):
            return list(c.refusal(key, part).problems)
    if _NEUTRAL.search(key):
        return []
    if isinstance(value, list) and len(value) >= layers > 1 and len({str(entry) for entry in value}) > 1:
        return list(c.refusal(key, "patterns over the layers that this key describes").problems)
    if isinstance(value, dict) and key.endswith(("_config", "_cfg")) and not key.startswith(("quantization", "compression", "generation")):
        return list(c.refusal(key, "parts that this key describes").problems)
    if isinstance(value, int) and not isinstance(value, bool) and value > 1 and _SIZES.search(key):
        return list(c.refusal(key, "sizes that this key describes (it is not known for this family)").problems)
    return []
