"""The exact search: every plan of a space, in blocks; the best few, and the Pareto front of step time against memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tuner.cost_model.estimate import estimate
from tuner.search.blocks import MAX_ROWS, Block, blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.arrays import Floats, Ints
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.estimate import Estimate
    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.search.space import Space

    Estimator = Callable[[Job, Plan, Calibration], Estimate]

Objective = Literal["throughput", "cost", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "cost", "memory")
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
    that fit. best: the first few by the objective. pareto: fitting plans that no other beats in both step time and memory, by
    memory. leanest: the legal plan that needs the least memory. seconds: wall time of the sweep.
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

    @property
    def plans_per_s(self) -> float:
        """Plans estimated a second of wall time."""
        return self.plans / self.seconds if self.seconds > 0 else math.inf

    def plan(self, found: Found) -> Plan:
        """Return the single plan that was found."""
        return self.space.plan_at(found.index)


class _Rows(NamedTuple):
    """Aligned columns of candidates: index in the space, step seconds, bytes, probability of running out."""

    index: Ints
    step_s: Floats
    memory: Floats
    p_oom: Floats

    def take(self, which: Ints) -> _Rows:
        return _Rows(*(column[which] for column in self))

    def join(self, other: _Rows) -> _Rows:
        return _Rows(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    def found(self) -> tuple[Found, ...]:
        return tuple(Found(int(i), float(s), float(m), float(p)) for i, s, m, p in zip(*self, strict=True))


def _none() -> _Rows:
    return _Rows(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0), np.empty(0))


@dataclass(slots=True)
class _Keeper:
    """What is kept of the blocks seen: bounded by top_k and by the front's length."""

    objective: Objective
    top_k: int
    best: _Rows = field(default_factory=_none)
    front: _Rows = field(default_factory=_none)
    leanest: _Rows = field(default_factory=_none)

    def _keys(self, rows: _Rows) -> tuple[Floats, Floats]:
        return (rows.memory, rows.step_s) if self.objective == "memory" else (rows.step_s, rows.memory)

    def see_fitting(self, rows: _Rows) -> None:
        self._see_best(rows)
        self.front = _front(self.front.join(rows.take(_not_beaten(self.front, rows))))

    def _see_best(self, rows: _Rows) -> None:
        first, _ = self._keys(rows)
        if len(self.best.index) >= self.top_k:
            bar = self._keys(self.best)[0][-1]
        elif len(first) > self.top_k:
            bar = np.partition(first, self.top_k - 1)[self.top_k - 1]
        else:
            bar = np.inf
        both = self.best.join(rows.take(np.flatnonzero(first <= bar)))
        first, second = self._keys(both)
        self.best = both.take(np.lexsort((both.index, second, first))[: self.top_k])

    def see_legal(self, rows: _Rows) -> None:
        both = self.leanest.join(rows.take(np.flatnonzero(rows.memory == rows.memory.min())))
        self.leanest = both.take(np.lexsort((both.index, both.step_s, both.memory))[:1])


def _not_beaten(front: _Rows, rows: _Rows) -> Ints:
    """Return the rows that are no slower than every plan of the front that needs no more memory."""
    if not len(front.index):
        return np.arange(len(rows.index))
    at = np.searchsorted(front.memory, rows.memory, side="right") - 1
    return np.flatnonzero((at < 0) | (rows.step_s <= front.step_s[at]))


def _front(rows: _Rows) -> _Rows:
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
) -> SweepResult:
    """Return the best plans of `space` for `job`, having looked at all of them.

    A plan fits when it runs out of memory with a probability below max_p_oom and needs at most max_memory bytes. Ties in the
    objective go to the plan that is better in the other of time and memory, then to the lower index, so the result does not depend
    on the blocks. progress(judged, of) counts plans of the product.
    """
    keeper = _Keeper(objective, max(top_k, 1))
    plans = legal = fit = judged = 0
    start = time.perf_counter()
    for block in blocks(space, max_rows=max_rows):
        judged += block.decides
        if block.plan is not None and (rows := np.flatnonzero(np.broadcast_to(block.allowed, block.shape))).size:
            seen = _columns(estimator(job, block.plan, calibration), block, rows, space)
            fitting = np.flatnonzero((seen.p_oom < max_p_oom) & (seen.memory <= max_memory))
            plans, legal, fit = plans + math.prod(block.shape), legal + rows.size, fit + fitting.size
            if fitting.size:
                keeper.see_fitting(seen.take(fitting))
            keeper.see_legal(seen)
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
        best=keeper.best.found()[:top_k],
        pareto=keeper.front.found(),
        leanest=next(iter(keeper.leanest.found()), None),
    )


def _columns(of: Estimate, block: Block, rows: Ints, space: Space) -> _Rows:
    columns = [np.broadcast_to(column, block.shape).reshape(-1)[rows] for column in (of.step_s, of.memory_bytes, of.p_oom)]
    return _Rows(block.indices(space, rows), *columns)
