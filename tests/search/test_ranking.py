"""The ranked answer: rows as estimated, the person's plan placed among them, and what cannot be told apart."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.jobs import calibration_of
from tests.search.small import one_by_one, small_job, small_space
from tuner.cost_model.estimate import estimate, mfu, tokens_per_s_per_gpu
from tuner.plan import FULL, Plan
from tuner.search.exhaustive import sweep
from tuner.search.ranking import Row, intricate, plainer, rank


def test_rows_are_the_estimates_of_their_plans() -> None:
    job, space = small_job(), small_space()
    calibration = calibration_of(job)
    plans = [space.plan_at(f.index) for f in sweep(job, space, calibration, top_k=5).best]
    ranking = rank(job, plans, calibration)
    assert [row.rank for row in ranking.rows] == [1, 2, 3, 4, 5]
    for row, plan in zip(ranking.rows, plans, strict=True):
        of = estimate(job, plan, calibration)
        assert row.plan == plan
        assert (row.step_s, row.low_s, row.high_s, row.memory_bytes, row.p_oom) == (
            of.step_s,
            of.low_s,
            of.high_s,
            of.memory_bytes,
            of.p_oom,
        )
        assert row.tokens_per_s_per_gpu == tokens_per_s_per_gpu(job, of.step_s) == pytest.approx(64 * 8192 / row.step_s / 16)
        assert row.mfu == mfu(job, of.step_s)
        assert row.basis == "analytic"


def test_plans_whose_ratio_to_the_best_is_not_known_well_enough_are_tied() -> None:
    """Without measured runs: log ratio of variance k(i, i) + k(0, 0) - 2 k(i, 0) + 2 x 0.06^2, what all plans share cancels.

    For plans that differ in tp alone, 1 against 2 (one doubling): 2 (plan + plan_job)(1 - rho) + 2 pair (the pairs with tp, each 1 - rho).
    """
    job, space = small_job(), small_space()
    calibration = calibration_of(job)
    found = sorted(one_by_one(space), key=lambda f: f.step_s)
    ranking = rank(job, [space.plan_at(f.index) for f in found], calibration)
    assert ranking.rows[0].tied
    assert 1 < ranking.tied < len(ranking.rows)
    kernel = calibration.kernel
    rho, pair = (math.exp(-1.0 / (2.0 * reach)) for reach in (kernel.plan_reach, kernel.pair_reach))
    variance = 2 * (kernel.plan + kernel.plan_job) * (1 - rho) + 2 * kernel.pair * 2 * (1 - pair) + 2 * 0.06**2
    two = rank(job, [Plan(tp=1, zero=1), Plan(tp=2, zero=1)], calibration).rows
    assert two[1].tied == (two[1].step_s / two[0].step_s <= math.exp(1.645 * math.sqrt(variance)))


def test_the_present_plan_is_ranked_beside_the_best() -> None:
    job, space = small_job(), small_space()
    calibration = calibration_of(job)
    plans = [space.plan_at(f.index) for f in sweep(job, space, calibration, top_k=5).best]
    same = rank(job, plans, calibration, current=plans[2]).current
    assert same is not None
    assert same.rank == 1 + sum(row.step_s < same.step_s for row in rank(job, plans, calibration).rows) <= 3
    slow = Plan(tp=8, pp=1, recompute=FULL, zero=1)
    ranking = rank(job, plans, calibration, current=slow)
    assert ranking.current is not None
    assert ranking.current.rank == 6
    assert ranking.gain == ranking.current.step_s / ranking.rows[0].step_s > 1.2
    assert ranking.current.problems == ()


def test_an_illegal_present_plan_is_ranked_with_what_is_wrong() -> None:
    job = small_job()
    calibration = calibration_of(job)
    ranking = rank(job, [], calibration, current=Plan(tp=1, sequence_parallel=1, vpp=2))
    assert ranking.rows == ()
    assert ranking.gain is None
    assert ranking.current is not None
    assert [problem.partition(":")[0] for problem in ranking.current.problems] == ["error", "duplicate", "warning"]
    assert "vpp = 2 needs pp > 1" in ranking.current.problems[0]


def test_memory_ranks_by_bytes() -> None:
    job, space = small_job(), small_space()
    calibration = calibration_of(job)
    plans = [space.plan_at(f.index) for f in sweep(job, space, calibration, objective="memory", top_k=4).best]
    ranking = rank(job, plans, calibration, objective="memory", current=plans[0])
    assert [row.memory_bytes for row in ranking.rows] == sorted(row.memory_bytes for row in ranking.rows)
    assert ranking.current is not None
    assert ranking.current.rank == 1


def test_the_plainest_of_what_cannot_be_told_apart_is_named() -> None:
    """Two knobs fewer at 1 % more time, within a noise of 3 %; one at 0.5 % is less plain; none at 5 % is beyond the noise."""
    job, space = small_job(), small_space()
    row = rank(job, [space.plan_at(sweep(job, space, calibration_of(job), top_k=1).best[0].index)], calibration_of(job)).rows[0]

    def other(place: int, slower: float, plan: Plan, *, tied: bool = True) -> Row:
        return dataclasses.replace(row, rank=place, step_s=slower, plan=plan, tied=tied)

    rich = Plan(tp=4, pp=2, vpp=2, cp=2, cp_kind=2, offload=1)
    rows = [other(1, 1.0, rich), other(2, 1.005, Plan(vpp=2, cp=2)), other(3, 1.01, Plan(vpp=2)), other(4, 1.05, Plan())]
    assert intricate(rich) == ("vpp", "cp", "offload", "cp_kind")
    assert plainer(rows, 0.03) == (3, pytest.approx(0.01), ("cp", "offload", "cp_kind"))
    assert plainer(rows, 0.06) == (4, pytest.approx(0.05), ("vpp", "cp", "offload", "cp_kind"))
    assert plainer([rows[0], other(2, 1.001, Plan(), tied=False)], 0.03) is None
    assert plainer(rows[3:], 0.03) is None and plainer([], 0.03) is None
    assert intricate(Plan(cp_kind=2, recompute_layers=3)) == ()  # neither does anything here
    assert intricate(Plan(recompute=FULL, recompute_layers=3)) == ("recompute_layers",)


def test_rows_are_frozen() -> None:
    job = small_job()
    row = rank(job, [Plan(tp=8)], calibration_of(job)).rows[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.rank = 2  # type: ignore[misc]
