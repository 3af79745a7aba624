"""What one lost GPU costs a job: the group it was in goes on at the next lower degree, or its replica is dropped, whichever is better."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tuner.cost_model.degraded import degraded, degraded_experts
from tuner.cost_model.estimate import estimate
from tuner.cost_model.rules.fallback import FALLBACK
from tuner.plan import Plan
from tuner.search.exhaustive import MAX_P_OOM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.arrays import Bools, Floats, Ints
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.degraded import Degraded
    from tuner.cost_model.estimate import Estimate
    from tuner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGpu:
    """What the loss of one GPU does to a single plan.

    way: "tp" or "ep", the group of that axis goes on at `to` instead of `degree`; "drop": the replicas that share the group are lost
    (`degree` data-parallel ones, `to` are left). change: of the job's samples a second (-0.02: 2 % fewer); overhead: share of a healthy
    step that resharding adds to all; power: that the reduced group would need, over nominal, to keep step; why: why no lower degree is
    possible, "" where one is.
    """

    way: Literal["tp", "ep", "drop"]
    degree: int
    to: int
    change: float
    overhead: float = 0.0
    power: float | None = None
    why: str = ""


class _Way(NamedTuple):
    """A way to go on (columns over plans): where it is possible, the degree, and its cost."""

    name: Literal["tp", "ep"]
    possible: Bools
    degree: Ints
    to: Ints
    cost: Degraded


def dropped_replicas(job: Job, plan: Plan) -> Ints:
    """Return how many data-parallel replicas end with one GPU where no group falls back: those that share its expert-parallel group."""
    return np.maximum(plan.ep * plan.etp // (plan.tp * plan.cp), 1) if job.model.moe else 1


def lost_gpus(job: Job, plans: Sequence[Plan], calibration: Calibration, *, stated: bool = False) -> list[LostGpu]:
    """Return what one lost GPU costs each plan: at its fallback_tp if it has one, else at the next lower degree.

    A fallback counts that a search would list as a plan: one that breaks no rule and runs out of memory with a probability below MAX_P_OOM.
    One that is stated and cannot run is no fallback, whatever other degrees could do. stated: whether a plan without a fallback_tp was
    chosen as such: it drops its replica then.
    """
    if not plans:
        return []
    table = Plan.table(plans)
    healthy = estimate(job, table, calibration)
    ways = [_tensor(job, table, calibration, healthy, stated=stated)]
    if job.model.moe:
        ways.append(_experts(job, table, calibration, healthy))
    replicas, gone = np.maximum(table.dp(job.gpus), 1), np.broadcast_to(dropped_replicas(job, table), (len(plans),))
    dropped = [
        LostGpu(way="drop", degree=int(n), to=int(n - lost), change=-float(lost / n), why=why)
        for n, lost, why in zip(replicas, gone, _why(job, table, ways), strict=True)
    ]
    return [_best(i, one, ways) for i, one in enumerate(dropped)]


def _best(row: int, dropped: LostGpu, ways: Sequence[_Way]) -> LostGpu:
    best = dropped
    for way in ways:
        if not way.possible[row]:
            continue
        of = way.cost
        change = float(_at(of.throughput, row)) - 1.0
        if change >= best.change:
            best = LostGpu(
                way=way.name, degree=int(way.degree[row]), to=int(way.to[row]), change=change,
                overhead=float(_at(of.overhead, row)), power=float(_at(of.power(), row)),
            )  # fmt: skip
    return best


def _at(column: Floats, row: int) -> Floats:
    return column[row] if np.ndim(column) else column


def _tensor(job: Job, table: Plan, calibration: Calibration, healthy: Estimate, *, stated: bool) -> _Way:
    to = table.fallback if stated else np.where(table.fallback_tp > 0, table.fallback, np.maximum(table.tp - 1, 1))
    asked = dataclasses.replace(table, fallback_tp=to)
    cost = degraded(job, dataclasses.replace(table, fallback_tp=np.minimum(to, table.tp)), calibration, healthy)
    legal = np.ones(len(to), dtype=bool) & (to < table.tp)
    for rule in FALLBACK:
        if rule.severity == "error":
            legal = legal & rule.holds(job, asked)
    return _Way("tp", legal & (cost.p_oom < MAX_P_OOM), table.tp, to, cost)


def _experts(job: Job, table: Plan, calibration: Calibration, healthy: Estimate) -> _Way:
    to = np.maximum(table.ep - 1, 1)
    cost = degraded_experts(job, table, calibration, to, healthy)
    return _Way("ep", (table.ep > 1) & (cost.p_oom < MAX_P_OOM), table.ep, to, cost)


def _why(job: Job, table: Plan, ways: Sequence[_Way]) -> list[str]:
    """Return why each plan has no lower degree, "" where it has one that merely costs more than dropping."""
    words = []
    for i in range(len(ways[0].degree)):
        if any(way.possible[i] for way in ways):
            words.append("")
        elif all(way.degree[i] == 1 for way in ways):
            words.append("no group to fall back in")
        elif (rule := _broken(job, table, ways[0], i)) and table.fallback_tp[i] > 0:
            words.append(rule)
        elif way := next((way for way in ways if way.to[i] < way.degree[i] and _at(way.cost.p_oom, i) >= MAX_P_OOM), None):
            need, has = float(_at(way.cost.memory_bytes, i)) / 1e9, job.cluster.gpu.memory.value / 1e9
            chance = 100 * float(_at(way.cost.p_oom, i))
            words.append(f"{way.name} {way.to[i]} needs {need:.1f} of {has:.1f} GB, P(OOM) {chance:.1f} %")
        else:
            words.append(rule or ("its fallback_tp is tp itself" if ways[0].to[i] == ways[0].degree[i] > 1 else ""))
    return words


def _broken(job: Job, table: Plan, way: _Way, i: int) -> str:
    """Return the rule that a plan's lower tensor-parallel degree breaks, "" where it keeps all."""
    row = dataclasses.replace(table.row(i), fallback_tp=int(way.to[i]))
    return next((rule.says(job, row) for rule in FALLBACK if rule.severity == "error" and not rule.holds(job, row)), "")
