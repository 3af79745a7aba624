"""The best plan that a launcher can spell, beside one that somebody launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.answers import basis_of, cost_of
from tuner.checking.patching import version_of
from tuner.cost_model.estimate import estimate as evaluate
from tuner.errors import SpecError
from tuner.plan_text import plan_record
from tuner.search.space import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.answers import Cost, EstimateAnswer
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Launcher
    from tuner.plan import Plan
    from tuner.search.exhaustive import SweepResult
    from tuner.search.space import SpaceSpec

    Progress = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """The best plan that the launcher can spell. gain: how many times as fast as the one checked (None: that does not run); changes:
    (knob, from, to).
    """

    plan: Plan
    cost: Cost
    gain: float | None
    changes: tuple[tuple[str, Any, Any], ...]
    record: Mapping[str, Any]


def better_than(
    job: Job,
    plan: Plan,
    calibration: Calibration,
    launcher: Launcher | None,
    release: str,
    estimate: EstimateAnswer | None,
    searched: dict[Any, Plan | None],
    progress: Progress | None,
) -> tuple[Better | None, str]:
    """Return the best plan that the launcher can spell, or why there is none. estimate: of the plan checked, where that runs; searched:
    best plans found so far, so that launches of one job and launcher share a search.
    """
    on = tuple(knob for knob in RUNTIME if getattr(plan, knob))
    key = (job.model_dump_json(), calibration.hash, launcher.name if launcher else "", release, on)
    if key not in searched:
        searched[key] = _best_plan(job, calibration, launcher, release, on, progress)
    best = searched[key]
    if best is None:
        spelled = f" and that {launcher.name} spells" if launcher else ""
        return None, f"no plan of this job that is legal and fits{spelled} was found"
    cost = cost_of(job, evaluate(job, best, calibration), basis_of(calibration))
    gain = None if estimate is None else estimate.cost.step_s / cost.step_s
    if gain is not None and gain <= 1.0:
        return None, "it is as fast as the best plan that a search finds"
    before, after = plan_record(plan, job.gpus), plan_record(best, job.gpus)
    changes = tuple(
        (knob, before[knob], after[knob]) for knob in after if before.get(knob) != after[knob] and knob not in ("edp", "fallback_tp")
    )
    return Better(plan=best, cost=cost, gain=gain, changes=changes, record=after), ""


def _best_plan(
    job: Job, calibration: Calibration, launcher: Launcher | None, release: str, on: tuple[str, ...], progress: Progress | None
) -> Plan | None:
    """Return the best plan of the search space (of what the launcher can spell), None where none is legal and fits. on: runtime knobs that
    the launch has on: both states are looked at.
    """
    from tuner.search.exhaustive import sweep
    from tuner.search.space import SpaceSpec, build_space
    from tuner.spelling import MOST_TRIED, best_written

    cannot = frozenset() if launcher is None else frozenset(launcher.cannot)
    told = None if progress is None else lambda done, of: progress("plans", done, of)

    def swept(spec: SpaceSpec) -> SweepResult:
        return sweep(job, build_space(job, spec), calibration, top_k=MOST_TRIED, distinct=False, progress=told)

    try:
        spec = SpaceSpec(axes={knob: [0, 1] for knob in on if knob not in cannot})
        return best_written(spec, job, cannot, swept, lambda plan: _written(launcher, job, plan, release))[0]
    except SpecError:  # of a space without a plan
        return None


def _written(launcher: Launcher | None, job: Job, plan: Plan, release: str) -> Plan:
    """Return the plan if the launcher spells it. What it cannot say of the model stays as the person's files say it. Raises SpecError."""
    try:
        if launcher is not None:
            launcher.write(job, plan, version_of(launcher, release))
    except SpecError as error:
        if any(problem.path not in ("model", "precision", "task") for problem in error.problems):
            raise
    return plan
