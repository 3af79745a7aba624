"""A space cut into open grids of bounded size, without the values that no legal plan has.

Each rule is a mask over the few axes that it depends on, so a part of the space is a position list for each axis and a slice of
each mask. A position that some mask forbids whatever the other axes say is dropped (the plans that go with it are thereby judged);
what is left is cut along its outer axes until a block is small enough and mostly legal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.arrays import Bools, Ints
    from tuner.plan import Plan
    from tuner.search.space import Space

MAX_ROWS = 524_288  # columns of a block stay near the cores: more rows a call cost more each
MIN_ROWS = 131_072  # below this a block costs more in calls than its illegal rows do
DENSE = 0.5  # cut a block further while fewer of its plans are legal
_LARGEST_MASK = 4_000_000


@dataclass(frozen=True, slots=True)
class Block:
    """An open grid: its plan, the mask of the plans to consider, their positions on the space's axes, and how many plans of the
    space this block decides (those dropped on the way to it are illegal).
    """

    plan: Plan | None
    allowed: Bools
    positions: tuple[Ints, ...]
    decides: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Positions on each axis."""
        return tuple(len(p) for p in self.positions)

    def indices(self, space: Space, rows: Ints) -> Ints:
        """Return the indices in the space's product of these flat rows of the block."""
        where = np.unravel_index(rows, self.shape)
        return np.ravel_multi_index([p[w] for p, w in zip(self.positions, where, strict=True)], space.shape)


@dataclass(slots=True)
class _Part:
    """A part of a space on the way to a block."""

    positions: list[Ints]
    masks: list[Bools]
    decides: int

    @property
    def rows(self) -> int:
        return prod(len(p) for p in self.positions)


def blocks(space: Space, *, max_rows: int = MAX_ROWS, min_rows: int = MIN_ROWS) -> Iterator[Block]:
    """Yield blocks that together decide each plan of the space once, in a fixed order. Blocks without a legal plan have plan None."""
    stack = [_Part(*_judge(space), space.size)]
    while stack:
        part = _shrink(stack.pop())
        if part.rows == 0:
            yield Block(None, False, tuple(part.positions), part.decides)
            continue
        axis = _axis_to_cut(part)
        if axis is not None and part.rows > min_rows and (part.rows > max_rows or _density(part) < DENSE):
            stack.extend(reversed(_cut(part, axis)))
            continue
        shape = tuple(len(p) for p in part.positions)
        yield Block(space.grid(part.positions), _conjunction(part.masks, shape), tuple(part.positions), part.decides)


def values_in_use(space: Space) -> list[list[int]]:
    """Return for each axis the positions that some legal plan of the space has."""
    used = [np.zeros(n, dtype=bool) for n in space.shape]
    for block in blocks(space, max_rows=1_000_000, min_rows=65_536):
        if block.plan is None or all(u[p].all() for u, p in zip(used, block.positions, strict=True)):
            continue
        allowed = np.broadcast_to(block.allowed, block.shape)
        for i, positions in enumerate(block.positions):
            others = tuple(j for j in range(len(used)) if j != i)
            used[i][positions] |= allowed.any(axis=others)
        if all(u.all() for u in used):
            break
    return [np.flatnonzero(u).tolist() for u in used]


def conditional_choices(space: Space, choose: Callable[[str, list[str]], str]) -> int | None:
    """Return the index of the plan that `choose(knob, words)` leads to, knob by knob from the outer axes in, each time offered the
    words that legal plans with the choices so far have; None where the choices lead to no legal plan.
    """
    part = _Part(*_judge(space), space.size)
    for i, axis in enumerate(space.axes):
        for k, knob in enumerate(axis.knobs):
            part = _shrink(part)
            alive = part.positions[i][_used_on(part, i)] if part.rows else np.empty(0, dtype=np.int64)
            words = list(dict.fromkeys(axis.words[position][k] for position in alive.tolist()))
            if not words:
                return None
            word = words[0] if len(words) == 1 else choose(knob, words)
            chosen = np.array([n for n, position in enumerate(part.positions[i].tolist()) if axis.words[position][k] == word])
            part = _select(part, i, chosen)
    part = _shrink(part)
    return int(np.ravel_multi_index([int(p[0]) for p in part.positions], space.shape)) if part.rows else None


def _used_on(part: _Part, axis: int) -> Ints:
    """Return which positions of an axis legal plans of the part have (at least all of these, where the part is large)."""
    if part.rows > _LARGEST_MASK:
        return np.arange(len(part.positions[axis]))
    allowed = _conjunction(part.masks, (1,) * len(part.positions))
    alive = allowed.any(axis=tuple(i for i in range(allowed.ndim) if i != axis))
    return np.flatnonzero(np.broadcast_to(alive, len(part.positions[axis])))


def _select(part: _Part, axis: int, which: Ints) -> _Part:
    positions = list(part.positions)
    positions[axis] = positions[axis][which]
    return _Part(positions, [mask if mask.shape[axis] == 1 else mask.take(which, axis=axis) for mask in part.masks], part.decides)


def _judge(space: Space) -> tuple[list[Ints], list[Bools]]:
    """Return all positions of each axis, and the masks of the whole space: merged where one spans the axes of another."""
    masks = [np.asarray(mask) for mask in space.masks(space.grid())]
    naxes = len(space.axes)
    merged: dict[tuple[int, ...], Bools] = {}
    for mask in masks:
        full = mask.reshape((1,) * (naxes - mask.ndim) + mask.shape)
        merged[full.shape] = merged[full.shape] & full if full.shape in merged else full
    return [np.arange(n) for n in space.shape], list(merged.values())


def _shrink(part: _Part) -> _Part:
    """Drop the positions that some mask forbids whatever the other axes say, until none is left to drop."""
    positions, masks = list(part.positions), list(part.masks)
    changed = True
    while changed:
        changed = False
        for i in range(len(positions)):
            alive = _alive(masks, i, len(positions[i]))
            if alive.all():
                continue
            changed = True
            keep = np.flatnonzero(alive)
            positions[i] = positions[i][keep]
            masks = [mask if mask.shape[i] == 1 else mask.take(keep, axis=i) for mask in masks]
            if not len(keep):
                return _Part(positions, [], part.decides)
    return _Part(positions, [mask for mask in masks if not mask.all()], part.decides)


def _alive(masks: list[Bools], axis: int, length: int) -> Bools:
    alive = np.ones(length, dtype=bool)
    for mask in masks:
        if mask.shape[axis] > 1 or mask.size == 1 or length == 1:
            alive &= mask.any(axis=tuple(i for i in range(mask.ndim) if i != axis))
    return alive


def _density(part: _Part) -> float:
    """Return the share of legal plans, or at most that where counting them would cost much."""
    if part.rows > _LARGEST_MASK:
        return min((np.count_nonzero(mask) / mask.size for mask in part.masks), default=1.0)
    allowed = _conjunction(part.masks, (1,) * len(part.positions))
    return float(np.count_nonzero(allowed) / allowed.size)


def _axis_to_cut(part: _Part) -> int | None:
    """Return the outermost axis of several positions that the most forbidding mask spans; None when each axis has one position."""
    spans = [i for i, p in enumerate(part.positions) if len(p) > 1]
    for mask in sorted(part.masks, key=lambda m: np.count_nonzero(m) / m.size):
        for i in spans:
            if mask.shape[i] > 1:
                return i
    return spans[0] if spans else None


def _cut(part: _Part, axis: int) -> list[_Part]:
    """Return the halves of the part along an axis."""
    n = len(part.positions[axis])
    cuts = (slice(0, n // 2), slice(n // 2, n))
    shares = _shares(part.decides, [n // 2, n - n // 2])
    parts = []
    for cut, decides in zip(cuts, shares, strict=True):
        positions = list(part.positions)
        positions[axis] = positions[axis][cut]
        masks = [mask if mask.shape[axis] == 1 else mask[(slice(None),) * axis + (cut,)] for mask in part.masks]
        parts.append(_Part(positions, masks, decides))
    return parts


def _shares(total: int, lengths: list[int]) -> list[int]:
    """Return whole shares of `total` in proportion to lengths: progress, and a sum that is exact."""
    ends, done = [], 0
    for length in lengths:
        done += length
        ends.append(total * done // sum(lengths))
    return [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _conjunction(masks: list[Bools], shape: tuple[int, ...]) -> Bools:
    """Return the mask over the block: small masks first."""
    result: Bools = np.ones((1,) * len(shape), dtype=bool)
    for mask in sorted(masks, key=lambda m: m.size):
        result = result & mask
    return result
