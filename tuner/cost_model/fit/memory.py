"""Coefficients of memory fitted to what a framework's runs took, and to whether they ran out.

A figure counts by a Cauchy loss on log(measured / predicted), a run that fitted or ran out by the logarithm of the probability that
the margin model gives it; each coefficient is held near its prior. Folds are whole models: what a file states of its worth, and the
spread of the margin, come from rows that the fit had not seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.calibration import Override
from tuner.cost_model.memory import NORMAL_90, stage_memory
from tuner.cost_model.pipeline import stages_to_watch
from tuner.job import gradient_bytes
from tuner.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.measurement import Measurement

LOSS_SCALE = 0.05
SPREAD = "oom_margin_spread"
LEAST_SPREAD = 0.04  # no framework's memory is known better than this

# Standard deviation of each coefficient's doubt before any row (in its own unit), and the range it may take.
DOUBT: Mapping[str, tuple[float, float, float]] = {
    "fragmentation": (0.15, 1.0, 1.6),
    "logits_bytes_per_element": (5.0, 4.0, 24.0),
    "gathered_inputs_kept": (0.5, 0.0, 1.0),
    "added_gradients_share": (0.5, 0.0, 1.0),
    "workspace_bytes": (2e8, 0.0, 1e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Coefficients, and on held-out models: median and 90th percentile of |log error| before and after (None without figures), and
    runs predicted right to fit and to run out, of how many. Where the fit does not help (helps), the spread alone is left.
    """

    overrides: dict[str, Override]
    n: int
    errors: tuple[tuple[float, float], tuple[float, float]] | None
    labels: tuple[int, int, int, int]
    helps: bool


class Table:
    """The rows of one job as a table of plans."""

    def __init__(self, rows: Sequence[Measurement], calibration: Calibration) -> None:
        self.job: Job = rows[0].job
        self.plan = Plan.table([row.plan for row in rows])
        self.calibration = calibration
        self.capacity = self.job.cluster.gpu.memory.value
        self.microbatches = self.plan.microbatches(self.job.gpus, self.job.global_batch)
        self.watched = stages_to_watch(self.job, self.plan)
        self.measured = np.array([row.memory_bytes or np.nan for row in rows])
        self.kinds = np.array([row.memory_kind for row in rows])
        self.ran_out = np.array([row.outcome == "oom" for row in rows])

    def predict(self, values: Mapping[str, float]) -> tuple[Any, Any]:
        """Return the bytes that each row's figure counts, and the device's, on the fullest stage."""
        known = self.calibration.coefficients
        changed = {name: known[name].model_copy(update={"value": value}) for name, value in values.items()}
        used = self.calibration.model_copy(update={"coefficients": {**known, **changed}})
        memory = stage_memory(self.job, self.plan, used, self.microbatches, self.watched)
        shape = (len(self.watched), len(self.measured))
        device = np.broadcast_to(memory.device, shape)
        at = (device.argmax(axis=0), np.arange(len(self.measured)))
        sums = {kind: np.broadcast_to(getattr(memory, kind), shape)[at] for kind in set(self.kinds.tolist())}
        return np.choose([sorted(sums).index(kind) for kind in self.kinds], [sums[kind] for kind in sorted(sums)]), device[at]


def names_for(rows: Sequence[Measurement]) -> list[str]:
    """Return the coefficients that these rows can say something about."""
    first = rows[0].job
    found = ["logits_bytes_per_element", "workspace_bytes"]
    if any(row.memory_bytes is None or row.memory_kind != "allocated" for row in rows):
        found.append("fragmentation")
    gathers = any(int(row.plan.sequence_parallel) and int(row.plan.tp) > 1 for row in rows)
    if gathers and first.framework.gathered_inputs is None:
        found.append("gathered_inputs_kept")
    if any(gradient_bytes(row.job) > 4 for row in rows):
        found.append("added_gradients_share")
    return sorted(found)


def fit_memory(rows: Sequence[Measurement], calibration_of: Callable[[Job], Calibration], source: str) -> Fitted:
    """Return the coefficients of the rows of one framework."""
    names = names_for(rows)
    models = sorted({row.job.model.name for row in rows})
    tables = _tables(rows, calibration_of)
    prior = {name: calibration_of(rows[0].job)[name] for name in (*names, SPREAD)}
    held_out: list[tuple[Any, Any, Any, Any]] = []
    for model in models:
        others = [table for table in tables if table.job.model.name != model]
        values = _fit(others, names, prior)
        held_out += [
            (*table.predict({n: values[n] for n in names}), table, values[SPREAD]) for table in tables if table.job.model.name == model
        ]
    before = [(*table.predict({}), table, prior[SPREAD]) for table in tables]
    values = _fit(tables, names, prior)
    errors, was = _errors(held_out), _errors(before)
    spread = values[SPREAD] if errors is None else max(errors[1] / NORMAL_90, LEAST_SPREAD)
    labels, labels_before = _labels(held_out), _labels(before)
    wrong, wrong_before = (a[1] - a[0] + a[3] - a[2] for a in (labels, labels_before))
    helps = wrong < wrong_before if errors is None or was is None else errors[0] < was[0]
    if not helps and was is not None:  # what the model is worth as it is, with nothing fitted
        errors, names, labels = was, [], labels_before
        spread = max(was[1] / NORMAL_90, LEAST_SPREAD)
    residual = None if errors is None else round(errors[0], 4)
    rounded = {name: float(f"{values[name]:.4g}") for name in names} | {SPREAD: round(spread, 3)}
    overrides = {
        name: Override(
            value=value, source=source + (", models held out" if name == SPREAD and names else ""), n=len(rows), residual=residual
        )
        for name, value in rounded.items()
    }
    return Fitted(
        overrides=overrides, n=len(rows), errors=None if errors is None or was is None else (was, errors), labels=labels, helps=helps
    )


def _tables(rows: Sequence[Measurement], calibration_of: Callable[[Job], Calibration]) -> list[Table]:
    by_job: dict[int, list[Measurement]] = defaultdict(list)
    for row in rows:
        by_job[id(row.job)].append(row)
    return [Table(own, calibration_of(own[0].job)) for own in by_job.values()]


def _normal_log(z: Any) -> Any:
    """Return log of the normal distribution function, also far out (Abramowitz and Stegun, 26.2.12)."""
    below = np.array([0.5 * math.erfc(-min(max(v, -30.0), 30.0) / math.sqrt(2.0)) for v in np.ravel(z)])
    far = -0.5 * np.minimum(z, -5.0) ** 2 - np.log(-np.minimum(z, -5.0) * math.sqrt(2.0 * math.pi))
    return np.where(z < -5.0, far, np.log(np.maximum(below, 1e-300)))


def _loss(tables: Sequence[Table], names: Sequence[str], values: Mapping[str, float], prior: Mapping[str, float]) -> float:
    total = sum(0.5 * ((values[n] - prior[n]) / DOUBT[n][0]) ** 2 for n in names)
    for table in tables:
        said, device = table.predict({n: values[n] for n in names})
        known = ~np.isnan(table.measured)
        off = np.log(said[known] / table.measured[known]) / LOSS_SCALE
        total += float(np.log1p(off**2).sum())
        sign = np.where(table.ran_out, 1.0, -1.0)[~known]
        z = sign * np.log(device[~known] / table.capacity) / values[SPREAD]
        total -= float(_normal_log(z).sum())
    return total


def _fit(tables: Sequence[Table], names: Sequence[str], prior: Mapping[str, float]) -> dict[str, float]:
    """Return the values of least loss, by a search along each coefficient in turn with halving steps."""
    ranges = {n: DOUBT[n] for n in names} | {SPREAD: (0.05, LEAST_SPREAD, 0.4)}
    values = {n: min(max(prior[n], ranges[n][1]), ranges[n][2]) for n in ranges}
    steps = {n: ranges[n][0] for n in ranges}
    best = _loss(tables, names, values, prior)
    while max(steps[n] / ranges[n][0] for n in ranges) > 0.02:
        for name, (_, least, most) in ranges.items():
            moved = False
            for way in (1.0, -1.0):
                tried = values | {name: min(max(values[name] + way * steps[name], least), most)}
                found = _loss(tables, names, tried, prior)
                if found < best - 1e-9:
                    values, best, moved = tried, found, True
                    break
            if not moved:
                steps[name] *= 0.5
    return values


def _errors(found: Sequence[tuple[Any, Any, Table, float]]) -> tuple[float, float] | None:
    off = [np.abs(np.log(said / table.measured))[~np.isnan(table.measured)] for said, _, table, _ in found]
    every = np.concatenate(off)
    return (float(np.median(every)), float(np.quantile(every, 0.9))) if len(every) else None


def _labels(found: Sequence[tuple[Any, Any, Table, float]]) -> tuple[int, int, int, int]:
    """Return runs that fitted and were predicted to, those that fitted, that ran out and were predicted to, that ran out."""
    fits = np.concatenate([device < table.capacity for _, device, table, _ in found])
    out = np.concatenate([table.ran_out for _, _, table, _ in found])
    return int((fits & ~out).sum()), int((~out).sum()), int((~fits & out).sum()), int(out.sum())
