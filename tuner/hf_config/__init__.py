"""Hugging Face configurations: a config.json as published, read as a Model or refused by name.

A configuration is read only when everything in it that changes cost can be represented. What can not (linear attention, sparse
attention, Mamba layers, vision towers, ...) is named in the error; nothing is guessed and no key that may cost time or memory is
ignored. A quantised checkpoint describes the architecture it was quantised from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.errors import nearest, one_problem
from tuner.hf_config.config import Config
from tuner.hf_config.families import FAMILIES, Family
from tuner.hf_config.layouts import moe, window
from tuner.hf_config.refusals import UNMODELLED, canonical, check_rest, check_towers
from tuner.load import load_spec
from tuner.model import Model

__all__ = ["read_hf_config"]


def read_hf_config(data: dict[str, Any], where: str) -> Model:
    """Return the model that a config.json describes. Raises SpecError: unknown family, unmodelled part, missing or wrong key."""
    data = _text_part(data, where)
    kind = data.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise one_problem(
            where, "model_type", kind or "", "must name the family of the model", f"known: {', '.join(sorted(FAMILIES)[:8])}, ..."
        )
    config = Config(data, where, kind)
    name = canonical(kind)
    if name in UNMODELLED:
        raise config.refusal("model_type", UNMODELLED[name])
    if name not in FAMILIES:
        raise one_problem(where, "model_type", kind[:80], "this family is not known", nearest(name[:80], FAMILIES))
    family = FAMILIES[name]
    fields = _fields(config, family)
    config.finish()
    check_rest(config, layers=fields["layers"])
    return load_spec(Model, fields | {"name": _name(data, where), "source": f"Hugging Face config.json, {kind}"}, where)


def _text_part(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the language model of a wrapped config that has nothing but it; refuse one with a vision or audio tower."""
    inner: dict[str, Any] | None = next(
        (data[key] for key in ("text_config", "llm_config", "language_config") if isinstance(data.get(key), dict)), None
    )
    check_towers(data, inner, where)
    if inner is None:
        return data
    outer = {key: data[key] for key in ("tie_word_embeddings", "model_type", "_name_or_path") if key in data}
    return outer | inner


def _name(data: dict[str, Any], where: str) -> str:
    path = Path(where)
    given = data.get("_name_or_path")
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return (name or (given if isinstance(given, str) else "") or "model")[:120]


def _fields(c: Config, family: Family) -> dict[str, Any]:
    c.use_defaults(family.defaults)
    hidden = c.integer("hidden_size", "n_embd", "d_model", "n_embed")
    layers = c.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=10_000)
    heads = c.integer("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    mla, kv_heads = _latent(c) if family.mla else None, _kv_heads(c, family, heads)
    fields: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if mla else kv_heads,
        "head_dim": mla["v_head_dim"] if mla else _head_dim(c, family, hidden, heads),
        "ffn_hidden": _ffn(c, family, hidden),
        "vocab": c.integer("vocab_size", "padded_vocab_size"),
        "gated_mlp": family.gated,
        "tied_embeddings": c.flag(("tie_word_embeddings", family.tied)),
        "norm": family.norm,
        "norms_per_layer": family.norms,
        "qk_norm": c.flag(family.qk_norm),
        "qk_norm_whole": family.qk_norm_whole,
        "embedding_norm": family.embedding_norm,
        "biases": c.flag(family.biases),
        "qkv_bias": c.flag(family.qkv_bias),
        "output_bias": c.flag(family.output_bias),
        "mlp_bias": c.flag(family.mlp_bias),
        "attention_sinks": family.sinks,
        "dropout": c.rate(
            "resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", "attention_dropout", "attn_pdrop", default=family.dropout
        ),
        "mla": mla,
        "sliding_window": window(c, family.window, layers),
        "moe": moe(c, family.moe, layers) if family.moe else None,
        "mtp_layers": sum(c.integer(key, default=0, least=0, most=8) for key in family.mtp),
    }
    positions = c.integer(
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length", default=0, least=0
    )
    fields |= {"positions": family.positions}
    if family.positions == "learned":
        fields["max_positions"] = positions + family.position_offset
    if mla and c.flag(("attention_bias", False)):
        raise c.refusal("attention_bias", "biases of latent attention")
    return {**fields, **(family.adjust(c, fields) if family.adjust else {})}


def _kv_heads(c: Config, family: Family, heads: int) -> int:
    return c.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", default=family.kv_heads or heads)


def _head_dim(c: Config, family: Family, hidden: int, heads: int) -> int:
    given = c.integer("head_dim", "kv_channels", default=family.head_dim)
    if given:
        return given
    if hidden % heads and not c.problems:
        c.add("num_attention_heads", heads, f"must divide hidden_size = {hidden}, as head_dim is not given")
    return max(hidden // heads, 1)


def _ffn(c: Config, family: Family, hidden: int) -> int:
    default = family.ffn_ratio * hidden if family.ffn_ratio else None
    return c.integer("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dense_intermediate_size", default=default)


def _latent(c: Config) -> dict[str, int]:
    c.get("head_dim", "qk_head_dim")  # follow from the sizes below
    return {
        "q_lora_rank": c.integer("q_lora_rank", default=0, least=0),
        "kv_lora_rank": c.integer("kv_lora_rank"),
        "qk_nope_head_dim": c.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": c.integer("qk_rope_head_dim", least=0),
        "v_head_dim": c.integer("v_head_dim"),
    }
