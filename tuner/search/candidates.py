"""Plans that a measured search may run, with what the cost model says of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.estimate import estimate
from tuner.cost_model.residual import plan_errors
from tuner.cost_model.runs import FIELDS
from tuner.plan import Plan
from tuner.plan_text import plan_record
from tuner.search.beliefs import FAULTS_KNOB, FAULTS_SHARED, KNOB, SOUND, Beliefs, Latent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.arrays import Floats
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.search.beliefs import Between

UNSEEN = tuple(f.name for f in dataclasses.fields(Plan) if f.name not in FIELDS or f.name == "recompute")


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """n plans of one job; step_s, memory_bytes, (n,) each, as the cost model says with this calibration; settings: (n, k) codes of what
    else tells them apart (an attention kernel).
    """

    job: Job
    plans: tuple[Plan, ...]
    step_s: Floats
    memory_bytes: Floats
    calibration: Calibration
    settings: Any = None

    @staticmethod
    def of(job: Job, plans: Sequence[Plan], calibration: Calibration) -> Candidates:
        """Return these plans with their estimates."""
        table = Plan.table(plans)
        said = estimate(job, table, calibration)
        step_s, memory = (np.broadcast_to(np.asarray(column, dtype=float), (len(plans),)) for column in (said.step_s, said.memory_bytes))
        return Candidates(job=job, plans=tuple(plans), step_s=step_s, memory_bytes=memory, calibration=calibration)

    def __len__(self) -> int:
        return len(self.plans)

    @cached_property
    def words(self) -> tuple[dict[str, Any], ...]:
        """The knobs that tell the candidates apart, as people write them, of each."""
        records = [plan_record(plan, self.job.gpus) for plan in self.plans]
        if self.settings is not None:
            records = [
                record | {f"setting_{k}": int(code) for k, code in enumerate(row)}
                for record, row in zip(records, self.settings, strict=True)
            ]
        names = [name for name in records[0] if len({record[name] for record in records}) > 1 and name not in ("dp", "edp")]
        return tuple({name: record[name] for name in names or ["tp"]} for record in records)

    @cached_property
    def places(self) -> dict[tuple[tuple[str, Any], ...], int]:
        """The place of each candidate by its words."""
        return {tuple(sorted(words.items())): i for i, words in enumerate(self.words)}

    def beliefs(self) -> Beliefs:
        """Return what is believed of them before any ran."""
        table, n = Plan.table(self.plans), len(self)
        codes = _codes(table, self.settings)
        of = self.calibration
        points = np.stack([getattr(table, name) for name in FIELDS], axis=-1)
        return Beliefs(
            time=Latent(
                mean=np.log(self.step_s),
                between=_sum(plan_errors(self.job, table, n, of.kernel, of.residual), _settings(codes)),
            ),
            memory=Latent(
                mean=np.log(self.memory_bytes),
                between=_sum(plan_errors(self.job, table, n, of.memory_kernel, of.memory_residual), _settings(codes)),
            ),
            capacity=np.full(n, float(np.log(self.job.cluster.gpu.memory.value))),
            faults=Latent(mean=np.full(n, SOUND), between=_alike(np.concatenate([points, codes], axis=1))),
        )


def _codes(table: Plan, settings: Any) -> Any:
    """Return the (n, k) settings that differ between plans and that the kernels do not see."""
    columns = [np.asarray(getattr(table, name)) for name in UNSEEN]
    columns += [] if settings is None else list(np.asarray(settings).T)
    varied = [column for column in columns if (column != column[0]).any()]
    return np.stack(varied, axis=-1) if varied else np.zeros((len(columns[0]), 0), dtype=np.int64)


def _sum(*parts: Between) -> Between:
    return lambda rows, columns: sum(part(rows, columns) for part in parts)


def _settings(codes: Any) -> Between:
    return lambda rows, columns: KNOB**2 * (codes[rows][:, None] == codes[columns][None]).sum(axis=-1)


def _alike(codes: Any) -> Between:
    """Return the covariance of faults: of all plans, and of those that share a setting."""
    differing = codes[:, (codes != codes[0]).any(axis=0)]
    share = FAULTS_KNOB / max(differing.shape[1], 1)

    def between(rows: Any, columns: Any) -> Any:
        return FAULTS_SHARED + share * (differing[rows][:, None] == differing[columns][None]).sum(axis=-1)

    return between
