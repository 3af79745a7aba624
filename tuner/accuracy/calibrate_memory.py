"""`python -m tuner.accuracy.calibrate_memory ROWS... -o FOLDER`: `<framework>-memory.yaml`, from what published runs took.

A framework gets a file where it has memory figures, or runs that ran out of memory, of at least two models. Where models that the fit
had not seen came out no better, the file holds the spread of the margin alone: how far the model is off as it is. `calibrate` leaves
these files alone: they hold other coefficients than its own.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.accuracy.rows import read_files
from tuner.cost_model.calibration import MEMORY, calibration_for
from tuner.cost_model.fit.memory import Fitted, fit_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.measurement import Measurement

FEWEST_ROWS = 20
FEWEST_MODELS = 2


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
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--only", help="one framework")
    options = parser.parse_args(arguments)
    measurements, _ = read_files(options.rows)
    for framework, rows in rows_by_framework(measurements).items():
        if options.only not in (None, framework):
            continue
        origin = ", ".join(sorted({"-".join(row.id.split("-")[:2]) for row in rows}))
        fitted = fit_memory(rows, _base, f"memory of runs: {origin}")
        path = options.out / f"{framework}{MEMORY}.yaml"
        if not fitted.helps and fitted.errors is None:
            sys.stderr.write(f"{path.stem}: declined, held-out models came out no better\n")
            path.unlink(missing_ok=True)
            continue
        sys.stderr.write(text_of(framework, fitted))
        path.write_text(text_of(framework, fitted), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
