"""The ranking after a measured search, and what else its runs say."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tuner.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.found import RankedPlan
    from tuner.job import Job
    from tuner.launch.trial import Result
    from tuner.plan import Plan
    from tuner.profiling.campaign import Ended
    from tuner.profiling.standing import Standing


def ranked_after(
    job: Job,
    standing: Sequence[Standing],
    plans: Sequence[Plan],
    calibration: Calibration,
    top: int,
    max_p_oom: float,
    together: float = 0.0,
) -> list[RankedPlan]:
    """Return the first `top` plans, as a search ranks them, with measured times where there are some.

    Plans that did not run themselves and are as likely to run out of memory as a search refuses (one half, where a proxy ran), or that
    more likely than not fail, are not among them. together: see Measured; it is in the ranges, and does not
    tie plans.
    """
    from tuner.answers import run_of
    from tuner.cost_model.estimate import mfu, tokens_per_s_per_gpu
    from tuner.found import RankedPlan
    from tuner.search.lost_gpu import lost_gpus
    from tuner.search.ranking import rank

    risk = {"measured": 1.0, "proxy": 0.5}  # a proxy's memory says nothing of the plan's: the model's doubt stays
    shown = [one for one in standing if 1.0 - one.fits < risk.get(one.basis, max_p_oom) and one.sound >= 0.5][:top]
    tied = [one.low_s <= shown[0].high_s for one in shown]
    shown = [one.widened(together) for one in shown]
    rows = rank(job, [plans[one.index] for one in shown], calibration).rows
    lost = lost_gpus(job, [row.plan for row in rows], calibration)
    found = []
    for place, (one, row) in enumerate(zip(shown, rows, strict=True)):
        result = one.result
        filled = dataclasses.replace(
            row,
            rank=place + 1,
            step_s=one.step_s,
            low_s=one.low_s,
            high_s=one.high_s,
            tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, one.step_s)),
            mfu=float(mfu(job, one.step_s)),
            p_oom=1.0 - one.fits,
            basis=one.basis,
            tied=tied[place],
            memory_bytes=result.memory_bytes if result and result.memory_bytes else row.memory_bytes,
        )
        found.append(
            RankedPlan(
                row=filled,
                basis=one.basis,
                run=run_of(job, row.plan, calibration),
                low_tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, one.high_s)),
                high_tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, one.low_s)),
                microbatches=int(row.plan.microbatches(job.gpus, job.global_batch)),
                lost=lost[place],
            )
        )
    return found


def calibration_text(job: Job, plans: Sequence[Plan], results: Mapping[int, Result]) -> str:
    """Return a calibration file of the measured runs, "" where they do not clearly help (accuracy/own.py)."""
    from tuner.accuracy.own import own_calibration
    from tuner.measurement import Measurement

    timed = {index: result for index, result in results.items() if result.end == "ok" and result.step_s and not result.extrapolated}
    rows = [
        Measurement(
            id=f"run {index}", framework=job.framework.name, job=job, plan=plans[index], step_s=result.step_s, source="own", series={}
        )
        for index, result in timed.items()
    ]
    try:
        return own_calibration(rows, "measured").text if rows else ""
    except SpecError:  # a run is further off than another unit or job would be: nothing to build on
        return ""


def drift_of(ended: Ended) -> float | None:
    """Return by what factor the last repeat of a plan's run was slower than its first, None where none was repeated."""
    repeats = [entry for entry in ended.entries if entry.reference and entry.result.step_s]
    if not repeats:
        return None
    first = next((e.result.step_s for e in ended.entries if e.key == repeats[-1].key and not e.reference and e.result.step_s), None)
    return None if first is None or repeats[-1].result.step_s is None else repeats[-1].result.step_s / first
