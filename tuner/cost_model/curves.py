"""Efficiency curves: how far an operator stays from its data-sheet time, as numbers that the formulas take.

roofline.py and collectives.py say how each number enters; fit/ makes them from measured operators.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from tuner.spec import Spec

_fraction = Annotated[float, Field(gt=0, le=1)]
_seconds = Annotated[float, Field(ge=0, le=10)]


class Fit(Spec):
    """How well a curve describes the points it was fitted to: n points, median and 90th percentile of |error|; the same two
    for points held out of the fit (`held_out`: which ones), where that was tried.
    """

    source: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=0)] = 0
    median: Annotated[float, Field(ge=0)] | None = None
    p90: Annotated[float, Field(ge=0)] | None = None
    held_out: str = ""
    held_out_median: Annotated[float, Field(ge=0)] | None = None
    held_out_p90: Annotated[float, Field(ge=0)] | None = None


class Grid(Spec):
    """A factor over one to three axes, interpolated linearly between breakpoints and held constant outside.

    axes: increasing breakpoints of each axis; values: one line of numbers for each combination of the leading axes (row
    major), as text, because a YAML parser needs a hundred times longer for a list of numbers.
    """

    axes: tuple[tuple[float, ...], ...] = Field(min_length=1, max_length=3)
    values: str

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for axis in self.axes:
            if len(axis) < 2 or any(b <= a for a, b in pairwise(axis)):
                raise ValueError("each axis needs at least two breakpoints, increasing")
        try:
            table = np.array(self.values.split(), dtype=float)
        except ValueError as error:
            raise ValueError(f"values must be numbers: {error}") from None
        shape = tuple(len(axis) for axis in self.axes)
        if table.size != int(np.prod(shape)) or not np.isfinite(table).all() or (table <= 0).any():
            raise ValueError(f"values must be {' x '.join(map(str, shape))} positive numbers, not {table.size}")
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and (self.axes, self.values) == (other.axes, other.values)

    def __hash__(self) -> int:
        return hash((self.axes, self.values))

    @cached_property
    def table(self) -> Any:
        """The values as an array with one axis for each of `axes`; read only."""
        table = np.array(self.values.split(), dtype=float).reshape([len(axis) for axis in self.axes])
        table.setflags(write=False)
        return table

    @cached_property
    def _breaks(self) -> tuple[tuple[Any, Any, Any, int], ...]:
        made = []
        for axis in self.axes:
            points = np.array(axis, dtype=float)
            made.append((points, points[1:], 1.0 / np.diff(points), len(axis) - 2))
        return tuple(made)

    def __call__(self, *columns: Any) -> Any:
        """Return the factor at `columns` (one for each axis, broadcastable). Scalar and vector agree to the last bit: only
        IEEE + - * and comparisons are used.
        """
        weights, lows = [], []
        for (points, inner, inverse, last), x in zip(self._breaks, columns, strict=True):
            clipped = np.minimum(np.maximum(x, points[0]), points[-1]) * 1.0
            low = np.minimum(np.searchsorted(inner, clipped, side="right"), last)
            lows.append(low)
            weights.append((clipped - points[low]) * inverse[low])
        return _multilinear(self.table, lows, weights)


def _multilinear(table: Any, lows: list[Any], weights: list[Any]) -> Any:
    """Return `table` interpolated linearly along each axis between index low and low + 1."""
    if len(lows) == 1:
        low, weight = lows[0], weights[0]
        return table[low] * (1.0 - weight) + table[low + 1] * weight
    if len(lows) == 2:
        (i, j), (u, v) = lows, weights
        near = table[i, j] * (1.0 - v) + table[i, j + 1] * v
        far = table[i + 1, j] * (1.0 - v) + table[i + 1, j + 1] * v
        return near * (1.0 - u) + far * u
    (i, j, k), (u, v, w) = lows, weights
    if np.ndim(k) == 0:  # one number: the same sums on the small table
        return _multilinear(table[:, :, k] * (1.0 - w) + table[:, :, k + 1] * w, lows[:2], weights[:2])
    near = (table[i, j, k] * (1.0 - w) + table[i, j, k + 1] * w) * (1.0 - v)
    near = near + (table[i, j + 1, k] * (1.0 - w) + table[i, j + 1, k + 1] * w) * v
    far = (table[i + 1, j, k] * (1.0 - w) + table[i + 1, j, k + 1] * w) * (1.0 - v)
    far = far + (table[i + 1, j + 1, k] * (1.0 - w) + table[i + 1, j + 1, k + 1] * w) * v
    return near * (1.0 - u) + far * u


class Tile(Spec):
    """A block of output that one multiprocessor computes at once, the parts that k is split into, and the fraction of the
    multiprocessor's peak that it reaches in the long run.
    """

    m: Annotated[int, Field(ge=1)]
    n: Annotated[int, Field(ge=1)]
    splits: Annotated[int, Field(ge=1, le=64)] = 1
    efficiency: _fraction


class GemmCurve(Spec):
    """Matrix products of one dtype (roofline.products_seconds says how these enter).

    launch_s: fixed time; prologue_k: filling and draining of the pipeline in units of k; partial_wave: how much of an
    incomplete last wave is paid (0: its share, 1: a full wave); memory: fraction of the HBM bandwidth; reduction: passes over
    fp32 partial sums for each split of k; power: factor on the efficiency over watts per dense bf16 TFLOP/s, because a card
    with less power for its peak clocks lower under load. Factors on the time: correction over (m, n, k); waves over (tiles of
    128 x 128 for each multiprocessor, k), what the rounding to waves leaves; unaligned over (m, n, k) where m is no multiple of 16.
    """

    launch_s: _seconds
    tiles: tuple[Tile, ...] = Field(min_length=1, max_length=8)
    prologue_k: Annotated[float, Field(ge=0, le=1e5)]
    partial_wave: Annotated[float, Field(ge=0, le=1)]
    memory: _fraction
    reduction: Annotated[float, Field(ge=0, le=100)] = 1.0
    power: Grid | None = None
    correction: Grid | None = None
    waves: Grid | None = None
    unaligned: Grid | None = None
    fit: Fit

    @property
    def plain(self) -> GemmCurve:
        """The curve without its factors over sizes, which were seen on single products."""
        return self.model_copy(update={"correction": None, "waves": None, "unaligned": None})


class GroupedCurve(Spec):
    """Grouped products: factor on the time of the GEMM curve at the same rows in each group, over (rows, groups).

    Needed to compare with tables of measured MoE operators and left out of grouped_gemm_seconds: routing_s, routing_passes, what
    the operator does beside its products (fixed time; passes over the tokens' hidden states); typical, the median of inference
    libraries over the fastest of them, over (rows, groups); ungated, the same for experts without a gate on top, over rows.
    """

    factor: Grid
    routing_s: _seconds = 0.0
    routing_passes: Annotated[float, Field(ge=0, le=1000)] = 0.0
    typical: Grid | None = None
    ungated: Grid | None = None
    fit: Fit


class AttentionCurve(Spec):
    """A fused attention kernel, forward (roofline.attention_seconds says how these enter).

    efficiency: fraction of the bf16 peak over head dimension (QK); half_length: cost of starting a block of queries, in keys,
    over head dimension; block: queries in a block; correction: factor on the time over (batch x heads, queries, head dimension);
    sharing: the same over (heads of a KV head, queries, head dimension). Needed to compare with tables of measured kernels and left
    out of attention_seconds: typical, the median of inference libraries over that, head dimensions included that few of them tune
    for, over (batch x heads, queries, head dimension); prompts, the same on top over (tokens, heads).
    """

    launch_s: _seconds
    efficiency: Grid
    half_length: Grid
    block: Annotated[int, Field(ge=1, le=1024)]
    partial_wave: Annotated[float, Field(ge=0, le=1)]
    memory: _fraction
    correction: Grid | None = None
    sharing: Grid | None = None
    typical: Grid | None = None
    prompts: Grid | None = None
    fit: Fit


class CollectiveCurve(Spec):
    """One collective inside the innermost domain: latency in seconds over members; fraction of the link's bandwidth that the
    bus reaches over (members, bytes).
    """

    latency: Grid
    efficiency: Grid
    fit: Fit
