"""The cheapest count of GPUs that meets a deadline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import calibration_of, llama_job
from tuner import presets
from tuner.cost_model.estimate import training_seconds
from tuner.errors import SpecError
from tuner.search.counts import candidate_counts, cheapest, sweep_counts
from tuner.search.space import SpaceSpec

SPEC = SpaceSpec(
    axes={"recompute": ["none", "full"], "micro_batch": [1, 2], "vpp": [1], "pipeline_layout": ["even"]},
    fix={"zero": 1, "cp": 1, "offload": "none", "shard_group": 0},
)


def job(**changes: Any) -> Any:
    return llama_job(model=presets.model("llama3-8b"), cluster=presets.cluster("h100x64"), tokens=100e9, **changes)


def test_counts_are_whole_nodes() -> None:
    assert candidate_counts(job(), 8, 64) == (8, 16, 24, 32, 40, 48, 56, 64)
    assert candidate_counts(job(), 20, 30) == (24,)
    many = candidate_counts(job(), 256, 1024)
    assert many == (256, 320, 384, 448, 512, 640, 768, 896, 1024)  # 8 GPUs x 2^i x 1, 3, 5 or 7
    assert candidate_counts(job(), 264, 1000)[:2] == (264, 320)  # and both ends
    assert candidate_counts(job(), 264, 1000)[-1] == 1000


@pytest.mark.parametrize(("fewest", "most"), [(0, 8), (64, 32), (9, 15), (-8, 8)])
def test_a_range_without_a_node_is_refused(fewest: int, most: int) -> None:
    with pytest.raises(SpecError, match="whole nodes of 8 GPUs"):
        candidate_counts(job(), fewest, most)


def test_a_budget_of_tokens_is_needed() -> None:
    with pytest.raises(SpecError, match="--tokens"):
        sweep_counts(llama_job(), [64], calibration_of(llama_job()))


def test_the_cheapest_count_that_meets_the_deadline() -> None:
    calibration = calibration_of(job())
    seen: list[tuple[int, int]] = []
    results = sweep_counts(job(), [64, 16, 32], calibration, spec=SPEC, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [r.gpus for r in results] == [16, 32, 64]
    for r in results:
        assert r.plan is not None
        assert r.run_s == training_seconds(r.job, r.plan, calibration)
        assert r.gpu_hours == pytest.approx(r.gpus * r.run_s / 3600)
        assert r.job.gpus == r.gpus
        assert (r.job.global_batch, r.job.seq_len) == (512, 8192)
        assert r.cost is None
    times = [r.run_s or 0.0 for r in results]
    assert times == sorted(times, reverse=True)
    by_hours = sorted(results, key=lambda r: r.gpu_hours or 0.0)
    assert cheapest(results, times[0] * 2) == by_hours[0]
    assert cheapest(results, times[1]) == min(results[1:], key=lambda r: r.gpu_hours or 0.0)
    assert cheapest(results, times[2] * 0.9) is None


def test_money_where_the_cluster_states_a_price() -> None:
    priced = job().replace(cluster=presets.cluster("h100x16").replace(price_per_gpu_hour=2.5))
    (result,) = sweep_counts(priced, [16], calibration_of(priced), spec=SPEC)
    assert result.gpu_hours is not None
    assert result.cost == pytest.approx(2.5 * result.gpu_hours)


def test_a_count_where_nothing_fits_costs_nothing() -> None:
    (result,) = sweep_counts(job(), [8], calibration_of(job()), spec=SPEC, max_memory=1e9)
    assert (result.plan, result.run_s, result.gpu_hours, result.cost) == (None, None, None, None)
    assert not result.meets(1e12)
    assert cheapest([result], 1e12) is None
