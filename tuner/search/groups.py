"""Plans that are alike: those of one mesh, micro batch, sharding and kind of recomputation, which differ in smaller knobs only.

A ranking shows the best plan of each group; the others of a group that come within NEAR of it are counted, not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tuner.plan import ALL_LAYERS, FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.arrays import Floats, Ints
    from tuner.search.space import Axis, Space

GROUP_KNOBS = ("tp", "pp", "cp", "ep", "etp", "micro_batch", "zero")  # and the kind of recomputation
NEAR = 0.005  # a plan within 0.5 % of the best of its group by the objective is its near equal
MOST_NEAR = 4_000_000


def recompute_kind(recompute: int, layers: int) -> int:
    """Return 0 for none, 1 for some modules, 2 for some layers in full, 3 for all of them."""
    return (2 + (layers >= ALL_LAYERS)) if recompute & FULL else int(recompute != 0)


def _codes(axis: Axis) -> Ints:
    """Return a number for each position of an axis, equal where its grouped knobs are."""
    columns = [axis.fields[name] for name in GROUP_KNOBS if name in axis.fields]
    if "recompute" in axis.fields:
        columns.append(tuple(map(recompute_kind, axis.fields["recompute"], axis.fields["recompute_layers"])))
    rows = list(zip(*columns, strict=True)) if columns else [()] * len(axis)
    numbers = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    return np.array([numbers[row] for row in rows], dtype=np.int64)


def grouping(space: Space) -> Callable[[Ints], Ints]:
    """Return the function from indices in the product of the axes to the numbers of their groups."""
    codes = [_codes(axis) for axis in space.axes]
    sizes = [int(code.max()) + 1 for code in codes]
    weights = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    scaled = [code * weight for code, weight in zip(codes, weights, strict=True)]

    def group(index: Ints) -> Ints:
        where = np.unravel_index(index, space.shape)
        number: Ints = np.zeros(np.shape(index), dtype=np.int64)
        for column, position in zip(scaled, where, strict=True):
            number = number + column[position]
        return number

    return group


def first_of_each(groups: Ints) -> Ints:
    """Return the positions at which a group stands for the first time, ascending."""
    _, first = np.unique(groups, return_index=True)
    return np.sort(first)


@dataclass(frozen=True, slots=True)
class Near:
    """Plans that may be near equals of one of the best: their indices and their values of the objective."""

    index: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    value: Floats = field(default_factory=lambda: np.empty(0))

    def join(self, index: Ints, value: Floats, bar: float) -> Near | None:
        """Return these and new plans, without those too far above `bar` (what the last of the best has); None beyond MOST_NEAR."""
        most = bar * (1.0 + NEAR)
        new, old = np.flatnonzero(value <= most), np.flatnonzero(self.value <= most)
        if len(new) + len(old) > MOST_NEAR:
            return None
        return Near(np.concatenate((self.index[old], index[new])), np.concatenate((self.value[old], value[new])))

    def count(self, group: Callable[[Ints], Ints], best: Ints, value: Floats) -> tuple[int, ...]:
        """Return for each of the best plans (index and value) how many others of its group come within NEAR of it."""
        groups = group(self.index)
        return tuple(
            int(np.count_nonzero((groups == own) & (self.value <= least * (1.0 + NEAR)))) - 1
            for own, least in zip(group(best).tolist(), value.tolist(), strict=True)
        )
