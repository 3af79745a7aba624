"""The answer of `tuner explain`: an estimate taken apart, the way to a plan that runs, and the neighbours in each knob."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.answers import EstimateAnswer, answer_estimate, basis_of, cost_of, plain
from tuner.cost_model.estimate import estimate as evaluate
from tuner.cost_model.explain import KnobStep, Term, does_not_fit, knob_steps, nearest_that_fits, stages, time_terms
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.answers import Cost
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """The legal plan that fits with the fewest knobs changed: (knob, from, to) of each, and its cost."""

    plan: dict[str, Any]
    changes: tuple[tuple[str, Any, Any], ...]
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One step in one knob. time_change, memory_change: relative to the plan (-0.05: 5 % less)."""

    step: KnobStep
    before: Any
    after: Any
    time_change: float
    memory_change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One term of the plan asked about and of the best one, in the term's unit (seconds a step, bytes of the fullest stage)."""

    name: str
    what: str
    unit: str
    value: float
    best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The best plan that a search of the default space finds, and how the plan asked about differs from it.

    why_not: why a search does not choose the plan asked about; gain: how many times faster the best is; changes: (knob, from, to);
    time, memory: terms of both, the largest difference first; they sum to the two steps, and to the two totals of bytes.
    """

    plan: dict[str, Any]
    cost: Cost
    gain: float
    why_not: str
    changes: tuple[tuple[str, Any, Any], ...]
    time: tuple[Difference, ...]
    memory: tuple[Difference, ...]

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON's types."""

        def terms(of: tuple[Difference, ...]) -> list[dict[str, Any]]:
            return [dataclasses.asdict(term) | {"difference": term.value - term.best} for term in of]

        return {
            "plan": self.plan,
            **dataclasses.asdict(self.cost),
            "gain": self.gain,
            "why_not": self.why_not,
            "changes": _changes_record(self.changes),
            "time": terms(self.time),
            "memory": terms(self.memory),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainAnswer:
    """why_not_fit: in words, "" where the plan fits; way_out: None where the plan runs as it is, or nothing near it does; best:
    None where no search was asked for or none finds anything.
    """

    estimate: EstimateAnswer
    why_not_fit: str
    way_out: WayOut | None
    neighbours: tuple[Neighbour, ...]
    best: Rival | None = None

    @property
    def runs(self) -> bool:
        """Whether the plan is legal and more likely fits than not."""
        return self.estimate.legal and self.estimate.cost.fits

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        way = self.way_out
        record = self.estimate.record() | {
            "why_not_fit": self.why_not_fit,
            "nearest_that_fits": None
            if way is None
            else {
                "plan": way.plan,
                "changes": _changes_record(way.changes),
                **dataclasses.asdict(way.cost),
            },
            "best": None if self.best is None else self.best.record(),
            "knobs": [_neighbour_record(item) for item in self.neighbours],
        }
        return dict(plain(record))


def _changes_record(changes: tuple[tuple[str, Any, Any], ...]) -> list[dict[str, Any]]:
    return [{"knob": knob, "from": before, "to": after} for knob, before, after in changes]


def _neighbour_record(item: Neighbour) -> dict[str, Any]:
    figures = {name: getattr(item.step, name) for name in ("step_s", "memory_bytes", "p_oom")}
    changes = {"time_change": item.time_change, "memory_change": item.memory_change}
    return {"knob": item.step.knob, "before": item.before, "after": item.after} | figures | changes


def answer_explain(
    job: Job,
    plan: Plan,
    assumed: tuple[str, ...],
    calibration: Calibration,
    *,
    search: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ExplainAnswer:
    """Return the explanation of a single plan; with `search` also how it stands to the best one. progress(plans judged, of)."""
    answer = answer_estimate(job, plan, assumed, calibration)
    now = answer.cost
    steps = knob_steps(job, plan, calibration)
    before = plan_record(plan, job.gpus)
    neighbours = [
        Neighbour(
            step=step,
            before=before[step.knob],
            after=plan_record(step.plan, job.gpus)[step.knob],
            time_change=step.step_s / now.step_s - 1.0,
            memory_change=step.memory_bytes / now.memory_bytes - 1.0,
        )
        for step in steps
    ]
    return ExplainAnswer(
        estimate=answer,
        why_not_fit=does_not_fit(job, plan, calibration, evaluate(job, plan, calibration)),
        way_out=None if answer.legal and now.fits else _way_out(job, plan, calibration),
        neighbours=tuple(sorted(neighbours, key=lambda n: n.time_change)),
        best=_rival(job, plan, answer, calibration, progress) if search else None,
    )


def _rival(
    job: Job, plan: Plan, answer: EstimateAnswer, calibration: Calibration, progress: Callable[[int, int], None] | None
) -> Rival | None:
    from tuner.search.exhaustive import MAX_P_OOM, sweep
    from tuner.search.space import default_space

    found = sweep(job, default_space(job), calibration, top_k=1, progress=progress)
    if not found.best:
        return None
    best = found.plan(found.best[0])
    estimate = evaluate(job, best, calibration)
    cost = cost_of(job, estimate, answer.cost.basis)
    there = stages(job, best, calibration)[cost.worst_stage]
    return Rival(
        plan=plan_record(best, job.gpus),
        cost=cost,
        gain=answer.cost.step_s / cost.step_s,
        why_not=_why_not(answer, cost, same=best == plan, limit=MAX_P_OOM),
        changes=_changes(plan, best, job),
        time=_differences(answer.step, time_terms(job, best, calibration, estimate)),
        memory=_differences(answer.stages[answer.cost.worst_stage].memory, there.memory),
    )


def _why_not(answer: EstimateAnswer, best: Cost, *, same: bool, limit: float) -> str:
    """Return why a search does not choose a plan, "" where it is the best one itself."""
    if same:
        return ""
    own = answer.cost
    if not answer.legal:
        return "it is illegal"
    if own.p_oom >= limit:
        return f"P(OOM) {100 * own.p_oom:.1f} %, and a search allows {100 * limit:g} %"
    if own.step_s > best.step_s:
        return f"it is slower: {own.step_s:.4g} s a step against {best.step_s:.4g} s"
    return "the best one is no faster" if own.step_s == best.step_s else "it is outside the space that a search covers by itself"


def _differences(own: Sequence[Term], best: Sequence[Term]) -> tuple[Difference, ...]:
    """Return the terms of two estimates side by side, the largest difference first."""
    there = {term.name: term.value for term in best}
    pairs = [Difference(name=t.name, what=t.what, unit=t.unit, value=t.value, best=there[t.name]) for t in own]
    return tuple(sorted(pairs, key=lambda d: -abs(d.value - d.best)))


def _changes(plan: Plan, other: Plan, job: Job) -> tuple[tuple[str, Any, Any], ...]:
    """Return the knobs in which two plans differ: (knob, of the first, of the second)."""
    before, after = plan_record(plan, job.gpus), plan_record(other, job.gpus)
    follows = {"dp", "edp"} | (set() if falls_back(plan) or falls_back(other) else {"fallback_tp"})  # tp itself: no fallback
    return tuple((knob, before[knob], after[knob]) for knob in after if before[knob] != after[knob] and knob not in follows)


def falls_back(plan: Plan) -> bool:
    """Whether a replica that lost GPUs goes on at a lower degree."""
    return bool(plan.fallback < plan.tp)


def _way_out(job: Job, plan: Plan, calibration: Calibration) -> WayOut | None:
    near = nearest_that_fits(job, plan, calibration)
    if near is None:
        return None
    changes = _changes(plan, near, job)
    return WayOut(
        plan=plan_record(near, job.gpus), changes=changes, cost=cost_of(job, evaluate(job, near, calibration), basis_of(calibration))
    )
