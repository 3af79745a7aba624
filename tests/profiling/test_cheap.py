"""Which runs hold short steps, and what they cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.jobs import calibration_of, llama_job
from tuner import presets
from tuner.job import Job
from tuner.plan import Plan
from tuner.profiling.cheap import cost_of, counts_of, limits_of
from tuner.profiling.limits import STARTUP_S, Limits
from tuner.search.candidates import Candidates

SHORT = Limits(short=True)


def job() -> Job:
    return llama_job(model=presets.model("llama3-8b"), cluster=presets.cluster("h100x16"), global_batch=1024)


def test_steps_are_short_where_half_of_a_run_is_saved() -> None:
    plan = Plan(tp=8, pp=2, sequence_parallel=1)  # 1,024 micro batches: steps of 2 and 4 take 3 of 1,024
    saved = 1.0 - 3.0 / 1024
    least = 0.5 * STARTUP_S / (8 * (saved - 0.5))  # 8 t saved = (60 + 8 t) / 2
    assert counts_of(job(), plan, 1.001 * least, SHORT) == (2, 4)
    assert counts_of(job(), plan, 0.999 * least, SHORT) is None
    assert counts_of(job(), plan, 1000.0, Limits()) is None  # not asked for


def test_few_micro_batches_are_whole_steps() -> None:
    assert counts_of(job(), Plan(tp=1, pp=2, micro_batch=8, zero=1), 1000.0, SHORT) == (2, 4)  # 1,024 / (8 x 8) = 16
    assert counts_of(job(), Plan(tp=1, pp=2, micro_batch=16, zero=1), 1000.0, SHORT) is None  # 8


def test_each_count_needs_two_timed_steps() -> None:
    plan = Plan(tp=8, pp=2, sequence_parallel=1)
    assert counts_of(job(), plan, 1000.0, Limits(short=True, steps=6, warmup=2)) == (2, 4)
    assert counts_of(job(), plan, 1000.0, Limits(short=True, steps=5, warmup=2)) is None


def test_a_short_run_costs_what_its_micro_batches_take() -> None:
    plans = [Plan(tp=8, pp=2, sequence_parallel=1), Plan(tp=1, pp=2, micro_batch=16, zero=1)]
    cost = cost_of(Candidates.of(job(), plans, calibration_of(job())), SHORT)
    assert cost(np.array([100.0, 100.0])) == pytest.approx([STARTUP_S + 8 * 100.0 * 3 / 1024, STARTUP_S + 800.0])


def test_limits_of_each_kind_of_search() -> None:
    given = Limits(worse=2.0, reference_every=8)
    assert limits_of(given, short=True, proxy=False) == Limits(short=True)
    assert limits_of(given, short=False, proxy=False) == given
    assert limits_of(given, short=True, proxy=True) == Limits(worse=math.inf, reference_every=0)
