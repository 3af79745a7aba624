"""`tuner validate --cross`: each row predicted from a calibration that has not seen its series, its model or its source.

A framework's coefficients are refitted without the rows left out by iterating the same robust, prior-held least squares on the model's
derivative at the shipped coefficients, and the residual process forgets the rows in closed form; so does that of memory, whose
coefficients stay. Held as they are too: the hardware's curves, the kernels, and each source's noise and reach.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tuner.accuracy.calibrate import FEWEST_JOBS, FEWEST_ROWS, bases_of, grouped, hardware_of, step_of, tell
from tuner.accuracy.calibrate_memory import runs_of
from tuner.cost_model.fit.coefficients import DOUBT, LOSS_SCALE, log_errors, tables_of
from tuner.cost_model.fit.residuals import WORST, held_out, without
from tuner.cost_model.residual import covariance
from tuner.cost_model.runs import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.accuracy.validate import Prediction, Scored
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.fit.coefficients import Step
    from tuner.cost_model.runs import Runs
    from tuner.job import Job

Left = Literal["series", "model", "source"]
LEFT: tuple[Left, ...] = ("series", "model", "source")
ITERATIONS = 6
STEP = 1e-3


def left_out(item: Scored, left: Left) -> str:
    """Return what is left out together with a row: its series, all rows of its model in its source, or its source."""
    row = item.row
    if left == "source":
        return row.source
    return f"{row.source}|{row.job.model.name}" if left == "model" else f"{row.source}|" + "|".join(map(str, row.series.values()))


def told_without(
    scored: Sequence[Scored], calibration_of: Callable[[Job], Calibration], progress: Callable[[str, int, int], None] | None = None
) -> dict[Left, list[Scored]]:
    """Return the rows with step times told without what each leaves out; rows that no calibration was fitted to stay as they are."""
    told: dict[Left, dict[int, Prediction]] = {left: {} for left in LEFT}
    by_framework: dict[str, list[Scored]] = defaultdict(list)
    for item in scored:
        row = item.row
        if row.step_s and not row.superseded and row.job.task == "pretrain":
            by_framework[row.job.framework.name].append(item)
    for done, (name, items) in enumerate(by_framework.items()):
        if progress is not None:
            progress(f"leaving out rows of {name}: framework", done + 1, len(by_framework))
        fitted = linearised(items, calibration_of)
        for left in LEFT:
            told[left].update(_told(fitted, left))
    memory = _memory_told(scored, calibration_of)
    for left, found in memory.items():
        for item in scored:
            if id(item) in found:
                said = told[left].get(id(item), item.said)
                told[left][id(item)] = said._replace(memory_bytes=found[id(item)])
    return {left: [dataclasses.replace(i, said=told[left].get(id(i), i.said)) for i in scored] for left in LEFT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearised:
    """A framework's rows: log errors (n,) without its coefficients and with them, their derivative (n, k) by the logarithms of the
    coefficients, where these stand (k,) from the prior, and the prior's doubt (k,); the half-width of the interval, as a logarithm, of a
    framework that was never measured.
    """

    items: list[Scored]
    steps: list[Step]
    calibration: Calibration
    bare: Any
    fitted: Any
    slope: Any
    moved: Any
    doubt: Any
    unmeasured: float


def linearised(items: Sequence[Scored], calibration_of: Callable[[Job], Calibration]) -> Linearised:
    """Return a framework's rows with the model's derivative at its coefficients."""
    by_job: dict[int, list[Scored]] = defaultdict(list)
    for item in items:
        by_job[id(item.row.job)].append(item)
    ordered = [item for of_job in by_job.values() for item in of_job]
    steps = [step_of(item.row) for item in ordered]
    bases = bases_of(steps)
    tables = tables_of(steps, bases)
    calibration = calibration_of(ordered[0].row.job)
    own = calibration.framework == ordered[0].row.job.framework.name
    values = {name: calibration[name] for name in DOUBT if own and calibration.coefficients[name].based_on == calibration.name}
    prior = {name: next(iter(bases.values()))[name] for name in values}
    bare, fitted = log_errors(tables_of(steps, hardware_of(steps)), {}), log_errors(tables, values)
    slopes = [(log_errors(tables, values | {name: value * np.exp(STEP)}) - fitted) / STEP for name, value in values.items()]
    return Linearised(
        items=ordered,
        steps=steps,
        calibration=calibration,
        bare=bare,
        fitted=fitted,
        slope=np.stack(slopes, axis=-1) if slopes else np.zeros((len(ordered), 0)),
        moved=np.log([values[name] / prior[name] for name in values]) if values else np.zeros(0),
        doubt=np.array([DOUBT[name][0] for name in values]),
        unmeasured=float(np.log1p(next(iter(bases.values()))["time_spread_90"])),
    )


def enough(of: Linearised, rest: Any) -> bool:
    """Whether the rows `rest` (indices) would make a calibration; one that never saw any of the rows stays as it is."""
    return unseen(of) or (len(rest) >= FEWEST_ROWS and len({id(of.items[i].row.job) for i in rest.tolist()}) >= FEWEST_JOBS)


def refitted(of: Linearised, rest: Any) -> Any:
    """Return the log errors of all rows with the coefficients of the rows `rest` (indices) alone: reweighted least squares for the
    Cauchy loss of the fit, on its derivative. Too few rows leave the prior.
    """
    if not len(of.doubt) or not enough(of, rest):
        return of.bare
    if unseen(of):
        return of.fitted
    slope, step = of.slope[rest], np.zeros(len(of.doubt))
    for _ in range(ITERATIONS):
        errors = of.fitted[rest] + slope @ step
        weight = 1.0 / (LOSS_SCALE**2 + errors**2)
        normal = slope.T @ (weight[:, None] * slope) + np.diag(1.0 / of.doubt**2)
        step = np.linalg.solve(normal, -slope.T @ (weight * of.fitted[rest]) - of.moved / of.doubt**2)
    return of.fitted + of.slope @ step


def unseen(of: Linearised) -> bool:
    """Whether the calibration's runs are others than these rows: a person's own, which its coefficients were not fitted to."""
    residual = of.calibration.residual
    return residual is not None and not {step.id for step in of.steps} & set(residual.solved.runs.ids)


def _told(of: Linearised, left: Left) -> dict[int, Prediction]:
    groups = np.array([left_out(item, left) for item in of.items])
    found: dict[int, Prediction] = {}
    process = _process(of)
    for group in np.unique(groups):
        these = np.flatnonzero(groups == group)
        rest = np.flatnonzero(groups != group)
        errors, known = refitted(of, rest), enough(of, rest)
        spread90 = float(np.log1p(of.calibration["time_spread_90"])) if known else of.unmeasured
        mean, half = np.zeros(len(these)), np.full(len(these), spread90)
        if process is not None and known:
            inverse, runs, before = process
            bounded = np.concatenate([runs.log_error[:before], np.clip(errors, -WORST, WORST)])
            held = without(inverse, bounded, inverse @ bounded, runs, these + before)
            mean, half = held.mean, held.deviation * runs.reach[these + before]
        for k, i in enumerate(these.tolist()):
            row, said = of.items[i].row, of.items[i].said
            seconds, spread = (row.step_s or 0.0) * float(np.exp(mean[k] - errors[i])), float(np.exp(half[k]))
            found[id(of.items[i])] = said._replace(step_s=seconds, low_s=seconds / spread, high_s=seconds * spread)
    return found


def _process(of: Linearised) -> tuple[Any, Runs, int] | None:
    """Return the inverse covariance of the rows as fitted runs, these, and how many shipped ones stand before them (those of the
    calibration where it has not seen the rows); None where the framework has none.
    """
    residual = of.calibration.residual
    if residual is None:
        return None
    runs, before = tell(residual.kernel, grouped(of.steps, of.fitted)).runs, 0
    if unseen(of):
        before = len(residual.solved.runs.ids)
        runs = joined(residual.solved.runs, runs)
    return np.linalg.inv(covariance(residual.kernel, runs) + np.diag(runs.variance)), runs, before


def _memory_told(scored: Sequence[Scored], calibration_of: Callable[[Job], Calibration]) -> dict[Left, dict[int, float]]:
    """Return the bytes of rows with a memory figure whose framework has memory runs, each told without what it leaves out."""
    by_framework: dict[str, list[Scored]] = defaultdict(list)
    for item in scored:
        if item.row.memory_bytes is not None and calibration_of(item.row.job).memory_residual is not None:
            by_framework[item.row.job.framework.name].append(item)
    told: dict[Left, dict[int, float]] = {left: {} for left in LEFT}
    for items in by_framework.values():
        made = runs_of([item.row for item in items], lambda job: calibration_of(job).model_copy(update={"measured_memory": None}))
        if made is None:
            continue
        kernel = calibration_of(items[0].row.job).memory_kernel
        runs = tell(kernel, made[1]).runs
        for left in LEFT:
            held = held_out(kernel, runs, np.array([left_out(item, left) for item in items]))
            for item, mean, error, beyond in zip(items, held.mean, made[1].runs.log_error, made[2], strict=True):
                allocated = (item.row.memory_bytes or 0.0) - beyond
                told[left][id(item)] = float(allocated * np.exp(mean - error) + beyond)
    return told
