"""What a job of failing GPUs keeps on average, for columns of plans."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.jobs import gpt_job, moe_job
from tuner import presets
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.degraded import degraded
from tuner.cost_model.estimate import estimate
from tuner.cost_model.goodput import goodput, lasting_of, unit_gpus, units_of_replica
from tuner.job import Job
from tuner.plan import FULL, Plan
from tuner.search.exhaustive import sweep
from tuner.search.space import SpaceSpec, build_space

TWO = Plan(tp=8, pp=8, micro_batch=1, sequence_parallel=1, recompute=FULL)


def small() -> Job:
    """Two replicas of 64 GPUs: 16 tensor-parallel groups, 8 a replica."""
    return gpt_job(cluster=presets.cluster("a100x128"), global_batch=32)


def share(job: Job, plan: Plan, failed: float) -> float:
    calibration = load_calibration("none", job)
    allowed = [int(plan.tp - plan.fallback)] if plan.fallback < plan.tp else []
    return float(estimate(job, plan, calibration).step_s / goodput(job, plan, calibration, {1: failed}, allowed).step_s)


def hit(p: float) -> float:
    """Replicas of 8 groups that hold the hit ones of 16, packed: none, 1 to 8, more than 8."""
    from math import comb

    of = [comb(16, k) * p**k * (1 - p) ** (16 - k) for k in range(17)]
    return sum(of[1:9]) + 2 * sum(of[9:])


def test_a_dropped_replica_by_hand() -> None:
    p1 = 1 - 0.99**8  # 0.0773
    assert share(small(), TWO, 0.01) == pytest.approx(1 - hit(p1) / 2, rel=1e-9)


def test_a_fallback_by_hand() -> None:
    job, plan = small(), dataclasses.replace(TWO, fallback_tp=7)
    calibration = load_calibration("none", job)
    cost = degraded(job, plan, calibration, estimate(job, plan, calibration))
    p1, p2 = 1 - 0.99**8, 1 - 0.99**8 - 8 * 0.01 * 0.99**7
    alone = min(1 - float(cost.kept), 2 * (1 - float(cost.pace)))
    lost = (hit(p2) + (hit(p1) - hit(p2)) * alone) / 2
    expected = (1 - lost) / (1 + float(cost.overhead) * (1 - (1 - p1) ** 16))
    assert share(job, plan, 0.01) == pytest.approx(expected, rel=1e-9)
    assert share(job, plan, 0.01) > share(job, TWO, 0.01)


def test_no_failures_cost_nothing() -> None:
    for plan in (TWO, dataclasses.replace(TWO, fallback_tp=7)):
        assert share(small(), plan, 0.0) == 1.0


def test_a_fallback_that_runs_out_of_memory_counts_as_a_plan_that_does() -> None:
    job = gpt_job(cluster=presets.cluster("a100x1024"))
    plan = Plan(tp=8, pp=4, zero=0, fallback_tp=4)
    calibration = load_calibration("none", job)
    healthy, judged = estimate(job, plan, calibration), goodput(job, plan, calibration, {1: 0.001}, [4])
    assert float(judged.p_oom) >= float(healthy.p_oom)
    assert float(judged.p_oom) == float(degraded(job, plan, calibration, healthy).p_oom)


def test_an_expert_group_falls_together() -> None:
    plan = Plan(tp=2, cp=2, pp=2, ep=16, etp=1)  # 16 ranks of 4-GPU stages: 4 replicas share a group
    assert (int(unit_gpus(plan)), int(units_of_replica(plan))) == (16, 2)
    assert (int(unit_gpus(TWO)), int(units_of_replica(TWO))) == (8, 8)
    assert share(moe_job(), Plan(ep=8, pp=2), 0.001) == pytest.approx(1 - _packed(32, 1 - 0.999**8, 2) / 16, rel=1e-9)


def _packed(units: int, p: float, m: int) -> float:
    from scipy.stats import binom

    return sum(float(binom.pmf(k, units, p)) * -(-k // m) for k in range(units + 1))


def test_the_sweep_for_goodput_is_exact() -> None:
    job = small()
    calibration = load_calibration("none", job)
    axes = {"tp": [4, 8], "pp": [8], "fallback_tp": [0, 3, 7], "micro_batch": [1, 2], "recompute": ["none", "full"], "zero": [0, 1]}
    space = build_space(job, SpaceSpec(axes=axes, fix={"cp": 1, "vpp": 1, "offload": "none"}))

    def judge(*question: object) -> object:
        return goodput(*question, {1: 0.002}, [1])  # type: ignore[arg-type]

    found = sweep(job, space, calibration, objective="goodput", top_k=3, max_p_oom=1.1, estimator=judge)  # type: ignore[arg-type]
    table = space.plans_at(range(space.size))
    legal = np.broadcast_to(space.allows(table), space.size)
    every = np.where(legal, np.broadcast_to(goodput(job, table, calibration, {1: 0.002}, [1]).step_s, space.size), np.inf)
    assert [one.step_s for one in found.best] == pytest.approx(sorted(every.tolist())[:3], rel=1e-12)
    assert found.plan(found.best[0]).fallback_tp in (3, 7)


def test_work_that_lasts_by_hand() -> None:
    """100 GPUs of an MTBF of 1,000 h: Lam = 0.1 an hour; u = 0.5 h, w = 0.02 h, d the best: A = Lam d exp(-Lam u) / (exp(Lam (d + w)) - 1).

    Lam d = 1 + W(-exp(-1.002)): to first order sqrt(2 * 0.002) = 0.0632, less a third of its square, 0.0619. Then A =
    0.0619 * exp(-0.05) / (exp(0.0639) - 1) = 0.0619 * 0.95123 / 0.065986 = 0.8924.
    """
    given = {"value": 3.6e6, "source": "ours"}
    pauses = {
        name: {"value": seconds, "source": "ours"} for name, seconds in (("detection", 600), ("restart", 1200), ("checkpoint_write", 72))
    }
    data = presets.failure("llama3-herd").replace(mtbf=given, **pauses)
    assert lasting_of(data, 100) == pytest.approx(0.8924, abs=3e-4)


def test_what_lasts_is_a_factor_of_every_plan() -> None:
    job, calibration = small(), load_calibration("none", small())
    whole, half = (float(goodput(job, TWO, calibration, {1: 0.01}, [], lasting).step_s) for lasting in (1.0, 0.5))
    assert half == pytest.approx(2 * whole)
