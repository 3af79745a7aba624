"""The best plan of a search in each format's words: where a format cannot say it, or its framework refuses it, the best one that it can.

Each format launches one framework, so its plans are judged by that framework's rules and figures. Knobs that the search held at the
default of the framework it was about are held at that of the format's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from tuner.answers import broken_by
from tuner.cost_model.estimate import estimate
from tuner.errors import Problem, SpecError
from tuner.exporting import ExportAnswer, Place, export_one, wrapped
from tuner.formats import NONUNIFORM, Formats, as_knobs, as_under, framework_of, refuse_accelerator
from tuner.launch.launchers.launcher import chosen, open_launcher
from tuner.plan_text import KNOBS
from tuner.search.space import RUNTIME, complete
from tuner.spelling import best_written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.exporting import Exported
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Launcher
    from tuner.launch.site import Site
    from tuner.plan import Plan
    from tuner.search.exhaustive import SweepResult
    from tuner.search.space import SpaceSpec

AS_GOOD = 1.005  # a listed plan is taken rather than another that is better by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search was about. plans: the listed ones, best first; by: the figure they are ranked by; spec: the space as asked for; fits:
    whether a plan with this memory (bytes, P(OOM)) counts; sweep: the best plans of a space; nothing: why a sweep has none; ahead: how many
    plans of the search are faster than these times.
    """

    job: Job
    plans: Sequence[Plan]
    by: Literal["step_s", "memory_bytes"]
    spec: SpaceSpec
    fits: Callable[[float, float], bool]
    calibrate: Callable[[Job], Calibration]
    sweep: Callable[[Job, SpaceSpec, Calibration], SweepResult]
    nothing: Callable[[SweepResult, Calibration], str]
    ahead: Callable[[Sequence[float]], Sequence[int | None]]


def translate(asked: Question, formats: Formats, site: Site | None = None) -> ExportAnswer:
    """Return the files of the best plan in these formats, or of the best that a format can write; formats that can write none of the
    search are in `refused`.
    """
    found: dict[str, Exported] = {}
    refused: dict[str, tuple[Problem, ...]] = {}
    for name in formats.names:
        try:
            found[name] = _one(asked, name)
        except SpecError as error:
            refused[name] = as_knobs(error.problems)
    found = _placed(asked, found)
    usable = []
    for wrap in formats.wraps:  # what cannot be wrapped is written all the same
        try:
            wrapped(found, Formats(formats.names, (wrap,)), site)
            usable.append(wrap)
        except SpecError as error:
            refused[wrap] = error.problems
    found = wrapped(found, Formats(formats.names, tuple(usable)), site)
    return ExportAnswer(job=asked.job, plan=asked.plans[0], assumed=(), formats=found, refused=refused)


def _one(asked: Question, name: str) -> Exported:
    if name == NONUNIFORM:
        rule = "is about GPUs that failed, not about a search"
        raise SpecError([Problem(where=name, path="", value="", rule=rule, hint=f"tuner export {NONUNIFORM} -p PLAN --failed 0:3")])
    launcher = open_launcher(name)
    job = as_under(asked.job, framework_of(name, asked.job.framework.name))
    calibration = asked.calibrate(job)
    listed = [moved(plan, job, asked.spec) for plan in asked.plans]
    refuse_accelerator(name, job)
    why = _hindrance(asked, name, job, listed[0], calibration)
    hopeless = [problem for problem in why if problem.path and problem.path not in KNOBS]
    if hopeless:  # the model, the precision: no other plan helps
        raise SpecError(hopeless)
    if not why:
        return export_one(name, job, listed[0], calibration, place=Place(rank=1))
    best = _searched(asked, launcher, job, calibration, why)
    for rank, plan in enumerate(listed, 1):
        cost = estimate(job, plan, calibration)
        if float(getattr(cost, asked.by)) <= AS_GOOD * getattr(best, asked.by) and not _hindrance(asked, name, job, plan, calibration):
            return export_one(name, job, plan, calibration, place=Place(rank=rank, why=why))
    return dataclasses.replace(best, place=Place(rank=None, why=why))


def moved(plan: Plan, job: Job, spec: SpaceSpec) -> Plan:
    """Return a plan of another framework under this one: runtime knobs that nobody named are as this framework has them."""
    named = {*spec.axes, *spec.fix}
    fields = {
        field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name not in RUNTIME or field.name in named
    }
    return complete(job, fields)


def _hindrance(asked: Question, name: str, job: Job, plan: Plan, calibration: Calibration) -> tuple[Problem, ...]:
    """Return why a plan is not written in a format: what it cannot spell, what its framework refuses, or that it does not fit there."""
    try:
        launcher = open_launcher(name)
        launcher.write(job, plan, chosen(launcher, ""))
    except SpecError as error:
        return as_knobs(error.problems)
    wrong = [item for item in broken_by(job, plan) if item.severity == "error"]
    if wrong:
        return tuple(Problem(where=name, path="", value="", rule=f"{item.text} [{item.rule}]") for item in wrong)
    cost = estimate(job, plan, calibration)
    if job is asked.job or asked.fits(float(cost.memory_bytes), float(cost.p_oom)):  # the search knows its own plans to fit
        return ()
    need, has = float(cost.memory_bytes) / 1e9, job.cluster.gpu.memory.value / 1e9
    rule = f"needs {need:.1f} of {has:.1f} GB as {job.framework.name}, P(OOM) {100 * float(cost.p_oom):.1f} %"
    return (Problem(where=name, path="", value="", rule=rule),)


def _searched(asked: Question, launcher: Launcher, job: Job, calibration: Calibration, why: tuple[Problem, ...]) -> Exported:
    """Return the fastest plan that the launcher can spell, of a search of its own framework. Raises SpecError where there is none."""
    best, result = best_written(
        asked.spec,
        job,
        launcher.cannot,
        lambda spec: asked.sweep(job, spec, calibration),
        lambda plan: export_one(launcher.name, job, plan, calibration),
    )
    if best is not None:
        return best
    rule = f"no plan of this search that it can spell is legal and fits as {job.framework.name}"
    raise SpecError([Problem(where=launcher.name, path="", value="", rule=rule, hint=asked.nothing(result, calibration)), *why])


def _placed(asked: Question, found: Mapping[str, Exported]) -> dict[str, Exported]:
    """Return the formats with how many plans of the search are ahead of those that it does not list."""
    unlisted = [name for name, one in found.items() if one.place is not None and one.place.rank is None]
    if not unlisted:
        return dict(found)
    calibration = asked.calibrate(asked.job)
    own = [moved(found[name].plan, asked.job, asked.spec) for name in unlisted]
    counts = asked.ahead([float(np.asarray(estimate(asked.job, plan, calibration).step_s)) for plan in own])
    out = dict(found)
    for name, count in zip(unlisted, counts, strict=True):
        place = found[name].place
        assert place is not None  # noqa: S101 (those are chosen above)
        out[name] = dataclasses.replace(found[name], place=dataclasses.replace(place, ahead=count))
    return out
