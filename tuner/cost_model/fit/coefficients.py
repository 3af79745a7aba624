"""Coefficients fitted to whole steps: what a framework makes of the same hardware.

Least squares on log(measured / predicted) with a Cauchy loss (broken runs, and runs of another kind under the same name, must not
steer it), each coefficient held near its prior by a normal penalty on its logarithm, so that three rows move little and three hundred
decide. Folds are whole jobs (one model on one number of GPUs): the error and the interval that the file states come from rows that the
fit had not seen.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.arrays import total
from tuner.cost_model.calibration import Override
from tuner.cost_model.estimate import step_time
from tuner.cost_model.pipeline import stages_to_watch
from tuner.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job

LOSS_SCALE = 0.1  # log residuals well beyond this hardly count
FOLDS = 4
MOST_JOBS = 32  # a fit looks at no more jobs than this, evenly drawn: more of one framework's runs say little more
MOST_SPREAD = 20.0
COARSE_STEPS = 4
CLEARLY = 0.9
WORST = 0.5

# Relative doubt (standard deviation of the logarithm) about each coefficient before any row, and the range it may take.
DOUBT: Mapping[str, tuple[float, float, float]] = {
    "gemm_sustained": (0.15, 0.3, 1.05),
    "memory_bandwidth_efficiency": (0.3, 0.15, 1.0),
    "host_per_layer_s": (1.0, 1e-5, 2e-2),
    "layer_fixed_s": (1.5, 1e-6, 2e-2),
    "microbatch_fixed_s": (1.5, 1e-5, 2.0),
    "pp_send_s": (1.5, 1e-6, 0.5),
    "step_fixed_s": (1.0, 1e-4, 2.0),
    "overlap_contention": (0.7, 0.02, 1.0),
    "grouped_sustained": (0.3, 0.15, 1.05),
    "permute_passes": (0.5, 2.0, 30.0),
    "ep_volume_factor": (0.4, 0.2, 4.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured step: id, job, plan and seconds; series: the runs it is compared with, left out with it; source: who measured."""

    id: str
    job: Job
    plan: Plan
    step_s: float
    series: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Coefficients with what they are worth on held-out jobs: median and 90th percentile of |log error|, before and after; and its mean
    with each row bounded by WORST, so that a few hopeless rows neither make nor break a fit.
    """

    overrides: dict[str, Override]
    rows: tuple[str, ...]
    before: tuple[float, float]
    after: tuple[float, float]
    mean_before: float
    mean_after: float

    @property
    def helps(self) -> bool:
        """Whether rows that the fit had not seen came out clearly better, in the middle and on average."""
        return self.after[0] < CLEARLY * self.before[0] and self.mean_after < CLEARLY * self.mean_before


@dataclass(frozen=True, slots=True)
class Table:
    """The steps of one job as columns."""

    job: Job
    plan: Plan
    log_measured: Any
    base: Calibration


def tables_of(steps: Sequence[Step], calibrations: Mapping[str, Calibration]) -> list[Table]:
    """Return the steps as one table a job; calibrations: the one each is predicted with, by GPU name."""
    by_job: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_job[id(step.job)].append(step)
    made = []
    for of_job in by_job.values():
        columns = {f.name: np.array([getattr(s.plan, f.name) for s in of_job], dtype=np.int64) for f in dataclasses.fields(Plan)}
        seconds = np.log(np.array([s.step_s for s in of_job]))
        made.append(Table(of_job[0].job, Plan(**columns), seconds, calibrations[of_job[0].job.cluster.gpu.name]))
    return made


def _with(base: Calibration, values: Mapping[str, float]) -> Calibration:
    changed = {name: base.coefficients[name].model_copy(update={"value": value}) for name, value in values.items()}
    return base.model_copy(update={"coefficients": {**base.coefficients, **changed}})


def log_errors(tables: Sequence[Table], values: Mapping[str, float]) -> Any:
    """Return log(measured / predicted) of every row of the tables, in order, with these coefficients in place of their calibrations'."""
    parts: list[Any] = []
    made: dict[int, Calibration] = {}
    for table in tables:
        calibration = made.setdefault(id(table.base), _with(table.base, values))
        job, plan = table.job, table.plan
        step, _ = step_time(job, plan, calibration, plan.microbatches(job.gpus, job.global_batch), stages_to_watch(job, plan))
        said = total(step)
        parts.append(table.log_measured - np.log(np.broadcast_to(said, table.log_measured.shape)))
    return np.concatenate(parts)


def _solve(tables: Sequence[Table], names: Sequence[str], near: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the coefficients of least cost; near: where to start (else a coarse search around the prior)."""
    from scipy.optimize import least_squares

    prior = np.log([tables[0].base[name] for name in names])
    doubt = np.array([DOUBT[name][0] for name in names])
    low, high = (np.log([DOUBT[name][i] for name in names]) for i in (1, 2))

    def cost(theta: Any) -> Any:
        r = log_errors(tables, dict(zip(names, np.exp(theta).tolist(), strict=True))) / LOSS_SCALE
        return np.concatenate([np.sign(r) * np.sqrt(np.log1p(r * r)), (theta - prior) / doubt])

    if near is None:
        start = _coarse(cost, np.clip(prior, low + 1e-6, high - 1e-6), low, high)
    else:
        start = np.clip(np.log([near[name] for name in names]), low + 1e-6, high - 1e-6)
    found = least_squares(cost, start, bounds=(low, high), diff_step=np.full(len(names), 1e-3), ftol=1e-3, xtol=1e-3, max_nfev=8)
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


EXPERT_COEFFICIENTS = ("grouped_sustained", "permute_passes", "ep_volume_factor")


def names_for(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the coefficients that these steps can speak of."""
    experts = any(step.job.model.moe for step in steps)
    return tuple(name for name in DOUBT if experts or name not in EXPERT_COEFFICIENTS)


def _coarse(cost: Callable[[Any], Any], start: Any, low: Any, high: Any) -> Any:
    """Return a start that no step of a factor 2 or 8 in one coefficient betters, taking the best step of all each time: a floor that
    binds nowhere at the prior (a host that is never waited for) has no gradient there to follow.
    """
    best, value = start, float(np.sum(cost(start) ** 2))
    for _ in range(COARSE_STEPS):
        trials: list[tuple[float, int, Any]] = []
        for i in range(len(start)):
            for step in (-2.08, -0.69, 0.69, 2.08):
                trial = best.copy()
                trial[i] = np.clip(trial[i] + step, low[i] + 1e-6, high[i] - 1e-6)
                trials.append((float(np.sum(cost(trial) ** 2)), len(trials), trial))
        found, _, trial = min(trials, key=lambda item: item[:2])
        if found >= value:
            break
        best, value = trial, found
    return best


def fit_coefficients(steps: Sequence[Step], calibrations: Mapping[str, Calibration], names: Sequence[str], source: str) -> Fitted:
    """Return the coefficients `names` fitted to `steps`; calibrations: the one to start from, by GPU name.

    The interval's half-width (time_spread_90) is the 90th percentile of the out-of-fold |log error|.
    """
    tables = tables_of(steps, calibrations)
    tables.sort(key=lambda table: (table.job.model.name, table.job.gpus, table.job.global_batch, table.job.seq_len))
    tables = random.Random(0).sample(tables, min(len(tables), MOST_JOBS))  # noqa: S311 (an even draw that is the same every time)
    order = range(len(tables))
    folds = [order[k::FOLDS] for k in range(FOLDS) if order[k::FOLDS]]
    before = np.abs(log_errors(tables, {}))
    values = _solve(tables, names)
    unseen = []
    for fold in folds:
        rest = [tables[i] for i in order if i not in fold]
        without = _solve(rest, names, values) if rest else {}
        unseen.append(np.abs(log_errors([tables[i] for i in fold], without)))
    after = np.concatenate(unseen)
    spread = min(math.expm1(float(np.quantile(after, 0.9))), MOST_SPREAD)
    residual = float(np.median(np.abs(log_errors(tables, values))))
    overrides = {
        name: Override(value=float(f"{value:.4g}"), source=source, n=len(steps), residual=round(residual, 4))
        for name, value in values.items()
    }
    overrides["time_spread_90"] = Override(value=round(spread, 3), source=f"{source}, jobs held out", n=len(steps))
    return Fitted(
        overrides=overrides,
        rows=tuple(step.id for step in steps),
        before=(float(np.median(before)), float(np.quantile(before, 0.9))),
        after=(float(np.median(after)), float(np.quantile(after, 0.9))),
        mean_before=float(np.mean(np.minimum(before, WORST))),
        mean_after=float(np.mean(np.minimum(after, WORST))),
    )
