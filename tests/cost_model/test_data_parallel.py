from __future__ import annotations

import pytest

from tests.jobs import calibration_of, llama_job, moe_job
from tuner import presets
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.collectives import Group, collective_seconds
from tuner.cost_model.data_parallel import exposed, optimizer_seconds, traffic, wire_bytes
from tuner.cost_model.pipeline import StageTime
from tuner.cost_model.weights import Weights
from tuner.plan import OFFLOADS, Plan

WEIGHTS = Weights(1e9, 0.0)
NOTHING = StageTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ENDLESS = StageTime(1e9, 1e9, 0.0, 0.0, 0.0, 0.0)


def seconds(job, plan, microbatches=4, weights=WEIGHTS, calibration=None):
    return traffic(job, plan, weights, microbatches, calibration or calibration_of(job))


def alone(job, op, bytes_, group):
    return float(collective_seconds(op, bytes_, group, cluster=job.cluster, calibration=calibration_of(job)))


def test_zero_0_and_1_by_hand() -> None:
    job = llama_job()
    g, w = wire_bytes(job)
    group = Group(8, 8)  # 64 GPUs, tp 8
    plain, sharded = seconds(job, Plan(tp=8)), seconds(job, Plan(tp=8, zero=1))
    assert float(plain.gradients) == pytest.approx(alone(job, "all_reduce", g * 1e9, group))
    assert float(plain.weights) == 0
    assert float(sharded.gradients) == pytest.approx(alone(job, "reduce_scatter", g * 1e9, group))
    assert float(sharded.weights) == pytest.approx(alone(job, "all_gather", w * 1e9, group))


def test_zero_3_gathers_for_every_micro_batch() -> None:
    job = llama_job()
    once = alone(job, "all_gather", wire_bytes(job)[1] * 1e9, Group(64, 1))
    resharded = 2 if job.framework.resharded_after_forward.value else 1
    assert float(seconds(job, Plan(zero=3), 4).weights) == pytest.approx(once * 4 * resharded)
    with_pipeline = alone(job, "all_gather", wire_bytes(job)[1] * 1e9, Group(32, 1))
    assert float(seconds(job, Plan(zero=3, pp=2), 4).weights) == pytest.approx(with_pipeline)


def test_hybrid_sharding_stays_in_the_node_and_reduces_between_nodes() -> None:
    job = llama_job()
    hybrid, full = seconds(job, Plan(zero=3, shard_group=8)), seconds(job, Plan(zero=3))
    assert float(hybrid.weights) < float(full.weights)
    between = alone(job, "all_reduce", wire_bytes(job)[0] * 1e9 / 8, Group(8, 8))
    assert float(hybrid.gradients) == pytest.approx(4 * alone(job, "reduce_scatter", wire_bytes(job)[0] * 1e9, Group(8, 1)) + between)


def test_overlap_needs_a_window() -> None:
    job = llama_job()
    calibration = calibration_of(job)
    comm = seconds(job, Plan(tp=8, zero=1))
    whole = float(comm.gradients + comm.weights)
    assert float(exposed(Plan(tp=8, zero=1), comm, ENDLESS, 4, calibration)) == pytest.approx(whole)
    overlapped = Plan(tp=8, zero=1, dp_overlap=1)
    assert float(exposed(overlapped, comm, NOTHING, 4, calibration)) == pytest.approx(whole)
    shown = 1 - calibration["dp_overlap_fraction"] * (1 - calibration["overlap_contention"])
    assert float(exposed(overlapped, comm, ENDLESS, 4, calibration)) == pytest.approx(whole * shown)


def test_experts_reduce_over_their_own_ranks() -> None:
    job = moe_job()
    only_experts = seconds(job, Plan(ep=8), weights=Weights(0.0, 1e9))
    assert float(only_experts.gradients) == pytest.approx(
        alone(job, "all_reduce", wire_bytes(job)[0] * 1e9, Group(32, 8)) + alone(job, "all_reduce", 0.0, Group(256, 1)), rel=1e-3
    )


def test_optimizer_by_hand() -> None:
    """1e9 parameters: 30 bytes each and 4 for the norm over the achieved HBM bandwidth; ZeRO 1 divides by dp."""
    job = llama_job()
    calibration = calibration_of(job)
    rate = job.cluster.gpu.hbm.value * calibration["memory_bandwidth_efficiency"]
    launches = 4 * calibration["kernel_launch_s"]
    assert float(optimizer_seconds(job, Plan(tp=8), WEIGHTS, calibration)) == pytest.approx(34e9 / rate + launches)
    assert float(optimizer_seconds(job, Plan(tp=8, zero=1), WEIGHTS, calibration)) == pytest.approx(34e9 / 8 / rate + launches)
    offloaded = Plan(tp=8, offload=OFFLOADS["optimizer"])
    assert float(optimizer_seconds(job, offloaded, WEIGHTS, calibration)) > 5 * 34e9 / rate


def test_zero_1_of_nanotron_cuts_every_tensor_for_every_rank() -> None:
    """80 layers of 6 tensors over 64 ranks, 4.8 us a slice: 0.147 s; a quarter of them with pp 4 (16 ranks: a sixteenth)."""
    job = llama_job(framework=presets.framework("nanotron"))
    slicing, plain = load_calibration("nanotron-rings", job), load_calibration("none", job)

    def cut(plan):
        return float(seconds(job, plan, calibration=slicing).weights) - float(seconds(job, plan, calibration=plain).weights)

    assert cut(Plan(zero=1)) == pytest.approx(80 * 6 * 64 * 4.8e-6)
    assert cut(Plan(zero=1, pp=4)) == pytest.approx(80 * 6 * 64 * 4.8e-6 / 16)
    assert cut(Plan(zero=0)) == 0
    assert cut(Plan(zero=1, tp=8, pp=8)) == 0
