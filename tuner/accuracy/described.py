"""The model and the cluster that a row describes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tuner.accuracy.fields import Row, Section, Unscorable
from tuner.accuracy.inter_node import inter_node_bandwidth
from tuner.accuracy.sources import fact_of
from tuner.cluster import Cluster, Sourced
from tuner.errors import SpecError, printable
from tuner.load import load_spec
from tuner.model import Model
from tuner.presets import cluster as cluster_preset
from tuner.presets import gpu as gpu_preset
from tuner.presets import model as model_preset
from tuner.presets import names, with_gpus

if TYPE_CHECKING:
    from tuner.cluster import Gpu
    from tuner.job import Framework

# What the schema of a row does not hold and a preset of the same name and shape does.
_DETAILS = (
    "norm",
    "norms_per_layer",
    "qk_norm",
    "biases",
    "qkv_bias",
    "attention_sinks",
    "positions",
    "max_positions",
    "sliding_window",
    "dropout",
)
_SHAPE = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads")
_MOE = ("experts", "top_k", "expert_ffn_hidden", "shared_expert_ffn_hidden", "first_dense_layers")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_CHUNK = 128  # tokens: within a chunk a Mamba-2 layer attends, between chunks it carries its state (arXiv 2405.21060, section 6)


def model_of(row: Row, framework: Framework) -> Model:
    """Return the architecture; what the row leaves out is taken from the preset of its name, else from its kind, and noted."""
    given = row.model
    seq_len = given.need("seq_len")
    layers, hidden, heads = (given.need(key) for key in ("layers", "hidden", "heads"))
    name = printable(given.text("name") or "").strip()[:120] or "unnamed"
    fields: dict[str, Any] = {"name": name, "layers": layers, "hidden": hidden, "heads": heads}
    gated = _filled(row, "gated_mlp", given.flag("gated_mlp"), given.count("ffn_hidden") != 4 * hidden)
    fields["gated_mlp"] = gated
    moe, mla = _moe(given.section("moe")), _counts(given.section("mla"), _MLA)
    fields["ffn_hidden"] = _filled(row, "ffn_hidden", given.count("ffn_hidden"), 4 * hidden)
    fields["kv_heads"] = _filled(row, "kv_heads", given.count("kv_heads"), heads)
    fields["head_dim"] = given.count("head_dim") or max(hidden // heads, 1)
    gpt = not (gated or moe or given.data.get("hybrid"))
    fields["vocab"] = _filled(row, "vocab", given.count("vocab"), 50304 if gpt else 128256)
    tied = _filled(row, "tied_embeddings", given.flag("tied_embeddings"), gpt)
    fields |= {"tied_embeddings": tied, "moe": moe, "mla": mla, "mtp_layers": given.count("mtp_layers", least=0) or 0}
    fields |= _kind_of(fields, framework, seq_len) | _named(fields) | _window(given)
    if fields["positions"] == "learned":  # what ran had a position for each token
        fields["max_positions"] = max(fields.get("max_positions", 0), seq_len)
    if hybrid := given.section("hybrid").data:
        fields |= _as_transformer(row, fields, Section("model.hybrid", hybrid))
    return load_spec(Model, {k: v for k, v in fields.items() if v is not None}, "model", units=False)


def _filled(row: Row, key: str, value: Any, default: Any) -> Any:
    if value is None:
        row.assume(f"{key}={str(default).lower()}")
        return default
    return value


def _counts(section: Section, keys: tuple[str, ...]) -> dict[str, int] | None:
    found = {key: section.count(key, least=0) for key in keys}
    return {key: value for key, value in found.items() if value is not None} if section.data else None


def _moe(section: Section) -> dict[str, Any] | None:
    fields: dict[str, Any] | None = _counts(section, _MOE)
    if fields is not None and "alternating" in (section.text("moe_layer_pattern") or ""):
        fields["every"] = 2
    return fields


def _kind_of(fields: dict[str, Any], framework: Framework, seq_len: int) -> dict[str, Any]:
    """Return what follows from an architecture's kind: GPT (plain MLP, tied) has biases, layer norms and learned positions."""
    if fields["gated_mlp"] or fields["moe"]:
        return {"norm": "rms", "positions": "rotary"}
    if not fields["tied_embeddings"]:
        return {"norm": "layer", "positions": "rotary"}
    dropout = framework.gpt_dropout is not None and framework.gpt_dropout.value
    return {"norm": "layer", "biases": True, "positions": "learned", "max_positions": seq_len, "dropout": dropout}


@lru_cache(maxsize=1024)
def _preset(name: str) -> Model | None:
    try:
        return None if "/" in name or "\\" in name or name.endswith((".yaml", ".yml", ".json")) else model_preset(name)
    except SpecError:
        return None


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    known = _preset(fields["name"])
    if known is None or any(getattr(known, key) != fields[key] for key in _SHAPE):
        return {}
    return {key: getattr(known, key) for key in _DETAILS if key in known.model_fields_set}


def _window(given: Section) -> dict[str, Any]:
    """Return the sliding window of an attention_pattern like "alternating sliding window 128 / full; attention sinks"."""
    text = (given.text("attention_pattern") or "").lower()
    size = re.search(r"window\D{0,12}(\d{1,7})", text)
    if size is None:
        return {}
    window = {"size": int(size[1]), "full_every": 2 if "alternat" in text else 0}
    return {"sliding_window": window, "attention_sinks": "sink" in text, "biases": "linear bias" in text}


def _as_transformer(row: Row, fields: dict[str, Any], hybrid: Section) -> dict[str, Any]:
    """Return the nearest transformer of a hybrid: one layer for each MLP or expert layer, whose attention has the mean parameters of
    the mixers (Mamba-2 and attention) that fall to it and sees one chunk of tokens, but for as many layers as really attend.

    A Mamba-2 mixer has h (2 d + 2 g n + a) + d h weights: d = a x head size inner width, g groups, n state size, a heads
    (Dao and Gu 2024, arXiv 2405.21060, section 7).
    """
    pattern = hybrid.text("pattern") or ""
    mlps = hybrid.count("mlp_layers") or len(re.findall(r"[E-]", pattern))
    mambas, attentions = hybrid.count("mamba_layers") or pattern.count("M"), hybrid.count("attention_layers") or pattern.count("*")
    if not mlps:
        raise Unscorable("model.hybrid states neither mlp_layers nor a pattern with MLP layers")
    h, kv, size = fields["hidden"], fields["kv_heads"], fields["head_dim"]
    inner = hybrid.need("mamba_num_heads") * hybrid.need("mamba_head_dim")
    states = 2 * hybrid.need("mamba_groups") * hybrid.need("mamba_state_dim") + hybrid.need("mamba_num_heads")
    mamba = h * (2 * inner + states) + inner * h
    attention = 2 * h * size * (fields["heads"] + kv)
    mean = (mambas * mamba + attentions * attention) / mlps
    heads = max(round((mean / (2 * h * size) - kv) / kv), 1) * kv
    row.assume(f"hybrid={mlps} transformer layers with {heads} heads, {attentions} of them attending to all tokens")
    every = max(round(mlps / attentions), 1) if attentions else 0
    return {"layers": mlps, "heads": heads, "sliding_window": {"size": _CHUNK, "full_every": every}}


@lru_cache(maxsize=256)
def _gpu(name: str) -> Gpu:
    if "/" in name or "\\" in name or name.endswith((".yaml", ".yml", ".json")):
        raise Unscorable(f"cluster.gpu = {name[:40]!r}: must be the name of a GPU")
    try:
        return gpu_preset(name)
    except SpecError as error:
        raise Unscorable(f"cluster.gpu = {name[:40]!r}: no such GPU ({error.problems[0].hint[:80]})") from None


@lru_cache(maxsize=256)
def _usual_node(gpu: str) -> tuple[Cluster, bool]:
    """Return the node preset with this GPU, and whether it is the GPU's own or that of the nearest relative: by name, else by memory
    bandwidth among its vendor's.
    """
    for name in (gpu, *names("clusters")):
        try:
            found = cluster_preset(name)
        except SpecError:
            continue
        if found.gpu.name == gpu:
            return found, True
    nodes = [cluster_preset(name) for name in names("clusters")]
    own = gpu_preset(gpu)
    for node in nodes:
        if node.gpu.name.split("-")[0] == gpu.split("-")[0]:
            return node, False
    kin = [node for node in nodes if node.gpu.vendor == own.vendor] or nodes
    return min(kin, key=lambda node: max(node.gpu.hbm.value / own.hbm.value, own.hbm.value / node.gpu.hbm.value)), False


def cluster_of(row: Row) -> Cluster:
    """Return the cluster: the usual node of the GPU, with the row's node size, NVLink domain and network where stated."""
    given = row.cluster
    name = given.text("gpu")
    if not name or name == "unstated" or name.endswith("?"):
        raise Unscorable("cluster.gpu is not stated" if name in (None, "", "unstated") else f"cluster.gpu = {name!r} is not certain")
    gpus, per_node, domain = given.need("gpus"), given.count("gpus_per_node"), given.count("nvlink_domain")
    gpu = _gpu(name)
    if re.search(r"\d+gb", gpu.name) and not re.search(r"\d+gb", name):
        row.assume(f"gpu={gpu.name}")
    known = fact_of(row).node
    node, own = (cluster_preset(known), True) if known else _usual_node(gpu.name)
    if not own:
        row.assume(f"node={node.name}")
    if per_node is None:
        row.assume(f"gpus_per_node={node.gpus_per_node}")
    return _wired(row, node.replace(gpu=gpu), gpus, per_node or node.gpus_per_node, domain)


def _wired(row: Row, node: Cluster, gpus: int, per_node: int, nvlink: int | None) -> Cluster:
    inner, outer = node.domains[0], node.domains[-1]
    size = nvlink or (per_node if inner.size == node.gpus_per_node else inner.size) or per_node
    size = max(size, per_node) if size % per_node == 0 else per_node
    text = row.cluster.text("inter_node")
    bandwidth = inter_node_bandwidth(text, per_node) if text else None
    if bandwidth is None and gpus > size:
        row.assume(f"inter_node={outer.name}")
    stated = {} if bandwidth is None or text is None else {"bandwidth": Sourced[float](value=bandwidth, source=text)}
    domains = (inner.replace(size=size), outer.replace(size=None, **stated))
    fields = {"name": node.name, "gpu": node.gpu, "gpus": gpus, "gpus_per_node": per_node, "domains": domains}
    cluster: Cluster = load_spec(Cluster, fields, "cluster", units=False)
    whole = gpus <= per_node or gpus % per_node == 0
    return with_gpus(cluster, gpus, "cluster") if whole else cluster
