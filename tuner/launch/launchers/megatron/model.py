"""An architecture, precision and sequence length as settings of Megatron-Core, under the names that its command line gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError
from tuner.launch.launchers.megatron import precision
from tuner.launch.launchers.megatron.layout import moe_pattern, parse_pattern, read_moe_pattern
from tuner.launch.launchers.megatron.precision import FP8, PRECISION, RECIPES
from tuner.launch.launchers.tables.settings import Aspect, Kind, Meaning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.launch.launchers.launcher import Unknown
    from tuner.launch.launchers.tables.settings import Ask, Dialect, Values
    from tuner.model import Model

KINDS: Mapping[str, Kind] = {
    "num_layers": "count", "hidden_size": "count", "ffn_hidden_size": "count", "num_attention_heads": "count",
    "num_query_groups": "count", "group_query_attention": "flag", "kv_channels": "count", "vocab_size": "count",
    "swiglu": "flag", "squared_relu": "flag", "quick_geglu": "flag", "untie_embeddings_and_output_weights": "flag", "normalization": "text",
    "qk_layernorm": "flag", "add_bias_linear": "flag", "add_qkv_bias": "flag", "hidden_dropout": "number", "attention_dropout": "number",
    "position_embedding_type": "text", "use_rotary_position_embeddings": "flag", "max_position_embeddings": "count",
    "multi_latent_attention": "flag", "q_lora_rank": "count", "kv_lora_rank": "count", "qk_head_dim": "count",
    "qk_pos_emb_head_dim": "count", "v_head_dim": "count", "mtp_num_layers": "count",
    "num_experts": "count", "moe_router_topk": "count", "moe_ffn_hidden_size": "count", "moe_shared_expert_intermediate_size": "count",
    "moe_shared_expert_gate": "flag", "moe_layer_freq": "text", "moe_router_enable_expert_bias": "flag",
    "moe_router_score_function": "text",
    "moe_grouped_gemm": "flag", "moe_token_dispatcher_type": "text", "moe_router_force_load_balancing": "flag",
    "window_size": "words", "window_attn_skip_freq": "text", "softmax_type": "text",
    "seq_length": "count", **precision.KINDS,
}  # fmt: skip
# What an architecture is where nothing tells (megatron/training/arguments.py).
BARE: Mapping[str, Any] = {
    "swiglu": False, "untie_embeddings_and_output_weights": False, "normalization": "LayerNorm", "qk_layernorm": False,
    "add_bias_linear": True, "add_qkv_bias": False, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "position_embedding_type": "learned_absolute", "moe_router_topk": 2, "moe_layer_freq": "1", "kv_lora_rank": 32, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "multi_latent_attention": False,
}  # fmt: skip
_POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}
_READ_POSITIONS = {"rope": "rotary", "yarn": "rotary", "mrope": "rotary", "learned_absolute": "learned", "none": "none"}


def _all_biases(model: Model) -> bool:
    """Whether each linear layer has a bias: Megatron has a switch for all of them (experts and router too) and one for queries and keys."""
    moe = model.moe
    dense = moe is None or bool(moe.first_dense_layers) or moe.every > 1
    rest = (not dense or model.mlp_bias) and (moe is None or moe.expert_bias)
    return model.biases or (model.qkv_bias and model.output_bias and rest)


def unspelled(job: Job, dialect: Dialect) -> list[Problem]:
    """Return what of a job has no spelling."""
    model = job.model
    traits = {
        "alibi positions": model.positions == "alibi",
        "a norm behind the embedding": model.embedding_norm,
        f"{model.norms_per_layer} norms a layer": model.norms_per_layer != 2,
        "a norm over all heads together": model.qk_norm_whole,
        "biases of some linear layers only": not _all_biases(model) and (model.output_bias or model.mlp_bias),
        "biases of experts only": bool(model.moe and model.moe.expert_bias) and not _all_biases(model),
        "multi-latent attention": model.mla is not None and "no-mla" in dialect.traits,
        "sliding windows": model.sliding_window is not None and "no-window" in dialect.traits,
        "attention sinks": model.attention_sinks and "no-window" in dialect.traits,
        "a gate of shared experts": bool(model.moe and model.moe.shared_expert_gate) and "no-window" in dialect.traits,
    }
    found = [
        Problem(
            where=dialect.launcher,
            path="model",
            value=model.name,
            rule=f"cannot be written: it has {trait}, which no setting turns on",
            hint="needs a model class or a recipe of its own",
        )
        for trait, has in traits.items()
        if has
    ]
    if job.task != "pretrain":
        found.append(Problem(where=dialect.launcher, path="task", value=job.task, rule="cannot be written: pretraining alone is"))
    if job.precision not in ("bf16", "fp16", "fp32", "nvfp4", *FP8):
        rule = f"cannot be written: fp8 recipes are {', '.join(RECIPES)}"
        found.append(Problem(where=dialect.launcher, path="precision", value=job.precision, rule=rule))
    return found


# -- dense parts


def _put_dense(ask: Ask) -> dict[str, Any]:
    job = ask.job
    model = job.model
    found: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_hidden,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_dim,
        "vocab_size": model.vocab,
        "seq_length": job.seq_len,
        "max_position_embeddings": max(job.seq_len, model.max_positions),
        "position_embedding_type": _POSITIONS.get(model.positions, "none"),
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "swiglu": model.gated_mlp,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "add_bias_linear": _all_biases(model),
        "qk_layernorm": model.qk_norm,
        "hidden_dropout": 0.1 if model.dropout else 0.0,
        "attention_dropout": 0.1 if model.dropout else 0.0,
    }
    if model.qkv_bias and not _all_biases(model):
        found["add_qkv_bias"] = True
    if model.mla is None and model.kv_heads != model.heads:
        found |= {"group_query_attention": True, "num_query_groups": model.kv_heads}
    if model.mtp_layers:
        found["mtp_num_layers"] = model.mtp_layers
    if model.sliding_window:
        found["window_size"] = [f"{model.sliding_window.size},0"]
        found["window_attn_skip_freq"] = str(model.sliding_window.full_every) if model.sliding_window.full_every else None
    if model.attention_sinks:
        found["softmax_type"] = "learnable"
    return found


def _take_dense(values: Values) -> Meaning:
    layers, hidden, heads = values.get("num_layers"), values.get("hidden_size"), values.get("num_attention_heads")
    model: dict[str, Any] = {
        name: values.get(told)
        for name, told in (
            ("layers", "num_layers"),
            ("hidden", "hidden_size"),
            ("ffn_hidden", "ffn_hidden_size"),
            ("heads", "num_attention_heads"),
            ("head_dim", "kv_channels"),
            ("vocab", "vocab_size"),
        )
        if values.get(told)
    }
    assumed: dict[str, str] = {}
    gated = values.get("quick_geglu") or values.get("swiglu")
    if gated is not None:
        model["gated_mlp"] = bool(gated)
    if layers and hidden and heads:
        if not values.get("ffn_hidden_size"):
            model["ffn_hidden"] = hidden * 8 // 3 // 64 * 64 if values.get("swiglu") else 4 * hidden
            assumed["ffn_hidden"] = f"{model['ffn_hidden']}: what ffn_hidden_size is unless given"
        if not values.get("kv_channels") and hidden % heads == 0:
            model["head_dim"] = hidden // heads
    meaning = _take_traits(values)
    problems: list[Problem] = []
    unknown: list[Unknown] = []
    groups, switch = values.get("num_query_groups"), values.get("group_query_attention")
    if values.get("multi_latent_attention") or (groups and switch is False):
        groups = None
    if groups or heads:
        model["kv_heads"] = groups or heads
    window = _window(values)
    if window is not None:
        model["sliding_window"] = window
    else:
        unknown += [values.unknown(name) for name in ("window_size", "window_attn_skip_freq") if values.has(name) and values.get(name)]
    if groups and heads and heads % groups:
        problems.append(values.problem("num_query_groups", f"must divide num_attention_heads {heads}"))
    job = {"seq_len": values.get("seq_length")} if values.get("seq_length") else {}
    return Meaning(
        model={**model, **meaning.model},
        job=job,
        problems=(*problems, *meaning.problems),
        unknown=(*unknown, *meaning.unknown),
        assumed={**assumed, **meaning.assumed},
    )


def _window(values: Values) -> dict[str, int] | None:
    """Return the sliding window of "128,0" with a whole number behind it, or None."""
    words = [word.strip("()[] ") for item in values.get("window_size") or [] for word in item.split(",") if word.strip("()[] ")]
    every = values.get("window_attn_skip_freq")
    if not words or not words[0].isdigit() or int(words[0]) == 0 or (every is not None and not every.isdigit()):
        return None
    return {"size": int(words[0]), "full_every": int(every or 0)}


def _take_traits(values: Values) -> Meaning:
    model: dict[str, Any] = {}
    assumed: dict[str, str] = {}
    problems: list[Problem] = []
    for name, told, turned in (
        ("tied_embeddings", "untie_embeddings_and_output_weights", True),
        ("qk_norm", "qk_layernorm", False),
        ("qkv_bias", "add_qkv_bias", False),
    ):
        if values.get(told) is not None:
            model[name] = bool(values.get(told)) is not turned
    if values.get("add_bias_linear") is not None:
        model["biases"] = values.get("add_bias_linear")
        if model["biases"]:
            model["qkv_bias"] = False  # one of them all
        if not values.has("add_bias_linear") and model["biases"]:
            assumed["biases"] = "on: linear layers have biases unless switched off"
    norm = values.get("normalization")
    if norm is not None:
        if norm not in ("LayerNorm", "RMSNorm"):
            raise SpecError([values.problem("normalization", "must be LayerNorm or RMSNorm")])
        model["norm"] = "rms" if norm == "RMSNorm" else "layer"
    dropouts = [values.get(name) for name in ("hidden_dropout", "attention_dropout")]
    if any(value is not None for value in dropouts):
        model["dropout"] = any(dropouts)
        if model["dropout"] and not values.has("hidden_dropout", "attention_dropout"):
            assumed["dropout"] = "on: hidden_dropout and attention_dropout are 0.1 unless given"
    position = "rope" if values.get("use_rotary_position_embeddings") else values.get("position_embedding_type")
    if position is not None:
        if position not in _READ_POSITIONS:
            problems.append(values.problem("position_embedding_type", f"is none that a model here can have: {', '.join(_READ_POSITIONS)}"))
        else:
            model["positions"] = _READ_POSITIONS[position]
            if model["positions"] == "learned" and values.get("max_position_embeddings"):
                model["max_positions"] = values.get("max_position_embeddings")
    if values.get("mtp_num_layers"):
        model["mtp_layers"] = values.get("mtp_num_layers")
    if values.get("softmax_type") == "learnable":
        model["attention_sinks"] = True
    unknown = (values.unknown("softmax_type"),) if values.get("softmax_type") not in (None, "vanilla", "learnable") else ()
    return Meaning(model=model, problems=tuple(problems), assumed=assumed, unknown=unknown)


# -- multi-latent attention and experts


def _put_mla(ask: Ask) -> dict[str, Any]:
    job = ask.job
    mla = job.model.mla
    if mla is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def _take_mla(values: Values) -> Meaning:
    if not values.get("multi_latent_attention"):
        return Meaning()
    problems: tuple[Problem, ...] = ()
    if values.has("group_query_attention") and values.get("group_query_attention"):
        problems = (values.problem("group_query_attention", "cannot stand together with multi_latent_attention"),)
    mla = {
        "q_lora_rank": values.get("q_lora_rank") or 0,
        "kv_lora_rank": values.get("kv_lora_rank"),
        "qk_nope_head_dim": values.get("qk_head_dim"),
        "qk_rope_head_dim": values.get("qk_pos_emb_head_dim"),
        "v_head_dim": values.get("v_head_dim"),
    }
    return Meaning(model={"mla": {name: value for name, value in mla.items() if value is not None}}, problems=problems)


def _put_experts(ask: Ask) -> dict[str, Any]:
    job = ask.job
    model, moe = job.model, job.model.moe
    if moe is None:
        return {}
    kinds = [model.kind(layer).moe for layer in range(model.layers)]
    found: dict[str, Any] = {
        "num_experts": moe.experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden,
        "moe_layer_freq": None if all(kinds) else moe_pattern(kinds),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        # random tokens route unevenly without a trained router
        "moe_router_force_load_balancing": None if "no-forced-balance" in ask.dialect.traits else True,
    }
    if moe.shared_expert_ffn_hidden:
        found |= {"moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden}
        found |= {"moe_shared_expert_gate": True if moe.shared_expert_gate else None}
    if moe.router_bias and not _all_biases(model):
        found |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    return found


def _take_experts(values: Values) -> Meaning:
    experts = values.get("num_experts")
    if not experts:
        idle = [name for name in ("moe_router_topk", "moe_ffn_hidden_size") if values.has(name) and values.get(name)]
        ep = values.get("expert_model_parallel_size") or 1
        if ep > 1 and not idle and values.get("num_layers"):
            return Meaning(problems=(values.problem("expert_model_parallel_size", "needs num_experts"),))
        return Meaning()
    moe: dict[str, Any] = {"experts": experts}
    assumed: dict[str, str] = {}
    problems: list[Problem] = []
    unknown: list[Unknown] = []
    ffn = values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size")
    if ffn:
        moe["expert_ffn_hidden"] = ffn
        if not values.get("moe_ffn_hidden_size"):
            assumed["moe.expert_ffn_hidden"] = f"{ffn}: that of ffn_hidden_size, as moe_ffn_hidden_size is not given"
    if values.get("moe_router_topk"):
        moe["top_k"] = values.get("moe_router_topk")
    if values.get("moe_shared_expert_intermediate_size"):
        moe["shared_expert_ffn_hidden"] = values.get("moe_shared_expert_intermediate_size")
    if values.get("moe_shared_expert_gate"):
        moe["shared_expert_gate"] = True
    model: dict[str, Any] = {}
    if values.get("add_bias_linear"):
        moe |= {"expert_bias": True, "router_bias": True}
        model = {"biases": False, "qkv_bias": True, "output_bias": True, "mlp_bias": False}
    elif values.get("moe_router_enable_expert_bias"):
        moe["router_bias"] = True
    pattern = _moe_layers(values)
    if isinstance(pattern, dict):
        moe |= pattern
        if model and (pattern["first_dense_layers"] or pattern["every"] > 1):
            model["mlp_bias"] = True
    elif values.has("moe_layer_freq"):
        unknown.append(values.unknown("moe_layer_freq"))
    ep = values.get("expert_model_parallel_size") or 1
    if experts % ep:
        problems.append(values.problem("expert_model_parallel_size", f"must divide num_experts {experts}"))
    if values.has("moe_token_dispatcher_type") and values.get("moe_token_dispatcher_type") not in (None, "alltoall"):
        unknown.append(values.unknown("moe_token_dispatcher_type"))
    return Meaning(model={"moe": moe, **model}, assumed=assumed, problems=tuple(problems), unknown=tuple(unknown))


def _moe_layers(values: Values) -> dict[str, int] | None:
    """Return which layers are mixtures of experts, as a model tells it."""
    told, layers = values.get("moe_layer_freq"), values.get("num_layers")
    if told is None:
        return {}
    if told.isdigit() and int(told) <= 1:
        return {"first_dense_layers": 0, "every": 1}
    if told.isdigit():
        # layer i is one where i % N == 0, so that the first is; a model here counts the other way, with as many of them
        return {"first_dense_layers": 0, "every": int(told)} if layers and layers % int(told) == 0 else None
    try:
        pattern = parse_pattern(told)
    except ValueError as error:
        raise SpecError([values.problem("moe_layer_freq", str(error))]) from None
    if layers and len(pattern) != layers:
        raise SpecError([values.problem("moe_layer_freq", f"has {len(pattern)} layers, and num_layers is {layers}")])
    return read_moe_pattern(pattern)


MODEL = (
    Aspect(
        group="model",
        keys=(
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "group_query_attention"),
            *("kv_channels", "vocab_size", "seq_length", "max_position_embeddings", "position_embedding_type"),
            *(
                "use_rotary_position_embeddings",
                "normalization",
                "swiglu",
                "squared_relu",
                "quick_geglu",
                "add_bias_linear",
                "add_qkv_bias",
            ),
            *("untie_embeddings_and_output_weights", "qk_layernorm", "hidden_dropout", "attention_dropout", "mtp_num_layers"),
            *("window_size", "window_attn_skip_freq", "softmax_type"),
        ),
        put=_put_dense,
        take=_take_dense,
    ),
    Aspect(
        group="model",
        keys=("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        put=_put_mla,
        take=_take_mla,
    ),
    Aspect(
        group="model",
        keys=(
            *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
            *("moe_layer_freq", "moe_router_enable_expert_bias", "moe_router_score_function", "moe_grouped_gemm"),
            *("moe_token_dispatcher_type", "moe_router_force_load_balancing"),
        ),
        put=_put_experts,
        take=_take_experts,
    ),
    PRECISION,
)
