"""Gradients of a bucket from comp layout to sync layout, summed over replicas, and back (arXiv 2504.06095, section 3).

Before: spares send the units that the cores' sync shares lack, and partial gradients of replicated parameters are summed in the replica.
Then rank r of every replica sums its sync share. Behind it the cores send the spares their units back, and one of them what is replicated.
All that moves goes by one all-to-all with unequal splits each way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tuner.launch.nonuniform.layout import moves, sync_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tuner.launch.engine.parts import Part, Parts
    from tuner.launch.nonuniform.groups import Groups


def by_unit(x: Tensor, part: Part) -> Tensor:
    """Return a view of what a rank holds of a parameter with its units first: (units held, elements along the axis in one, ...)."""
    if part.axis is None:
        return x[None]
    each = part.shape[part.axis] // part.units
    cut = x.reshape(*x.shape[: part.axis], x.shape[part.axis] // each, each, *x.shape[part.axis + 1 :])
    return cut.movedim((part.axis, part.axis + 1), (0, 1))


@dataclass(slots=True, kw_only=True)
class Member:
    """A parameter of a bucket. sums: its gradients' sums with units first, those of this rank's own units in front, and on a core those
    of its sync share behind them; pieces: units that each spare holds of each core's share (none where nothing is shared out).
    """

    owner: Parts
    name: str
    part: Part
    parameter: nn.Parameter
    sums: Tensor
    pieces: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> int:
        """How many units this rank computes with."""
        return by_unit(self.parameter, self.part).shape[0]

    def collect(self) -> None:
        """Add what the backward of a micro batch has left to the sums."""
        if self.parameter.grad is not None:
            self.sums[: self.kept].add_(by_unit(self.parameter.grad, self.part))
            self.parameter.grad = None

    def gradient(self) -> Tensor:
        """Return the summed gradient of what this rank holds, in the parameter's shape."""
        own = self.sums[: self.kept]
        if self.part.axis is None:
            return own[0]
        return own.movedim((0, 1), (self.part.axis, self.part.axis + 1)).flatten(self.part.axis, self.part.axis + 1)


class Bucket:
    """Parameters whose gradients move together. moved: bytes that this rank sent and received before the sum, and behind it."""

    def __init__(self, members: Sequence[tuple[Parts, str, Part]], groups: Groups, dtype: torch.dtype) -> None:
        self.groups = groups
        shared = [member for member in members if member[2].axis is not None]
        whole = [member for member in members if member[2].axis is None and not member[2].sums]
        partial = [member for member in members if member[2].axis is None and member[2].sums]
        shapes = [self._shape(member) for member in (*shared, *whole, *partial)]
        sizes = [shape.numel() for shape in shapes]
        self.sums = torch.zeros(sum(sizes), dtype=dtype, device=groups.device)
        views = [piece.view(shape) for piece, shape in zip(torch.split(self.sums, sizes), shapes, strict=True)]
        self.members = [self._member(member, view) for member, view in zip((*shared, *whole, *partial), views, strict=True)]
        self.replicated = self.sums[sum(sizes[: len(shared)]) :]
        self.partial = self.sums[sum(sizes[: len(shared) + len(whole)]) :]
        self.shares, self.missing = bool(shared), 0
        self.moved = {"before": [0, 0], "after": [0, 0]}
        self.works: list[dist.Work] = []
        self.side = torch.empty(0)

    def _shape(self, member: tuple[Parts, str, Part]) -> torch.Size:
        owner, name, part = member
        shape = by_unit(owner.get_parameter(name), part).shape
        if part.axis is None or self.groups.spare:
            return shape
        return torch.Size((len(sync_layout(part.units, self.groups.cast.cores)[self.groups.slot]), *shape[1:]))

    def _member(self, member: tuple[Parts, str, Part], view: Tensor) -> Member:
        owner, name, part = member
        pieces = () if part.axis is None else moves(part.units, self.groups.degree, self.groups.cast.cores)
        return Member(owner=owner, name=name, part=part, parameter=owner.get_parameter(name), sums=view, pieces=pieces)

    def begin(self) -> None:
        """Start what goes before the sum: spares send, cores receive."""
        groups, self.works = self.groups, []
        if groups.degree > groups.cast.cores and self.shares:
            if groups.spare:
                self._exchange(self._packed(), self._for_cores(), [0] * groups.degree, "before")
            else:
                self._exchange(self.sums[:0], [0] * groups.degree, self._from_spares(), "before")
        if groups.before.size > 1 and len(self.partial):
            self._note(dist.all_reduce(self.partial, group=groups.before.handle, async_op=True))

    def arrive(self) -> None:
        """Put the units that came behind a core's own, where its sync share has them."""
        self.works = []
        if self.groups.degree > self.groups.cast.cores and self.shares and not self.groups.spare:
            self._place()

    def reduce(self) -> None:
        """Start the sum over replicas."""
        groups, self.works = self.groups, []
        if groups.peers.size > 1:
            self._note(dist.all_reduce(self.sums, group=groups.peers.handle, async_op=True))

    def finish(self) -> None:
        """Start what goes behind the sum: cores send, spares receive."""
        groups, self.works = self.groups, []
        if groups.degree == groups.cast.cores:
            return
        if groups.spare:
            self._exchange(self.sums[:0], [0] * groups.degree, self._for_cores(replicated=True), "after")
        else:
            self._exchange(self._returned(), self._from_spares(replicated=True), [0] * groups.degree, "after")

    def end(self) -> None:
        """Put what a spare got back in its place."""
        self.works = []
        if self.groups.spare:
            for target, source in zip(self._own_pieces(), torch.split(self.side, [x.numel() for x in self._own_pieces()]), strict=True):
                target.copy_(source.view(target.shape))

    def wait(self) -> None:
        """Wait for what was started last."""
        for work in self.works:
            work.wait()

    @property
    def there(self) -> bool:
        """Whether what was started last has come to its end."""
        return all(work.is_completed() for work in self.works)

    def _note(self, work: dist.Work | None) -> None:
        if work is not None:
            self.works.append(work)

    def _exchange(self, sent: Tensor, to: list[int], of: list[int], direction: str) -> None:
        group = self.groups.before if direction == "before" else self.groups.after
        self.side = self.sums.new_empty(sum(of))
        self._note(dist.all_to_all_single(self.side, sent, of, to, group=group.handle, async_op=True))
        self.moved[direction] = [sum(to) * self.sums.element_size(), sum(of) * self.sums.element_size()]

    def _for_cores(self, *, replicated: bool = False) -> list[int]:
        """Return the elements between this spare and each rank of its replica."""
        counts = [sum(x.numel() for x in self._pieces_of(core)) for core in range(self.groups.cast.cores)]
        if replicated:
            counts[self._lender(self.groups.slot)] += len(self.replicated)
        return counts + [0] * (self.groups.degree - len(counts))

    def _from_spares(self, *, replicated: bool = False) -> list[int]:
        """Return the elements between this core and each rank of its replica."""
        cores, spares = self.groups.cast.cores, range(self.groups.degree - self.groups.cast.cores)
        counts = [sum(x.numel() for x in self._tails_of(spare)) for spare in spares]
        if replicated:
            counts = [n + len(self.replicated) * (self._lender(cores + j) == self.groups.slot) for j, n in enumerate(counts)]
        return [0] * cores + counts

    def _lender(self, spare: int) -> int:
        """Return the core that sends a spare the replicated gradients."""
        return spare % self.groups.cast.cores

    def _pieces_of(self, core: int) -> Iterator[Tensor]:
        """Yield this spare's runs of a core's share, one of each parameter."""
        for member in self.members:
            if member.pieces:
                counts = member.pieces[self.groups.slot - self.groups.cast.cores]
                start = sum(counts[:core])
                yield member.sums[start : start + counts[core]]

    def _tails_of(self, spare: int) -> Iterator[Tensor]:
        """Yield the runs of this core's share that a spare holds, one of each parameter."""
        for member in self.members:
            if member.pieces:
                stops = [*accumulate((row[self.groups.slot] for row in member.pieces), initial=member.kept)]
                yield member.sums[stops[spare] : stops[spare + 1]]

    def _packed(self) -> Tensor:
        return torch.cat([x.flatten() for core in range(self.groups.cast.cores) for x in self._pieces_of(core)])

    def _place(self) -> None:
        spares = range(self.groups.degree - self.groups.cast.cores)
        targets = [x for spare in spares for x in self._tails_of(spare)]
        for target, source in zip(targets, torch.split(self.side, [x.numel() for x in targets]), strict=True):
            target.copy_(source.view(target.shape))

    def _returned(self) -> Tensor:
        found = []
        for spare in range(self.groups.degree - self.groups.cast.cores):
            found += [x.flatten() for x in self._tails_of(spare)]
            if self._lender(self.groups.cast.cores + spare) == self.groups.slot:
                found.append(self.replicated)
        return torch.cat([self.sums[:0], *found])

    def _own_pieces(self) -> list[Tensor]:
        """Return where this spare puts what each core sends back, in that order."""
        found = []
        for core in range(self.groups.cast.cores):
            found += list(self._pieces_of(core))
            if core == self._lender(self.groups.slot):
                found.append(self.replicated)
        return found


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far the buckets of a step have come: those before `begun` have started what goes before the sum, and so on."""

    buckets: list[Bucket]
    begun: int = 0
    reducing: int = 0
    finishing: int = 0
    ended: int = 0
    ready: set[int] = field(default_factory=set)

    def complete(self, index: int) -> None:
        """Note that a bucket's gradients are all there, and start all that can start, in the order of buckets on every rank."""
        self.ready.add(index)
        while self.begun in self.ready:
            self.buckets[self.begun].begin()
            self.begun += 1
        self.advance()

    def advance(self) -> None:
        """Start what follows on what has come to its end; waits for nothing."""
        while self.reducing < self.begun and self.buckets[self.reducing].there:
            self._reduce()
        while self.finishing < self.reducing and self.buckets[self.finishing].there:
            self._finish()

    def _reduce(self) -> None:
        self.buckets[self.reducing].arrive()
        self.buckets[self.reducing].reduce()
        self.reducing += 1

    def _finish(self) -> None:
        self.buckets[self.finishing].finish()
        self.finishing += 1
