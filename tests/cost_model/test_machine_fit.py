"""Calibrations of a machine from timings that the model itself made with other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.terminal import ROOT
from tuner import presets
from tuner.cost_model.calibration import Calibration, CalibrationFile, calibration_for, layered
from tuner.cost_model.collectives import Group, collective_seconds, inner_seconds, send_seconds
from tuner.cost_model.fit.machine import errors_of, machine_calibration, shrunk, usable
from tuner.cost_model.fit.timings import levelled
from tuner.cost_model.roofline import attention_seconds, gemm_seconds
from tuner.errors import SpecError
from tuner.launch.logs.nccl_tests import read_nccl_log
from tuner.launch.questions import questions
from tuner.timing import Timing, read_timings, timing_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.cluster import Cluster

LOGS = ROOT / "tests/fixtures/nccl"
TRUTH = {"memory_bandwidth_efficiency": 0.5, "long_stream_efficiency": 0.5, "kernel_launch_s": 2e-5, "attention_backward_ratio": 3.5}
TRUTH |= {"pp_send_s": 4e-4}


def slower(base: Calibration, factor: float = 2.0, latency: float = 20.0) -> Calibration:
    """Return the calibration of a machine that is slower than `base` says, in every curve and coefficient."""
    curves: dict[str, Any] = {
        "gemm": {"bfloat16": levelled(base.gemm["bfloat16"], factor, latency)},
        "attention": {"gqa": levelled(base.attention["gqa"], factor, latency)},
        "collectives": {op: levelled(curve, factor, latency) for op, curve in base.collectives.items()},
    }
    coefficients: Any = {name: {"value": value, "source": "truth"} for name, value in TRUTH.items()}
    return layered(base, CalibrationFile(name="truth", coefficients=coefficients, **curves))


def answers(cluster: Cluster, machine: Calibration, world: int, noise: float = 0.03, precision: str = "bf16") -> list[Timing]:
    """Return what microbenchmarks would measure where `machine` is the truth."""
    random, gpu, found = np.random.default_rng(0), cluster.gpu, []
    link = cluster.domains[0].bandwidth.value
    for q in questions(world, world, accelerated=True, precision=precision):
        fields = {name: value for name, value in q.items() if name != "repeats"}
        op = q["op"]
        if op == "gemm":
            seconds = gemm_seconds(q["m"], q["n"], q["k"], precision=precision, gpu=gpu, calibration=machine)
        elif op == "attention":
            sizes = (q["batch"], q["length"], q["length"], q["heads"], q["kv_heads"], q["head_dim"], q["head_dim"])
            seconds = attention_seconds(*sizes, causal=True, window=0, precision=precision, gpu=gpu, calibration=machine)
            seconds = seconds * (machine["attention_backward_ratio"] if q.get("backward") else 1.0)
        elif op == "stream":
            seconds = q["bytes"] / (gpu.hbm.value * machine["memory_bandwidth_efficiency"]) + machine["kernel_launch_s"]
        elif op == "p2p":
            seconds = send_seconds(q["bytes"], 1, cluster=cluster, calibration=machine) + machine["pp_send_s"]
        elif op in ("launch", "issue"):
            seconds = machine["kernel_launch_s"]
        else:
            seconds = inner_seconds(op, q["bytes"], q["members"], link=link, calibration=machine)
        found.append(Timing(**fields, seconds=float(seconds) * float(np.exp(noise * random.standard_normal()))))
    return found


@pytest.fixture(scope="module")
def h100() -> Cluster:
    return presets.cluster("h100x8")


@pytest.fixture(scope="module")
def told(h100: Cluster) -> Any:
    base = calibration_for("auto", h100.gpu)
    return machine_calibration(answers(h100, slower(base), 8), h100, base, "mine", "measured")


def test_operators_that_were_held_out_are_told_as_well_as_the_noise_allows(told: Any) -> None:
    scores = {kind.name: kind for kind in told.told}
    assert set(scores) >= {"gemm", "attention", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "stream", "p2p"}
    for name in ("gemm", "attention", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert scores[name].way != "shipped", name
        assert scores[name].after[0] < 0.1 < 0.3 < scores[name].before[0], name


def test_coefficients_come_out_near_the_truth_with_rows_and_source(told: Any) -> None:
    for name in ("memory_bandwidth_efficiency", "long_stream_efficiency", "attention_backward_ratio", "kernel_launch_s"):
        entry = told.file.coefficients[name]
        assert entry.value == pytest.approx(TRUTH[name], rel=0.15), name
        assert entry.n > 0
        assert entry.source.startswith("measured")


def test_a_search_uses_the_file(told: Any, h100: Cluster, tmp_path: Path) -> None:
    import tuner
    from tuner.cost_model.fit.__main__ import dump

    path = tmp_path / "mine.yaml"
    path.write_text(dump(told.file, "a test"))
    asked: dict[str, Any] = {"model": "llama3-8b", "cluster": "h100x8", "seq_len": 4096, "global_batch": 64, "plan": "tp=2,zero=1"}
    shipped = tuner.estimate(**asked, framework="torchtitan").record()
    mine = tuner.estimate(**asked, framework="torchtitan", calibration=str(path)).record()
    assert 1.3 < mine["step_s"] / shipped["step_s"] < 4.0  # a machine half as fast
    loaded = calibration_for(str(path), h100.gpu, framework="torchtitan")
    auto = calibration_for("auto", h100.gpu, framework="torchtitan")
    assert [layer for layer in loaded.layers if layer != "mine"] == list(auto.layers)
    assert loaded.layers.index("mine") < loaded.layers.index("torchtitan")  # what is the framework's own stays on top
    assert loaded["host_per_layer_s"] == auto["host_per_layer_s"]


def test_few_rows_shift_the_shipped_curve_and_no_more(h100: Cluster) -> None:
    base = calibration_for("auto", h100.gpu)
    few = [t for t in answers(h100, slower(base), 1) if t.op == "gemm"][:8]
    found = machine_calibration(few, h100, base, "mine", "measured")
    (kind,) = found.told
    assert kind.way == "level"
    assert set(found.file.gemm) == {"bfloat16"}
    assert not found.file.collectives
    assert kind.after[0] < 0.5 * kind.before[0]


def test_what_does_not_help_stays_as_it_ships(h100: Cluster) -> None:
    base = calibration_for("auto", h100.gpu)
    same = [t for t in answers(h100, base, 8, noise=0.1) if t.op not in ("gemm", "attention")]
    found = machine_calibration(same, h100, base, "mine", "measured")
    assert {kind.way for kind in found.told if kind.name in ("all_gather", "all_reduce")} == {"shipped"}
    assert all(kind.after[0] <= kind.before[0] for kind in found.told if kind.way == "shipped")


def test_a_coefficient_is_shrunk_to_what_ships(h100: Cluster) -> None:
    base = calibration_for("auto", h100.gpu)
    one = shrunk("attention_backward_ratio", np.log([5.0]), base, "x").value
    many = shrunk("attention_backward_ratio", np.log([5.0] * 50), base, "x").value
    assert base["attention_backward_ratio"] < one < many < 5.0
    assert many == pytest.approx(5.0, rel=0.02)
    assert shrunk("memory_bandwidth_efficiency", np.log([9.0] * 50), base, "x").value == 1.0  # the most that a formula takes


def test_logs_of_one_node_and_of_two() -> None:
    cluster = presets.cluster("h100x16")
    base = calibration_for("auto", cluster.gpu)
    timings = read_nccl_log(LOGS / "all_reduce-8.log")[0] + read_nccl_log(LOGS / "all_reduce-16-mpirun.log")[0]
    found = machine_calibration(timings, cluster, base, "mine", "nccl-tests")
    assert {kind.name for kind in found.told} == {"all_reduce", "between nodes"}
    assert all(kind.after[0] <= kind.before[0] for kind in found.told)
    curve, prior = found.file.collectives["all_reduce"], base.collectives["all_reduce"]
    # Sizes of group that the log does not have keep their ratio to those that it has.
    assert float(curve.latency(2)) / float(curve.latency(8)) == pytest.approx(float(prior.latency(2)) / float(prior.latency(8)), rel=0.01)
    calibration = layered(base, found.file)
    far = [t for t in timings if t.nodes == 2 and t.bytes >= 2**24]
    said = [float(collective_seconds("all_reduce", t.bytes, Group(16, 1), cluster=cluster, calibration=calibration)) for t in far]
    assert np.median(np.abs(np.log(np.array(said) / [t.seconds for t in far]))) < 0.2


def test_precisions_are_not_mixed(h100: Cluster) -> None:
    rows = [Timing(op="gemm", m=512, n=512, k=512, seconds=1e-3, precision=name) for name in ("fp32", "bf16", "bf16", "fp8")]
    assert [t.precision for t in usable(rows)] == ["bf16", "bf16"]
    found = machine_calibration(rows, h100, calibration_for("auto", h100.gpu), "mine", "measured")
    assert found.unread == {"in another precision, or one without a curve to fit": 2}


def test_errors_of_a_calibration_by_kind(h100: Cluster) -> None:
    base = calibration_for("auto", h100.gpu)
    exact = errors_of(answers(h100, base, 2, noise=0.0), h100, base)
    assert max(median for median, _ in exact.values()) < 1e-6


def test_nothing_to_fit_is_said(h100: Cluster) -> None:
    rows = [Timing(op="all_reduce", bytes=8, members=1, seconds=1e-6)]
    with pytest.raises(SpecError, match="hold nothing that a calibration reads"):
        machine_calibration(rows, h100, calibration_for("auto", h100.gpu), "mine", "measured")


def test_timings_are_lines_that_read_back(tmp_path: Path) -> None:
    rows = [Timing(op="gemm", m=1, n=2, k=3, seconds=1.0, precision="fp32"), Timing(op="launch", seconds=1e-6)]
    path = tmp_path / "t.jsonl"
    path.write_text(timing_lines(rows))
    assert read_timings(path) == rows
    path.write_text(timing_lines(rows) + '{"op": "gemm", "seconds": -1}\n')
    with pytest.raises(SpecError, match=r"t\.jsonl:3: seconds"):
        read_timings(path)
    path.write_text("\n")
    with pytest.raises(SpecError, match="is empty"):
        read_timings(path)
