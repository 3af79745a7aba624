"""`python -m tuner.accuracy.calibrate_memory ROWS... -o FOLDER`: `<framework>-memory.yaml`, from what published runs took.

A framework gets a file where it has memory figures, or runs that ran out of memory, of at least two models. Where models that the fit
had not seen came out no better, the file holds the spread of the margin alone: how far the model is off as it is. `calibrate` leaves
these files alone: they hold other coefficients than its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.accuracy.calibrate import fitted_lines, grouped, put, runs_help, step_of, tell, with_kernel
from tuner.accuracy.rows import read_files
from tuner.cost_model.calibration import MEMORY, CalibrationFile, calibration_for, layered
from tuner.cost_model.estimate import estimate
from tuner.cost_model.fit.memory import LEAST_SPREAD, SPREAD, Fitted, fit_memory
from tuner.cost_model.fit.residuals import Grouped, fit_kernel
from tuner.cost_model.memory import NORMAL_90, stage_memory
from tuner.cost_model.residual import Kernel
from tuner.cost_model.runs import runs_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.fit.coefficients import Step
    from tuner.job import Job
    from tuner.measurement import Measurement

FEWEST_ROWS = 20
FEWEST_MODELS = 2
FEWEST_OF_RUNS = 10
FEWEST_SERIES = 3
LEAST_SHARE = 0.1  # of what the model says is allocated: a figure below it is no figure of this run


def rows_by_framework(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Return by framework the rows with a memory figure; where there are none, those that fitted or ran out, if some did run out."""
    found: dict[str, list[Measurement]] = defaultdict(list)
    for row in measurements:
        found[row.job.framework.name].append(row)
    chosen = {}
    for framework, rows in sorted(found.items()):
        figures = [row for row in rows if row.memory_bytes is not None]
        own = figures or (rows if any(row.outcome == "oom" for row in rows) else [])
        if len(own) >= FEWEST_ROWS and len({row.job.model.name for row in own}) >= FEWEST_MODELS:
            chosen[framework] = own
    return chosen


def runs_of(rows: Sequence[Measurement], calibration_of: Callable[[Job], Calibration]) -> tuple[list[Step], Grouped, Any] | None:
    """Return the rows with a memory figure as steps and as runs with the log errors in what is allocated, and the bytes of each that its
    figure counts beyond that; None where there are too few series to leave one out. The calibrations must have no memory runs.
    """
    figures = [row for row in rows if row.memory_bytes is not None]
    steps, errors, others = [], [], []
    for row in figures:
        used = calibration_of(row.job)
        microbatches = row.plan.microbatches(row.job.gpus, row.job.global_batch)
        memory = stage_memory(row.job, row.plan, used, microbatches, estimate(row.job, row.plan, used).worst_stage)
        allocated = float(memory.allocated)
        beyond = float(getattr(memory, row.memory_kind)) - allocated
        steps.append(step_of(row))
        errors.append(math.log(max((row.memory_bytes or 0.0) - beyond, LEAST_SHARE * allocated) / allocated))
        others.append(beyond)
    if len(figures) < FEWEST_OF_RUNS or len({step.series for step in steps}) < FEWEST_SERIES:
        return None
    return steps, grouped(steps, np.array(errors)), np.array(others)


def with_runs(framework: str, fitted: Fitted, steps: Sequence[Step], of: Grouped, kernel: Kernel) -> str:
    """Return the YAML of a calibration file with the runs, and with the spread that series left out have around the others; without
    them where series left out come out no better.
    """
    told = tell(kernel, of)
    off = np.abs(told.held.mean - of.runs.log_error)
    if not runs_help(of.runs.log_error, told.held.mean):
        return text_of(framework, fitted)
    spread = round(max(float(np.quantile(off, 0.9)) / NORMAL_90, LEAST_SPREAD), 3)
    known = fitted.overrides[SPREAD].model_copy(update={"value": spread, "source": fitted.overrides[SPREAD].source + ", series left out"})
    text = text_of(framework, dataclasses.replace(fitted, overrides=fitted.overrides | {SPREAD: known}))
    lines = runs_text(fitted_lines(steps, told.runs)).rstrip("\n").split("\n")
    worth = (
        f"# Runs of series left out, told by the others: {100 * np.median(np.expm1(off)):.1f} % off (median), "
        f"{100 * np.quantile(np.expm1(off), 0.9):.1f} % (90th percentile)."
    )
    head, rest = text.split("\n", 1)
    return "\n".join([head, worth, rest.rstrip(), "measured_memory:", "  runs: |", *(f"    {line}" for line in lines)]) + "\n"


def text_of(framework: str, fitted: Fitted) -> str:
    """Return the YAML of a calibration file, with what it is worth as a comment."""
    worth = []
    if fitted.errors and not fitted.helps:
        worth.append(f"# Median |log error| {fitted.errors[1][0]:.3f}, 90th percentile {fitted.errors[1][1]:.3f}, with nothing fitted.")
    elif fitted.errors:
        (median, p90), (after, p90_after) = fitted.errors
        worth.append(f"# Models held out: median |log error| {median:.3f} -> {after:.3f}, 90th percentile {p90:.3f} -> {p90_after:.3f}.")
    right, fits, out_right, out = fitted.labels
    counted = f"{right} of {fits} runs that fitted" + (f" and {out_right} of {out} that ran out" if out else "")
    worth.append(f"# {'Models held out: ' if fitted.helps else ''}{counted} predicted so.")
    lines = ["# Written by `python -m tuner.accuracy.calibrate_memory`; change the fit, not this file.", *worth]
    lines += [f"name: {framework}{MEMORY}", f"framework: {framework}", "coefficients:"]
    for name, entry in fitted.overrides.items():
        residual = "" if entry.residual is None else f", residual: {entry.residual}"
        lines.append(f'  {name}: {{value: {entry.value}, source: "{entry.source}", n: {entry.n}{residual}}}')
    return "\n".join(lines) + "\n"


def _base(job: Job) -> Calibration:
    return calibration_for("auto", job.cluster.gpu)


def main(arguments: list[str] | None = None) -> int:
    """Fit every framework of the files and write what helps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="a folder with a prior.yaml")
    options = parser.parse_args(arguments)
    measurements, _ = read_files(options.rows)
    found: dict[str, tuple[Fitted, tuple[list[Step], Grouped, Any] | None]] = {}
    for framework, rows in rows_by_framework(measurements).items():
        origin = ", ".join(sorted({"-".join(row.id.split("-")[:2]) for row in rows}))
        fitted = fit_memory(rows, _base, f"memory of runs: {origin}")
        if not fitted.helps and fitted.errors is None:
            sys.stderr.write(f"{framework}{MEMORY}: declined, held-out models came out no better\n")
            (options.out / f"{framework}{MEMORY}.yaml").unlink(missing_ok=True)
            continue
        over = CalibrationFile(name="fitted", coefficients=fitted.overrides)
        found[framework] = fitted, runs_of(rows, lambda job, over=over: layered(_base(job), over))  # type: ignore[misc]
    kernel = fit_kernel({name: runs[1] for name, (_, runs) in found.items() if runs})
    for framework, (fitted, runs) in found.items():
        text = with_runs(framework, fitted, runs[0], runs[1], kernel) if runs else text_of(framework, fitted)
        sys.stderr.write("".join(line + "\n" for line in text.splitlines() if line.startswith("#")))
        put(options.out / f"{framework}{MEMORY}.yaml", text)
    prior = options.out / "prior.yaml"
    put(prior, with_kernel(prior.read_text(encoding="utf-8"), kernel, "memory_kernel"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
