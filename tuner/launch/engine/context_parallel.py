"""Attention whose sequences are cut over ranks, and the same on a whole sequence.

A sequence is cut in 2 cp chunks, of which rank i holds i and 2 cp - 1 - i, so that causal attention costs all ranks the same (Megatron-LM,
Brandon 2023, arXiv 2311.09431). Kinds: keys and values pass round a ring and partial results merge by their log-sum-exp (Liu 2023, arXiv
2310.01889); keys and values are gathered (Llama 3, arXiv 2407.21783, section 3.3.2); heads are exchanged for sequence (Ulysses,
arXiv 2309.14509). Queries, keys and values are (batch, heads, seq, head_dim); key heads may be fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tuner.launch.engine import collectives

if TYPE_CHECKING:
    from tuner.launch.engine.mesh import Group

_aten = torch.ops.aten


def positions(seq_len: int, group: Group, device: torch.device) -> Tensor:
    """Return the positions of the tokens that this rank holds, in the order it holds them."""
    if group.size == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).view(2 * group.size, -1)
    return torch.cat((chunks[group.index], chunks[2 * group.size - 1 - group.index]))


def _sequence_order(seq_len: int, ranks: int, device: torch.device) -> Tensor:
    """Return where each position stands once the ranks' tokens are gathered in the order of ranks."""
    chunks = torch.arange(seq_len, device=device).view(2 * ranks, -1)
    held = torch.cat([torch.cat((chunks[i], chunks[2 * ranks - 1 - i])) for i in range(ranks)])
    return torch.argsort(held)


def causal(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Return fused causal attention of a whole sequence."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dropout: float = 0.0) -> Tensor:
    """Return fused attention where `allowed` (queries, keys) is true."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1])


def unfused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dropout: float = 0.0) -> Tensor:
    """Return attention by products and a softmax that keep the scores."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, dropout) if dropout else weights, v)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Return causal attention of this rank's two chunks of queries to all keys and values, gathered."""
    size, half = 2 * group.size, q.shape[2] // 2
    order = _sequence_order(q.shape[2] * group.size, group.size, q.device)
    k, v = (collectives.gather(x.permute(2, 0, 1, 3).contiguous(), group)[order].permute(1, 2, 0, 3) for x in (k, v))
    parts = []
    for chunk, queries in zip((group.index, size - 1 - group.index), q.chunk(2, 2), strict=True):
        seen = (chunk + 1) * half
        row, column = torch.arange(half, device=q.device)[:, None], torch.arange(seen, device=q.device)
        parts.append(masked(queries, k[:, :, :seen], v[:, :, :seen], column <= row + chunk * half))
    return torch.cat(parts, 2)


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Return causal attention of whole sequences over a share of the heads, exchanged before and after."""
    order = _sequence_order(q.shape[2] * group.size, group.size, q.device)
    whole = [_heads_for_sequence(x, group)[:, :, order] for x in (q, k, v)]
    out = causal(whole[0], whole[1], whole[2])
    return _sequence_for_heads(out[:, :, torch.argsort(order)], group)


def _heads_for_sequence(x: Tensor, group: Group) -> Tensor:
    """(b, n, s / cp, d) to (b, n / cp, s, d)."""
    b, n, s, d = x.shape
    cut = x.view(b, group.size, n // group.size, s, d).permute(1, 3, 0, 2, 4).reshape(group.size * s, -1)
    got = collectives.exchange(cut, [s] * group.size, [s] * group.size, group)
    return got.view(group.size * s, b, n // group.size, d).permute(1, 2, 0, 3)


def _sequence_for_heads(x: Tensor, group: Group) -> Tensor:
    """(b, n / cp, s, d) to (b, n, s / cp, d)."""
    b, n, s, d = x.shape
    each = s // group.size
    got = collectives.exchange(x.permute(2, 0, 1, 3).reshape(s, -1), [each] * group.size, [each] * group.size, group)
    return got.view(group.size, each, b, n, d).permute(2, 0, 3, 1, 4).reshape(b, group.size * n, each, d)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Return causal attention with keys and values passed round a ring."""
    result: Tensor = _Ring.apply(q, k, v, group)  # type: ignore[no-untyped-call]
    return result


class _Pass:
    """Tensors on their way to the next rank of the ring, and those on their way here."""

    def __init__(self, tensors: list[Tensor], group: Group) -> None:
        after, before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
        self.sent = [x.contiguous() for x in tensors]
        self.taken = [torch.empty_like(x) for x in self.sent]
        sends = [dist.P2POp(dist.isend, x, after, group.handle) for x in self.sent]
        takes = [dist.P2POp(dist.irecv, x, before, group.handle) for x in self.taken]
        self.works = dist.batch_isend_irecv(sends + takes)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.taken


def _attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp (b, n, s)."""
    if q.is_cuda:
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    return found[0], found[1]


def _attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool) -> list[Tensor]:
    """Return the gradients of q, k, v; out and lse are those over all keys, of which k is a part."""
    if not q.is_cuda:
        return list(_aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, is_causal))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    args = (grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, offset)
    return list(_aten._scaled_dot_product_flash_attention_backward(*args))


def _halves(q: Tensor, k: Tensor, source: int, index: int) -> tuple[slice, slice]:
    """Return which queries attend to which keys of the rank `source`: all to all of its own, all to its first chunk if it is before
    this rank, the second chunk to all if it is behind.
    """
    if source == index:
        return slice(None), slice(None)
    if source < index:
        return slice(None), slice(k.shape[2] // 2)
    return slice(q.shape[2] // 2, None), slice(None)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold attention to further keys into (out, lse), in place and in fp32."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp()[..., None]).add_(part * (part_lse - both).exp()[..., None])
    lse.copy_(both)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
        keys, values = k, v
        out = lse = torch.empty(0)
        for step in range(group.size):
            under_way = _Pass([keys, values], group) if step < group.size - 1 else None
            source = (group.index - step) % group.size
            rows, columns = _halves(q, k, source, group.index)
            part, part_lse = _attend(q[:, :, rows], keys[:, :, columns], values[:, :, columns], is_causal=step == 0)
            if step == 0:
                out, lse = part.float().clone(), part_lse.float().clone()
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            if under_way:
                keys, values = under_way.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        dq = torch.zeros_like(q, dtype=torch.float32)
        held = [k, v, torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)]
        for step in range(group.size):
            source = (group.index - step) % group.size
            rows, columns = _halves(q, k, source, group.index)
            of_queries = [x[:, :, rows].contiguous() for x in (grad, q)]
            of_keys = [x[:, :, columns].contiguous() for x in held[:2]]
            kept = [out[:, :, rows].contiguous(), lse[:, :, rows].contiguous()]
            found = _attend_backward(*of_queries, *of_keys, *kept, is_causal=step == 0)
            dq[:, :, rows] += found[0]
            held[2][:, :, columns] += found[1]
            held[3][:, :, columns] += found[2]
            held = _Pass(held, group).wait()  # after the last step the gradients are where their keys are
        return dq.to(q.dtype), held[2].to(k.dtype), held[3].to(v.dtype), None
