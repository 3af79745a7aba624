"""A decoder-only transformer in stages: the same model for every layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tuner.launch.engine import context_parallel
from tuner.launch.engine.experts import MixtureOfExperts, Routing, activated
from tuner.launch.engine.parts import Part, Parts
from tuner.launch.engine.recompute import Recompute, recomputed, remade
from tuner.launch.engine.tensor_parallel import Columns, Embedding, Head, Norm, Rows, TensorParallel, taker, vocabulary_part
from tuner.plan import CP_KINDS

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.engine.mesh import Mesh
    from tuner.model import Model
    from tuner.plan import Plan

ROTARY_BASE = 10_000.0
DROPOUT = 0.1
_CP_NAMES = {code: name for name, code in CP_KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every module of a rank is built from. dtype: of activations."""

    job: Job
    plan: Plan
    mesh: Mesh
    tp: TensorParallel
    recompute: Recompute
    routing: Routing
    dtype: torch.dtype

    @property
    def dropout(self) -> float:
        """Probability of dropout, 0 for models trained without."""
        return DROPOUT if self.job.model.dropout else 0.0


class Attention(Parts):
    """Multi-head attention with grouped keys and values; heads are cut over tp, key heads copied where tp exceeds them."""

    def __init__(self, key: str, setting: Setting, window: int) -> None:
        super().__init__()
        self.setting, self.window = setting, window
        model, tp = setting.job.model, setting.tp
        bias = model.biases or model.qkv_bias
        units = attention_units(model, tp)
        self.query = Columns(f"{key}.query", tp, groups=1, width=model.heads * model.head_dim, inputs=model.hidden, bias=bias, units=units)
        self.width, self.biased = model.head_dim, bias
        self.key_values = KeyValues(f"{key}.key_values", setting, bias=bias)
        self.output = Rows(f"{key}.output", tp, width=model.hidden, inputs=model.heads * model.head_dim,
                           bias=model.biases or model.output_bias, units=units)  # fmt: skip
        self.query_norm = Norm(f"{key}.query_norm", tp, width=model.head_dim, layer=False, always=True) if model.qk_norm else None
        self.key_norm = Norm(f"{key}.key_norm", tp, width=model.head_dim, layer=False, always=True) if model.qk_norm else None

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        """Return the output for a gathered (seq, batch, hidden); turn: cosines and sines of the positions, where these are rotary."""
        q = self.query(x).unflatten(-1, (-1, self.width))
        k, v = self.key_values(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if turn is not None:
            q, k = rotated(q, turn), rotated(k, turn)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q, k, v))
        drop = "core_attn" in self.setting.recompute.modules
        out = recomputed(self._core, q, k, v) if drop else self._core(q, k, v)
        return self.output(out.permute(2, 0, 1, 3).flatten(2))  # type: ignore[no-any-return]

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cp, job = self.setting.mesh.cp, self.setting.job
        if cp.size > 1:
            return _CONTEXT[_CP_NAMES[int(self.setting.plan.cp_kind)]](q, k, v, cp)
        if job.attention == "flash" and not self.window:
            return context_parallel.causal(q, k, v, self.setting.dropout)
        row = torch.arange(q.shape[2], device=q.device)
        allowed = row <= row[:, None]
        if self.window:
            allowed = allowed & (row > row[:, None] - self.window)
        kernel = context_parallel.masked if job.attention == "flash" else context_parallel.unfused
        return kernel(q, k, v, allowed, self.setting.dropout)


_CONTEXT = {
    "p2p": context_parallel.ring_attention,
    "all_gather": context_parallel.gathered_attention,
    "a2a": context_parallel.exchanged_attention,
}


class KeyValues(Parts):
    """Key and value projections of a rank's key heads.

    Where equal shares are more than the key heads, ranks hold copies. Where unequal ones are, every rank holds all key heads, uses
    those that its query heads (`uses`) attend to, and gives one to each query head (`of_query`): a group is split over ranks then.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, key: str, setting: Setting, *, bias: bool) -> None:
        super().__init__()
        model, tp = setting.job.model, setting.tp
        self.width, self.inputs, self.biased = model.head_dim, model.hidden, bias
        self.uses: Tensor | None = None
        shape = (2, model.kv_heads, model.head_dim, model.hidden)
        for name, size, deviation in (("weight", 4, model.hidden**-0.5), ("bias", 3, 0.0)):
            if name == "bias" and not bias:
                continue
            if splits_groups(model, tp):
                part = tp.replicated(f"{key}.{name}", shape[:size], deviation=deviation, always=True)
            else:
                part = self._cut(f"{key}.{name}", shape[:size], deviation, setting)
            self.hold(name, part)
        if tp.uneven is not None and splits_groups(model, tp):
            wanted = torch.tensor(tp.uneven.units(model.heads)) // (model.heads // model.kv_heads)
            self.uses, self.of_query = wanted.unique(return_inverse=True)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cut(key: str, shape: tuple[int, ...], deviation: float, setting: Setting) -> Part:
        tp, copies, heads = setting.tp, setting.mesh.copies, shape[1]
        if tp.uneven is not None:
            return Part(key=key, shape=shape, deviation=deviation, cut=taker(1, tp.cut(heads, heads)), axis=1, units=heads)
        each = max(heads // tp.group.size, 1)
        first = tp.group.index // copies.size * each
        cut = taker(1, slice(first, first + each))
        sums: Literal["", "copies"] = "copies" if copies.size > 1 else ""
        return Part(key=key, shape=shape, deviation=deviation, cut=cut, sums=sums, copies=copies.size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (seq, batch, heads, head_dim) each."""
        weight, bias = self.weight, self.bias if self.biased else None
        if self.uses is not None:
            weight, bias = weight[:, self.uses], None if bias is None else bias[:, self.uses]
        both = F.linear(x, weight.reshape(-1, self.inputs), None if bias is None else bias.flatten())
        both = both.view(*x.shape[:2], 2, -1, self.width)
        if self.uses is not None:
            both = both[..., self.of_query, :]
        return both[..., 0, :, :], both[..., 1, :, :]


def splits_groups(model: Model, tp: TensorParallel) -> bool:
    """Whether query heads of one key head are on several ranks that have unequal shares: where there are fewer key heads than ranks."""
    return tp.uneven is not None and model.kv_heads < tp.uneven.most


def attention_units(model: Model, tp: TensorParallel) -> int:
    """Return in how many pieces attention is shared out: key heads with their query heads or, where these are split, query heads."""
    return model.heads if splits_groups(model, tp) else model.kv_heads


def turns(places: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines (2, seq, 1, 1, width / 2) of rotary positions."""
    rates = ROTARY_BASE ** -(torch.arange(0, width, 2, device=places.device, dtype=torch.float32) / width)
    angles = places.float()[:, None] * rates
    return torch.stack((angles.cos(), angles.sin()))[:, :, None, None].to(dtype)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Return (seq, batch, heads, width) turned by its positions (Su 2021, arXiv 2104.09864)."""
    cos, sin = turn[0], turn[1]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mlp(nn.Module):
    """A gated or plain MLP, cut over tp along its width."""

    def __init__(self, key: str, setting: Setting, width: int) -> None:
        super().__init__()
        model = setting.job.model
        bias = model.biases or model.mlp_bias
        self.gates = 2 if model.gated_mlp else 1
        self.up = Columns(f"{key}.up", setting.tp, groups=self.gates, width=width, inputs=model.hidden, bias=bias)
        self.down = Rows(f"{key}.down", setting.tp, width=model.hidden, inputs=width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a whole x, cut along the sequence where sequences are."""
        return self.down(activated(self.up(x), self.gates))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP (or a mixture of experts), each behind a norm and beside a residual."""

    def __init__(self, index: int, setting: Setting) -> None:
        super().__init__()
        model, kind, key = setting.job.model, setting.job.model.kind(index), f"layer{index}"
        self.setting = setting
        self.norm1, self.norm2 = (_norm(f"{key}.norm{i}", setting) for i in (1, 2))
        sandwich = model.norms_per_layer == 4
        self.after1, self.after2 = (_norm(f"{key}.after{i}", setting) if sandwich else None for i in (1, 2))
        self.attention = Attention(f"{key}.attention", setting, kind.window)
        self.mlp: Mlp | MixtureOfExperts = _experts(key, setting) if kind.moe else Mlp(f"{key}.mlp", setting, model.ffn_hidden)

    def forward(self, x: Tensor, turn: Tensor | None, places: Tensor) -> Tensor:
        """Return the layer's output for (seq, batch, hidden)."""
        x = x + self._finished(self._attended(x, turn), self.after1)
        return x + self._finished(self._fed(x, places), self.after2)

    def _finished(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if norm is None else norm(x)
        return F.dropout(x, self.setting.dropout) if self.setting.dropout else x

    def _attended(self, x: Tensor, turn: Tensor | None) -> Tensor:
        tp = self.setting.tp
        if "layernorm" in self.setting.recompute.modules:
            return remade(lambda: tp.enter(self.norm1(x)), lambda y: self.attention(y, turn))
        return self.attention(tp.enter(self.norm1(x)), turn)  # type: ignore[no-any-return]

    def _fed(self, x: Tensor, places: Tensor) -> Tensor:
        modules, tp = self.setting.recompute.modules, self.setting.tp
        if isinstance(self.mlp, MixtureOfExperts):
            return self._mixed(x, places)
        if "mlp" in modules and "layernorm" in modules:
            return recomputed(lambda y: self.mlp(tp.enter(self.norm2(y))), x)
        if "mlp" in modules:
            return recomputed(lambda y: self.mlp(tp.enter(y)), self.norm2(x))
        if "layernorm" in modules:
            return remade(lambda: tp.enter(self.norm2(x)), self.mlp)
        return self.mlp(tp.enter(self.norm2(x)))  # type: ignore[no-any-return]

    def _mixed(self, x: Tensor, places: Tensor) -> Tensor:
        modules = self.setting.recompute.modules
        if "moe" in modules:
            return recomputed(self.mlp, self.norm2(x), places)
        if "layernorm" in modules:
            return remade(lambda: self.norm2(x), lambda y: self.mlp(y, places))
        return self.mlp(self.norm2(x), places)  # type: ignore[no-any-return]


def _norm(key: str, setting: Setting) -> Norm:
    model = setting.job.model
    return Norm(key, setting.tp, width=model.hidden, layer=model.norm == "layer")


def _experts(key: str, setting: Setting) -> MixtureOfExperts:
    model = setting.job.model
    moe = model.moe
    assert moe is not None  # noqa: S101
    wide = moe.shared_expert_ffn_hidden
    shared = Mlp(f"{key}.shared", setting, wide) if wide else None
    return MixtureOfExperts(f"{key}.moe", setting.tp, setting.mesh.ep, model, moe, setting.routing, shared, setting.recompute.modules)


class Stage(Parts):
    """A model chunk: some layers, the embedding if it is the first, the head if it is the last."""

    learned: Tensor

    def __init__(self, layers: range, setting: Setting, *, first: bool, last: bool) -> None:
        super().__init__()
        model, tp = setting.job.model, setting.tp
        self.setting, self.first, self.last = setting, first, last
        tied = model.tied_embeddings and not (first and last)
        table = vocabulary_part(model.vocab, model.hidden, tp, "embedding", tied=tied)
        self.embedding = Embedding(table, tp) if first else None
        learned = first and model.positions == "learned"
        if learned:
            self.hold("learned", tp.replicated("positions", (model.max_positions or setting.job.seq_len, model.hidden), deviation=0.02))
        self.embedding_norm = _norm("embedding_norm", setting) if first and model.embedding_norm else None
        self.layers = nn.ModuleList(Layer(i, setting) for i in layers)
        self.norm = _norm("norm", setting) if last else None
        head = table if model.tied_embeddings else vocabulary_part(model.vocab, model.hidden, tp, "head", tied=False)
        self.head = Head(head, tp, self.embedding if model.tied_embeddings else None) if last else None
        self._turn: Tensor | None = None
        self._places = torch.empty(0, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the last stage, activations of the others, for (batch, seq) tokens or activations."""
        if not len(self._places):
            self._locate(x.device, x.shape[0] if self.embedding is not None else x.shape[1])
        if self.embedding is not None:
            x = self._embedded(self.embedding, x)
        for i, layer in enumerate(self.layers):
            whole = i < self.setting.recompute.layers
            x = recomputed(layer, x, self._turn, self._places) if whole else layer(x, self._turn, self._places)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x

    def _embedded(self, embedding: Embedding, tokens: Tensor) -> Tensor:
        x = embedding(tokens)
        if "learned" in self.parts:
            x = x + self.learned[self._cut(self._positions(tokens.device))][:, None]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = x.to(self.setting.dtype)
        return F.dropout(x, self.setting.dropout) if self.setting.dropout else x

    def _positions(self, device: torch.device) -> Tensor:
        return context_parallel.positions(self.setting.job.seq_len, self.setting.mesh.cp, device)

    def _cut(self, places: Tensor) -> Tensor:
        """Return this rank's share of a context rank's positions."""
        tp = self.setting.tp
        return places[tp.share(len(places))] if tp.sequence else places

    def _locate(self, device: torch.device, batch: int) -> None:
        """Note the positions of a context rank's tokens, and number those of this rank's own (position x batch + sequence)."""
        model, held = self.setting.job.model, self._positions(device)
        if model.positions == "rotary":
            self._turn = turns(held, model.head_dim, self.setting.dtype)
        self._places = (self._cut(held)[:, None] + torch.zeros(batch, dtype=torch.long, device=device)).flatten()


def compute_type(precision: str) -> torch.dtype:
    """Return the type that activations are computed in."""
    return torch.float32 if precision == "fp32" else torch.bfloat16
