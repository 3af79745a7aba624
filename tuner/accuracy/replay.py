"""`tuner replay`: how good a measured search would have been on sweeps that were already measured, as one JSON-ready document."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tuner.accuracy.rows import read_files
from tuner.accuracy.scores import LEAST_LAYOUTS, PREDICTED_OOM
from tuner.accuracy.validate import Scored, calibrations, predict
from tuner.cost_model.estimate import estimate, peak_memory
from tuner.errors import one_problem
from tuner.plan import Plan
from tuner.search.beliefs import Ran
from tuner.search.candidates import Candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.measurement import Measurement
    from tuner.search.sampler import Strategy as SamplerStrategy

Strategy = Literal["residual", "analytic", "tpe", "gp", "random"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
LOTTERY = 1.15  # a series whose second-best layout is further behind is decided by finding one layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout of a series. first: the first of the rows that measured it; end, measured_s, measured_bytes: it fits where one of its rows
    did, and took the median of their times and bytes (on the device: what the model says lies beyond the kind that was measured is
    added); step_s, device_bytes, p_oom: what the model says of it.
    """

    first: Measurement
    end: Literal["ok", "oom", "failed"]
    measured_s: float | None
    measured_bytes: float | None
    step_s: float
    device_bytes: float
    p_oom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Layouts of one job that were measured side by side."""

    key: dict[str, Any]
    layouts: tuple[Layout, ...]
    job: Job
    calibration: Calibration

    @property
    def times(self) -> list[float]:
        """Seconds of the layouts that ran, fastest first."""
        return sorted(seconds for layout in self.layouts if (seconds := layout.measured_s) is not None)

    def run(self, index: int) -> Ran:
        """Return what a run of a layout shows."""
        layout = self.layouts[index]
        return Ran(index, layout.end, layout.measured_s, layout.measured_bytes)

    def candidates(self) -> Candidates:
        """Return its layouts as candidates of a measured search."""
        return Candidates(
            job=self.job,
            plans=tuple(layout.first.plan for layout in self.layouts),
            step_s=np.array([layout.step_s for layout in self.layouts]),
            memory_bytes=np.array([layout.device_bytes for layout in self.layouts]),
            calibration=self.calibration,
            settings=np.array([[layout.first.job.attention == "flash"] for layout in self.layouts]),
        )


def replay(
    paths: Sequence[Path],
    *,
    runs: int,
    strategy: Strategy = "residual",
    seed: int = 0,
    calibration: str = "none",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the document of a search of `runs` runs on every series of the files. Raises SpecError.

    The series are those of `validate`; layouts that failed are candidates too. A search that saw no layout run is left with the
    slowest one. Series whose second-best layout is further than LOTTERY behind stand apart from the means.
    """
    every = read_series(paths, calibration)
    if not every:
        raise one_problem("replay", "", None, f"no series has {LEAST_LAYOUTS} layouts with a time", "see docs/measured_step_time.md")
    found = []
    for done, series in enumerate(every):
        if progress is not None:
            progress("series", done, len(every))
        found.append(outcome(series, runs, strategy, seed))
    plain = [one for one in found if not one["apart"]]
    regrets, apart = [one["regret"] for one in plain], [one["regret"] for one in found if one["apart"]]
    return {
        "strategy": strategy,
        "runs": runs,
        "seed": seed,
        "calibration": calibration,
        "series": found,
        "mean_regret": fmean(regrets) if regrets else None,
        "max_regret": max(regrets, default=None),
        "mean_failed_runs": fmean(one["failed_runs"] for one in plain) if plain else None,
        "apart": {
            "series": len(apart),
            "mean_regret": fmean(apart) if apart else None,
        },
    }


def outcome(series: Series, runs: int, strategy: Strategy, seed: int) -> dict[str, Any]:
    """Return what a search of `runs` runs ends with on a series."""
    ran = [series.run(index) for index in islice(_ORDERS[strategy](series, seed), runs)]
    times = series.times
    chosen = min((run.step_s for run in ran if run.step_s), default=None)
    return {
        "key": series.key,
        "candidates": len(series.layouts),
        "best_s": times[0],
        "chosen_s": chosen,
        "regret": (chosen or times[-1]) / times[0] - 1.0,
        "failed_runs": sum(run.end != "ok" for run in ran),
        "runs": len(ran),
        "second_best": times[1] / times[0],
        "apart": times[1] / times[0] > LOTTERY,
    }


def _analytic(series: Series, seed: int) -> Iterator[int]:  # noqa: ARG001 (one signature)
    """The order of the cost model: those it says fit by time, then the others."""
    rank = [(layout.p_oom >= PREDICTED_OOM, layout.step_s, place) for place, layout in enumerate(series.layouts)]
    return iter([place for _, _, place in sorted(rank)])


def _sampled(strategy: SamplerStrategy) -> Callable[[Series, int], Iterator[int]]:
    """Return the order in which a study with a sampler of ours runs the layouts of a series."""

    def order(series: Series, seed: int) -> Iterator[int]:
        from tuner.search.sampler import PlanSampler
        from tuner.search.trials import ask, new_study, tell

        candidates = series.candidates()
        study = new_study(PlanSampler(candidates, strategy, seed))
        while (asked := ask(study, candidates)) is not None:
            trial, index = asked
            yield index
            tell(study, trial, series.run(index))

    return order


_ORDERS: dict[Strategy, Callable[[Series, int], Iterator[int]]] = {
    "residual": _sampled("residual"),
    "analytic": _analytic,
    "tpe": _sampled("tpe"),
    "gp": _sampled("gp"),
    "random": _sampled("random"),
}


def read_series(paths: Sequence[Path], calibration: str = "none") -> list[Series]:
    """Return the series of the files with at least LEAST_LAYOUTS layouts that ran. Raises SpecError."""
    measurements, _ = read_files(paths, failures=True)
    of = calibrations(calibration)
    grouped: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Scored]]] = defaultdict(lambda: defaultdict(list))
    scored = predict(measurements, estimate, peak_memory, of)
    device = _device_bytes(scored, of)
    for item in scored:
        grouped[tuple(item.row.series.values())][item.layout].append(item)
    found = []
    for layouts in grouped.values():
        kept = [rows for rows in layouts.values() if any(item.row.step_s or item.row.outcome != "ok" for item in rows)]
        if sum(any(item.row.step_s for item in rows) for rows in kept) >= LEAST_LAYOUTS:
            first = kept[0][0].row
            shared = of(first.job)
            found.append(Series(key=first.series, layouts=tuple(_layout(rows, device) for rows in kept), job=first.job, calibration=shared))
    return found


def _layout(rows: Sequence[Scored], device: Mapping[int, float]) -> Layout:
    said = [device[id(item)] for item in rows]
    times = [item.row.step_s for item in rows if item.row.step_s]
    memory = [
        item.row.memory_bytes + on_device - item.said.memory_bytes
        for item, on_device in zip(rows, said, strict=True)
        if item.row.memory_bytes and item.row.step_s
    ]
    return Layout(
        first=rows[0].row,
        end="ok" if times else "oom" if any(item.row.outcome == "oom" for item in rows) else "failed",
        measured_s=median(times) if times else None,
        measured_bytes=median(memory) if memory else None,
        step_s=median(item.said.step_s for item in rows),
        device_bytes=min(said),
        p_oom=min(item.said.p_oom for item in rows),
    )


def _device_bytes(scored: Sequence[Scored], of: Callable[[Job], Calibration]) -> dict[int, float]:
    """Return the bytes on the device that the model says of each row (by its id); the rows of a job are one table."""
    by_job: dict[int, list[Scored]] = defaultdict(list)
    for item in scored:
        by_job[id(item.row.job)].append(item)
    found: dict[int, float] = {}
    for items in by_job.values():
        job = items[0].row.job
        said = estimate(job, Plan.table([item.row.plan for item in items]), of(job)).memory_bytes
        found.update(zip(map(id, items), np.broadcast_to(said, (len(items),)).tolist(), strict=True))
    return found
