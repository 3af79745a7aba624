"""Proxies of a few layers on one node: what they keep, by hand, and what they say of the plan."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.jobs import calibration_of, llama_job
from tuner import presets
from tuner.cost_model.estimate import estimate
from tuner.cost_model.residual import plan_errors
from tuner.job import Job, RampUp
from tuner.launch.limits import refusals
from tuner.launch.trial import Result
from tuner.model import Model, Moe, SlidingWindow
from tuner.plan import FULL, RECOMPUTE_MODULES, SCHEDULES, Plan
from tuner.plan_text import parse_recompute
from tuner.profiling.proxy import (
    FITS,
    PROXY,
    Cropped,
    Proxy,
    cropped,
    cropped_model,
    errors,
    extrapolated,
    most_periods,
    period,
    proxy_of,
    spreads,
    why_none,
)

FIELDS: dict[str, Any] = {
    "name": "m", "layers": 12, "hidden": 1024, "ffn_hidden": 4096, "heads": 16, "kv_heads": 8, "head_dim": 64, "vocab": 32000,
}  # fmt: skip
MOE: dict[str, Any] = {"experts": 16, "top_k": 2, "expert_ffn_hidden": 512}


def model(**changes: Any) -> Model:
    return Model(**FIELDS | changes)


def job(of: Model | None = None, gpus: int = 64, **changes: Any) -> Job:
    return llama_job(model=of or model(), cluster=presets.cluster("h100x64").replace(gpus=gpus), global_batch=256, **changes)


def kinds(of: Model) -> list[tuple[int, bool]]:
    return [tuple(of.kind(i)) for i in range(of.layers)]


def test_a_dense_model_keeps_all_but_its_layers() -> None:
    small = cropped_model(model(), 2)
    assert small == model(layers=2)
    assert (period(model()), most_periods(model())) == (1, 12)
    assert cropped_model(model(), 12) == cropped_model(model(), 99) == model()


def test_leading_dense_layers_stay_in_proportion_and_at_least_one() -> None:
    of = model(layers=13, moe=Moe(**MOE, first_dense_layers=3))  # 3 dense, 10 of experts
    assert kinds(cropped_model(of, 1)) == [(0, False), (0, True)]
    assert kinds(cropped_model(of, 6)) == [(0, False)] * 2 + [(0, True)] * 6  # 3 x 6 / 10 = 1.8
    assert cropped_model(of, most_periods(of)) == of


def test_every_other_layer_of_experts_stays_every_other() -> None:
    of = model(layers=13, moe=Moe(**MOE, first_dense_layers=1, every=2))
    small = cropped_model(of, 2)
    assert period(of) == 2
    assert [moe for _, moe in kinds(small)] == [False, True, False, True, False]  # one leading, two periods
    assert [moe for _, moe in kinds(of)][:5] == [False, True, False, True, False]


def test_sliding_windows_keep_their_period() -> None:
    of = model(sliding_window=SlidingWindow(size=128, full_every=3), moe=Moe(**MOE, every=2))
    assert period(of) == 6
    assert set(kinds(cropped_model(of, 1))) == set(kinds(of))
    assert kinds(cropped_model(of, 1)) == kinds(of)[:6]
    assert period(model(sliding_window=SlidingWindow(size=128))) == 1  # all layers slide


def test_a_model_of_leading_dense_layers_alone() -> None:
    of = model(layers=3, moe=Moe(**MOE, first_dense_layers=3))
    assert (most_periods(of), cropped_model(of, 1)) == (1, of)


def test_a_plan_keeps_its_rank_and_loses_the_rest() -> None:
    plan = Plan(
        tp=2, cp=2, pp=4, micro_batch=2, sequence_parallel=1, zero=1, recompute=RECOMPUTE_MODULES["core_attn"], dp_overlap=1,
        embedding_layers=1, loss_layers=1, cp_kind=2,
    )  # fmt: skip
    small = cropped(job(tokens=10**12, ramp_up=RampUp(start=16, increment=16, samples=10**6)), plan, 3)
    assert small.plan == Plan(
        tp=2, cp=2, micro_batch=2, sequence_parallel=1, zero=1, recompute=RECOMPUTE_MODULES["core_attn"], dp_overlap=1, cp_kind=2
    )
    assert (small.job.gpus, small.plan.dp(8)) == (8, 2)
    assert small.job.global_batch == 4 * 2 * 2  # micro batches, sequences, replicas
    assert small.job.model == model(layers=3)
    assert (small.job.tokens, small.job.ramp_up) == (None, None)
    kept = {"model", "cluster", "global_batch", "tokens", "ramp_up"}
    assert small.job.model_dump(exclude=kept) == job().model_dump(exclude=kept)
    assert small.job.cluster.replace(gpus=64) == job().cluster


def test_schedules_and_chunks_are_left_to_the_model() -> None:
    for plan in (Plan(tp=8, pp=2), Plan(tp=8, pp=4, vpp=3), Plan(tp=8, pp=2, schedule=SCHEDULES["zb-2p"]), Plan(tp=8)):
        assert cropped(job(), plan) == cropped(job(), Plan(tp=8))


def test_a_node_that_tp_does_not_divide_is_not_used_whole() -> None:
    small = cropped(job(model(heads=12, kv_heads=12)), Plan(tp=3))
    assert (small.job.gpus, small.plan.dp(6)) == (6, 2)


def test_a_job_smaller_than_a_node_stays_on_its_accelerators() -> None:
    assert cropped(job(gpus=4), Plan(tp=2, pp=2)).job.gpus == 4


@pytest.mark.parametrize(("recompute", "pp", "periods", "layers"), [("full:2", 2, 6, 2), ("full:2", 2, 1, 1), ("full:6", 2, 4, 4)])
def test_recomputed_layers_keep_their_share(recompute: str, pp: int, periods: int, layers: int) -> None:
    small = cropped(job(), Plan(tp=8, pp=pp, **parse_recompute(recompute)), periods)
    assert (small.plan.recompute, small.plan.recompute_layers) == (FULL, layers)  # 2 of 6 layers a stage are a third


def test_experts_of_a_rank_stay_where_ep_exceeds_a_node() -> None:
    of = job(model(moe=Moe(**MOE)))
    assert cropped(of, Plan(pp=2, ep=8)).job.model.moe == Moe(**MOE)
    small = cropped(of, Plan(pp=2, ep=16))
    assert small.plan.ep == 8
    assert small.job.model.moe == Moe(**MOE | {"experts": 8})  # one a rank, as 16 over 16
    assert why_none(of, Plan(ep=16)) == ""
    few = job(model(moe=Moe(**MOE | {"top_k": 12})))
    assert why_none(few, Plan(ep=16)) == "ep = 16: the experts of 8 of its ranks are fewer than top_k = 12"
    split = job(model(moe=Moe(**MOE)))
    assert cropped(split, Plan(tp=4, ep=4, etp=4)).plan.ep == 2  # 8 / etp


def test_shards_of_a_group_stay_where_it_fits() -> None:
    assert cropped(job(), Plan(zero=3, shard_group=4)).plan.shard_group == 4
    assert cropped(job(), Plan(zero=3, shard_group=16)).plan.shard_group == 0  # all eight
    assert cropped(job(), Plan(tp=2, zero=3, shard_group=4)).plan.shard_group == 0  # all four


def test_what_exceeds_a_node_has_no_proxy() -> None:
    assert why_none(job(), Plan(tp=8, cp=2)) == "tp*cp = 8*2 exceeds the 8 accelerators of a node"
    assert why_none(job(), Plan(tp=4, cp=2)) == ""


def test_the_workload_runs_what_it_runs_in_small() -> None:
    for plan in (
        Plan(tp=2, pp=4, zero=1),
        Plan(tp=4, pp=2, vpp=2, sequence_parallel=1),
        Plan(cp=2, pp=8),
        Plan(pp=4, zero=3, dp_overlap=1),
    ):
        assert refusals(job(), plan) == refusals(*cropped(job(), plan)) == []
    assert refusals(*cropped(job(), Plan(tp=2, offload=1))) == ["offload: the workload has none"]


def llama70() -> Job:
    return llama_job(model=presets.model("llama3-70b"), cluster=presets.cluster("h100x256"), global_batch=1024)


def test_as_many_layers_as_fit() -> None:
    of, plan = llama70(), Plan(tp=8, pp=4, sequence_parallel=1, zero=1)
    known = calibration_of(of)
    proxy = proxy_of(of, plan, known)
    layers, room = proxy.of.job.model.layers, FITS * of.cluster.gpu.memory.value
    assert 1 < layers < 80
    assert estimate(*cropped(of, plan, layers), known).memory_bytes <= room < estimate(*cropped(of, plan, layers + 1), known).memory_bytes
    assert proxy.of == cropped(of, plan, layers)
    assert proxy.factor == pytest.approx(estimate(of, plan, known).step_s / estimate(*proxy.of, known).step_s)
    assert proxy.words == f"proxy of {layers} of 80 layers, 8 of 256 GPUs, 4 micro batches"


def test_a_layer_that_does_not_fit_is_run_all_the_same() -> None:
    of = llama70()
    assert proxy_of(of, Plan(tp=1, pp=64, micro_batch=16), calibration_of(of)).of.job.model.layers == 1


def test_a_measured_proxy_moves_the_plan_by_the_ratio() -> None:
    of, plan = llama70(), Plan(tp=8, pp=4, sequence_parallel=1)
    known = calibration_of(of)
    proxy = proxy_of(of, plan, known)
    said = float(estimate(*proxy.of, known).step_s)
    result = Result(end="ok", step_s=1.3 * said, spread_s=0.1 * said, steps=5, memory_bytes=5e10, nodes=("n1",))
    found = extrapolated(result, proxy, 0.08)
    whole = float(estimate(of, plan, known).step_s)
    assert (found.step_s, found.spread_s) == (pytest.approx(1.3 * whole), pytest.approx(0.1 * whole))
    assert (found.memory_bytes, found.extrapolated, found.nodes, found.steps) == (None, 0.08, ("n1",), 5)
    assert found.basis.startswith("proxy of ")
    assert found.basis.endswith("by the model")


def test_a_proxy_out_of_memory_says_so_of_a_larger_plan_only() -> None:
    of = Cropped(job(), Plan())
    larger, smaller = (Proxy(of=of, factor=2.0, tells_memory=tells, words="proxy") for tells in (True, False))
    result = Result(end="oom", reason="CUDA out of memory")
    assert extrapolated(result, larger, 0.1).end == "oom"
    found = extrapolated(result, smaller, 0.1)
    assert (found.end, found.extrapolated, found.step_s) == ("failed", 0.0, None)
    assert found.reason == "its proxy ran out of memory, which needs more than the plan: CUDA out of memory"


def test_errors_are_those_of_the_kernel_between_jobs() -> None:
    of = llama70()
    kernel = calibration_of(of).kernel
    plans = [Plan(tp=8, pp=4), Plan(tp=4, pp=4)]
    whole = [Cropped(of, plan) for plan in plans]
    assert errors(kernel, list(zip(whole, whole, strict=True))) == pytest.approx(0.0, abs=1e-12)  # nothing is extrapolated
    far = [cropped(of, plan, 4) for plan in plans]
    found = errors(kernel, list(zip(whole, far, strict=True)))
    assert found[0, 0] > found[0, 1] == pytest.approx(found[1, 0])
    assert found[0, 0] < 2.0 * kernel.prior
    # within a job the covariance is that which candidates are believed by
    table = Plan.table(plans)
    same = plan_errors(of, table, 2, kernel, None)
    pair = errors(kernel, [(whole[0], whole[1])])  # cov(f_1 - f_2) = k_11 + k_22 - 2 k_12
    assert float(pair[0, 0]) == pytest.approx(float(same([0], [0])[0, 0] + same([1], [1])[0, 0] - 2.0 * same([0], [1])[0, 0]))


def test_what_is_common_and_what_is_a_plans_own_add_up() -> None:
    of = llama70()
    kernel = calibration_of(of).kernel
    pairs = [(Cropped(of, plan), cropped(of, plan, 4)) for plan in (Plan(tp=8, pp=4), Plan(tp=4, pp=4), Plan(tp=4, pp=8))]
    found = errors(kernel, pairs)
    common, own = spreads(kernel, pairs)
    mean, off = found.diagonal().mean(), (found.sum() - found.trace()) / 6
    assert common == pytest.approx(math.sqrt(off))
    assert own == pytest.approx(math.sqrt(mean - off + PROXY**2))
    assert PROXY < own < common
    assert spreads(kernel, pairs[:1]) == (0.0, pytest.approx(math.sqrt(found[0, 0] + PROXY**2)))
