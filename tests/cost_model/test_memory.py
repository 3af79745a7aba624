from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import calibration_of, gpt, gpt_job, llama_job, moe_job
from tuner.arrays import total
from tuner.cost_model.memory import out_of_memory_probability, stage_memory
from tuner.cost_model.params import parameters, trained_parameters
from tuner.cost_model.weights import stage_weights
from tuner.plan import FULL, Plan


def memory(job, plan, stage=0):
    return stage_memory(job, plan, calibration_of(job), plan.microbatches(job.gpus, job.global_batch), stage)


def test_one_rank_holds_all_parameters() -> None:
    """GPT-3: h V + s h + 96 (12 h^2 + 13 h) + 2h, the head tied; padding adds nothing to 51,200."""
    job = gpt_job(gpt(layers=96, hidden=12288, heads=96, max_positions=2048))
    held = stage_weights(job, Plan(), 0)
    assert float(held.dense) == pytest.approx(parameters(job.model), rel=1e-6)


def test_stages_and_ranks_add_up_to_the_model() -> None:
    job = moe_job()
    plan = Plan(tp=1, pp=9, ep=8)
    dense = sum(float(stage_weights(job, plan, s).dense) for s in range(9))
    expert = sum(float(stage_weights(job, plan, s).expert) for s in range(9)) * 8
    assert dense + expert == pytest.approx(trained_parameters(job.model), rel=1e-4)


def test_zero_stages_by_hand() -> None:
    """Mixed precision Adam in Megatron-LM: 2 + 4 + 12 bytes a parameter; ZeRO 1 shards the 12 over dp x cp."""
    job = llama_job()
    plan = Plan(tp=8, pp=1, zero=0)
    held = float(stage_weights(job, plan, 0).dense)
    plain, sharded = memory(job, plan), memory(job, Plan(tp=8, pp=1, zero=1))
    assert float(plain.weights) == 2 * held
    assert float(plain.optimizer) == 12 * held
    assert float(sharded.optimizer) == pytest.approx(12 * held / 8)
    assert float(memory(job, Plan(tp=8, zero=3)).weights) == pytest.approx(2 * held / 8)


def test_first_stage_of_1f1b_holds_all_layers_worth() -> None:
    """34 s b h L / t on the first stage with sequence parallelism and selective recompute, whatever p (Korthikanti, section 4.2.3)."""
    job = gpt_job()
    for pp in (1, 4, 8):
        kept = float(memory(job, Plan(tp=8, pp=pp, sequence_parallel=1, recompute=1)).activations)
        mask = 2048 * 12288 / 8 * pp  # embedding dropout, s b h p / t
        assert kept == pytest.approx(34 * 2048 * 12288 * 96 / 8 + mask, rel=1e-12)


def test_full_recompute_holds_inputs() -> None:
    """2 s b h L whatever p, and the embedding's mask."""
    job = gpt_job()
    kept = float(memory(job, Plan(tp=8, pp=8, recompute=FULL)).activations)
    assert kept == pytest.approx(2 * 2048 * 12288 * 96 + 2048 * 12288 * 8, rel=1e-12)


def test_device_is_the_sum_of_the_leaves() -> None:
    for job in (gpt_job(), moe_job()):
        one = memory(job, Plan(tp=2, pp=2, zero=1), 1)
        assert float(one.device) == pytest.approx(float(total(one)), rel=1e-12)


def test_logits_are_on_the_last_stage_only() -> None:
    job = llama_job()
    assert float(memory(job, Plan(tp=8, pp=4), 0).logits) == 0
    s_b_v_t = 8192 * 128256 / 8  # padded to a multiple of 128 x 8: 129,024 / 8 = 16,128
    assert float(memory(job, Plan(tp=8, pp=4), 3).logits) == pytest.approx(calibration_of(job)["logits_bytes_per_element"] * 8192 * 16128)
    assert s_b_v_t / 8192 <= 16128


def test_probability_is_one_half_at_capacity() -> None:
    job = gpt_job()
    capacity = job.cluster.gpu.memory.value
    assert float(out_of_memory_probability(job, capacity, calibration_of(job))) == 0.5
    need = np.linspace(0.3, 2.0, 200) * capacity
    assert (np.diff(out_of_memory_probability(job, need, calibration_of(job))) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), mb=st.sampled_from([1, 2, 4]), zero=st.integers(0, 3))
def test_memory_is_monotone(tp: int, pp: int, mb: int, zero: int) -> None:
    job = llama_job()
    here = float(memory(job, Plan(tp=tp, pp=pp, micro_batch=mb, zero=zero)).device)
    assert float(memory(job, Plan(tp=tp, pp=pp, micro_batch=2 * mb, zero=zero)).device) >= here
    assert float(memory(job, Plan(tp=tp, pp=pp, micro_batch=mb, zero=zero, recompute=FULL)).activations) <= float(
        memory(job, Plan(tp=tp, pp=pp, micro_batch=mb, zero=zero)).activations
    )
    if zero < 2:
        sharded = memory(job, Plan(tp=tp, pp=pp, micro_batch=mb, zero=zero + 1))
        assert float(sharded.device) <= here * (1 + 1e-12)
