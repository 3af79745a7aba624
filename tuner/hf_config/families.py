"""The families of models that can be read, by `model_type`, as data.

Each entry says how that family differs from Llama: what transformers' configuration class assumes for absent keys and what its
modelling code builds (huggingface/transformers, src/transformers/models/FAMILY). Parallel attention and MLP (GPT-NeoX, Falcon, Phi,
Cohere) has the same products as serial; norms without weights (OLMo) or without a bias (Cohere, DBRX) count as RMS norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tuner.hf_config.config import Config, Flag
from tuner.hf_config.layouts import MoeKeys, WindowKeys

Adjust = Callable[[Config, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family builds. Flags are fixed or (key, default); `adjust` returns fields of Model that need more than a key.

    norms: per layer; ffn_ratio: ffn_hidden / hidden when the width is absent; kv_heads: when absent (0: as heads); head_dim: when
    absent (0: hidden / heads); dropout: when no key says so; position_offset: rows of the position table beyond max_positions;
    mtp: keys that count MTP layers.
    """

    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norms: int = 2
    tied: bool = False
    biases: Flag = False
    qkv_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: Flag = False
    qk_norm_whole: bool = False
    embedding_norm: bool = False
    sinks: bool = False
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    position_offset: int = 0
    dropout: bool = False
    ffn_ratio: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mla: bool = False
    window: WindowKeys = field(default_factory=WindowKeys)
    moe: MoeKeys | None = None
    mtp: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    adjust: Adjust | None = None


def _falcon(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """One KV head unless grouped or multi-headed; two norms for the grouped architecture or a serial block."""
    new = c.flag(("new_decoder_architecture", False))
    kv_heads = fields["kv_heads"] if new else 1 if c.flag(("multi_query", True)) else fields["heads"]
    two = c.integer("num_ln_in_parallel_attn", default=2 if new else 1) == 2 or not c.flag(("parallel_attn", True))
    positions = "alibi" if c.flag(("alibi", False)) else "rotary"
    return {"kv_heads": kv_heads, "norms_per_layer": 2 if two else 1, "positions": positions}


def _multi_query(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    return {"kv_heads": 1 if c.flag(("multi_query", True)) else fields["heads"]}


def _opt(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    if c.integer("word_embed_proj_dim", default=fields["hidden"]) != fields["hidden"]:
        raise c.refusal("word_embed_proj_dim", "projections of the embedding")
    return {"biases": c.flag(("enable_bias", True))}


def _parallel_norm(c: Config, _: dict[str, Any]) -> dict[str, Any]:
    """StableLM: one norm for each layer when attention and MLP are parallel."""
    return {"norms_per_layer": 1 if c.flag(("use_parallel_residual", False)) else 2}


def _qwen1(_: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """Qwen (first generation) splits intermediate_size between the gate and the value."""
    return {"ffn_hidden": max(fields["ffn_hidden"] // 2, 1)}


def _minimax(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """attn_type_list: 1 is softmax attention, 0 lightning; MTP modules of some transformer layers each."""
    kinds = c.sequence("attn_type_list", fields["layers"])
    if kinds and any(kind != 1 for kind in kinds):
        raise c.refusal("attn_type_list", "linear-attention layers (lightning attention)")
    modules = c.integer("num_mtp_modules", default=0, least=0, most=8) * c.integer("mtp_transformer_layers", default=1, most=8)
    return {"mtp_layers": modules if c.flag(("use_mtp", False)) else 0}


def _gpt_neo(c: Config, _: dict[str, Any]) -> dict[str, Any]:
    raise c.refusal("attention_types", "irregular patterns of local attention")


def _nested(c: Config, key: str, allowed: dict[str, Any]) -> dict[str, Any]:
    """Return a nested mapping; values other than the allowed ones (None: anything) are refused."""
    inner = c.get(key) or {}
    if not isinstance(inner, dict):
        c.add(key, inner, "must be a mapping")
        return {}
    for name, wanted in allowed.items():
        if wanted is not None and inner.get(name, wanted[0]) not in wanted:
            raise c.refusal(f"{key}.{name}", f"blocks with {name} = {str(inner[name])[:40]}")
    return inner


def _whole(c: Config, key: str, inner: dict[str, Any], name: str, default: int | None = None) -> int:
    sub = Config({f"{key}.{name}": inner.get(name)}, c.where, c.kind)
    value = sub.integer(f"{key}.{name}", default=default)
    c.problems.extend(sub.problems)
    return value


def _mpt(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    inner = _nested(c, "attn_config", {"prefix_lm": (False,), "qk_ln": (False,), "attn_uses_sequence_id": (False,)})
    one = inner.get("attn_type") == "multiquery_attention"
    kv_heads = 1 if one else _whole(c, "attn_config", inner, "kv_n_heads", fields["heads"])
    ffn = c.integer("expansion_ratio", default=4) * fields["hidden"]
    alibi = inner.get("alibi", True) is True
    learned = not alibi and c.flag(("learned_pos_emb", True))
    bias = not c.flag(("no_bias", True))
    positions = {"positions": "alibi" if alibi else "learned" if learned else "none"}
    length = c.integer("max_seq_len", default=0, least=0) if learned else 0
    return positions | {
        "kv_heads": kv_heads,
        "ffn_hidden": ffn,
        "biases": bias,
        "norm": "layer" if bias else "rms",
        "max_positions": length,
    }


def _dbrx(c: Config, _: dict[str, Any]) -> dict[str, Any]:
    attention, ffn = _nested(c, "attn_config", {}), _nested(c, "ffn_config", {})
    width = _whole(c, "ffn_config", ffn, "ffn_hidden_size")
    experts, top_k = _whole(c, "ffn_config", ffn, "moe_num_experts"), _whole(c, "ffn_config", ffn, "moe_top_k")
    expert = {"experts": experts, "top_k": top_k, "expert_ffn_hidden": width}
    return {"kv_heads": _whole(c, "attn_config", attention, "kv_n_heads"), "ffn_hidden": width, "moe": expert}


def _smollm3(c: Config, _: dict[str, Any]) -> dict[str, Any]:
    c.get("no_rope_layers", "no_rope_layer_interval")  # which layers rotate costs nothing
    return {}


def _bailing(c: Config, _: dict[str, Any]) -> dict[str, Any]:
    c.get("moe_shared_expert_intermediate_size")  # the code multiplies num_shared_experts by moe_intermediate_size
    return {}


def _hunyuan(c: Config, _: dict[str, Any]) -> dict[str, Any]:
    """HunYuan's files carry the sizes of variants that they switch off."""
    if c.flag(("use_mla", False)):
        raise c.refusal("use_mla", "latent-attention variants of this family")
    c.get(
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "attention_head_dim",
        "org_vocab_size",
        "cla_share_factor",
    )
    return {}


def _chatglm(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    grouped = c.flag(("multi_query_attention", False))
    return {"kv_heads": c.integer("multi_query_group_num", default=1) if grouped else fields["heads"]}


_ALWAYS, _FLAG = WindowKeys(mode="always"), WindowKeys(mode="flag", size=4096)
_GPT: dict[str, Any] = {"gated": False, "norm": "layer", "biases": True, "ffn_ratio": 4}
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": ("attention_bias", False), "output_bias": ("attention_bias", False)}
_LLAMA = Family(**_ATTENTION_BIAS, mlp_bias=("mlp_bias", False))
_DEEPSEEK_MOE = MoeKeys(shared_count=("n_shared_experts",), optional=True)
_DEEPSEEK_V3_MOE = MoeKeys(shared_count=("n_shared_experts", "num_shared_experts"), router_bias=True, optional=True)
_NEXT = ("num_nextn_predict_layers",)
_DEEPSEEK_V3 = Family(mla=True, moe=_DEEPSEEK_V3_MOE, mtp=_NEXT, defaults={"first_k_dense_replace": 3})
_FFN = ("intermediate_size",)
_BAILING = Family(
    qkv_bias=("use_qkv_bias", False),
    output_bias=("use_bias", False),
    qk_norm=("use_qk_norm", False),
    moe=MoeKeys(shared_count=("num_shared_experts",), router_bias=("moe_router_enable_expert_bias", False)),
    mtp=_NEXT,
    adjust=_bailing,
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "yi": _LLAMA,
    "xverse": Family(),
    "baichuan": Family(),
    "aquila": _LLAMA,
    "minicpm": Family(tied=True),
    "mistral": Family(window=WindowKeys(mode="always", size=4096)),
    "ministral": Family(window=_ALWAYS),
    "ministral3": Family(window=_ALWAYS),
    "mixtral": Family(window=_ALWAYS, moe=MoeKeys(ffn=_FFN)),
    "qwen": Family(qkv_bias=True, adjust=_qwen1),
    "qwen2": Family(qkv_bias=True, window=_FLAG),
    "qwen2_moe": Family(
        qkv_bias=("qkv_bias", True), window=_FLAG, moe=MoeKeys(shared_size=("shared_expert_intermediate_size",), shared_gate=True)
    ),
    "qwen3": Family(**_ATTENTION_BIAS, qk_norm=True, head_dim=128, window=_FLAG),
    "qwen3_moe": Family(**_ATTENTION_BIAS, qk_norm=True, window=_FLAG, moe=MoeKeys(shared_size=("shared_expert_intermediate_size",))),
    "mimo": Family(qkv_bias=("attention_bias", True), window=_FLAG, mtp=_NEXT),
    "deepseek": Family(**_ATTENTION_BIAS, moe=_DEEPSEEK_MOE),
    "deepseek_v2": Family(mla=True, moe=_DEEPSEEK_MOE),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": _DEEPSEEK_V3,
    "glm4_moe_lite": Family(mla=True, moe=_DEEPSEEK_V3_MOE, mtp=_NEXT, defaults={"first_k_dense_replace": 1}),
    "minicpm3": Family(mla=True, tied=True),
    "dots1": Family(**_ATTENTION_BIAS, qk_norm=True, window=WindowKeys(mode="flag"), moe=_DEEPSEEK_V3_MOE),
    "gpt_oss": Family(
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        sinks=True,
        head_dim=64,
        window=WindowKeys(mode="period", size=128, period=2),
        moe=MoeKeys(ffn=_FFN, router_bias=True, expert_bias=True),
    ),
    "gpt2": Family(**_GPT, tied=True, positions="learned", dropout=True),
    "gpt_bigcode": Family(**_GPT, tied=True, positions="learned", dropout=True, adjust=_multi_query),
    "gpt_neo": Family(**_GPT, tied=True, positions="learned", adjust=_gpt_neo),
    "gpt_neox": Family(**_GPT),
    "gptj": Family(gated=False, norm="layer", norms=1, mlp_bias=True, ffn_ratio=4),
    "codegen": Family(gated=False, norm="layer", norms=1, mlp_bias=True, ffn_ratio=4),
    "bloom": Family(**_GPT, tied=True, positions="alibi", embedding_norm=True),
    "opt": Family(**_GPT, tied=True, positions="learned", position_offset=2, dropout=True, adjust=_opt),
    "xglm": Family(**_GPT, tied=True, positions="none", dropout=True),
    "mpt": Family(gated=False, tied=True, ffn_ratio=4, adjust=_mpt),
    "dbrx": Family(norm="rms", ffn_ratio=4, adjust=_dbrx),
    "falcon": Family(gated=False, norm="layer", tied=True, biases=("bias", False), ffn_ratio=4, adjust=_falcon),
    "persimmon": Family(gated=False, norm="layer", biases=True, qk_norm=("qk_layernorm", True)),
    "gemma": Family(**_ATTENTION_BIAS, tied=True, head_dim=256),
    "gemma2": Family(**_ATTENTION_BIAS, tied=True, norms=4, head_dim=256, window=WindowKeys(mode="period", size=4096, period=2)),
    "gemma3": Family(
        **_ATTENTION_BIAS,
        tied=True,
        norms=4,
        qk_norm=True,
        head_dim=256,
        window=WindowKeys(mode="period", size=4096, period=6),
        defaults={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "phi": Family(gated=False, norm="layer", norms=1, biases=True, qk_norm=("qk_layernorm", False)),
    "phi3": Family(window=_ALWAYS),
    "phimoe": Family(**_ATTENTION_BIAS, norm="layer", kv_heads=8, window=_ALWAYS, moe=MoeKeys(ffn=_FFN)),
    "granite": _LLAMA,
    "granitemoe": Family(**_ATTENTION_BIAS, moe=MoeKeys(ffn=_FFN)),
    "granitemoeshared": Family(**_ATTENTION_BIAS, moe=MoeKeys(ffn=_FFN, shared_size=("shared_intermediate_size",))),
    "olmo": Family(**_ATTENTION_BIAS),
    "olmo2": Family(**_ATTENTION_BIAS, qk_norm=True, qk_norm_whole=True),
    "olmo3": Family(**_ATTENTION_BIAS, qk_norm=True, qk_norm_whole=True, window=WindowKeys(mode="period", size=4096, period=4)),
    "olmoe": Family(**_ATTENTION_BIAS, qk_norm=True, qk_norm_whole=True, moe=MoeKeys(ffn=_FFN)),
    "starcoder2": Family(gated=False, norm="layer", tied=True, biases=("use_bias", True), window=_ALWAYS),
    "stablelm": Family(
        norm="layer",
        qkv_bias=("use_qkv_bias", False),
        qk_norm=("qk_layernorm", False),
        qk_norm_whole=True,
        adjust=_parallel_norm,
    ),
    "internlm": Family(qkv_bias=("bias", True), output_bias=("bias", True)),
    "internlm2": Family(qkv_bias=("bias", False), output_bias=("bias", False)),
    "internlm3": Family(qkv_bias=("qkv_bias", False), output_bias=("bias", False), mlp_bias=("bias", False)),
    "cohere": Family(**_ATTENTION_BIAS, norms=1, tied=True, qk_norm=("use_qk_norm", False), qk_norm_whole=True),
    "cohere2": Family(**_ATTENTION_BIAS, norms=1, tied=True, window=WindowKeys(mode="period", size=4096, period=4)),
    "chatglm": Family(qkv_bias=("add_qkv_bias", False), adjust=_chatglm),
    "glm": Family(qkv_bias=("attention_bias", False), head_dim=128),
    "glm4": Family(qkv_bias=("attention_bias", False), norms=4, head_dim=128),
    "glm4_moe": Family(
        qkv_bias=("attention_bias", False),
        qk_norm=("use_qk_norm", False),
        moe=_DEEPSEEK_V3_MOE,
        mtp=_NEXT,
        defaults={"first_k_dense_replace": 1},
    ),
    "minimax_m2": Family(
        qk_norm=("use_qk_norm", True),
        qk_norm_whole=True,
        moe=MoeKeys(ffn=_FFN, shared_size=("shared_intermediate_size",), router_bias=("use_routing_bias", True)),
        adjust=_minimax,
    ),
    "ernie4_5": Family(tied=True, biases=("use_bias", False)),
    "ernie4_5_moe": Family(
        tied=True,
        biases=("use_bias", False),
        moe=MoeKeys(shared_count=("moe_num_shared_experts",), router_bias=True),
        defaults={"moe_layer_start_index": 1},
    ),
    "nemotron": Family(gated=False, norm="layer", **_ATTENTION_BIAS, mlp_bias=("mlp_bias", False)),
    "arcee": Family(gated=False, **_ATTENTION_BIAS, mlp_bias=("mlp_bias", False)),
    "apertus": Family(gated=False, **_ATTENTION_BIAS, qk_norm=True),
    "exaone": Family(),
    "exaone4": Family(qk_norm=True, window=WindowKeys(mode="period", size=4096, period=4)),
    "smollm3": Family(**_ATTENTION_BIAS, mlp_bias=("mlp_bias", False), tied=True, kv_heads=4, window=_FLAG, adjust=_smollm3),
    "seed_oss": Family(
        qkv_bias=("attention_bias", True), output_bias=("attention_out_bias", False), mlp_bias=("mlp_bias", False), kv_heads=8, head_dim=128
    ),
    "hunyuan_v1_dense": Family(**_ATTENTION_BIAS, qk_norm=True, adjust=_hunyuan),
    "hunyuan_v1_moe": Family(
        **_ATTENTION_BIAS,
        qk_norm=True,
        moe=MoeKeys(ffn=("moe_intermediate_size", "intermediate_size"), shared_count=("num_shared_expert",)),
        adjust=_hunyuan,
    ),
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "orion": Family(norm="layer"),
}
