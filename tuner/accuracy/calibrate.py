"""`python -m tuner.accuracy.calibrate ROWS... -o FOLDER`: calibration files of frameworks, from published rows.

One file a framework: coefficients fitted to its steps, written only where jobs that the fit had not seen came out clearly better with
them, and its measured runs with the errors that are left, from which the residual process (cost_model/residual.py) tells the error near
a plan. The kernel of that process is one for all frameworks and stands at the end of prior.yaml, which is written too.
`--keep-coefficients` leaves the coefficients of the folder's files as they are.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tuner.accuracy.rows import read_files
from tuner.accuracy.unmeasured import unmeasured, with_spread
from tuner.cost_model.calibration import CalibrationFile, Override, before_fit, calibration_for, layered
from tuner.cost_model.fit.coefficients import CLEARLY, MOST_SPREAD, WORST, Fitted, Step, fit_coefficients, log_errors, names_for, tables_of
from tuner.cost_model.fit.residuals import Grouped, HeldOut, fit_kernel, fit_noise, held_out, reaching, weighed
from tuner.cost_model.residual import Kernel
from tuner.cost_model.runs import FIELDS, MeasuredRuns, Runs, read_runs, runs_text
from tuner.errors import printable
from tuner.files import write
from tuner.load import load_spec, load_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.measurement import Measurement

FEWEST_ROWS = 5
FEWEST_JOBS = 3
FEWEST_FOR_KERNEL = 10
WIDEST = 5.0  # the log error of a run in another unit, or of another job
NOISY = 0.3  # a framework whose runs are noisier than this says nothing of how errors vary with the plan


class Written(NamedTuple):
    """A calibration file in the making: its coefficients (empty where they were declined), comment lines, and the verdict."""

    framework: str
    coefficients: dict[str, Override]
    comments: tuple[str, ...]
    verdict: str


def steps_by_framework(measurements: Iterable[Measurement]) -> dict[str, list[Step]]:
    """Return the timed pretraining steps by framework, in the order of their GPUs; superseded rows are left out."""
    stacks: dict[str, list[Step]] = defaultdict(list)
    for row in measurements:
        if row.step_s and not row.superseded and row.job.task == "pretrain":
            stacks[row.job.framework.name].append(step_of(row))
    return {name: sorted(steps, key=lambda step: step.job.cluster.gpu.name) for name, steps in sorted(stacks.items())}


def step_of(row: Measurement) -> Step:
    """Return a row with a step time as a step."""
    series = "|".join(str(value) for value in row.series.values())
    return Step(id=row.id, job=row.job, plan=row.plan, step_s=row.step_s or 0.0, series=series, source=row.source)


def bases_of(steps: Sequence[Step]) -> dict[str, Calibration]:
    """Return the calibration of each GPU of these steps, without what is fitted to their framework."""
    return {step.job.cluster.gpu.name: before_fit(step.job.cluster.gpu, step.job.framework.name) for step in steps}


def hardware_of(steps: Sequence[Step]) -> dict[str, Calibration]:
    """Return the calibration of each GPU of these steps, without any framework's."""
    return {step.job.cluster.gpu.name: calibration_for("auto", step.job.cluster.gpu) for step in steps}


def fit_steps(steps: Sequence[Step], bases: Mapping[str, Calibration]) -> Fitted | None:
    """Return the coefficients of these steps on top of `bases` (by GPU), or None where too few rows or jobs are there to hold some out."""
    if len(steps) < FEWEST_ROWS or len({id(step.job) for step in steps}) < FEWEST_JOBS:
        return None
    source = "whole steps: " + ", ".join(sorted({_origin(step.id) for step in steps}))
    return fit_coefficients(steps, bases, names_for(steps), source)


def judged(framework: str, steps: Sequence[Step]) -> Written:
    """Return the coefficients of a framework, or none where held-out jobs came out no better or there are too few rows."""
    fitted = fit_steps(steps, bases_of(steps))
    if fitted is None:
        return Written(framework, {}, (), f"{framework}: {len(steps)} rows, too few for coefficients")
    change = f"{framework}: {len(steps)} rows, {fitted.before[0]:.3f} -> {fitted.after[0]:.3f} held out"
    if not fitted.helps:
        words = "coefficients declined: held-out jobs came out no better, or not clearly"
        return Written(framework, as_it_is(fitted), (f"# {words.capitalize()}; how far off the model is without.",), f"{change}, {words}")
    comment = (
        f"# Coefficients on jobs held out: median |log error| {fitted.before[0]:.3f} -> {fitted.after[0]:.3f}, "
        f"90th percentile {fitted.before[1]:.3f} -> {fitted.after[1]:.3f}."
    )
    return Written(framework, fitted.overrides, (comment,), f"{change}, written")


def as_it_is(fitted: Fitted) -> dict[str, Override]:
    """Return the spread that the model has on a framework's jobs with nothing fitted, where enough of them say so."""
    known = fitted.overrides["time_spread_90"]
    if known.n < FEWEST_FOR_KERNEL:
        return {}
    spread = min(math.expm1(fitted.before[1]), MOST_SPREAD)
    return {"time_spread_90": Override(value=round(spread, 3), source=known.source.replace(", jobs held out", ""), n=known.n)}


def kept(folder: Path, framework: str) -> Written:
    """Return what the folder's file of a framework has of coefficients."""
    path = folder / f"{framework}.yaml"
    if not path.is_file():
        return Written(framework, {}, (), f"{framework}: no file")
    file: CalibrationFile = load_spec(CalibrationFile, load_yaml(path), str(path))
    comments = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# Coefficients"))
    return Written(framework, dict(file.coefficients), comments, f"{framework}: coefficients kept")


def run_of(step: Step, log_error: float) -> list[Any]:
    """Return a step as a line of residual.COLUMNS, its noise, weight and reach not yet fitted."""
    job, model = step.job, step.job.model
    sizes = (model.hidden, model.layers, job.seq_len, job.gpus, job.global_batch, job.cluster.sizes[0])
    kinds = (int(model.moe is not None), int(model.mla is not None))
    knobs = (int(getattr(step.plan, name)) for name in FIELDS)
    names = (printable(text) for text in (step.id, job.cluster.gpu.name, job.release, job.precision))
    return [*names, *sizes, *kinds, *knobs, round(min(max(log_error, -WIDEST), WIDEST), 5), 0.06, 1, 1.645]


def runs_of(steps: Sequence[Step], coefficients: Mapping[str, Override], bases: Mapping[str, Calibration]) -> Grouped:
    """Return steps (those of one job together) as runs with the log errors that `coefficients` on top of `bases` leave."""
    over = CalibrationFile(name="fitted", coefficients=dict(coefficients))
    left = log_errors(tables_of(steps, {gpu: layered(base, over) for gpu, base in bases.items()}), {})
    return grouped(steps, left)


def grouped(steps: Sequence[Step], errors: Any) -> Grouped:
    """Return steps and their log errors as runs."""
    lines = [run_of(step, error) for step, error in zip(steps, errors.tolist(), strict=True)]
    series, sources = (np.array([getattr(step, name) for step in steps]) for name in ("series", "source"))
    return Grouped(read_runs(runs_text(lines)), series, sources, np.arange(len(steps)))


class Told(NamedTuple):
    """A framework's runs, fitted, and what runs of other series say of each."""

    runs: Runs
    held: HeldOut


def tell(kernel: Kernel, of: Grouped) -> Told:
    """Return runs with noise, weight and reach, and what runs of other series say of each."""
    runs = weighed(kernel, fit_noise(kernel, of))
    held = held_out(kernel, runs, of.series)
    return Told(reaching(runs, of, held), held)


def fitted_lines(steps: Sequence[Step], runs: Runs) -> list[list[Any]]:
    """Return fitted runs as lines of residual.COLUMNS; steps: in the order of the runs."""
    fitted = zip(steps, *(column.tolist() for column in (runs.log_error, runs.noise, runs.weight, runs.reach)), strict=True)
    return [
        [*run_of(step, error)[:-3], round(max(noise, 1e-3), 5), round(min(weight, 1e6), 2), round(min(max(reach, 0.05), 50.0), 3)]
        for step, error, noise, weight, reach in fitted
    ]


def text_of(written: Written, measured: MeasuredRuns | None, gpus: Sequence[str], error: str = "") -> str:
    """Return the YAML of a calibration file, with what it is worth as a comment."""
    on = f"gpus: [{gpus[0]}]" if len(gpus) == 1 else f"fitted_on: [{', '.join(gpus)}]"
    lines = ["# Written by `python -m tuner.accuracy.calibrate`; change the fit, not this file.", *written.comments]
    lines += [error] if error else []
    lines += [f"name: {written.framework}", f"framework: {written.framework}", on]
    lines += ["coefficients:"] if written.coefficients else []
    for key, entry in written.coefficients.items():
        residual = "" if entry.residual is None else f", residual: {entry.residual}"
        lines.append(f'  {key}: {{value: {entry.value}, source: "{entry.source}", n: {entry.n}{residual}}}')
    if measured is not None:
        lines += ["measured:", "  runs: |"]
        lines += [f"    {line}" for line in measured.runs.rstrip("\n").split("\n")]
    return "\n".join(lines) + "\n"


def runs_help(log_error: Any, told: Any) -> bool:
    """Whether series left out come out clearly better told by the other runs (median no worse, bounded mean clearly better)."""
    before, after = np.abs(log_error), np.abs(told - log_error)
    clearly = np.mean(np.minimum(after, WORST)) < CLEARLY * np.mean(np.minimum(before, WORST))
    return bool(np.median(after) < np.median(before) and clearly)


def errors_comment(of: Grouped, told: Told) -> str:
    """Return the comment that says how far left-out series are off."""
    off = np.abs(np.expm1(told.held.mean - of.runs.log_error))
    return (
        f"# Runs of series left out, told by the others: {100 * np.median(off):.1f} % off (median), {100 * np.quantile(off, 0.9):.1f} % "
        "(90th percentile)."
    )


def calibrate(
    frameworks: Mapping[str, Sequence[Step]], written: Mapping[str, Written], kernel: Kernel | None = None
) -> tuple[dict[str, str], Kernel]:
    """Return the text of each framework's file, and the kernel over all (fitted where none is given)."""
    every = {name: runs_of(by_job(steps), written[name].coefficients, bases_of(steps)) for name, steps in frameworks.items()}
    ready = {name: of for name, of in every.items() if len(of.series) >= FEWEST_ROWS and len(set(of.series.tolist())) >= FEWEST_JOBS}
    kernel = kernel or fit_kernel(
        {name: of for name, of in ready.items() if len(of.series) >= FEWEST_FOR_KERNEL and spread_of(of.runs) < NOISY}
    )
    texts = {}
    for name, steps in frameworks.items():
        measured, comment = None, ""
        if name in ready:
            told = tell(kernel, ready[name])
            comment = errors_comment(ready[name], told)
            if runs_help(ready[name].runs.log_error, told.held.mean):
                measured = MeasuredRuns(runs=runs_text(fitted_lines(by_job(steps), told.runs)))
            else:
                comment += " Without them it is no worse, so they are left out."
        if measured is not None or written[name].coefficients:
            gpus = list(dict.fromkeys(step.job.cluster.gpu.name for step in steps))
            texts[name] = text_of(written[name], measured, gpus, comment)
    return texts, kernel


def by_job(steps: Sequence[Step]) -> list[Step]:
    """Return steps with those of one job together, in the order in which jobs first come."""
    found: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        found[id(step.job)].append(step)
    return [step for of_job in found.values() for step in of_job]


def spread_of(runs: Runs) -> float:
    """Return the median distance of log errors from their median: a rough noise."""
    return float(np.median(np.abs(runs.log_error - np.median(runs.log_error))))


def with_kernel(prior: str, kernel: Kernel, name: str = "kernel") -> str:
    """Return the text of prior.yaml with another kernel of this name, at its end; those of other names stay."""
    head, _, rest = prior.partition(f"\n{name}:\n")
    lines = rest.splitlines()
    after = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    block = [f"  {key}: {value}" for key, value in kernel.model_dump().items()]
    return "\n".join([head.rstrip(), *lines[after:], f"{name}:", *block]) + "\n"


def as_if_unmeasured(frameworks: Mapping[str, Sequence[Step]], written: Mapping[str, Written]) -> dict[str, Any]:
    """Return the log errors of each framework's steps with its own calibration unknown: on top of their GPUs' curves lie the coefficients
    of the first relative that was measured on the GPU, else of the first. A framework whose errors scatter more than NOISY says how noisy
    its cluster was, and is left out.
    """
    on = {name: {step.job.cluster.gpu.name for step in steps} for name, steps in frameworks.items()}
    found = {}
    for name, steps in frameworks.items():
        known = [relative for relative in steps[0].job.framework.relatives if relative in written]
        bases = {}
        for gpu, base in hardware_of(steps).items():
            chosen = ([relative for relative in known if gpu in on[relative]] or known)[:1]
            over = CalibrationFile(name="relative", coefficients={} if not chosen else written[chosen[0]].coefficients)
            bases[gpu] = layered(base, over)
        errors = log_errors(tables_of(steps, bases), {})
        if float(np.median(np.abs(errors - np.median(errors)))) < NOISY:
            found[name] = errors
    return found


def main(arguments: list[str] | None = None) -> int:
    """Fit every framework of the files and write what helps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="a folder with a prior.yaml")
    parser.add_argument("--keep-coefficients", action="store_true", help="fit the runs alone")
    parser.add_argument("--only", action="append", help="fit the coefficients of this framework alone, and the runs of all")
    options = parser.parse_args(arguments)
    frameworks = _steps_of(tuple(options.rows))
    fitting = [name for name in frameworks if not options.keep_coefficients and (not options.only or name in options.only)]
    written = {name: kept(options.out, name) for name in frameworks if name not in fitting}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        largest = sorted(fitting, key=lambda name: -len(frameworks[name]))
        for done in pool.map(_judged_of, [tuple(options.rows)] * len(largest), largest):
            sys.stderr.write(done.verdict + "\n")
            written[done.framework] = done
    texts, kernel = calibrate(frameworks, written)
    for name in frameworks:
        put(options.out / f"{name}.yaml", texts.get(name, ""))
    prior = with_kernel((options.out / "prior.yaml").read_text(encoding="utf-8"), kernel)
    found = unmeasured(as_if_unmeasured(frameworks, written))
    if found is not None:
        words = (
            f"{found.frameworks} frameworks as if never measured: {found.error:.3f} off, range {found.spread:.3f}, holds {found.inside:.3f}"
        )
        sys.stderr.write(words + "\n")
        prior = with_spread(prior, found)
    put(options.out / "prior.yaml", prior)
    return 0


@lru_cache(maxsize=1)
def _steps_of(rows: tuple[Path, ...]) -> dict[str, list[Step]]:
    return steps_by_framework(read_files(rows)[0])


def _judged_of(rows: tuple[Path, ...], framework: str) -> Written:
    """Return the coefficients of a framework of these files, which each worker reads for itself: jobs do not travel."""
    return judged(framework, _steps_of(rows)[framework])


def put(path: Path, text: str) -> None:
    """Write a calibration file; an empty text removes it."""
    if text:
        write(path, text)
    else:
        path.unlink(missing_ok=True)


def _origin(row_id: str) -> str:
    """Return the leading words of a row's id, which name its source."""
    return "-".join(row_id.split("-")[:2])


if __name__ == "__main__":
    sys.exit(main())
