"""Where candidates stand after some ran, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.jobs import calibration_of, llama_job
from tuner.launch.trial import Result
from tuner.plan import Plan
from tuner.profiling.standing import AGAIN, MEDIAN, QUARTILE, noise, standings
from tuner.search.beliefs import Ran
from tuner.search.candidates import Candidates


def candidates(*step_s: float) -> Candidates:
    """Plans of these predicted steps that surely fit."""
    job = llama_job()
    plans = tuple(Plan(tp=2**i, zero=1) for i in range(len(step_s)))
    return Candidates(
        job=job, plans=plans, step_s=np.array(step_s), memory_bytes=np.full(len(step_s), 1e9), calibration=calibration_of(job)
    )


def test_the_noise_of_a_run_by_hand() -> None:
    """Quartiles 0.02 s apart on either side of 1 s over 4 steps: 1.25 x 0.02 / 0.6745 / 2, and what repeating moves."""
    result = Result(end="ok", step_s=1.0, spread_s=0.02, steps=4)
    assert noise(result) == pytest.approx(math.hypot(MEDIAN * 0.02 / QUARTILE / 2, AGAIN))
    assert noise(Result(end="ok", step_s=1.0)) == pytest.approx(4 * AGAIN)


def test_nothing_ran_is_the_prediction() -> None:
    found = standings(candidates(2.0, 1.0, 3.0), [], {})
    assert [one.index for one in found] == [1, 0, 2]
    assert [one.basis for one in found] == ["analytic"] * 3
    assert [one.step_s for one in found] == pytest.approx([1.0, 2.0, 3.0])


def test_a_quiet_run_is_its_time_and_what_has_not_run_stands_behind_the_best_that_has() -> None:
    of = candidates(2.0, 1.0, 3.0)
    results = {2: Result(end="ok", step_s=3.0, spread_s=0.001, steps=8)}
    found = standings(of, [Ran(2, "ok", 3.0)], results)
    assert (found[0].index, found[0].basis) == (2, "measured")
    assert found[0].step_s == pytest.approx(3.0, rel=0.01)
    assert {one.basis for one in found[1:]} == {"calibrated"}
    assert found[1].step_s < found[0].step_s  # said as it is, though it is not ranked first


def test_a_noisy_lucky_run_is_weighed_with_the_rest() -> None:
    of = candidates(1.0, 1.0, 1.0)
    ran = [Ran(0, "ok", 1.0), Ran(1, "ok", 1.0), Ran(2, "ok", 0.8)]
    quiet, noisy = (
        {i: Result(end="ok", step_s=run.step_s, spread_s=spread, steps=4) for i, run in enumerate(ran)} for spread in (0.001, 0.3)
    )
    said = [{one.index: one.step_s for one in standings(of, ran, results)}[2] for results in (quiet, noisy)]
    assert said[0] == pytest.approx(0.8, rel=0.02)
    assert said[0] < said[1] < 1.0


def test_a_plan_that_ran_out_or_failed_is_not_ranked() -> None:
    found = standings(candidates(2.0, 1.0, 3.0), [Ran(1, "oom"), Ran(2, "failed")], {1: Result(end="oom"), 2: Result(end="failed")})
    assert [one.index for one in found] == [0]
