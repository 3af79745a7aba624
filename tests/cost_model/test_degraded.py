"""A group that goes on at a lower degree, and what that costs the healthy ones."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from tests.jobs import gpt, gpt_job, llama_job, moe_job
from tuner import presets
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.degraded import Degraded, degraded, degraded_experts, reduced_plan
from tuner.cost_model.estimate import estimate
from tuner.cost_model.shard import groups, shard
from tuner.job import Job
from tuner.plan import FULL, Plan
from tuner.search.exhaustive import MAX_P_OOM
from tuner.search.lost_gpu import lost_gpus

PLAN = Plan(tp=8, pp=8, micro_batch=1, sequence_parallel=1, zero=0, recompute=FULL)


def of(job: Job, plan: Plan) -> Degraded:
    calibration = load_calibration("none", job)
    return degraded(job, plan, calibration, estimate(job, plan, calibration))


def made(**columns: Any) -> Degraded:
    """Return a Degraded of hand-made figures."""
    usual = dict.fromkeys(Degraded.__dataclass_fields__, 0.0)
    return Degraded(
        **(
            usual
            | {"plan": Plan(), "healthy_s": 10.0, "reduced_s": 12.5, "microbatches": 6, "of": 8, "replicas": 4, "spanned": 1, "lost": 0}
            | columns
        )
    )


def test_without_a_fallback_nothing_changes() -> None:
    for fallback in (0, 8):
        same = of(gpt_job(), dataclasses.replace(PLAN, fallback_tp=fallback))
        assert (same.throughput, same.overhead, same.kept, same.pace, same.moved_bytes) == (1.0, 0.0, 1.0, 1.0, 0.0)


def test_the_reduced_replica_is_the_plan_at_a_smaller_degree_in_the_same_mesh() -> None:
    job, small = gpt_job(), reduced_plan(PLAN, 7)
    assert (small.tp, small.idle_tp, small.dp(job.gpus)) == (7, 1, PLAN.dp(job.gpus))
    assert small.microbatches(job.gpus, job.global_batch) == PLAN.microbatches(job.gpus, job.global_batch)
    assert groups(job, small)["dp"] == groups(job, PLAN)["dp"] and groups(job, small)["pp"] == groups(job, PLAN)["pp"]
    assert groups(job, small)["tp"].size == 7


@pytest.mark.parametrize(("heads", "tp", "to", "fullest"), [(64, 8, 7, 10), (128, 32, 30, 5), (128, 32, 28, 5), (24, 8, 6, 4)])
def test_uneven_heads_make_the_fullest_rank(heads: int, tp: int, to: int, fullest: int) -> None:
    job = gpt_job(gpt(layers=96, hidden=heads * 128, heads=heads))
    assert shard(job, reduced_plan(Plan(tp=tp), to)).heads == fullest


def test_few_key_heads_are_copied_where_query_heads_span_them() -> None:
    held = shard(llama_job(), reduced_plan(Plan(tp=8, sequence_parallel=1), 7))  # 64 query heads in 8 groups
    assert (held.heads, held.kv_heads) == (10, 2)


def test_sequence_parallelism_pads() -> None:
    job = gpt_job(seq_len=8192)
    assert shard(job, reduced_plan(Plan(tp=8, sequence_parallel=1), 7)).query == 8197
    assert shard(job, reduced_plan(Plan(tp=8), 7)).query == 8192


def test_an_extra_rank_moves_its_gradients_both_ways() -> None:
    """arXiv 2504.06095, 480B: h 20480, 100 layers, tp 32, pp 8: 12 h^2 12.5 / 32 = 1.97e9 parameters a rank, 3.9 GB of 16-bit gradients."""
    job = gpt_job(gpt(layers=100, hidden=20480, heads=128), cluster=presets.cluster("h100x32768"), global_batch=1024)
    moved = of(job, Plan(tp=32, pp=8, fallback_tp=30, embedding_layers=2, loss_layers=2)).moved_bytes
    wire = float(job.framework.reduce_bytes.value) if job.framework.reduce_bytes else 4.0
    assert float(moved) / wire == pytest.approx(12 * 20480**2 * 13 / 32, rel=0.01)  # the fullest stages hold 13 of 104 units


def test_the_others_reduce_more_by_the_ratio_of_degrees() -> None:
    job = gpt_job()
    halved = of(job, dataclasses.replace(PLAN, fallback_tp=4))  # exact halves
    usual = estimate(job, PLAN, load_calibration("none", job)).slowest.traffic.gradients
    assert float(halved.reduce_s) == pytest.approx(float(usual), rel=0.02)  # n1 / n2 - 1 = 1, latencies apart


@pytest.mark.parametrize("fallback", [7, 6, 4])
def test_the_cut_batch_is_the_largest_that_keeps_step(fallback: int) -> None:
    job = gpt_job()
    calibration = load_calibration("none", job)
    cut = of(job, dataclasses.replace(PLAN, fallback_tp=fallback))

    def seconds(microbatches: int) -> float:
        sequences = microbatches * int(PLAN.dp(job.gpus))
        return float(estimate(job.model_copy(update={"global_batch": sequences}), cut.plan, calibration).step_s)

    kept, of_all = int(cut.microbatches), int(cut.of)
    assert 0 < kept < of_all
    assert seconds(kept) <= float(cut.healthy_s + cut.added_s) < seconds(kept + 1)


def test_throughput_is_the_better_of_a_cut_batch_and_of_waiting() -> None:
    """Four replicas, one of which keeps 6 of 8 micro batches at the healthy pace: (3 + 0.75) / 4; all waiting: 10 / 12.5."""
    assert made().throughput == pytest.approx(0.9375)
    assert made(replicas=1).throughput == pytest.approx(0.8)
    assert made(before_s=0.25, reduce_s=0.25).throughput == pytest.approx(0.9375 / 1.05)
    assert made(spanned=2, lost=1, microbatches=8).throughput == pytest.approx(0.75)  # one of the two replicas of a group is lost


def test_power_that_keeps_step() -> None:
    assert made().power() == pytest.approx(0.8 ** (-1 / 0.63))  # 1.425
    assert made().boosted_pace(1.3) == pytest.approx(0.8 * 1.3**0.63)  # 0.944
    assert made(reduced_s=11.0).boosted_pace(1.3) == 1.0
    assert made(reduced_s=10.0 * 8 / 7).power() == pytest.approx(1.236, abs=1e-3)  # the paper's 8 -> 7 with balanced shards: 1.21-1.24


def test_overlap_hides_moves() -> None:
    job = gpt_job()
    plain, hidden = (of(job, dataclasses.replace(PLAN, fallback_tp=7, dp_overlap=on)) for on in (0, 1))
    assert float(plain.before_s) == float(plain.resharding_before_s) > 0
    assert 0 < float(hidden.before_s) < float(plain.before_s) and float(hidden.after_s) < float(plain.after_s)
    assert float(hidden.resharding_before_s) == float(plain.resharding_before_s)


def test_columns_equal_single_plans() -> None:
    job = gpt_job()
    plans = [dataclasses.replace(PLAN, tp=tp, fallback_tp=to) for tp, to in ((8, 7), (8, 0), (4, 3), (2, 1), (1, 0), (8, 4))]
    table = of(job, Plan.table(plans))
    for i, plan in enumerate(plans):
        one = of(job, plan)
        for name in ("throughput", "overhead", "kept", "pace", "memory_bytes", "p_oom"):
            assert float(np.broadcast_to(getattr(table, name), len(plans))[i]) == float(getattr(one, name)), name


def test_a_job_of_one_replica_has_no_sibling_to_reshard_with() -> None:
    job = gpt_job()
    alone = job.model_copy(update={"cluster": job.cluster.model_copy(update={"gpus": PLAN.tp * PLAN.pp * PLAN.cp})})
    plan = dataclasses.replace(PLAN, fallback_tp=7)
    cost = of(alone, plan)
    assert (cost.added_s, cost.resharding_before_s, cost.resharding_after_s, cost.moved_bytes) == (0.0, 0.0, 0.0, 0.0)
    assert of(job, plan).moved_bytes > 0


def test_an_expert_group_that_lost_a_rank() -> None:
    """64 experts on 8 ranks: 8 each; on 7 ranks the fullest has 10, so the products of its experts take about 10/8 of the time."""
    job = moe_job()
    plan = Plan(ep=8, pp=2, micro_batch=1)
    calibration = load_calibration("none", job)
    healthy = estimate(job, plan, calibration)
    cost = degraded_experts(job, plan, calibration, 7, healthy)
    assert shard(job, cost.plan).experts == 10
    assert (int(cost.spanned), int(cost.lost)) == (8, 1)
    assert float(cost.pace) < 1.0 and float(cost.memory_bytes) > float(healthy.memory_bytes)
    assert float(cost.kept) == pytest.approx(7 / 8 * float(cost.microbatches / cost.of))


def test_one_lost_gpu_of_each_plan() -> None:
    job = gpt_job()
    calibration = load_calibration("none", job)
    lean = dataclasses.replace(PLAN, zero=1)
    asked = [dataclasses.replace(lean, fallback_tp=6), lean, Plan(pp=8, zero=1), dataclasses.replace(PLAN, zero=3)]
    six, seven, drop, sharded = lost_gpus(job, asked, calibration)
    assert (six.way, six.degree, six.to) == ("tp", 8, 6) and (seven.way, seven.to) == ("tp", 7)
    assert -1 / 16 < six.change < seven.change < 0
    assert (drop.way, drop.degree, drop.to, drop.change) == ("drop", 128, 127, -1 / 128) and drop.why == "no group to fall back in"
    assert (sharded.way, sharded.change) == ("drop", -1 / 16) and "zero = 3 shards" in sharded.why


def test_a_stated_fallback_that_cannot_run_is_not_replaced_by_another() -> None:
    job = gpt_job()
    above, shared = dataclasses.replace(PLAN, fallback_tp=9), dataclasses.replace(PLAN, zero=3, fallback_tp=7)
    for lost, why in zip(
        lost_gpus(job, [above, shared], load_calibration("none", job)), ("must not exceed tp = 8", "zero = 3"), strict=True
    ):
        assert (lost.way, lost.degree, lost.to, lost.change) == ("drop", 16, 15, -1 / 16) and why in lost.why


def test_a_plan_that_was_chosen_without_a_fallback_drops_its_replica() -> None:
    job = gpt_job()
    calibration = load_calibration("none", job)
    asked = [PLAN, dataclasses.replace(PLAN, fallback_tp=7)]
    assert [lost.way for lost in lost_gpus(job, asked, calibration)] == ["tp", "tp"]
    drop, seven = lost_gpus(job, asked, calibration, stated=True)
    assert (drop.way, drop.change, drop.why) == ("drop", -1 / 16, "its fallback_tp is tp itself")
    assert (seven.way, seven.to) == ("tp", 7)


def test_a_fallback_counts_by_the_limit_that_plans_are_listed_by() -> None:
    """At tp 6 these GPUs need 73.1 of 85.1 GB, P(OOM) 12.6 %: no search would list such a plan, so the replica is dropped."""
    job = gpt_job()
    calibration = load_calibration("none", job)
    six = dataclasses.replace(PLAN, fallback_tp=6)
    cost = degraded(job, six, calibration, estimate(job, PLAN, calibration))
    assert MAX_P_OOM <= float(cost.p_oom) < 0.5
    (lost,) = lost_gpus(job, [six], calibration)
    assert lost.way == "drop" and re.search(r"tp 6 needs 7\d\.\d of 85\.1 GB, P\(OOM\) 1\d\.\d %", lost.why)


def test_a_replica_that_does_not_fit_at_the_lower_degree_is_dropped() -> None:
    job = gpt_job(cluster=presets.cluster("a100x1024"))
    tight = dataclasses.replace(PLAN, pp=4, tp=8)
    (lost,) = lost_gpus(job, [tight], load_calibration("none", job))
    assert lost.way == "drop" and lost.why.startswith("tp 7 needs ")
