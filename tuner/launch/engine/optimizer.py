"""AdamW over weights that every replica holds whole (ZeRO 0) with its state shared out (ZeRO 1), in flat buckets as in Megatron-LM.

Rajbhandari 2020 (arXiv 1910.02054). Gradients are summed in fp32 over micro batches, then over replicas: all at the end of the step, or
(overlap) each bucket once its last micro batch's gradients are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tuner.launch.engine import collectives
from tuner.launch.engine.parts import Part, Parts, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.launch.engine.mesh import Group, Mesh

BUCKET_ELEMENTS = 40_000_000
RATE, DECAY, BETAS, EPSILON = 1e-3, 0.1, (0.9, 0.95), 1e-8


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer that every layout runs: one kernel over plain tensors."""
    return torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True)


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Parameters that lie one after the other and are reduced together.

    weights: of all of them; grads: their fp32 sums; shards: who shares their optimizer state out; twins: who holds the same share;
    partial: over whom gradients are summed first (tensor-parallel ranks, or the ends of a pipeline).
    """

    weights: Tensor
    grads: Tensor
    shards: Group
    twins: Group
    partial: Group
    master: nn.Parameter
    waiting: int = 0
    missing: int = 0
    work: dist.Work | None = None
    views: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def share(self, whole: Tensor) -> Tensor:
        """Return the slice of a whole buffer that this rank updates."""
        each = whole.numel() // self.shards.size
        return whole[self.shards.index * each : (self.shards.index + 1) * each]

    def launch(self) -> None:
        """Start the reduction over `shards` (over `twins` where nobody shares)."""
        if self.shards.size > 1:
            self.work = collectives.scatter_into(self.share(self.grads), self._source(), self.shards, wait=False)
        elif self.twins.size > 1:
            self.work = dist.all_reduce(self.grads, group=self.twins.handle, async_op=True)

    def _source(self) -> Tensor:
        # gloo writes the share while it still reads the whole
        return self.grads if self.grads.is_cuda else self.grads.clone()

    def reduced(self) -> None:
        """Bring the reduction to its end: this rank's share of `grads` is then whole."""
        for parameter, view in self.views:  # what no hook has collected: a split backward writes .grad itself
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.add_(parameter.grad)
                parameter.grad = None
        collectives.summed(self.grads, self.partial)
        if self.work is None:
            self.launch()
        if self.work is not None:
            self.work.wait()
        if self.shards.size > 1:
            collectives.summed(self.share(self.grads), self.twins)
        self.work = None

    def spread(self) -> None:
        """Bring the updated share to everyone, and clear the gradients."""
        mine = self.share(self.weights)
        if self.master.data_ptr() != mine.data_ptr():
            mine.copy_(self.master)
        if self.shards.size > 1:
            collectives.gather_into(self.weights, mine.clone(), self.shards)
        self.grads.zero_()


class ReplicatedWeights:
    """The weights of some model chunks, whole on every replica, and their optimizer."""

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, *, dtype: torch.dtype, microbatches: int, overlap: bool) -> None:
        self.mesh = mesh
        self.buckets = [self._bucket(kind, members, dtype) for kind, members in _grouped(chunks)]
        for bucket in self.buckets:
            for parameter, view in bucket.views:
                self._follow(bucket, parameter, view, overlap=overlap and bucket.partial.size == 1)
        self.hold(microbatches)
        self.optimizer = adamw([bucket.master for bucket in self.buckets])

    def hold(self, microbatches: int) -> None:
        """Take this many micro batches for a step, from the next one on."""
        for bucket in self.buckets:
            bucket.waiting = bucket.missing = len(bucket.views) * microbatches

    def _bucket(self, kind: _Kind, members: list[tuple[Parts, str, Part]], dtype: torch.dtype) -> Bucket:
        mesh = self.mesh
        shares = mesh.shards.size > 1
        of_experts = (mesh.expert_replicas, mesh.alone) if shares else (mesh.alone, mesh.expert_replicas)
        shards, twins = of_experts if kind.expert else (mesh.shards, mesh.twins)
        partial = mesh.ends if kind.tied else {"tp": mesh.tp, "copies": mesh.copies, "": mesh.alone}[kind.sums]
        elements = sum(owner.get_parameter(name).numel() for owner, name, _ in members)
        padded = -(-elements // shards.size) * shards.size
        weights = torch.zeros(padded, device=mesh.device, dtype=dtype)
        grads = torch.zeros(padded, device=mesh.device, dtype=torch.float32)
        bucket = Bucket(weights=weights, grads=grads, shards=shards, twins=twins, partial=partial, master=nn.Parameter(weights))
        _fill(bucket, members, mesh.device)
        share = bucket.share(weights)
        bucket.master = nn.Parameter(share if dtype == torch.float32 else share.float())
        bucket.master.grad = bucket.share(grads)
        return bucket

    def _follow(self, bucket: Bucket, parameter: nn.Parameter, view: Tensor, *, overlap: bool) -> None:
        """Sum a parameter's gradients into the bucket as they come, and start its reduction behind the last one."""
        if parameter.dtype == torch.float32:
            parameter.grad = view

        def collect(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.add_(parameter.grad)
                parameter.grad = None
            bucket.missing -= 1
            if overlap and bucket.missing == 0:
                bucket.launch()

        parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self) -> None:
        """Reduce, update, and clear the gradients."""
        for bucket in self.buckets:
            bucket.reduced()
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.spread()
            bucket.missing = bucket.waiting


@dataclass(frozen=True, slots=True)
class _Kind:
    expert: bool
    sums: str
    tied: bool


def _grouped(chunks: Sequence[nn.Module]) -> list[tuple[_Kind, list[tuple[Parts, str, Part]]]]:
    """Return parameters that are reduced alike, backward order, in buckets of bounded size."""
    kinds: dict[_Kind, list[list[tuple[Parts, str, Part]]]] = {}
    sizes: dict[_Kind, int] = {}
    found = [member for chunk in chunks for member in parts_of(chunk)]
    for owner, name, part in reversed(found):
        kind = _Kind(part.expert, part.sums, part.tied)
        elements = owner.get_parameter(name).numel()
        if kind not in kinds or sizes[kind] + elements > BUCKET_ELEMENTS:
            kinds.setdefault(kind, []).append([])
            sizes[kind] = 0
        kinds[kind][-1].append((owner, name, part))
        sizes[kind] += elements
    return [(kind, members) for kind, lists in kinds.items() for members in lists]


def _fill(bucket: Bucket, members: list[tuple[Parts, str, Part]], device: torch.device) -> None:
    """Put the parameters' first values into the bucket, and make views of it the modules' parameters."""
    start = 0
    for owner, name, part in members:
        old = owner.get_parameter(name)
        stop = start + old.numel()
        new = nn.Parameter(bucket.weights[start:stop].view(old.shape))
        with torch.no_grad():
            new.copy_(part.draw(device))
        owner.register_parameter(name, new)
        bucket.views.append((new, bucket.grads[start:stop].view(old.shape)))
        start = stop


def norm_of_parts(chunks: Sequence[nn.Module], mesh: Mesh, *, sharded: bool) -> float:
    """Return the norm of all parameters of the model, each element counted once whatever the layout; every rank calls this."""
    square = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for chunk in chunks:
        for owner, name, part in parts_of(chunk):
            held = owner.get_parameter(name).detach()
            alike = (
                mesh.alone if part.expert and sharded else mesh.expert_replicas if part.expert else mesh.twins if sharded else mesh.replicas
            )
            local = held.to_local() if hasattr(held, "to_local") else held
            copies = alike.size * part.copies * (2 if part.tied else 1)
            square += local.double().square().sum() / copies
    dist.all_reduce(square)
    return float(square.sqrt())
