"""Trials that are answered from rows measured before."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.errors import one_problem
from tuner.files import write
from tuner.launch import supervised
from tuner.launch.orders import LOG, save_result
from tuner.launch.trial import Result, read_result
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from tuner.launch.runner import Running, Setup
    from tuner.launch.trial import Trial
    from tuner.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRunner:
    """rows: the candidates, those that ran out of memory or failed included."""

    rows: tuple[Measurement, ...]
    parallel: int = 1

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return "replay"

    def start(self, trial: Trial) -> Running:
        """Answer from the rows of the trial's job and plan. Raises SpecError where there is none."""
        rows = self._rows(trial)
        supervised.prepare(trial, ("replay", *(row.id for row in rows)), {}, os.environ)
        write(trial.folder / LOG, "".join(f"{row.source}: {row.id}: {row.outcome}, step_s {row.step_s}\n" for row in rows))
        return supervised.Ended(save_result(trial.folder, _result(rows)))

    def attach(self, trial: Trial) -> Running | None:
        """Return the result that stands in the trial's folder."""
        result = read_result(trial.folder)
        return supervised.Ended(result) if result else None

    def _rows(self, trial: Trial) -> list[Measurement]:
        rows = [row for row in self.rows if not row.superseded and row.plan == trial.plan and row.job == trial.job]
        if not rows:
            plan = ",".join(f"{key}={value}" for key, value in plan_record(trial.plan, trial.job.gpus).items())
            raise one_problem("replay", "plan", plan, f"is not among the {len(self.rows)} measured rows", "only these can be asked for")
        return rows


def _result(rows: list[Measurement]) -> Result:
    """Return the result of rows of one plan: the median of those that ran; where none did, what most of them met."""
    now, ran = time.time(), [row for row in rows if row.outcome == "ok" and row.step_s is not None]
    if not ran:
        outcomes = [row.outcome for row in rows if row.outcome != "ok"]
        if not outcomes:
            raise one_problem(rows[0].source or "replay", "step_s", None, f"row {rows[0].id} ran, but its step time was not measured")
        return Result(end=statistics.mode(outcomes), reason=f"row {rows[0].id}", started=now, ended=now, versions={})
    times = sorted(row.step_s for row in ran if row.step_s is not None)
    memory = next((row for row in ran if row.memory_bytes is not None), ran[0])
    return Result(
        end="ok", step_s=statistics.median(times), spread_s=(times[-1] - times[0]) / 2, steps=len(times), started=now, ended=now,
        memory_bytes=memory.memory_bytes, memory_kind=memory.memory_kind, versions={},
    )  # fmt: skip


def open_runner(setup: Setup) -> ReplayRunner:
    """Return the runner for a setup. Raises SpecError."""
    if not setup.rows:
        raise one_problem("replay", "rows", None, "there are no measured rows to answer from", "name files of rows")
    return ReplayRunner(rows=setup.rows, parallel=setup.parallel)
