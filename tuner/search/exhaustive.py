"""The exact search: every plan of a space, in blocks; the best few, and the Pareto front of step time against memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tuner.cost_model.estimate import estimate
from tuner.cost_model.goodput import down_of, goodput
from tuner.search.blocks import MAX_ROWS, Block, blocks
from tuner.search.groups import Near, first_of_each, grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.arrays import Floats, Ints
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.estimate import Estimate
    from tuner.failure import FailureData
    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.search.space import Space

    Estimator = Callable[[Job, Plan, Calibration], Estimate]

Objective = Literal["throughput", "cost", "memory", "goodput"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "cost", "memory", "goodput")
MAX_P_OOM = 0.05


@dataclass(frozen=True, slots=True)
class Found:
    """A plan of the space, by its index in the product of the axes, and what it costs."""

    index: int
    step_s: float
    memory_bytes: float
    p_oom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep found.

    combinations: plans of the product of the axes, all of them judged by the rules; plans: those whose time and memory were
    computed (rules dropped the others by whole values of an axis); legal: plans that the rules and limits allow; fit: legal plans
    that fit. best: the first few by the objective, of distinct groups where these were asked for. pareto: fitting plans that no
    other beats in both step time and memory, by memory. leanest: the legal plan that needs the least memory. like: of how many
    near equals each of `best` is the best (groups.py; None: too many to count). ahead: how many plans that fit are faster than each of
    the times that were asked about. seconds: wall time of the sweep.
    """

    space: Space
    objective: Objective
    combinations: int
    plans: int
    legal: int
    fit: int
    seconds: float
    best: tuple[Found, ...]
    pareto: tuple[Found, ...]
    leanest: Found | None
    like: tuple[int | None, ...] = ()
    ahead: tuple[int, ...] = ()

    @property
    def plans_per_s(self) -> float:
        """Plans estimated a second of wall time."""
        return self.plans / self.seconds if self.seconds > 0 else math.inf

    def plan(self, found: Found) -> Plan:
        """Return the single plan that was found."""
        return self.space.plan_at(found.index)


class Rows(NamedTuple):
    """Aligned columns of candidates: index in the space, step seconds, bytes, probability of running out."""

    index: Ints
    step_s: Floats
    memory: Floats
    p_oom: Floats

    @staticmethod
    def of(found: Sequence[Found]) -> Rows:
        """Return the columns of what was found."""
        index = np.array([f.index for f in found], dtype=np.int64)
        return Rows(index, *(np.array([getattr(f, name) for f in found], dtype=float) for name in ("step_s", "memory_bytes", "p_oom")))

    def take(self, which: Ints) -> Rows:
        """Return these rows."""
        return Rows(*(column[which] for column in self))

    def join(self, other: Rows) -> Rows:
        """Return both, one after the other."""
        return Rows(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    def found(self) -> tuple[Found, ...]:
        """Return the rows one by one."""
        return tuple(Found(int(i), float(s), float(m), float(p)) for i, s, m, p in zip(*self, strict=True))


def _none() -> Rows:
    return Rows(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0), np.empty(0))


@dataclass(slots=True)
class Kept:
    """What is kept of the blocks seen: bounded by top_k and by the front's length. group: numbers plans by their group, so that
    `best` has the best plan of each and `near` the plans that may be as good as it.
    """

    objective: Objective
    top_k: int
    group: Callable[[Ints], Ints] | None = None
    best: Rows = field(default_factory=_none)
    front: Rows = field(default_factory=_none)
    leanest: Rows = field(default_factory=_none)
    near: Near | None = field(default_factory=Near)

    def _keys(self, rows: Rows) -> tuple[Floats, Floats]:
        return (rows.memory, rows.step_s) if self.objective == "memory" else (rows.step_s, rows.memory)

    def see_fitting(self, rows: Rows) -> None:
        """Take note of plans that fit."""
        self._see_best(rows)
        self.front = _front(self.front.join(rows.take(_not_beaten(self.front, rows))))

    def _see_best(self, rows: Rows) -> None:
        first, _ = self._keys(rows)
        bar = self._keys(self.best)[0][-1] if len(self.best.index) >= self.top_k else self._first_bar(rows, first)
        both = self.best.join(rows.take(np.flatnonzero(first <= bar)))
        ahead, second = self._keys(both)
        order = np.lexsort((both.index, second, ahead))
        if self.group is not None:
            order = order[first_of_each(self.group(both.index[order]))]
        self.best = both.take(order[: self.top_k])
        if self.group is not None and self.near is not None:
            full = len(self.best.index) >= self.top_k
            self.near = self.near.join(rows.index, first, self._keys(self.best)[0][-1] if full else np.inf)

    def _first_bar(self, rows: Rows, first: Floats) -> float:
        """Return a value of the objective that top_k plans (of distinct groups) of these rows do not exceed."""
        many = self.top_k
        while many < len(first):
            bar = float(np.partition(first, many - 1)[many - 1])
            if self.group is None or len(np.unique(self.group(rows.index[first <= bar]))) >= self.top_k:
                return bar
            many *= 16
        return math.inf

    def like(self) -> tuple[int | None, ...]:
        """Return how many other plans of its group come near each of the best."""
        if self.group is None:
            return ()
        if self.near is None:
            return (None,) * len(self.best.index)
        return self.near.count(self.group, self.best.index, self._keys(self.best)[0])

    def see_legal(self, rows: Rows) -> None:
        """Take note of legal plans, for the one that needs the least memory."""
        both = self.leanest.join(rows.take(np.flatnonzero(rows.memory == rows.memory.min())))
        self.leanest = both.take(np.lexsort((both.index, both.step_s, both.memory))[:1])


def _not_beaten(front: Rows, rows: Rows) -> Ints:
    """Return the rows that are no slower than every plan of the front that needs no more memory."""
    if not len(front.index):
        return np.arange(len(rows.index))
    at = np.searchsorted(front.memory, rows.memory, side="right") - 1
    return np.flatnonzero((at < 0) | (rows.step_s <= front.step_s[at]))


def _front(rows: Rows) -> Rows:
    """Return the rows that no other beats in both, ascending in memory; of equal ones that with the lowest index."""
    ordered = rows.take(np.lexsort((rows.index, rows.step_s, rows.memory)))
    if not len(ordered.index):
        return ordered
    before = np.minimum.accumulate(np.concatenate(([np.inf], ordered.step_s[:-1])))
    return ordered.take(np.flatnonzero(ordered.step_s < before))


def sweep(
    job: Job,
    space: Space,
    calibration: Calibration,
    *,
    objective: Objective = "throughput",
    top_k: int = 10,
    max_p_oom: float = MAX_P_OOM,
    max_memory: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
    estimator: Estimator = estimate,
    max_rows: int = MAX_ROWS,
    distinct: bool = False,
    than: Sequence[float] = (),
) -> SweepResult:
    """Return the best plans of `space` for `job`, having looked at all of them; with `distinct` the best plan of each group; than: step
    times, of which the faster plans are counted.

    A plan fits when it runs out of memory with a probability below max_p_oom and needs at most max_memory bytes. Ties in the
    objective go to the plan that is better in the other of time and memory, then to the lower index, so the result does not depend
    on the blocks. progress(judged, of) counts plans of the product.
    """
    kept = Kept(objective, max(top_k, 1), grouping(space) if distinct else None)
    plans = legal = fit = judged = 0
    ahead = np.zeros(len(than), dtype=np.int64)
    start = time.perf_counter()
    for block in blocks(space, max_rows=max_rows):
        judged += block.decides
        if block.plan is not None and (rows := np.flatnonzero(np.broadcast_to(block.allowed, block.shape))).size:
            seen = _columns(estimator(job, block.plan, calibration), block, rows, space)
            fitting = np.flatnonzero((seen.p_oom < max_p_oom) & (seen.memory <= max_memory))
            plans, legal, fit = plans + math.prod(block.shape), legal + rows.size, fit + fitting.size
            if fitting.size:
                kept.see_fitting(seen.take(fitting))
                ahead += np.searchsorted(np.sort(seen.step_s[fitting]), than) if len(than) else 0
            kept.see_legal(seen)
        if progress is not None:
            progress(judged, space.size)
    return SweepResult(
        space=space,
        objective=objective,
        combinations=space.size,
        plans=plans,
        legal=legal,
        fit=fit,
        seconds=time.perf_counter() - start,
        best=kept.best.found()[:top_k],
        pareto=kept.front.found(),
        leanest=next(iter(kept.leanest.found()), None),
        like=kept.like()[:top_k],
        ahead=tuple(ahead.tolist()),
    )


def judge(space: Space, failures: FailureData) -> Estimator:
    """Return what a sweep for goodput estimates plans with: step_s is that of an average over failures (cost_model/goodput.py)."""
    columns = {name: column for axis in space.axes for name, column in axis.fields.items() if name in ("tp", "fallback_tp")}
    allowed = {tp - to for tp in columns.get("tp", (1,)) for to in columns.get("fallback_tp", (0,)) if 0 < to < tp}
    return partial(goodput, down=down_of(failures), allowances=sorted(allowed))


def _columns(of: Estimate, block: Block, rows: Ints, space: Space) -> Rows:
    columns = [np.broadcast_to(column, block.shape).reshape(-1)[rows] for column in (of.step_s, of.memory_bytes, of.p_oom)]
    return Rows(block.indices(space, rows), *columns)
