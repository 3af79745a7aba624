"""How many GPUs: the cheapest count that trains a budget of tokens before a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cost_model.estimate import training_seconds
from tuner.errors import one_problem
from tuner.presets import with_gpus
from tuner.search.exhaustive import SweepResult, sweep
from tuner.search.space import SpaceSpec, build_space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan

MOST_COUNTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CountResult:
    """The best that `gpus` GPUs do: the job on them, the sweep, the fastest fitting plan, seconds of the whole run, GPU-hours, and
    money where the cluster states a price (None where no plan fits).
    """

    gpus: int
    job: Job
    sweep: SweepResult
    plan: Plan | None
    run_s: float | None
    gpu_hours: float | None
    cost: float | None

    def meets(self, deadline_s: float) -> bool:
        """Return whether the run ends before the deadline."""
        return self.run_s is not None and self.run_s <= deadline_s


def candidate_counts(job: Job, fewest: int, most: int) -> tuple[int, ...]:
    """Return counts of whole nodes from `fewest` to `most`: all of them when there are few, else those whose node count is a power
    of two times 1, 3, 5 or 7, and both ends. Raises SpecError when there is none.
    """
    node = job.cluster.gpus_per_node
    counts = [n * node for n in range(-(-fewest // node), most // node + 1)] if 1 <= fewest <= most else []
    if not counts:
        raise one_problem("--gpus", "", f"{fewest}..{most}", f"must be a range that holds whole nodes of {node} GPUs", "like 256..1024")
    if len(counts) <= MOST_COUNTS:
        return tuple(counts)
    return tuple(n for n in counts if n in (counts[0], counts[-1]) or _odd_part(n // node) <= 7)


def _odd_part(number: int) -> int:
    return number // (number & -number)


def sweep_counts(
    job: Job,
    counts: Sequence[int],
    calibration: Calibration,
    *,
    spec: SpaceSpec | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[CountResult, ...]:
    """Return the best of each count, ascending. The job must state its token budget; global batch and sequence length stay.

    options: those of `sweep` (max_p_oom, max_memory). progress(counts done, of).
    """
    if job.tokens is None:
        raise one_problem("--tokens", "", None, "is needed to tell how long a run takes", "like --tokens 15T")
    results = []
    for done, gpus in enumerate(sorted(counts), start=1):
        results.append(_best_of(job, gpus, calibration, spec or SpaceSpec(), options))
        if progress is not None:
            progress(done, len(counts))
    return tuple(results)


def _best_of(job: Job, gpus: int, calibration: Calibration, spec: SpaceSpec, options: dict[str, Any]) -> CountResult:
    resized = job.model_copy(update={"cluster": with_gpus(job.cluster, gpus, "--gpus")})
    found = sweep(resized, build_space(resized, spec), calibration, **options)
    if not found.best:
        return CountResult(gpus=gpus, job=resized, sweep=found, plan=None, run_s=None, gpu_hours=None, cost=None)
    plan = found.plan(found.best[0])
    run_s = training_seconds(resized, plan, calibration)
    hours = gpus * run_s / 3600.0
    price = resized.cluster.price_per_gpu_hour
    return CountResult(
        gpus=gpus, job=resized, sweep=found, plan=plan, run_s=run_s, gpu_hours=hours, cost=None if price is None else hours * price
    )


def cheapest(results: Sequence[CountResult], deadline_s: float) -> CountResult | None:
    """Return the count with the fewest GPU-hours (so the least money) that meets the deadline, or None."""
    meeting = [r for r in results if r.meets(deadline_s) and r.gpu_hours is not None]
    return min(meeting, key=lambda r: (r.gpu_hours or 0.0, r.gpus), default=None)
