"""Models as torchtitan knows them: its flavors by name, and the source that builds an architecture it has no flavor of."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.texts.python_config import docstring
from tuner.load import load_spec
from tuner.model import Model, Moe

if TYPE_CHECKING:
    from collections.abc import Mapping

# (module under torchtitan.models, flavor): our preset. Flavors whose sizes were compared with the preset (torchtitan 0.2.2 and 0.3.0,
# models/MODULE/__init__.py); multi-token prediction is off unless asked for.
FLAVORS: Mapping[tuple[str, str], str] = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
SELECTIVE = "layernorm+mlp"  # configs/frameworks/torchtitan.yaml defaults.recompute: what selective comes nearest to
_NAMES = {"name", "source", "aliases"}
_OWN = "ARCHITECTURE"  # the literal that a written module keeps the model in


def architecture(model: Model) -> dict[str, Any]:
    """Return what tells one architecture from another: the model without its name and source."""
    return model.model_dump(mode="json", exclude_defaults=True, exclude=_NAMES)


@cache
def _flavors() -> dict[str, tuple[str, str]]:
    return {repr(flavor_model(*key)): key for key in FLAVORS}


def flavor_model(module: str, flavor: str) -> dict[str, Any]:
    """Return a flavor as fields of Model, and the preset that it is. Raises KeyError for one that is unknown."""
    model = presets.model(FLAVORS[module, flavor])
    return architecture(model.replace(mtp_layers=0))


def flavor_of(model: Model) -> tuple[str, str] | None:
    """Return (module, flavor) of torchtitan that is this architecture."""
    return _flavors().get(repr(architecture(model)))


def model_of(told: Mapping[str, Any]) -> Model | None:
    """Return the model that fields of Model make, None where they are not all there."""
    fields = dict(told)
    try:
        if "preset" in fields:
            model: Model = presets.model(fields.pop("preset")).replace(**fields)
            return model
        return load_spec(Model, {"name": "model"} | fields, "model")
    except SpecError:
        return None


def flavor_by_function(name: str) -> tuple[str, str] | None:
    """Return the flavor behind a function of a config_registry: llama3_8b, qwen3_30b_a3b."""
    known = {f"{module}_{flavor}".lower().replace(".", "_").replace("-", "_"): (module, flavor) for module, flavor in FLAVORS}
    return known.get(name)


def dealt(layers: int, stages: int, first: int, last: int, head: str = "lm_head") -> list[list[str]]:
    """Return the modules of each stage as torchtitan deals them when the embedding counts as `first` layers and the output as `last`
    (distributed/pipeline_parallel.py _generate_llm_fqn_per_model_part): equal counts, the remainder to the first stages.
    """
    each, extra = divmod(layers + first + last, stages)
    counts = [each + (stage < extra) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    found: list[list[str]] = []
    at = 0
    for count in counts:
        upto = min(at + max(count, 0), layers)
        found.append([f"layers.{layer}" for layer in range(at, upto)])
        at = upto
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", head]
    return found


def unbuildable(model: Model) -> str:
    """Return why torchtitan's decoder blocks do not make this architecture, or ""."""
    moe = model.moe
    plain = (
        (model.norm == "rms" and model.norms_per_layer == 2, "norms other than two RMS norms a layer"),
        (model.gated_mlp, "an MLP without a gate"),
        (model.positions == "rotary", f"{model.positions} positions"),
        (not (model.biases or model.qkv_bias or model.output_bias or model.mlp_bias), "biases"),
        (
            not (model.qk_norm_whole or model.embedding_norm or model.attention_sinks or model.dropout),
            "sinks, dropout or norms of all heads",
        ),
        (model.mla is None, "latent attention of other sizes than its flavors"),
        (model.sliding_window is None, "sliding windows"),
        (not model.mtp_layers, "multi-token prediction"),
        (moe is None or _plain_experts(moe), "experts that are shared, biased or not in every layer"),
    )
    return next((what for good, what in plain if not good), "")


def _plain_experts(moe: Moe) -> bool:
    return not (moe.shared_expert_ffn_hidden or moe.first_dense_layers or moe.every > 1 or moe.router_bias or moe.expert_bias)


def own_model(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Model that a module written by the tuner holds, {} for others."""
    found = constants.get(_OWN)
    return dict(found) if isinstance(found, dict) else {}


def as_literal(model: Model) -> str:
    """Return the line that keeps the model in a Python module."""
    return f"{_OWN} = {model.model_dump(mode='json', exclude_defaults=True, exclude={'source', 'aliases'})!r}"


def llama_like(model: Model) -> bool:
    """Whether 0.2's Llama 3 arguments can say the model: they derive the head's width and have neither experts nor norms of heads."""
    return model.moe is None and not (model.qk_norm or model.tied_embeddings) and model.head_dim * model.heads == model.hidden


def module_0_2(model: Model) -> str:
    """Return the module that registers the architecture with torchtitan 0.2 ([experimental] custom_import). llama3 rounds the MLP's width,
    2/3 x 4 x dim x multiplier, up to a multiple of multiple_of: the width itself, with a multiplier that stays below it.
    """
    values: dict[str, Any]
    if llama_like(model):
        base = int(2 * 4 * model.hidden / 3)
        values = {
            "dim": model.hidden,
            "n_layers": model.layers,
            "n_heads": model.heads,
            "n_kv_heads": model.kv_heads,
            "vocab_size": model.vocab,
            "multiple_of": model.ffn_hidden,
            "ffn_dim_multiplier": round(0.5 * model.ffn_hidden / base, 6),
        }
        imports: tuple[str, ...] = ("from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec",)
        arguments = [f"{key}={value!r}" for key, value in values.items()]
        kind = "TransformerModelArgs"
    else:
        values = {
            "dim": model.hidden,
            "n_layers": model.layers,
            "n_heads": model.heads,
            "n_kv_heads": model.kv_heads,
            "vocab_size": model.vocab,
            "head_dim": model.head_dim,
            "hidden_dim": model.ffn_hidden,
            "qk_norm": model.qk_norm,
            "enable_weight_tying": model.tied_embeddings,
        }
        arguments = [f"{key}={value!r}" for key, value in values.items()]
        if model.moe:
            arguments += ["moe_enabled=True", f"moe_inter_dim={model.moe.expert_ffn_hidden}"]
            router = 'score_func="softmax", route_norm=True, score_before_experts=False'
            arguments += [f"moe_args=MoEArgs(num_experts={model.moe.experts}, num_shared_experts=0, top_k={model.moe.top_k}, {router})"]
        imports = (
            "from torchtitan.models.moe import MoEArgs",
            "from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec",
        )
        kind = "Qwen3ModelArgs"
    lines = [
        docstring(f"The architecture {model.name}, registered with torchtitan 0.2 as model tuner, flavor run."),
        "",
        "import dataclasses",
        "",
        *imports,
        "from torchtitan.protocols.train_spec import register_train_spec",
        "",
        as_literal(model),
        "",
        f"arguments = {kind}(",
        *(f"    {argument}," for argument in arguments),
        ")",
        'register_train_spec("tuner", dataclasses.replace(get_train_spec(), model_args={"run": arguments}))',
    ]
    return "\n".join(lines) + "\n"


_BUILDER_IMPORTS = """\
from functools import partial

import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
"""
_BUILDER = """\
WEIGHTS = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
ONES = {"weight": nn.init.ones_}


def norm(width):
    return RMSNorm.Config(normalized_shape=width, param_init=ONES)


def mlp_or_experts():
    moe = ARCHITECTURE.get("moe")
    dim = ARCHITECTURE["hidden"]
    if moe is None:
        mlp = make_ffn_config(dim=dim, hidden_dim=ARCHITECTURE["ffn_hidden"], w1_param_init=WEIGHTS, w2w3_param_init=WEIGHTS)
        return {"feed_forward": mlp}
    sizes = {"num_experts": moe["experts"], "top_k": moe["top_k"]}
    router = make_router_config(dim=dim, gate_param_init=WEIGHTS, score_func="softmax", route_norm=True, **sizes)
    init = {name: WEIGHTS["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
    experts = make_routed_experts_config(
        dim=dim, hidden_dim=moe["expert_ffn_hidden"], param_init=init, comm_backend="standard", **sizes
    )
    return {"moe": make_moe_config(num_experts=moe["experts"], router=router, routed_experts=experts)}


def layer():
    head_dim = ARCHITECTURE["head_dim"]
    attention = make_gqa_config(
        dim=ARCHITECTURE["hidden"],
        n_heads=ARCHITECTURE["heads"],
        n_kv_heads=ARCHITECTURE["kv_heads"],
        head_dim=head_dim,
        wqkv_param_init=WEIGHTS,
        wo_param_init=WEIGHTS,
        inner_attention=get_attention_config("flex"),
        fuse_qkv=True,
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=SEQ_LEN, theta=500000.0),
        qk_norm=norm(head_dim) if ARCHITECTURE.get("qk_norm") else None,
    )
    dim = ARCHITECTURE["hidden"]
    return Qwen3TransformerBlock.Config(attention_norm=norm(dim), ffn_norm=norm(dim), attention=attention, **mlp_or_experts())


def own_spec(converters):
    dim, vocab = ARCHITECTURE["hidden"], ARCHITECTURE["vocab"]
    model = Qwen3Model.Config(
        vocab_size=vocab,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=ARCHITECTURE.get("tied_embeddings", False),
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=WEIGHTS),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=WEIGHTS),
        layers=[layer() for _ in range(ARCHITECTURE["layers"])],
    )
    for converter in converters:
        model = converter.build().convert(model)
    return ModelSpec(
        name="tuner",
        flavor="run",
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if "moe" in ARCHITECTURE else None,
        state_dict_adapter=None,
    )
"""


def builder(model: Model, seq_len: int) -> tuple[str, str]:
    """Return (imports, source) of a function own_spec(converters) that builds the architecture from torchtitan's parts: Qwen3's decoder
    block, whose norms of heads and experts may be left out.
    """
    return _BUILDER_IMPORTS, f"{as_literal(model)}\nSEQ_LEN = {seq_len}\n{_BUILDER}"
