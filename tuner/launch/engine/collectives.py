"""Collectives that autograd knows: each has its counterpart in the backward. A group of one does nothing.

Tensors are cut and gathered along dimension 0 and must be contiguous there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.launch.engine.mesh import Group

    Map = Callable[[Tensor, Group], Tensor]


def summed(x: Tensor, group: Group) -> Tensor:
    """Sum in place over a group, and return it."""
    if group.paired:
        return x.add_(_other_end(x, group))
    if group.size > 1:
        dist.all_reduce(x, group=group.handle)
    return x


def _other_end(x: Tensor, group: Group) -> Tensor:
    theirs, peer = torch.empty_like(x), group.ranks[1 - group.index]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer, group.handle), dist.P2POp(dist.irecv, theirs, peer, group.handle)]):
        work.wait()
    return theirs


def gather_into(out: Tensor, x: Tensor, group: Group, *, wait: bool = True) -> dist.Work | None:
    """Gather everyone's `x` into `out`, in the order of ranks."""
    work: dist.Work | None = dist.all_gather_single(out, x, group=group.handle, async_op=not wait)
    return work


def scatter_into(out: Tensor, x: Tensor, group: Group, *, wait: bool = True) -> dist.Work | None:
    """Sum everyone's `x` and leave this rank's share of it in `out`."""
    work: dist.Work | None = dist.reduce_scatter_single(out, x, group=group.handle, async_op=not wait)
    return work


def gathered(x: Tensor, group: Group) -> Tensor:
    """Return everyone's `x` along dimension 0."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    gather_into(out, x.contiguous(), group)
    return out


def scattered(x: Tensor, group: Group) -> Tensor:
    """Return this rank's share along dimension 0 of the sum over a group."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    scatter_into(out, x.contiguous(), group)
    return out


class _Pair(torch.autograd.Function):
    """A linear map over a group's ranks and its adjoint, each (tensor, group) -> tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map, group: Group) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    del group
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    return summed(x.clone(), group)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `sent[i]` rows to rank i, `taken[i]` rows from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], taken: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.taken, ctx.group = sent, taken, group
        return _exchanged(x, sent, taken, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.taken, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: list[int], taken: list[int], group: Group) -> Tensor:
    out = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), taken, sent, group=group.handle)
    return out


def copy(x: Tensor, group: Group) -> Tensor:
    """Return `x`; its gradient is summed over the group, whose ranks each use it for something else."""
    return x if group.size == 1 else _apply(_Pair, x, _same, _sum, group)


def total(x: Tensor, group: Group) -> Tensor:
    """Return the sum over a group; its gradient is everyone's own."""
    return x if group.size == 1 else _apply(_Pair, x, _sum, _same, group)


def gather(x: Tensor, group: Group) -> Tensor:
    """Return everyone's rows; the gradient is summed and cut."""
    return x if group.size == 1 else _apply(_Pair, x, gathered, scattered, group)


def scatter(x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the sum; the gradient is gathered."""
    return x if group.size == 1 else _apply(_Pair, x, scattered, gathered, group)


def exchange(x: Tensor, sent: list[int], taken: list[int], group: Group) -> Tensor:
    """Return the rows that the others sent here."""
    return x if group.size == 1 else _apply(_Exchange, x, sent, taken, group)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result
