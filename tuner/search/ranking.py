"""The ranked answer: plans with what they cost, how sure that is, and the person's own plan beside them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tuner.cost_model.estimate import estimate, mfu, tokens_per_s_per_gpu
from tuner.cost_model.memory import NORMAL_90
from tuner.cost_model.residual import noise_of, plan_errors, ratio_spread90
from tuner.cost_model.rules import broken
from tuner.plan import ALL_LAYERS, FULL, Plan
from tuner.search.beliefs import OWN_TIME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.search.exhaustive import Estimator, Objective

SAME = 0.005  # step times this near each other (as logarithms) are one, where no runs say how noisy they are
Basis = Literal["analytic", "calibrated", "measured", "proxy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A ranked plan (units as in Estimate). tied: it cannot be told apart from the best plan, see `_alike`; goodput: share of its samples
    a second that is left on average over failures and lasts over restarts (None where nobody asked); problems: what a framework's rules
    say against it (only a person's own plan has any).
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
    goodput: float | None = None
    problems: tuple[str, ...] = ()


# Knobs that a plan can do without, and what they are then: each is one more thing to set up and to go wrong.
PLAIN: Mapping[str, int] = {
    "vpp": 1,
    "cp": 1,
    "offload": 0,
    "shard_group": 0,
    "schedule": 0,
    "embedding_layers": 0,
    "loss_layers": 0,
    "cp_kind": 0,
    "recompute_layers": ALL_LAYERS,
}


class Plainer(NamedTuple):
    """A ranked plan that cannot be told apart from the first and needs fewer knobs: its rank, how much slower it is by the figures (0.01:
    1 %), and the knobs that it does without.
    """

    rank: int
    slower: float
    without: tuple[str, ...]


def intricate(plan: Plan) -> tuple[str, ...]:
    """Return the knobs of a single plan that it could do without."""
    used = {name for name, plain in PLAIN.items() if getattr(plan, name) != plain}
    idle = {"cp_kind"} if plan.cp == 1 else set()
    idle |= set() if plan.recompute & FULL else {"recompute_layers"}
    return tuple(name for name in PLAIN if name in used - idle)


def plainer(rows: Sequence[Row], noise: float) -> Plainer | None:
    """Return the plainest of the rows that are as fast as the first within the noise of a run (a standard deviation of the logarithm),
    the fastest of equals; None where the first is as plain.
    """
    if not rows:
        return None
    first = intricate(rows[0].plan)
    near = [row for row in rows if row.tied and row.step_s <= rows[0].step_s * math.exp(noise)]
    best = min(near, key=lambda row: (len(intricate(row.plan)), row.rank), default=rows[0])
    own = intricate(best.plan)
    if len(own) >= len(first):
        return None
    return Plainer(best.rank, best.step_s / rows[0].step_s - 1.0, tuple(name for name in first if name not in own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows, best first, and the person's present plan with the rank it would have among them and the plans of the space."""

    rows: tuple[Row, ...]
    objective: Objective
    current: Row | None = None
    plainer: Plainer | None = None

    @property
    def tied(self) -> int:
        """How many of the first rows cannot be told apart."""
        return next((i for i, row in enumerate(self.rows) if not row.tied), len(self.rows))

    @property
    def gain(self) -> float | None:
        """How many times faster the best plan is than the present one."""
        return self.current.step_s / self.rows[0].step_s if self.rows and self.current else None


def rank(
    job: Job,
    plans: Sequence[Plan],
    calibration: Calibration,
    *,
    objective: Objective = "throughput",
    current: Plan | None = None,
    judge: Estimator | None = None,
) -> Ranking:
    """Return the plans in their order, estimated as one table, with `current` placed among them.

    The rank of the present plan is 1 + the number of rows better than it by the objective; judge: what gave the order by goodput.
    """
    estimates = _each(job, plans, calibration)
    judged = [_each(job, plans, calibration, judge), _each(job, [current] if current else [], calibration, judge)]
    if not estimates:
        return Ranking(rows=(), objective=objective, current=_current(job, current, calibration, objective, [], judged))
    alike = _alike(job, plans, calibration, estimates)
    shares = _shares(estimates, judged[0], objective)
    rows = tuple(
        _row(job, plan, e, i + 1, tied, share) for i, (plan, e, tied, share) in enumerate(zip(plans, estimates, alike, shares, strict=True))
    )
    noise = SAME if calibration.residual is None else noise_of(job, calibration.residual)
    return Ranking(
        rows=rows,
        objective=objective,
        current=_current(job, current, calibration, objective, estimates, judged, plans[0]),
        plainer=plainer(rows, noise) if objective in ("throughput", "cost") else None,
    )


class _Cost(NamedTuple):
    """What _row reads of an estimate."""

    step_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    worst_stage: int
    p_oom: float


def _shares(costs: Sequence[_Cost], judged: Sequence[_Cost], objective: Objective) -> list[float | None]:
    """Return the share of each plan's samples a second that is left over failures and lasts, where that is what was judged."""
    return [of.step_s / by.step_s if objective == "goodput" else None for of, by in zip(costs, judged, strict=True)]


def _each(job: Job, plans: Sequence[Plan], calibration: Calibration, judge: Estimator | None = None) -> list[_Cost]:
    """Return the cost of each plan; a table of plans is one call, and equals single calls to the last bit."""
    if not plans:
        return []
    names = [field.name for field in dataclasses.fields(plans[0])]
    table = Plan(**{name: np.array([getattr(plan, name) for plan in plans], dtype=np.int64) for name in names})
    of = (judge or estimate)(job, table, calibration)
    columns = [np.broadcast_to(getattr(of, name), (len(plans),)).tolist() for name in _Cost._fields]
    return [_Cost(*row) for row in zip(*columns, strict=True)]


def _alike(job: Job, plans: Sequence[Plan], calibration: Calibration, costs: Sequence[_Cost]) -> list[bool]:
    """Return whether each plan may be as fast as the first: the ratio of their step times is within what it is known to in 90 % of
    cases. Without measured runs that is what the kernel says of two plans and the noise of a run: most of an error is common to both.
    """
    if calibration.residual is not None:
        known = ratio_spread90(job, Plan.table(plans), len(plans), calibration.residual)
    else:
        between = plan_errors(job, Plan.table(plans), len(plans), calibration.kernel, None)
        every = np.arange(len(plans))
        own = np.array([float(between(i, i)[0, 0]) for i in np.split(every, len(plans))])
        apart = own + own[0] - 2.0 * between(every, every[:1])[:, 0] + 2.0 * OWN_TIME**2
        known = np.exp(NORMAL_90 * np.sqrt(apart))
    return [of.step_s / costs[0].step_s <= spread for of, spread in zip(costs, known.tolist(), strict=True)]


def _current(
    job: Job,
    plan: Plan | None,
    calibration: Calibration,
    objective: Objective,
    others: list[_Cost],
    judged: Sequence[list[_Cost]],
    best: Plan | None = None,
) -> Row | None:
    if plan is None:
        return None
    own = _each(job, [plan], calibration)[0]
    better = sum(_key(e, objective) < _key(judged[1][0], objective) for e in judged[0])
    tied = not others or _alike(job, [best or plan, plan], calibration, [others[0], own])[1]
    problems = tuple(f"{rule.severity}: {text}" for rule, text in broken(job, plan))
    return _row(job, plan, own, better + 1, tied, _shares([own], judged[1], objective)[0], problems)


def _key(of: _Cost, objective: Objective) -> tuple[float, float]:
    step, memory = float(of.step_s), float(of.memory_bytes)
    return (memory, step) if objective == "memory" else (step, memory)


def _row(job: Job, plan: Plan, of: _Cost, place: int, tied: bool, goodput: float | None, problems: tuple[str, ...] = ()) -> Row:
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
        goodput=goodput,
        problems=problems,
    )
