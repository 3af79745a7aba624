"""A model as the config.json of a Hugging Face family: what launchers write whose models are transformers' own.

Each family is tried in turn: its keys are filled from the model, and the file is read back by the reader of such files. A family fits
where that gives the very same model, so that nothing is dropped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError, one_problem
from tuner.hf_config import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.job import Job
    from tuner.model import Model

_NAMES = frozenset({"name", "source", "aliases"})


def _nothing(_: Model) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """model_type; the class that transformers builds and that of its layers (src/transformers/models/FAMILY/modeling_FAMILY.py); keys: what
    the family has beyond the common ones; of_gpt2: it spells all keys as GPT-2 does; experts: its name among DeepSpeed's AutoEP presets.
    """

    model_type: str
    architecture: str
    layer: str
    keys: Callable[[Model], dict[str, Any]] = _nothing
    of_gpt2: bool = False
    experts: str = ""


def _mistral(model: Model) -> dict[str, Any]:
    return {"sliding_window": model.sliding_window.size if model.sliding_window else None}


def _mixtral(model: Model) -> dict[str, Any]:
    experts = {"num_local_experts": model.moe.experts, "num_experts_per_tok": model.moe.top_k} if model.moe else {}
    return _mistral(model) | experts


def _qwen_moe(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn_hidden,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(range(moe.first_dense_layers)),
        "norm_topk_prob": True,
    }


def _qwen2_moe(model: Model) -> dict[str, Any]:
    shared = model.moe.shared_expert_ffn_hidden if model.moe else 0
    return _qwen_moe(model) | {"shared_expert_intermediate_size": shared}


def _deepseek(model: Model) -> dict[str, Any]:
    mla, moe = model.mla, model.moe
    if mla is None:
        return {}
    keys: dict[str, Any] = mla.model_dump() | {"q_lora_rank": mla.q_lora_rank or None, "num_nextn_predict_layers": model.mtp_layers}
    if moe is not None:
        keys |= {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.expert_ffn_hidden,
            "n_shared_experts": moe.shared_expert_ffn_hidden // moe.expert_ffn_hidden,
            "first_k_dense_replace": moe.first_dense_layers,
            "moe_layer_freq": moe.every,
        }
    return keys


def _attention_bias(model: Model) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias}


_FAMILIES = (
    _Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        layer="LlamaDecoderLayer",
        keys=lambda m: _attention_bias(m) | {"mlp_bias": m.mlp_bias},
    ),
    _Family(model_type="mistral", architecture="MistralForCausalLM", layer="MistralDecoderLayer", keys=_mistral),
    _Family(model_type="qwen2", architecture="Qwen2ForCausalLM", layer="Qwen2DecoderLayer"),
    _Family(model_type="qwen3", architecture="Qwen3ForCausalLM", layer="Qwen3DecoderLayer", keys=_attention_bias),
    _Family(model_type="olmo2", architecture="Olmo2ForCausalLM", layer="Olmo2DecoderLayer", keys=_attention_bias),
    _Family(model_type="mixtral", architecture="MixtralForCausalLM", layer="MixtralDecoderLayer", keys=_mixtral, experts="mixtral"),
    _Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        layer="Qwen3MoeDecoderLayer",
        keys=lambda m: _attention_bias(m) | _qwen_moe(m),
        experts="qwen3_moe",
    ),
    _Family(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", layer="Qwen2MoeDecoderLayer", keys=_qwen2_moe),
    _Family(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        layer="DeepseekV3DecoderLayer",
        keys=_deepseek,
        experts="deepseek_v3",
    ),
    _Family(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        layer="DeepseekV2DecoderLayer",
        keys=_deepseek,
        experts="deepseek_v2",
    ),
    _Family(model_type="gpt2", architecture="GPT2LMHeadModel", layer="GPT2Block", of_gpt2=True),
    _Family(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        layer="GPTNeoXLayer",
        keys=lambda m: {"hidden_dropout": 0.1 if m.dropout else 0.0, "attention_dropout": 0.1 if m.dropout else 0.0},
    ),
    _Family(
        model_type="gemma2", architecture="Gemma2ForCausalLM", layer="Gemma2DecoderLayer", keys=lambda m: _attention_bias(m) | _mistral(m)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """config: a config.json; layer: class of a layer, which FSDP wraps; experts: as AutoEP calls the family."""

    config: dict[str, Any]
    layer: str
    experts: str


def _config(family: _Family, model: Model, seq_len: int) -> dict[str, Any]:
    start = {"architectures": [family.architecture], "model_type": family.model_type}
    if family.of_gpt2:
        rate = 0.1 if model.dropout else 0.0
        return start | {
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden,
            "n_positions": model.max_positions or seq_len,
            "vocab_size": model.vocab,
            "tie_word_embeddings": model.tied_embeddings,
            "resid_pdrop": rate,
            "embd_pdrop": rate,
            "attn_pdrop": rate,
        }
    return (
        start
        | {
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "intermediate_size": model.ffn_hidden,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab,
            "tie_word_embeddings": model.tied_embeddings,
            "max_position_embeddings": max(seq_len, model.max_positions, (model.sliding_window.size + 1) if model.sliding_window else 0),
        }
        | family.keys(model)
    )


def hf_model(model: Model, seq_len: int, where: str) -> HfModel:
    """Return the model as a config.json, for sequences of seq_len tokens. Raises SpecError where no family that is known here is the very
    same architecture.
    """
    ours = model.model_dump(exclude=set(_NAMES))
    for family in _FAMILIES:
        config = _config(family, model, seq_len)
        try:
            told = read_hf_config(dict(config), "config.json").model_dump(exclude=set(_NAMES))
        except SpecError:
            continue
        if family.of_gpt2 and model.positions == "learned" and not model.max_positions:
            told["max_positions"] = 0
        if told == ours:
            return HfModel(config=config, layer=family.layer, experts=family.experts)
    families = ", ".join(family.model_type for family in _FAMILIES)
    raise one_problem(
        where, "model", model.name, f"is no model of a family that can be written ({families})", "another format, like neutral"
    )


def checked_model(job: Job, where: str) -> tuple[HfModel | None, list[Problem]]:
    """Return a job's model as a config.json, or None and what is wrong."""
    try:
        return hf_model(job.model, job.seq_len, where), []
    except SpecError as error:
        return None, list(error.problems)


def families() -> tuple[dict[str, Any], ...]:
    """Return the families as records, for tests that hold them against transformers."""
    return tuple({name: getattr(family, name) for name in ("model_type", "architecture", "layer", "experts")} for family in _FAMILIES)
