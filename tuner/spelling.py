"""The best plan of a space that a launcher can write: the space without what it never spells, swept again and again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from tuner.errors import SpecError
from tuner.plan import CP_KINDS
from tuner.plan_text import KNOBS, idle_record, plan_record
from tuner.search.axes import default_axes
from tuner.search.space import AXES, SpaceSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.search.exhaustive import SweepResult

MOST_TRIED = 300  # plans of one sweep that a launcher is asked to write
MOST_SWEEPS = 12  # each leaves out the value that most of them were refused for
T = TypeVar("T")


def spellable(spec: SpaceSpec, job: Job, cannot: Collection[str]) -> SpaceSpec:
    """Return the space without values of knobs that a launcher cannot spell at all, and with each kind of context parallelism: some
    launch one alone. What a person named stays, and is refused later.
    """
    named = {*spec.axes, *spec.fix}
    fix = {knob: value for knob, value in idle_record(job.gpus).items() if knob in cannot and knob in AXES and knob not in named}
    axes = dict(spec.axes)
    if {"embedding_layers", "loss_layers"} & set(cannot) and "pipeline_layout" not in named:
        fix["pipeline_layout"] = "even"
    if "recompute_layers" in cannot and not {"recompute"} & {*named, *fix}:
        axes["recompute"] = [value for value in default_axes(job)["recompute"] if ":" not in str(value)]
    if "cp_kind" not in {*named, *fix}:
        axes["cp_kind"] = list(CP_KINDS)
    return SpaceSpec(axes=axes, fix={**spec.fix, **fix}, limit=spec.limit)


def best_written(
    spec: SpaceSpec, job: Job, cannot: Collection[str], sweep: Callable[[SpaceSpec], SweepResult], write: Callable[[Plan], T]
) -> tuple[T | None, SweepResult]:
    """Return what `write` makes of the best plan that it does not refuse (SpecError), None where it refuses all, and the last sweep. sweep:
    the best MOST_TRIED plans of a space.
    """
    narrowed = spellable(spec, job, cannot)
    for _ in range(MOST_SWEEPS):
        result = sweep(narrowed)
        refused: Counter[tuple[str, str]] = Counter()
        for one in result.best:
            plan = result.plan(one)
            try:
                return write(plan), result
            except SpecError as error:
                refused.update({item for problem in error.problems for item in _values(problem.path, plan, job)})
        worst = [(knob, value) for (knob, value), _ in refused.most_common() if knob not in spec.fix]
        if not worst:
            break
        narrowed = narrowed.model_copy(update={"limit": [*narrowed.limit, f"{worst[0][0]}!={worst[0][1]}"]})
    return None, result


def _values(field: str, plan: Plan, job: Job) -> list[tuple[str, str]]:
    """Return (knob, value as a limit has it) of a field that a launcher refused."""
    knob = {"recompute_layers": "recompute", "embedding_layers": "pipeline_layout", "loss_layers": "pipeline_layout"}.get(field, field)
    if knob not in KNOBS:
        return []
    value = plan_record(plan, job.gpus)[knob]
    return [(knob, str(int(value)) if isinstance(value, bool) and knob == "sequence_parallel" else str(value).lower())]
