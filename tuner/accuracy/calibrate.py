"""`python -m tuner.accuracy.calibrate ROWS... -o FOLDER`: one calibration file for each framework and GPU of published rows.

A file is written only where jobs that its fit had not seen came out better than without it; what is declined is said.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.accuracy.rows import read_files
from tuner.cost_model.calibration import calibration_for
from tuner.cost_model.fit.coefficients import Fitted, Step, fit_coefficients, names_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.cluster import Gpu
    from tuner.measurement import Measurement

FEWEST_ROWS = 5
FEWEST_JOBS = 3


def steps_by_stack(measurements: Iterable[Measurement]) -> dict[tuple[str, str], list[Step]]:
    """Return the timed pretraining steps by (framework, GPU); superseded rows are left out."""
    stacks: dict[tuple[str, str], list[Step]] = defaultdict(list)
    for row in measurements:
        if row.step_s and not row.superseded and row.job.task == "pretrain":
            step = Step(id=row.id, job=row.job, plan=row.plan, step_s=row.step_s)
            stacks[row.job.framework.name, row.job.cluster.gpu.name].append(step)
    return dict(sorted(stacks.items()))


def fit_stack(steps: list[Step], gpu: Gpu, source: str) -> Fitted | None:
    """Return the coefficients of one framework on one GPU, or None where there are too few rows or jobs to hold some out."""
    if len(steps) < FEWEST_ROWS or len({id(step.job) for step in steps}) < FEWEST_JOBS:
        return None
    return fit_coefficients(steps, {gpu.name: calibration_for("auto", gpu)}, names_for(steps), source)


def text_of(name: str, framework: str, gpu: str, fitted: Fitted) -> str:
    """Return the YAML of a calibration file."""
    lines = [
        "# Written by `python -m tuner.accuracy.calibrate`; change the fit, not this file.",
        f"# Jobs held out: median |log error| {fitted.before[0]:.3f} -> {fitted.after[0]:.3f}, "
        f"90th percentile {fitted.before[1]:.3f} -> {fitted.after[1]:.3f}.",
        f"name: {name}",
        f"gpus: [{gpu}]",
        f"framework: {framework}",
        "coefficients:",
    ]
    for key, entry in fitted.overrides.items():
        residual = "" if entry.residual is None else f", residual: {entry.residual}"
        lines.append(f'  {key}: {{value: {entry.value}, source: "{entry.source}", n: {entry.n}{residual}}}')
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Fit every stack of the files and write what helps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--only", help="one framework")
    options = parser.parse_args(arguments)
    measurements, _ = read_files(options.rows)
    for (framework, gpu), steps in steps_by_stack(measurements).items():
        if options.only not in (None, framework):
            continue
        source = "whole steps: " + ", ".join(sorted({_origin(step.id) for step in steps}))
        fitted = fit_stack(steps, steps[0].job.cluster.gpu, source)
        name = f"{framework}-{gpu}"
        if fitted is None:
            sys.stderr.write(f"{name}: {len(steps)} rows, too few\n")
            continue
        path = options.out / f"{name}.yaml"
        verdict = "written" if fitted.helps else "declined: held-out jobs came out worse"
        sys.stderr.write(f"{name}: {len(steps)} rows, {fitted.before[0]:.3f} -> {fitted.after[0]:.3f} held out, {verdict}\n")
        if fitted.helps:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text_of(name, framework, gpu, fitted), encoding="utf-8")
            temporary.replace(path)
    return 0


def _origin(row_id: str) -> str:
    """Return the leading words of a row's id, which name its source."""
    return "-".join(row_id.split("-")[:2])


if __name__ == "__main__":
    sys.exit(main())
