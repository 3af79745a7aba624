"""A person's own measured runs as a calibration: what they add to what ships, and whether they help.

Three ways are tried on the runs, each run foretold without itself (repeats of one plan in one job are left out together): the shipped
calibration as it is, the person's runs beside the shipped ones, and the person's alone. A way that is not clearly better than the first
is declined, so that a handful of runs may help and does not harm; the shipped runs go only where the person's are clearly better alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tuner.accuracy.calibrate import by_job, fitted_lines, grouped, step_of
from tuner.cost_model.calibration import CalibrationFile, load_calibration
from tuner.cost_model.fit.coefficients import CLEARLY, WORST, log_errors, tables_of
from tuner.cost_model.fit.residuals import HeldOut, fit_noise, reach_of, weighed, without
from tuner.cost_model.residual import covariance
from tuner.cost_model.runs import Runs, joined, runs_lines, runs_text
from tuner.errors import one_problem, printable
from tuner.load import load_spec, parse_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.fit.coefficients import Step
    from tuner.measurement import Measurement

FEWEST = 3
MANY = 20
MOST = 1_000
FAR = 3.0  # a log error of a run in another unit, or of another job
Way = Literal["shipped", "beside", "alone"]
WORDS: dict[Way, str] = {"shipped": "the shipped calibration", "beside": "own runs beside the shipped ones", "alone": "own runs alone"}


class Score(NamedTuple):
    """How far a way is off on runs that it has not seen: median and 90th percentile of |predicted / measured - 1|, and the mean of the
    log errors, each bounded.
    """

    median: float
    p90: float
    bounded_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCalibration:
    """What a person's runs gave. way: the best, "shipped" where the runs do not clearly help; text: the calibration file, "" then;
    predicted_s: what the shipped calibration says of each run, by id; too_few: whether there was nothing to cross-validate with.
    """

    framework: str
    rows: int
    plans: int
    scores: dict[Way, Score]
    way: Way
    text: str
    predicted_s: dict[str, float]
    too_few: bool = False


def own_calibration(rows: Sequence[Measurement], name: str) -> OwnCalibration:
    """Return the calibration of these rows under a name. Raises SpecError where they are of several frameworks, or too few."""
    timed = [row for row in rows if counts(row)]
    frameworks = sorted({row.job.framework.name for row in timed})
    if len(frameworks) > 1:
        raise one_problem("rows", "framework", ", ".join(frameworks), "must be one framework", "a file for each")
    steps = by_job([step_of(row) for row in timed])
    plans = plans_of(steps)
    if len(steps) > MOST:
        raise one_problem("rows", "", f"{len(steps)} timed rows", f"must be at most {MOST}", "the most telling ones")
    if not steps:
        raise one_problem("rows", "", f"{len(rows)} rows", f"must hold timed runs of {FEWEST} different layouts to be cross-validated")
    return _best(steps, plans, frameworks[0], name)


def counts(row: Measurement) -> bool:
    """Whether a row teaches: a current pretraining run that ended well and has a step time."""
    return row.step_s is not None and row.outcome == "ok" and not row.superseded and row.job.task == "pretrain"


def plans_of(steps: Sequence[Step]) -> Any:
    """Return a number for each step, the same for repeats of one plan in jobs of the same sizes."""
    known: dict[Any, int] = {}
    return np.array([known.setdefault((step.series, step.plan), len(known)) for step in steps])


def _best(steps: Sequence[Step], plans: Any, framework: str, name: str) -> OwnCalibration:
    calibrations = {step.job.cluster.gpu.name: load_calibration("auto", step.job) for step in steps}
    shipped_errors = log_errors(tables_of(steps, calibrations), {})
    worst = int(np.argmax(np.abs(shipped_errors)))
    if abs(float(shipped_errors[worst])) > FAR:
        off = f"{steps[worst].step_s:.3g} s a step, predicted {steps[worst].step_s / np.exp(shipped_errors[worst]):.3g} s"
        raise one_problem(
            "rows", printable(steps[worst].id), off, "is too far off to be this job", "step_time_s is in seconds; leave out broken runs"
        )
    predicted = {step.id: float(step.step_s / np.exp(error)) for step, error in zip(steps, shipped_errors, strict=True)}
    layouts = len(set(plans.tolist()))
    if layouts < FEWEST:
        only: dict[Way, Score] = {"shipped": score_of(shipped_errors)}
        return OwnCalibration(
            framework=framework, rows=len(steps), plans=layouts, scores=only, way="shipped", text="", predicted_s=predicted, too_few=True
        )
    bare = {gpu: of.model_copy(update={"measured": None}) for gpu, of in calibrations.items()}
    own = grouped(steps, log_errors(tables_of(steps, bare), {}))._replace(series=plans)
    calibration = next(iter(calibrations.values()))
    kernel = calibration.kernel
    fitted = weighed(kernel, fit_noise(kernel, own))
    shipped = calibration.residual.solved.runs if calibration.residual else None
    scores, held = {"shipped": score_of(shipped_errors)}, {}
    ways: list[Way] = ["alone"] if shipped is None else ["beside", "alone"]
    for way in ways:
        held[way] = _told(calibration, fitted, shipped if way == "beside" else None, plans)
        scores[way] = score_of(own.runs.log_error - held[way].mean)
    best = ways[0]  # what ships goes only for runs that are clearly better off without it
    if scores["alone"].bounded_mean < CLEARLY * scores[best].bounded_mean and scores["alone"].median < CLEARLY * scores[best].median:
        best = "alone"
    first: Score = scores["shipped"]
    helps = scores[best].median < CLEARLY * first.median and scores[best].bounded_mean < CLEARLY * first.bounded_mean
    text = _text(name, framework, steps, calibrations, _reaching(fitted, held[best]), best) if helps else ""
    of: dict[Way, Score] = {way: scores[way] for way in WORDS if way in scores}
    chosen: Way = best if helps else "shipped"
    return OwnCalibration(framework=framework, rows=len(steps), plans=layouts, scores=of, way=chosen, text=text, predicted_s=predicted)


def score_of(errors: Any) -> Score:
    """Return the score of log errors."""
    off = np.abs(np.expm1(-errors))
    return Score(float(np.median(off)), float(np.quantile(off, 0.9)), float(np.mean(np.minimum(np.abs(errors), WORST))))


def _told(calibration: Calibration, own: Runs, shipped: Runs | None, plans: Any) -> HeldOut:
    """Return what all runs but those of the same plan say of each own run."""
    runs = own if shipped is None else joined(shipped, own)
    before = len(runs.ids) - len(own.ids)
    inverse = np.linalg.inv(covariance(calibration.kernel, runs) + np.diag(runs.variance))
    pulled = inverse @ runs.log_error
    mean, deviation = np.empty(len(own.ids)), np.empty(len(own.ids))
    for plan in np.unique(plans):
        these = np.flatnonzero(plans == plan)
        mean[these], deviation[these] = without(inverse, runs.log_error, pulled, runs, these + before)
    return HeldOut(mean, deviation)


def _reaching(own: Runs, held: HeldOut) -> Runs:
    """Return the runs with the reach that 90 % of them need; few runs take Student's t for as many."""
    from scipy.stats import t

    n = len(own.ids)
    reach = reach_of(own.log_error, held) if n >= MANY else float(t.ppf(0.95, max(n - 1, 1)))
    return own._replace(reach=np.full(n, reach))


def _text(name: str, framework: str, steps: Sequence[Step], calibrations: dict[str, Calibration], own: Runs, way: Way) -> str:
    shipped = next((of.measured.runs for of in calibrations.values() if of.measured), "") if way == "beside" else ""
    csv = runs_text([*(runs_lines(shipped) if shipped else []), *fitted_lines(steps, own)])
    lines = [
        "# Written by `tuner calibrate`: the runs below, on top of the shipped calibration of their GPU and framework.",
        f"name: {json.dumps(name)}",
        f"framework: {framework}",
        f"fitted_on: [{', '.join(calibrations)}]",
        "base: auto",
        "measured:",
        "  runs: |",
        *(f"    {line}" for line in csv.rstrip("\n").split("\n")),
    ]
    text = "\n".join(lines) + "\n"
    load_spec(CalibrationFile, parse_yaml(text, name), name)  # what is written can be read
    return text
