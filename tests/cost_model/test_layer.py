from __future__ import annotations

import dataclasses

import pytest

from tests.jobs import calibration_of, gpt, gpt_job, llama_job, moe_job
from tuner import presets
from tuner.arrays import leaves
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.layer import embedding_time, head_time, layer_time
from tuner.cost_model.roofline import gemm_seconds
from tuner.cost_model.shard import groups, shard
from tuner.cost_model.work import Operators, Work
from tuner.plan import FULL, RECOMPUTE_MODULES, Plan


def times(job, plan, layer=-1, calibration=None):
    return layer_time(Operators(job, plan, calibration or calibration_of(job)), job.model.kind(layer % job.model.layers))


def test_products_of_a_gpt_layer_by_hand() -> None:
    """24 b s h^2 / t FLOPs forward as four products: (T, 3h/t, h), (T, h, h/t), (T, 4h/t, h), (T, h, 4h/t)."""
    job = gpt_job()
    calibration = calibration_of(job)
    t, h, tokens = 8, 12288, 2048

    def seconds(m: int, n: int, k: int) -> float:
        return float(gemm_seconds(m, n, k, precision="bf16", gpu=job.cluster.gpu, calibration=calibration))

    by_hand = seconds(tokens, 3 * h // t, h) + seconds(tokens, h, h // t) + seconds(tokens, 4 * h // t, h) + seconds(tokens, h, 4 * h // t)
    assert float(times(job, Plan(tp=t)).forward.gemm) == pytest.approx(by_hand / calibration["gemm_sustained"], rel=1e-12)


def test_layer_of_22b_against_the_measured_one() -> None:
    """Korthikanti 2022, table 4: one layer of the 22B model, 8 A100, b = 4: 7.7 ms forward, 11.9 ms backward."""
    job = gpt_job(gpt(layers=48, hidden=6144, heads=64), cluster=gpt_job().cluster.replace(gpus=8), global_batch=4)
    one = times(job, Plan(tp=8, micro_batch=4))
    assert float(one.forward.seconds) == pytest.approx(7.7e-3, rel=0.1)
    assert float(one.backward.seconds) == pytest.approx(11.9e-3, rel=0.1)


def test_recompute_repeats_the_forward_of_its_part() -> None:
    job = gpt_job()
    plain = times(job, Plan(tp=8))
    selective = times(job, Plan(tp=8, recompute=RECOMPUTE_MODULES["core_attn"]))
    assert float(selective.recompute.seconds) == pytest.approx(float(plain.forward.attention), rel=1e-12)
    full = times(job, Plan(tp=8, recompute=FULL))
    assert float(full.full_recompute.seconds) == float(plain.forward.seconds)
    assert float(full.recompute.seconds) == 0
    assert float(plain.full_recompute.seconds) == 0


def test_no_parallelism_has_no_communication() -> None:
    for job in (gpt_job(), moe_job()):
        for work in (times(job, Plan()).forward, times(job, Plan()).backward):
            assert float(work.tp_comm) == float(work.cp_comm) == float(work.ep_comm) == 0


def test_tensor_parallelism_beyond_the_node_is_slower() -> None:
    """Sixteen ranks stripe over eight NICs a node; a node with one slow NIC a GPU pays for it in full."""
    job = llama_job()
    narrow = [domain.model_dump() for domain in job.cluster.domains]
    narrow[-1]["bandwidth"]["value"] = narrow[-1]["bandwidth"]["value"] / 8
    slow = llama_job(cluster=job.cluster.replace(domains=narrow))
    inside, outside, crawling = (
        float(times(j, Plan(tp=tp, sequence_parallel=1)).forward.tp_comm) for j, tp in ((job, 8), (job, 16), (slow, 16))
    )
    assert inside < outside < crawling
    assert crawling > 4 * inside


def test_expert_rows_by_hand() -> None:
    """4,096 tokens on tp 2 with sequence parallelism: 2,048 leave a rank six times each; with etp 2 it computes twice as many."""
    job = moe_job()
    assert int(shard(job, Plan(tp=2, sequence_parallel=1)).rows) == 2048 * 6
    assert int(shard(job, Plan(tp=2, sequence_parallel=1, etp=2)).rows) == 2048 * 6 * 2
    assert int(shard(job, Plan(ep=8)).experts) == 8


def test_expert_parallelism_moves_tokens() -> None:
    job = moe_job()
    assert float(times(job, Plan(ep=8)).forward.ep_comm) > 0
    assert float(times(job, Plan(ep=8, ep_overlap=1)).forward.ep_comm) < float(times(job, Plan(ep=8)).forward.ep_comm)


def test_context_parallelism_cuts_the_tokens() -> None:
    job = llama_job()
    whole, half = times(job, Plan()), times(job, Plan(cp=2))
    assert float(half.forward.gemm) < 0.6 * float(whole.forward.gemm)
    assert float(half.backward.cp_comm) >= 0
    for kind in (1, 2):
        assert float(times(job, Plan(cp=2, cp_kind=kind)).forward.cp_comm) > 0


def test_lora_trains_no_weights() -> None:
    job = llama_job(task="lora")
    assert float(times(job, Plan(tp=2)).wgrad) == 0
    assert float(times(job, Plan(tp=2)).backward.gemm) < 0.7 * float(times(llama_job(), Plan(tp=2)).backward.gemm)


def test_quantised_products_pay_for_casts() -> None:
    plain, quantised = times(llama_job(), Plan(tp=2)), times(llama_job(precision="fp8"), Plan(tp=2))
    assert float(quantised.forward.memory_bound) > float(plain.forward.memory_bound)
    assert float(quantised.forward.gemm) < float(plain.forward.gemm)


def test_ends() -> None:
    job = llama_job()
    operators = Operators(job, Plan(tp=8), calibration_of(job))
    assert float(head_time(operators).forward.gemm) > 0
    assert float(embedding_time(operators).forward.gemm) == 0


def test_work_adds_leaf_by_leaf() -> None:
    one = Work(**{f.name: i + 1.0 for i, f in enumerate(dataclasses.fields(Work))})
    assert list(leaves(one + one.times(2.0)).values()) == [3.0 * (i + 1) for i in range(len(leaves(one)))]


def test_groups_follow_the_rank_order() -> None:
    """64 ranks, tp 4, cp 2, pp 2: dp = 4; cp strides over tp, dp over tp x cp, pp over the rest."""
    mesh = groups(llama_job(), Plan(tp=4, cp=2, pp=2))
    assert [tuple(int(x) for x in mesh[name]) for name in ("tp", "cp", "dp", "pp")] == [(4, 1), (2, 4), (8, 4), (2, 32)]
    experts = groups(moe_job(), Plan(tp=2, ep=8, pp=2))
    assert tuple(int(x) for x in experts["edp"]) == (16, 8)


def sums(job):
    """The seconds a layer's backward takes longer for adding its gradients."""
    plain = job.replace(framework=job.framework.replace(accumulation_bytes=None))
    return lambda plan: float(times(job, plan).backward.memory_bound) - float(times(plain, plan).backward.memory_bound)


def test_gradients_are_added_by_every_micro_batch() -> None:
    """12 h^2 / t parameters of a GPT layer x 6 B (read two, write one of 2 B) at 0.85 x 2,039 GB/s: 0.78 ms at tp 8."""
    job = gpt_job(framework=presets.framework("megatron-deepspeed"))
    added = sums(job)(Plan(tp=8))
    assert added == pytest.approx(12 * 12288**2 / 8 * 6 / (0.85 * job.cluster.gpu.hbm.value), rel=1e-9)
    assert added == pytest.approx(0.78e-3, rel=0.01)


def test_a_fused_sum_hides_behind_its_product() -> None:
    """Megatron-LM: a product over 2,048 tokens lasts longer than adding its result; one over 64 does not."""
    assert sums(gpt_job())(Plan(tp=8)) == 0
    few = gpt_job(seq_len=64)
    whole = sums(few.replace(framework=few.framework.replace(fused_accumulation=None)))(Plan(tp=8))
    assert 0 < sums(few)(Plan(tp=8)) < whole


def test_experts_add_the_gradients_of_all_they_hold() -> None:
    """8 of 64 experts of 3 x 1408 x 2048 parameters on each rank, besides the layer's other products."""
    job = moe_job(framework=presets.framework("deepspeed"))
    added = sums(job)
    eight = 8 * 3 * 1408 * 2048 * 6 / (0.85 * job.cluster.gpu.hbm.value)
    assert added(Plan(ep=8)) - added(Plan(ep=16)) == pytest.approx(eight / 2, rel=1e-6)


def test_lora_adds_no_gradients() -> None:
    job = llama_job(task="lora")
    assert Operators(job, Plan(), calibration_of(job)).accumulate(1e9) == 0.0


def test_rings_wait_where_a_pipeline_spans_nodes() -> None:
    """nanotron on 64 H100: 1.5 ms for each further rank of tp 8 makes a layer's forward at least 10.5 ms more, with a pipeline only."""
    job = llama_job(framework=presets.framework("nanotron"), seq_len=128)
    rings = load_calibration("nanotron-rings", job)
    host = rings["host_per_layer_s"] + rings["layer_fixed_s"]
    alone, piped = (float(times(job, Plan(tp=8, pp=pp), calibration=rings).forward.seconds) for pp in (1, 2))
    assert piped == pytest.approx(host + 7 * 1.5e-3)
    assert alone < piped - 7e-3
    inside = job.replace(cluster=job.cluster.replace(gpus=8))
    assert float(times(inside, Plan(tp=4, pp=2), calibration=rings).forward.seconds) == float(
        times(inside, Plan(tp=4), calibration=rings).forward.seconds
    )


def test_rings_across_nodes_lose_time_on_each() -> None:
    """tp 16 spans two nodes of 8: each of its four forward collectives is 0.4 ms later under nanotron; tp 32 spans four."""
    job = llama_job(framework=presets.framework("nanotron"))
    rings = load_calibration("nanotron-rings", job)
    plain = load_calibration("none", job)

    def late(tp: int) -> float:
        plan = Plan(tp=tp, sequence_parallel=1)
        return float(times(job, plan, calibration=rings).forward.tp_comm) - float(times(job, plan, calibration=plain).forward.tp_comm)

    assert late(8) == 0
    assert late(16) == pytest.approx(4 * 0.4e-3)
    assert late(32) == pytest.approx(4 * 3 * 0.4e-3)


def test_what_nothing_hides_is_added_to_every_layer() -> None:
    job = gpt_job()
    calibration = calibration_of(job)
    work = times(job, Plan(tp=8, micro_batch=4)).forward
    assert float(work.host) == pytest.approx(calibration["layer_fixed_s"])
    assert float(times(job, Plan(tp=8, micro_batch=4, cuda_graphs=1)).forward.host) == 0


def test_collectives_in_line_hide_behind_nothing() -> None:
    """Megatron-DeepSpeed: one all-reduce of 2,048 x 12,288 x 2 B for attention and one for the MLP, each way and all exposed."""
    job = gpt_job(framework=presets.framework("megatron-deepspeed"))
    work = times(job, Plan(tp=8))
    operators = Operators(job, Plan(tp=8), calibration_of(job))
    reduce = float(operators.tp_collectives[2])
    assert float(work.forward.tp_comm) == pytest.approx(2 * reduce)
    assert float(work.backward.tp_comm) == pytest.approx(2 * reduce)
    beside = times(gpt_job(), Plan(tp=8))
    assert float(beside.backward.tp_comm) < 2 * reduce
