"""The ranked answer: plans with what they cost, how sure that is, and the person's own plan beside them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tuner.cost_model.estimate import estimate, mfu, tokens_per_s_per_gpu
from tuner.cost_model.residual import ratio_spread90
from tuner.cost_model.rules import broken
from tuner.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.search.exhaustive import Objective

Basis = Literal["analytic", "calibrated", "measured", "proxy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A ranked plan (units as in Estimate). tied: it cannot be told apart from the best plan, see `_alike`;
    problems: what a framework's rules say against it (only a person's own plan has any).
    """

    rank: int
    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: float
    worst_stage: int
    p_oom: float
    basis: Basis
    tied: bool
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows, best first, and the person's present plan with the rank it would have among them and the plans of the space."""

    rows: tuple[Row, ...]
    objective: Objective
    current: Row | None = None

    @property
    def tied(self) -> int:
        """How many of the first rows cannot be told apart."""
        return next((i for i, row in enumerate(self.rows) if not row.tied), len(self.rows))

    @property
    def gain(self) -> float | None:
        """How many times faster the best plan is than the present one."""
        return self.current.step_s / self.rows[0].step_s if self.rows and self.current else None


def rank(
    job: Job, plans: Sequence[Plan], calibration: Calibration, *, objective: Objective = "throughput", current: Plan | None = None
) -> Ranking:
    """Return the plans in their order, estimated as one table, with `current` placed among them.

    The rank of the present plan is 1 + the number of rows better than it by the objective.
    """
    estimates = _each(job, plans, calibration)
    if not estimates:
        return Ranking(rows=(), objective=objective, current=_current(job, current, calibration, objective, []))
    alike = _alike(job, plans, calibration, estimates)
    rows = tuple(_row(job, plan, e, i + 1, tied) for i, (plan, e, tied) in enumerate(zip(plans, estimates, alike, strict=True)))
    return Ranking(rows=rows, objective=objective, current=_current(job, current, calibration, objective, estimates, plans[0]))


class _Cost(NamedTuple):
    """What _row reads of an estimate."""

    step_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    worst_stage: int
    p_oom: float


def _each(job: Job, plans: Sequence[Plan], calibration: Calibration) -> list[_Cost]:
    """Return the cost of each plan; a table of plans is one call, and equals single calls to the last bit."""
    if not plans:
        return []
    names = [field.name for field in dataclasses.fields(plans[0])]
    table = Plan(**{name: np.array([getattr(plan, name) for plan in plans], dtype=np.int64) for name in names})
    of = estimate(job, table, calibration)
    columns = [np.broadcast_to(getattr(of, name), (len(plans),)).tolist() for name in _Cost._fields]
    return [_Cost(*row) for row in zip(*columns, strict=True)]


def _alike(job: Job, plans: Sequence[Plan], calibration: Calibration, costs: Sequence[_Cost]) -> list[bool]:
    """Return whether each plan may be as fast as the first: the ratio of their step times is within what it is known to in 90 % of
    cases, or, without measured runs, their intervals overlap.
    """
    if calibration.residual is None:
        return [of.low_s <= costs[0].high_s for of in costs]
    known = ratio_spread90(job, Plan.table(plans), len(plans), calibration.residual)
    return [of.step_s / costs[0].step_s <= spread for of, spread in zip(costs, known.tolist(), strict=True)]


def _current(
    job: Job, plan: Plan | None, calibration: Calibration, objective: Objective, others: list[_Cost], best: Plan | None = None
) -> Row | None:
    if plan is None:
        return None
    own = _each(job, [plan], calibration)[0]
    better = sum(_key(e, objective) < _key(own, objective) for e in others)
    tied = not others or _alike(job, [best or plan, plan], calibration, [others[0], own])[1]
    problems = tuple(f"{rule.severity}: {text}" for rule, text in broken(job, plan))
    return _row(job, plan, own, better + 1, tied, problems)


def _key(of: _Cost, objective: Objective) -> tuple[float, float]:
    step, memory = float(of.step_s), float(of.memory_bytes)
    return (memory, step) if objective == "memory" else (step, memory)


def _row(job: Job, plan: Plan, of: _Cost, place: int, tied: bool, problems: tuple[str, ...] = ()) -> Row:
    return Row(
        rank=place,
        plan=plan,
        step_s=float(of.step_s),
        low_s=float(of.low_s),
        high_s=float(of.high_s),
        tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, of.step_s)),
        mfu=float(mfu(job, of.step_s)),
        memory_bytes=float(of.memory_bytes),
        worst_stage=int(of.worst_stage),
        p_oom=float(of.p_oom),
        basis="analytic",
        tied=tied,
        problems=problems,
    )
