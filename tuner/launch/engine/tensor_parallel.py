"""Tensor parallelism, with or without sequence parallelism: linear layers, embedding, norms and loss of a rank's share.

Shoeybi 2019 (arXiv 1909.08053) section 3; Korthikanti 2022 (arXiv 2205.05198) section 4.2 for sequence parallelism. Parameters are
plain tensors of a rank's share and the collectives are written out: a DTensor cannot say that ranks hold copies of a key head, and its
dispatch costs more than the tiny model's own products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tuner.launch.engine import collectives
from tuner.launch.engine.parts import Part, Parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.launch.engine.mesh import Group

EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Shares that need not be equal or contiguous. units: which of so many units this rank holds, in its order; most: the largest degree
    of any replica, which tells for all of them whether there are units enough.
    """

    units: Callable[[int], tuple[int, ...]]
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """A rank's tensor-parallel group, and whether sequences are cut over it between the blocks. uneven: None where all shares are equal."""

    group: Group
    sequence: bool
    uneven: Uneven | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a block's column-parallel products."""
        return collectives.gather(x, self.group) if self.sequence else collectives.copy(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the output of a block from its row-parallel products."""
        return collectives.scatter(x, self.group) if self.sequence else collectives.total(x, self.group)

    def share(self, size: int) -> slice:
        """Return this rank's share of `size` things."""
        each = size // self.group.size
        return slice(self.group.index * each, (self.group.index + 1) * each)

    def cut(self, size: int, units: int) -> slice | Tensor:
        """Return this rank's share of `size` things that come in `units` pieces of one size: a slice, or indices in this rank's order."""
        if self.uneven is None:
            return self.share(size)
        each = size // units
        return (torch.tensor(self.uneven.units(units), dtype=torch.long)[:, None] * each + torch.arange(each)).flatten()

    def rows(self, tokens: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """Return which of its rows of a table of `vocab` rows a rank uses for each token (0 where it has none), and where it has one."""
        if self.uneven is None:
            each = -(-vocab // self.group.size)
            local = tokens - self.group.index * each
            inside = (local >= 0) & (local < each)
        else:
            local = _rows_of(self.uneven.units(vocab), vocab, tokens.device)[tokens]
            inside = local >= 0
        return local.masked_fill(~inside, 0), inside

    def replicated(self, key: str, shape: tuple[int, ...], *, deviation: float = 0.0, mean: float = 0.0, always: bool = False) -> Part:
        """Return the part of a parameter that all ranks hold; its gradient is partial where sequences are cut (or `always`)."""
        partial = (self.group.size > 1 or self.uneven is not None) and (self.sequence or always)
        return Part(key=key, shape=shape, deviation=deviation, mean=mean, sums="tp" if partial else "", copies=self.group.size)


@cache
def _rows_of(units: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """Return where each token's row stands among `units`, -1 for those that are not there."""
    table = torch.full((vocab,), -1, dtype=torch.long)
    table[torch.tensor(units, dtype=torch.long)] = torch.arange(len(units))
    return table.to(device)


def taker(dim: int, index: slice | Tensor) -> Callable[[Tensor], Tensor]:
    """Return what takes a slice, or some indices, along one dimension."""

    def take(full: Tensor) -> Tensor:
        return full[(slice(None),) * dim + (index,)]

    return take


class Columns(Parts):
    """y = x W^T + b with the rows of W (groups, width, hidden) cut along `width`: `groups` stacked matrices of one width.

    units: pieces of the width that are not cut (0: single columns).
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, key: str, tp: TensorParallel, *, groups: int, width: int, inputs: int, bias: bool, units: int = 0) -> None:
        super().__init__()
        units = units or width
        cut, self.inputs = taker(1, tp.cut(width, units)), inputs
        shape = (groups, width, inputs)
        self.hold("weight", Part(key=f"{key}.weight", shape=shape, deviation=inputs**-0.5, cut=cut, axis=1, units=units))
        if bias:
            self.hold("bias", Part(key=f"{key}.bias", shape=shape[:2], deviation=0.0, cut=cut, axis=1, units=units))
        self.biased = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return y of a whole x, (..., groups x width / tp)."""
        bias = self.bias.flatten() if self.biased else None
        return F.linear(x, self.weight.view(-1, self.inputs), bias)


class Rows(Parts):
    """y = x W^T with the columns of W cut, partial: `TensorParallel.leave` sums it, then `bias` is added."""

    weight: Tensor
    bias: Tensor

    def __init__(self, key: str, tp: TensorParallel, *, width: int, inputs: int, bias: bool, units: int = 0) -> None:
        super().__init__()
        self.tp, self.biased, units = tp, bias, units or inputs
        cut = taker(1, tp.cut(inputs, units))
        self.hold("weight", Part(key=f"{key}.weight", shape=(width, inputs), deviation=inputs**-0.5, cut=cut, axis=1, units=units))
        if bias:
            self.hold("bias", tp.replicated(f"{key}.bias", (width,)))

    def forward(self, x: Tensor) -> Tensor:
        """Return y, cut along the sequence where sequences are."""
        y = self.tp.leave(F.linear(x, self.weight))
        return y + self.bias if self.biased else y


class Norm(Parts):
    """Root-mean-square or layer norm over the last dimension."""

    weight: Tensor
    bias: Tensor

    def __init__(self, key: str, tp: TensorParallel, *, width: int, layer: bool, always: bool = False) -> None:
        super().__init__()
        self.width, self.layer = width, layer
        self.hold("weight", tp.replicated(f"{key}.weight", (width,), mean=1.0, always=always))
        if layer:
            self.hold("bias", tp.replicated(f"{key}.bias", (width,), always=always))

    def forward(self, x: Tensor) -> Tensor:
        """Return x, normalised."""
        if self.layer:
            return F.layer_norm(x, (self.width,), self.weight, self.bias, EPSILON)
        return F.rms_norm(x, (self.width,), self.weight, EPSILON)


def vocabulary_part(vocab: int, hidden: int, tp: TensorParallel, key: str, *, tied: bool) -> Part:
    """Return the part of a (vocab, hidden) table: rows cut over the group, padded to equal shares (not where shares may be unequal)."""
    if tp.uneven is not None:
        rows_held = taker(0, tp.cut(vocab, vocab))
        return Part(key=key, shape=(vocab, hidden), deviation=hidden**-0.5, cut=rows_held, axis=0, units=vocab, tied=tied)
    padded = -(-vocab // tp.group.size) * tp.group.size
    rows = tp.share(padded)

    def cut(full: Tensor) -> Tensor:
        return F.pad(full, (0, 0, 0, padded - vocab))[rows]

    return Part(key=key, shape=(vocab, hidden), deviation=hidden**-0.5, cut=cut, tied=tied)


class Embedding(Parts):
    """Token embedding with the vocabulary cut over the group: (batch, seq) tokens to (seq, batch, hidden)."""

    weight: Tensor

    def __init__(self, part: Part, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.vocab = tp, part.shape[0]
        self.hold("weight", part)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens, cut along the sequence where sequences are."""
        tokens = tokens.t()
        if self.tp.group.size == 1:
            return F.embedding(tokens, self.weight)
        local, inside = self.tp.rows(tokens, self.vocab)
        found = F.embedding(local, self.weight)
        return self.tp.leave(found.masked_fill(~inside[..., None], 0.0))


class Head(Parts):
    """Logits of this rank's share of the vocabulary: (seq, batch, hidden) to (seq, batch, vocab / tp)."""

    weight: Tensor

    def __init__(self, part: Part, tp: TensorParallel, shared: Embedding | None) -> None:
        super().__init__()
        self.tp = tp
        self.table = shared
        if shared is None:
            self.hold("weight", part)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of whole sequences."""
        weight = self.weight if self.table is None else self.table.weight
        return F.linear(self.tp.enter(x), weight)


class _VocabularyLoss(torch.autograd.Function):
    """Sum of -log softmax at the targets over logits whose last dimension is cut over a group. Keeps the softmax for the backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: TensorParallel, vocab: int) -> Tensor:
        scores, group = wide(logits), tp.group
        start = group.index * scores.shape[-1]
        if tp.uneven is None and start + scores.shape[-1] > vocab:
            scores = scores.index_fill(-1, torch.arange(max(vocab - start, 0), scores.shape[-1], device=scores.device), -torch.inf)
        top = scores.amax(-1)
        torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=group.handle)
        probability = (scores - top[..., None]).exp_()
        local, inside = tp.rows(targets, vocab)
        at_target = scores.gather(-1, local[..., None])[..., 0].sub(top).masked_fill(~inside, 0.0)
        sums = collectives.summed(torch.stack((probability.sum(-1), at_target)), group)
        probability.div_(sums[0][..., None])
        ctx.save_for_backward(probability, local, inside)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability, local, inside = ctx.saved_tensors
        probability.scatter_add_(-1, local[..., None], -inside.to(probability.dtype)[..., None])
        return (probability * grad).to(ctx.dtype), None, None, None


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def summed_loss(logits: Tensor, targets: Tensor, tp: TensorParallel, vocab: int) -> Tensor:
    """Return the sum of the cross-entropies of (seq, batch, vocab / tp) logits against (batch, seq) targets, in nats, fp32 at least."""
    targets = targets.t()
    if tp.group.size == 1:
        return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), reduction="sum")
    result: Tensor = _VocabularyLoss.apply(logits, targets, tp, vocab)  # type: ignore[no-untyped-call]
    return result
