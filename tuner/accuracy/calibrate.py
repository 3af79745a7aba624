"""`python -m tuner.accuracy.calibrate ROWS... -o FOLDER`: calibration files of frameworks, from published rows.

A framework with rows on several GPUs gets one file for any GPU, and each of its GPUs one on top of that; a framework on one GPU gets
that one. Each release of a framework with several gets one on top of both. A file is written only where jobs that its fit had not seen
came out clearly better than without it; what is declined is said.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.accuracy.rows import read_files
from tuner.cost_model.calibration import CalibrationFile, calibration_for, layered
from tuner.cost_model.fit.coefficients import Fitted, Step, fit_coefficients, names_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.measurement import Measurement

FEWEST_ROWS = 5
FEWEST_JOBS = 3
FEWEST_OF_RELEASE = 14  # a handful of rows of one release says more about the rows than about the release


def steps_by_framework(measurements: Iterable[Measurement]) -> dict[str, dict[str, list[Step]]]:
    """Return the timed pretraining steps by framework and GPU; superseded rows are left out."""
    stacks: dict[str, dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for row in measurements:
        if row.step_s and not row.superseded and row.job.task == "pretrain":
            step = Step(id=row.id, job=row.job, plan=row.plan, step_s=row.step_s)
            stacks[row.job.framework.name][row.job.cluster.gpu.name].append(step)
    return {framework: dict(sorted(of_gpu.items())) for framework, of_gpu in sorted(stacks.items())}


def fit_steps(steps: Sequence[Step], bases: Mapping[str, Calibration]) -> Fitted | None:
    """Return the coefficients of these steps on top of `bases` (by GPU), or None where too few rows or jobs are there to hold some out."""
    if len(steps) < FEWEST_ROWS or len({id(step.job) for step in steps}) < FEWEST_JOBS:
        return None
    source = "whole steps: " + ", ".join(sorted({_origin(step.id) for step in steps}))
    return fit_coefficients(steps, bases, names_for(steps), source)


def text_of(file: CalibrationFile, fitted: Fitted) -> str:
    """Return the YAML of a calibration file, with what it is worth as a comment."""
    lines = [
        "# Written by `python -m tuner.accuracy.calibrate`; change the fit, not this file.",
        f"# Jobs held out: median |log error| {fitted.before[0]:.3f} -> {fitted.after[0]:.3f}, "
        f"90th percentile {fitted.before[1]:.3f} -> {fitted.after[1]:.3f}.",
        f"name: {file.name}",
        f"framework: {file.framework}",
        *([f'release: "{file.release}"'] if file.release else []),
        *(f"{key}: [{', '.join(names)}]" for key, names in (("gpus", file.gpus), ("fitted_on", file.fitted_on)) if names),
        "coefficients:",
    ]
    for key, entry in file.coefficients.items():
        residual = "" if entry.residual is None else f", residual: {entry.residual}"
        lines.append(f'  {key}: {{value: {entry.value}, source: "{entry.source}", n: {entry.n}{residual}}}')
    return "\n".join(lines) + "\n"


def calibrate_framework(framework: str, of_gpu: Mapping[str, list[Step]]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, YAML or "", verdict) of a framework: on any GPU, on each GPU with that beneath it, and each release with both."""
    bases = {gpu: calibration_for("auto", steps[0].job.cluster.gpu) for gpu, steps in of_gpu.items()}
    every = [step for steps in of_gpu.values() for step in steps]
    if len(of_gpu) > 1:
        fitted_on = [gpu for gpu, steps in of_gpu.items() if len(steps) >= FEWEST_ROWS]
        file, text, verdict = _judged(framework, framework, fit_steps(every, bases), len(every), fitted_on=fitted_on)
        yield framework, text, verdict
        bases = {gpu: layered(base, file) if file else base for gpu, base in bases.items()}
    for gpu, steps in of_gpu.items():
        name = f"{framework}-{gpu}"
        file, text, verdict = _judged(name, framework, fit_steps(steps, bases), len(steps), gpus=(gpu,))
        yield name, text, verdict
        bases[gpu] = layered(bases[gpu], file) if file else bases[gpu]
    releases = sorted({step.job.release for step in every if step.job.release})
    for release in releases if len(releases) > 1 else ():
        steps = [step for step in every if step.job.release == release]
        if len(steps) < FEWEST_OF_RELEASE:
            continue
        name = f"{framework}-{re.sub('[^a-z0-9.]+', '-', release.lower()).strip('-')}"
        _, text, verdict = _judged(name, framework, fit_steps(steps, bases), len(steps), release=release)
        yield name, text, verdict


def _judged(
    name: str,
    framework: str,
    fitted: Fitted | None,
    rows: int,
    *,
    gpus: Sequence[str] = (),
    fitted_on: Sequence[str] = (),
    release: str = "",
) -> tuple[CalibrationFile | None, str, str]:
    if fitted is None:
        return None, "", f"{name}: {rows} rows, too few"
    change = f"{name}: {rows} rows, {fitted.before[0]:.3f} -> {fitted.after[0]:.3f} held out"
    if not fitted.helps:
        return None, "", f"{change}, declined: held-out jobs came out no better, or not clearly"
    file = CalibrationFile(
        name=name, framework=framework, release=release, gpus=tuple(gpus), fitted_on=tuple(fitted_on), coefficients=fitted.overrides
    )
    return file, text_of(file, fitted), f"{change}, written"


def main(arguments: list[str] | None = None) -> int:
    """Fit every framework of the files and write what helps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--only", help="one framework")
    options = parser.parse_args(arguments)
    measurements, _ = read_files(options.rows)
    for framework, of_gpu in steps_by_framework(measurements).items():
        if options.only not in (None, framework):
            continue
        for name, text, verdict in calibrate_framework(framework, of_gpu):
            sys.stderr.write(verdict + "\n")
            path = options.out / f"{name}.yaml"
            if not text:
                path.unlink(missing_ok=True)
                continue
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    return 0


def _origin(row_id: str) -> str:
    """Return the leading words of a row's id, which name its source."""
    return "-".join(row_id.split("-")[:2])


if __name__ == "__main__":
    sys.exit(main())
