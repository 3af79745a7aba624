"""Which tensor-parallel rank holds which units of a matrix, in replicas of different degree. Imports no torch.

A unit is what cannot be cut: a column of an MLP's width, a key head with its query heads, a row of the vocabulary. A product's ranks may
hold any units in any order, as the sum over ranks is that over units (Nonuniform-Tensor-Parallelism, arXiv 2504.06095). Symbols: K units,
n ranks of a replica, m the least degree of all replicas, its ranks called cores; ranks m .. n-1 of a larger replica are its spares.

The sync layout cuts 0 .. K-1 in m contiguous shares. In the comp layout of n ranks, core c holds a prefix of sync share c and the spares
hold the tails, dealt in turn over the cores, so that every spare exchanges the same amount with every core (K / (n m) units, to one). The
comp layout of m ranks is the sync layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def balanced(units: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of `ranks` shares of `units` units: floor or ceil of units / ranks, larger ones first."""
    return tuple(units // ranks + (i < units % ranks) for i in range(ranks))


@cache
def sync_layout(units: int, cores: int) -> tuple[range, ...]:
    """Return the contiguous shares between which gradients are summed over replicas."""
    stops = list(accumulate(balanced(units, cores)))
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


@cache
def comp_layout(units: int, ranks: int, cores: int) -> tuple[tuple[int, ...], ...]:
    """Return the units that each of `ranks` ranks computes with, where the least degree of all replicas is `cores`.

    Sizes are those of balanced(units, ranks). A spare's units are in ascending order, so that what it got of one core is one run of the
    tail of that core's share, and a core's share is its own units, then the runs of spare 0, 1, ...
    """
    sizes = balanced(units, ranks)
    kept = [share[:size] for share, size in zip(sync_layout(units, cores), sizes, strict=False)]
    tails = [share[size:] for share, size in zip(sync_layout(units, cores), sizes, strict=False)]
    dealt = [unit for turn in zip_longest(*tails) for unit in turn if unit is not None]
    stops = list(accumulate(sizes[cores:]))
    spares = [tuple(sorted(dealt[start:stop])) for start, stop in zip([0, *stops], stops, strict=False)]
    return (*map(tuple, kept), *spares)


@cache
def moves(units: int, ranks: int, cores: int) -> tuple[tuple[int, ...], ...]:
    """Return how many units each spare holds of each core's sync share, (spares, cores)."""
    shares = sync_layout(units, cores)
    found = []
    for held in comp_layout(units, ranks, cores)[cores:]:
        counts = [0] * cores
        for unit in held:
            counts[_share_of(unit, shares)] += 1
        found.append(tuple(counts))
    return tuple(found)


def _share_of(unit: int, shares: Sequence[range]) -> int:
    larger = len(shares[0])
    head = sum(len(share) for share in shares if len(share) == larger)
    if unit < head:
        return unit // larger
    return head // larger + (unit - head) // len(shares[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Elements of gradients that a rank sends and receives before they are summed over replicas; afterwards the same, the other way."""

    sent: int
    received: int


def volume(units: int, each: int, rank: int, ranks: int, cores: int) -> Volume:
    """Return what a rank moves of a matrix with `units` units of `each` elements."""
    table = moves(units, ranks, cores)
    if rank >= cores:
        return Volume(sent=each * sum(table[rank - cores]), received=0)
    return Volume(sent=0, received=each * sum(row[rank] for row in table))


def ideal_bytes(parameters: float, element_bytes: int, rank: int, ranks: int, cores: int) -> float:
    """Return the bytes that a rank moves in each direction where every matrix divides evenly.

    P parameters that are shared out, e bytes a gradient's element, n ranks, m cores: a spare sends P e / n, a core receives
    (n - m) / m x P e / n (arXiv 2504.06095, section 3; replicated parameters are not in it).
    """
    share = parameters * element_bytes / ranks
    return share if rank >= cores else share * (ranks - cores) / cores


def shared(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return `total` things in proportion to `weights`: largest remainders first, then the front ones; each of them gets at least one
    where there is one for each.
    """
    whole = sum(weights)
    found = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(found)]:
        found[i] += 1
    while total >= len(found) and 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)


def padded(length: int, ranks: int) -> int:
    """Return the least multiple of `ranks` that is not below `length`: a sequence that is cut over ranks is padded to it."""
    return -(-length // ranks) * ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The replicas of a job: the degree of each. Ranks are numbered replica by replica, and within one by their slot. most: the largest
    degree that the job began with.
    """

    degrees: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, degrees: Sequence[int]) -> Cast:
        """Return the replicas of a job that begins."""
        return cls(degrees=tuple(degrees), most=max(degrees))

    @property
    def cores(self) -> int:
        """The least degree."""
        return min(self.degrees)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(self.degrees)

    def members(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica."""
        first = sum(self.degrees[:replica])
        return tuple(range(first, first + self.degrees[replica]))

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's replica and its slot there."""
        replica = next(i for i in range(len(self.degrees)) if rank in self.members(i))
        return replica, rank - self.members(replica)[0]

    def held(self, rank: int, units: int) -> tuple[int, ...]:
        """Return which of so many units a rank holds."""
        replica, slot = self.place(rank)
        return comp_layout(units, self.degrees[replica], self.cores)[slot]

    def without(self, lost: Sequence[int]) -> tuple[Cast, dict[int, int]]:
        """Return the replicas that are left when some ranks are lost (one without any rank is gone), and each survivor's new rank."""
        left = [[rank for rank in self.members(i) if rank not in lost] for i in range(len(self.degrees))]
        numbers = {rank: number for number, rank in enumerate(rank for ranks in left for rank in ranks)}
        return Cast(degrees=tuple(len(ranks) for ranks in left if ranks), most=self.most), numbers


class Lost(Exception):
    """Units that no survivor holds."""


def sources(units: int, old: Cast, lost: Sequence[int]) -> list[list[int]]:
    """Return, for each survivor (new rank), the new rank that it takes each of its new units from: itself, else one of its replica, else
    the next replica's that has it. Raises Lost.
    """
    new, numbers = old.without(lost)
    holders: list[dict[int, int]] = [{} for _ in old.degrees]
    for rank, number in numbers.items():
        holders[old.place(rank)[0]] |= dict.fromkeys(old.held(rank, units), number)
    found = []
    for rank, number in numbers.items():
        replica, own = old.place(rank)[0], set(old.held(rank, units))
        order = holders[replica:] + holders[:replica]
        found.append([number if unit in own else _first(order, unit) for unit in new.held(number, units)])
    return found


def _first(holders: Sequence[dict[int, int]], unit: int) -> int:
    for held in holders:
        if unit in held:
            return held[unit]
    raise Lost(f"unit {unit} was on lost ranks alone")
