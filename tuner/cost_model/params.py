"""How many parameters a model has, part by part, split as parallelism splits them.

Symbols: h hidden, f ffn_hidden, a heads, k kv_heads, d head_dim, V vocab, E experts, e expert_ffn_hidden. Counts are exact
whole numbers held as floats, so that a product with a column of a plan can not wrap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tuner.model import LayerKind, Mla, Model, Moe


class LayerParameters(NamedTuple):
    """Parameters of one layer, by how they are sharded.

    attention: matrices (and biases) that tensor parallelism shards by heads; mlp: those of a dense MLP, shared_experts those of
    the experts that see every token, both sharded by columns; experts: all routed experts, which ep and etp shard; replicated:
    norms, router, biases behind a row-parallel matrix and MLA's down-projections (Megatron-LM's "duplicated" linear layers),
    which every rank of a tensor-parallel group holds.
    """

    attention: float
    mlp: float
    shared_experts: float
    experts: float
    replicated: float

    @property
    def total(self) -> float:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.shared_experts + self.experts + self.replicated


def layer_parameters(model: Model, kind: LayerKind) -> LayerParameters:
    """Return the parameters of a layer of this kind (its window does not matter)."""
    attention, attention_replicated = _attention(model)
    norms = model.norms_per_layer * _norm(model)
    if kind.moe and model.moe:
        moe = model.moe
        router = float(model.hidden * moe.experts) + (moe.experts if moe.router_bias else 0)
        shared = float(_matrices(model) * model.hidden * moe.shared_expert_ffn_hidden)
        replicated = attention_replicated + norms + router + (model.hidden if moe.shared_expert_gate else 0)
        return LayerParameters(attention, 0.0, shared, expert_parameters(model, moe) * moe.experts, replicated)
    mlp = float(_matrices(model) * model.hidden * model.ffn_hidden)
    has_bias = model.biases or model.mlp_bias
    mlp += (_matrices(model) - 1) * model.ffn_hidden if has_bias else 0
    return LayerParameters(attention, mlp, 0.0, 0.0, attention_replicated + norms + (model.hidden if has_bias else 0))


def expert_parameters(model: Model, moe: Moe) -> float:
    """Return the parameters of one routed expert: 3 h e gated, 2 h e plain, with its biases."""
    weights = float(_matrices(model) * model.hidden * moe.expert_ffn_hidden)
    return weights + ((_matrices(model) - 1) * moe.expert_ffn_hidden + model.hidden if moe.expert_bias else 0)


def embedding_parameters(model: Model) -> float:
    """Return V h of the token embedding, held by the first stage."""
    return float(model.vocab * model.hidden)


def position_parameters(model: Model) -> float:
    """Return the learned positions and the norm behind the embedding (0 for most models), held by the first stage."""
    positions = float(model.max_positions * model.hidden) if model.positions == "learned" else 0.0
    return positions + (_norm(model) if model.embedding_norm else 0.0)


def head_parameters(model: Model) -> float:
    """Return V h of the output head, 0 when it shares the embedding's; held by the last stage."""
    return 0.0 if model.tied_embeddings else float(model.vocab * model.hidden)


def final_norm_parameters(model: Model) -> float:
    """Return the norm in front of the output head."""
    return _norm(model)


def mtp_parameters(model: Model) -> float:
    """Return what one multi-token-prediction layer holds beside a layer like the model's last: a 2h x h projection and three norms.

    DeepSeek-V3 (arXiv 2412.19437) section 2.2: norms of the embedding and of the previous state, the projection, the layer, a
    final norm. Embedding and head are the model's own.
    """
    return 2.0 * model.hidden * model.hidden + 3 * _norm(model)


def parameters(model: Model) -> float:
    """Return all parameters, without MTP layers: the count that models are named by (DeepSeek-V3: 671 billion)."""
    layers = sum(count * layer_parameters(model, kind).total for kind, count in model.layer_groups())
    ends = embedding_parameters(model) + position_parameters(model) + final_norm_parameters(model) + head_parameters(model)
    return ends + layers


def trained_parameters(model: Model) -> float:
    """Return all parameters with the MTP layers, which are trained beside the model."""
    last = layer_parameters(model, model.kind(model.layers - 1)).total
    return parameters(model) + model.mtp_layers * (last + mtp_parameters(model))


def active_parameters(model: Model) -> float:
    """Return the parameters that take part in one token's forward pass.

    Dense models: all. Mixtures of experts: top_k of the routed experts, and not the rows of an untied input embedding (a look-up,
    no product), as GPT-OSS counts them (its model card: 5.13 of 116.83 billion).
    """
    if model.moe is None:
        return parameters(model)
    idle = sum(count for kind, count in model.layer_groups() if kind.moe) * (model.moe.experts - model.moe.top_k)
    looked_up = 0.0 if model.tied_embeddings else embedding_parameters(model)
    return parameters(model) - idle * expert_parameters(model, model.moe) - looked_up


def _matrices(model: Model) -> int:
    return 3 if model.gated_mlp else 2


def _norm(model: Model) -> float:
    return model.hidden * (2.0 if model.norm == "layer" else 1.0)


def _attention(model: Model) -> tuple[float, float]:
    """Return (sharded by heads, replicated) parameters of one attention block, its norms of queries and keys included."""
    if model.mla:
        return _latent_attention(model, model.mla)
    h, a, k, d = model.hidden, model.heads, model.kv_heads, model.head_dim
    sharded = 2.0 * h * a * d + 2.0 * h * k * d
    sharded += (a + 2 * k) * d if model.biases or model.qkv_bias else 0
    sharded += a if model.attention_sinks else 0
    replicated = float(h) if model.biases or model.output_bias else 0.0
    if model.qk_norm:
        replicated += (a + k) * d if model.qk_norm_whole else 2 * d
    return sharded, replicated


def _latent_attention(model: Model, mla: Mla) -> tuple[float, float]:
    """Return (sharded, replicated) parameters of MLA, DeepSeek-V2 (arXiv 2405.04434) section 2.1.

    Queries go down to q_lora_rank, are normed and go up to the heads (rank 0: straight); keys and values go down to
    kv_lora_rank with one rotary key shared by the heads, are normed and go up.
    """
    h, a = model.hidden, model.heads
    query_from = mla.q_lora_rank or h
    sharded = (
        float(query_from * a * model.qk_head_dim) + a * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) + a * mla.v_head_dim * h
    )
    down = float(h * (mla.kv_lora_rank + mla.qk_rope_head_dim)) + h * mla.q_lora_rank
    return sharded, down + mla.kv_lora_rank + mla.q_lora_rank
