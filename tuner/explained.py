"""The answer of `tuner explain`: an estimate taken apart, the way to a plan that runs, and the neighbours in each knob."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.answers import EstimateAnswer, answer_estimate, basis_of, cost_of, plain
from tuner.cost_model.estimate import estimate as evaluate
from tuner.cost_model.explain import KnobStep, does_not_fit, knob_steps, nearest_that_fits
from tuner.plan_text import plan_record

if TYPE_CHECKING:
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
class ExplainAnswer:
    """why_not_fit: in words, "" where the plan fits; way_out: None where the plan runs as it is, or nothing near it does."""

    estimate: EstimateAnswer
    why_not_fit: str
    way_out: WayOut | None
    neighbours: tuple[Neighbour, ...]

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
                "changes": [{"knob": knob, "from": before, "to": after} for knob, before, after in way.changes],
                **dataclasses.asdict(way.cost),
            },
            "knobs": [_neighbour_record(item) for item in self.neighbours],
        }
        return dict(plain(record))


def _neighbour_record(item: Neighbour) -> dict[str, Any]:
    figures = {name: getattr(item.step, name) for name in ("step_s", "memory_bytes", "p_oom")}
    changes = {"time_change": item.time_change, "memory_change": item.memory_change}
    return {"knob": item.step.knob, "before": item.before, "after": item.after} | figures | changes


def answer_explain(job: Job, plan: Plan, assumed: tuple[str, ...], calibration: Calibration) -> ExplainAnswer:
    """Return the explanation of a single plan."""
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
    )


def _way_out(job: Job, plan: Plan, calibration: Calibration) -> WayOut | None:
    near = nearest_that_fits(job, plan, calibration)
    if near is None:
        return None
    before, after = plan_record(plan, job.gpus), plan_record(near, job.gpus)
    changes = tuple((knob, before[knob], after[knob]) for knob in after if before[knob] != after[knob] and knob not in ("dp", "edp"))
    return WayOut(plan=after, changes=changes, cost=cost_of(job, evaluate(job, near, calibration), basis_of(calibration)))
