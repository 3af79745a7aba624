"""`tuner validate`: predictions for published rows, and how far they are off, as one JSON-ready document."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tuner.accuracy import scores
from tuner.accuracy.rows import read_files
from tuner.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tuner.accuracy.fields import Skipped
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.measurement import Measurement


class Columns(Protocol):
    """What validation reads of an estimate (see cost_model.estimate.Estimate)."""

    @property
    def step_s(self) -> Any: ...  # noqa: D102
    @property
    def low_s(self) -> Any: ...  # noqa: D102
    @property
    def high_s(self) -> Any: ...  # noqa: D102
    @property
    def memory_bytes(self) -> Any: ...  # noqa: D102
    @property
    def p_oom(self) -> Any: ...  # noqa: D102
    @property
    def worst_stage(self) -> Any: ...  # noqa: D102


class Prediction(NamedTuple):
    """What the model says of one row: seconds a step with their 90 % interval, bytes of the fullest rank (of the row's memory_kind),
    probability of OOM.
    """

    step_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    p_oom: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A measurement and its prediction."""

    row: Measurement
    said: Prediction

    @property
    def covered(self) -> bool | None:
        """Whether the measured step time lies in the predicted interval."""
        return None if self.row.step_s is None else self.said.low_s <= self.row.step_s <= self.said.high_s

    @property
    def layout(self) -> tuple[Any, ...]:
        """What tells layouts of a series apart: the plan and the attention kernel."""
        return (*dataclasses.astuple(self.row.plan), self.row.job.attention)


def validate(paths: Sequence[Path], calibration: str = "auto") -> dict[str, Any]:
    """Return rows, skipped rows and the summary for JSONL files of published rows; raises SpecError for an unreadable file."""
    scored, skipped = score_files(paths, calibration)
    return document(scored, skipped)


def score_files(paths: Iterable[Path], calibration: str = "auto") -> tuple[list[Scored], list[Skipped]]:
    """Return every scorable row of the files with its prediction, and the skipped rows."""
    measurements, skipped = read_files(paths)
    return score(measurements, calibration), skipped


def score(measurements: Iterable[Measurement], calibration: str = "auto") -> list[Scored]:
    """Return measurements with what the model predicts for each."""
    from tuner.cost_model.estimate import estimate, peak_memory

    return predict(measurements, estimate, peak_memory, calibrations(calibration))


def calibrations(text: str) -> Callable[[Job], Calibration]:
    """Return a function from a job to the calibration `text` names for it; read once for each GPU, framework and release."""
    from tuner.cost_model.calibration import load_calibration

    known: dict[tuple[str, str, str], Calibration] = {}

    def of(job: Job) -> Calibration:
        key = (job.cluster.gpu.name, job.framework.name, job.release)
        if key not in known:
            known[key] = load_calibration(text, job)
        return known[key]

    return of


def predict(
    measurements: Iterable[Measurement],
    estimate: Callable[[Job, Plan, Any], Columns],
    peak_memory: Callable[[Job, Plan, Any, Any], Any],
    calibration_of: Callable[[Job], Any],
) -> list[Scored]:
    """Return the rows with their predictions, in their order. Rows of one job are estimated as one table of plans.

    peak_memory(job, plan, calibration, stage) has columns allocated, reserved and device: what a row's memory figure counts.
    """
    rows = list(measurements)
    by_job: dict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_job[id(row.job)].append(i)
    said: dict[int, Prediction] = {}
    for places in by_job.values():
        job, plans = rows[places[0]].job, table([rows[i].plan for i in places])
        calibration = calibration_of(job)
        columns = estimate(job, plans, calibration)
        found = _predictions(columns, len(places))
        kinds = {rows[i].memory_kind for i in places} - {"device"}
        if kinds:
            peak = peak_memory(job, plans, calibration, columns.worst_stage)
            by_kind = {kind: _column(getattr(peak, kind), len(places)) for kind in kinds} | {"device": [p.memory_bytes for p in found]}
            found = [p._replace(memory_bytes=by_kind[rows[i].memory_kind][k]) for k, (i, p) in enumerate(zip(places, found, strict=True))]
        said.update(zip(places, found, strict=True))
    return [Scored(row, said[i]) for i, row in enumerate(rows)]


def table(plans: Sequence[Plan]) -> Plan:
    """Return single plans as one table of plans."""
    return Plan.table(plans)


def _predictions(columns: Columns, n: int) -> list[Prediction]:
    values = (columns.step_s, columns.low_s, columns.high_s, columns.memory_bytes, columns.p_oom)
    return [Prediction(*row) for row in zip(*(_column(value, n) for value in values), strict=True)]


def _column(value: Any, n: int) -> list[float]:
    import numpy as np

    found: list[float] = np.broadcast_to(np.asarray(value, dtype=float), (n,)).tolist()
    return found


def document(scored: Sequence[Scored], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Return the JSON document: rows, skipped and summary; a figure that does not exist is None."""
    return {
        "rows": [record(item) for item in scored],
        "skipped": [{"id": item.id, "why": item.why} for item in skipped],
        "summary": summary(scored),
    }


def record(item: Scored) -> dict[str, Any]:
    """Return one row of the document."""
    row, said = item.row, item.said
    return {
        "id": row.id,
        "framework": row.framework,
        "measured_step_s": row.step_s,
        "predicted_step_s": said.step_s,
        "low_s": said.low_s,
        "high_s": said.high_s,
        "measured_bytes": row.memory_bytes,
        "predicted_bytes": said.memory_bytes,
        "p_oom": said.p_oom,
        "outcome": row.outcome,
        "assumed": list(row.assumed),
    }


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return the scores: time of current pretraining rows; memory and fit of all; series; by source; and what stands apart."""
    every = series_of(scored)
    stems = dict.fromkeys(item.row.source for item in scored)
    sources = [_source(stem, [item for item in scored if item.row.source == stem], every) for stem in stems]
    return {
        "time": time_errors(item for item in scored if counts(item)),
        "memory": memory_errors(scored),
        "fit": fit(scored),
        "series": every,
        "by_source": sources,
        "mean_regret": scores.mean(source["regret"] for source in sources),
        "mean_kendall_tau": scores.mean(source["kendall_tau"] for source in sources),
        "apart": {
            "superseded": time_errors(item for item in scored if item.row.superseded),
            "sft": time_errors(item for item in scored if item.row.job.task == "sft" and not item.row.superseded),
            "lora": time_errors(item for item in scored if item.row.job.task == "lora" and not item.row.superseded),
        },
    }


def counts(item: Scored) -> bool:
    """Whether a row counts towards the errors of time: pretraining, and not superseded by its publisher."""
    return item.row.job.task == "pretrain" and not item.row.superseded


def time_errors(scored: Iterable[Scored]) -> dict[str, float | int | None]:
    """Return the errors of step time over the rows that have one."""
    timed = [item for item in scored if item.row.step_s is not None]
    found = scores.errors([(item.row.step_s or 0.0, item.said.step_s) for item in timed], [item.covered for item in timed])
    return found | {"half_width90": scores.middle((item.said.high_s / item.said.low_s) ** 0.5 - 1.0 for item in timed)}


def memory_errors(scored: Iterable[Scored]) -> dict[str, float | int | None]:
    """Return the errors of memory over the rows that have a figure; memory is predicted without an interval."""
    return scores.errors([(item.row.memory_bytes, item.said.memory_bytes) for item in scored if item.row.memory_bytes is not None])


def fit(scored: Iterable[Scored]) -> dict[str, int]:
    """Return the confusion of fits and out of memory over the rows that ran or ran out of memory."""
    return scores.confusion((item.row.outcome == "oom", item.said.p_oom) for item in scored)


def series_of(scored: Iterable[Scored]) -> list[dict[str, Any]]:
    """Return the series with at least 5 layouts."""
    timed = [item for item in scored if item.row.step_s is not None]
    return scores.series((item.row.series, item.layout, item.row.step_s or 0.0, item.said.step_s) for item in timed)


def _source(stem: str, items: Sequence[Scored], every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [one for one in every if one["key"]["source"] == stem]
    return {
        "source": stem,
        "n": len(items),
        "time": time_errors(item for item in items if counts(item)),
        "memory": memory_errors(items),
        "fit": fit(items),
        "kendall_tau": scores.mean(one["kendall_tau"] for one in own),
        "regret": scores.mean(one["regret"] for one in own),
    }
