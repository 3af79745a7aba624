"""The architecture of a language model, as far as its cost depends on it."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tuner.spec import Name, Spec
from tuner.units import Count, CountOrZero


class Mla(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head sizes in elements.

    q_lora_rank 0: no query compression.
    """

    q_lora_rank: CountOrZero = 0
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: CountOrZero
    v_head_dim: Count


class SlidingWindow(Spec):
    """Attention to the last `size` tokens; every `full_every`-th layer attends to all of them (0: no layer does)."""

    size: Count
    full_every: CountOrZero = 0


class Moe(Spec):
    """Mixture of experts in place of the MLP, in layers after the first `first_dense_layers`, every `every`-th one."""

    experts: Count
    top_k: Count
    expert_ffn_hidden: Count
    shared_expert_ffn_hidden: CountOrZero = 0
    shared_expert_gate: bool = False
    first_dense_layers: CountOrZero = 0
    every: Count = 1
    router_bias: bool = False
    expert_bias: bool = False


class LayerKind(NamedTuple):
    """What tells one layer's cost from another's: its attention window (0: all tokens) and whether its MLP is a mixture of experts."""

    window: int
    moe: bool


class Model(Spec):
    """A decoder-only transformer.

    hidden, ffn_hidden, head_dim in elements; layers does not count MTP layers. `biases` are those of all linear layers
    (GPT), `qkv_bias` alone is Qwen2's, `output_bias` is that of the attention's output projection (GPT-OSS has both),
    `mlp_bias` that of the MLP.
    `qk_norm` normalises queries and keys, each head by itself (Qwen3) or, with `qk_norm_whole`, all heads together (OLMo 2).
    `dropout`: trained with dropout behind embedding, attention and MLP and on attention weights (GPT), which keeps its masks.
    `embedding_norm` is BLOOM's norm behind the embedding. `positions` learned adds max_positions x hidden parameters.
    """

    name: Name
    layers: Annotated[Count, Field(le=10_000)]
    hidden: Count
    ffn_hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    gated_mlp: bool = True
    tied_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norms_per_layer: Annotated[int, Field(ge=1, le=6, strict=True)] = 2
    qk_norm: bool = False
    qk_norm_whole: bool = False
    embedding_norm: bool = False
    biases: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    dropout: bool = False
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    max_positions: CountOrZero = 0
    mla: Mla | None = None
    moe: Moe | None = None
    sliding_window: SlidingWindow | None = None
    mtp_layers: Annotated[int, Field(ge=0, le=8, strict=True)] = 0
    source: str = ""
    aliases: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.moe and self.moe.top_k > self.moe.experts:
            raise ValueError(f"moe.top_k = {self.moe.top_k} must not exceed moe.experts = {self.moe.experts}")
        if self.moe and self.moe.first_dense_layers > self.layers:
            raise ValueError(f"moe.first_dense_layers = {self.moe.first_dense_layers} must not exceed layers = {self.layers}")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query or key head."""
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of one value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def leading_dense_layers(self) -> int:
        """Dense layers at the front of a mixture-of-experts model (0 for a dense model)."""
        return self.moe.first_dense_layers if self.moe else 0

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of the layer at this index (0 is next to the embedding)."""
        window = self.sliding_window
        full = window is None or (window.full_every > 0 and (layer + 1) % window.full_every == 0)
        moe = self.moe is not None and layer >= self.moe.first_dense_layers and (layer + 1) % self.moe.every == 0
        return LayerKind(0 if full or window is None else window.size, moe)

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[LayerKind, int], ...], tuple[tuple[LayerKind, int], ...]]:
        kinds = [self.kind(i) for i in range(self.layers)]
        leading = self.leading_dense_layers
        return tuple(Counter(kinds[:leading]).items()), tuple(Counter(kinds[leading:]).items())

    def leading_groups(self) -> tuple[tuple[LayerKind, int], ...]:
        """Return (kind, count) of the leading dense layers: a contiguous run next to the embedding."""
        return self._groups[0]

    def body_groups(self) -> tuple[tuple[LayerKind, int], ...]:
        """Return (kind, count) of the layers behind the leading dense ones: at most four kinds, evenly interleaved."""
        return self._groups[1]

    def layer_groups(self) -> tuple[tuple[LayerKind, int], ...]:
        """Return (kind, count) over all layers."""
        return tuple((Counter(dict(self.leading_groups())) + Counter(dict(self.body_groups()))).items())
