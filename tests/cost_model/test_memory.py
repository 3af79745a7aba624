from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import calibration_of, gpt, gpt_job, llama_job, moe_job
from tuner import presets
from tuner.arrays import total
from tuner.cost_model.estimate import estimate, peak_memory
from tuner.cost_model.explain import does_not_fit
from tuner.cost_model.fit.memory import Table, fit_memory
from tuner.cost_model.memory import out_of_memory_probability, stage_memory
from tuner.cost_model.params import parameters, trained_parameters
from tuner.cost_model.weights import stage_weights
from tuner.job import Job
from tuner.measurement import Measurement
from tuner.plan import FULL, OFFLOADS, Plan


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


def test_only_what_comes_and_goes_is_fragmented() -> None:
    job = llama_job()
    one, factor = memory(job, Plan(tp=8, pp=4, sequence_parallel=1)), calibration_of(job)["fragmentation"]
    assert float(one.fragmentation) == pytest.approx((factor - 1) * float(one.activations + one.recompute_peak))
    assert float(one.reserved) == pytest.approx(
        float(one.weights + one.gradients + one.optimizer + one.workspace) + factor * float(one.working)
    )


def test_blocks_between_layers_are_whole_and_the_loss_goes_before_them() -> None:
    """Two T x h blocks of 2 bytes whatever t: 4 x 8192 x 8192; on the last stage 10 bytes a logit of 16,128 cover them."""
    job = llama_job()
    plan = Plan(tp=8, pp=4, sequence_parallel=1)
    assert float(memory(job, plan, 0).recompute_peak) == 4 * 8192 * 8192
    assert float(memory(job, plan, 3).recompute_peak) == 0.0


def test_buckets_of_deepspeed() -> None:
    """ZeRO 1 reduces and gathers through 5e8 elements each of 2 bytes; a rank with fewer parameters through fewer."""
    job = llama_job(framework=presets.framework("megatron-deepspeed"), precision="fp16")
    assert float(memory(job.replace(precision="bf16"), Plan(tp=8, pp=4, zero=1)).gathered) == 0.0
    assert float(memory(job, Plan(tp=8, pp=4, zero=1)).gathered) == 4 * 5e8
    assert float(memory(job, Plan(tp=8, pp=4, zero=0)).gathered) == 0.0
    small = float(stage_weights(job, Plan(tp=8, pp=32, zero=1), 1).dense)
    assert float(memory(job.replace(cluster=presets.cluster("h100x512")), Plan(tp=8, pp=32, zero=1), 1).gathered) == 4 * small


def test_added_gradients_count_by_their_share() -> None:
    """nanotron: fp32 accumulators of 4 bytes, and of the 16-bit gradients beside them the share that stands at the peak."""
    job = llama_job(framework=presets.framework("nanotron"))
    held = float(stage_weights(job, Plan(tp=8), 0).dense)
    assert float(memory(job, Plan(tp=8)).gradients) == 6 * held
    used = calibration_of(job)
    half = used.coefficients["added_gradients_share"].model_copy(update={"value": 0.5})
    used = used.model_copy(update={"coefficients": {**used.coefficients, "added_gradients_share": half}})
    assert float(stage_memory(job, Plan(tp=8), used, 8, 0).gradients) == 5 * held


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
    spread = calibration_of(job)["oom_margin_spread"]
    assert float(out_of_memory_probability(job, capacity * np.exp(-2 * spread), calibration_of(job))) == pytest.approx(0.02275)
    need = np.linspace(0.3, 2.0, 200) * capacity
    assert (np.diff(out_of_memory_probability(job, need, calibration_of(job))) >= 0).all()


def test_memory_has_an_interval() -> None:
    """exp(1.645 x spread) either way."""
    job = llama_job()
    found = estimate(job, Plan(tp=8, pp=4), calibration_of(job))
    assert found.high_bytes / found.memory_bytes == pytest.approx(np.exp(1.645 * calibration_of(job)["oom_margin_spread"]))
    assert found.low_bytes * found.high_bytes == pytest.approx(found.memory_bytes**2)


def rows(**truth: float) -> list[Measurement]:
    """Runs of two Llamas as a machine with these coefficients would measure them."""
    made = []
    for layers in (16, 40):
        model = presets.model("llama3-70b").replace(name=f"llama-{layers}", layers=layers, hidden=4096, ffn_hidden=14336, heads=32)
        job = llama_job(model=model, framework=presets.framework("nanotron"), seq_len=4096)
        base = calibration_of(job)
        changed = {name: base.coefficients[name].model_copy(update={"value": value}) for name, value in truth.items()}
        machine = base.model_copy(update={"coefficients": {**base.coefficients, **changed}})
        plans = [Plan(tp=tp, pp=pp, micro_batch=mb, sequence_parallel=int(tp > 1)) for tp in (1, 8) for pp in (1, 4) for mb in (1, 4, 16)]
        table = Table([row(job, plan) for plan in plans], machine)
        made += [row(job, plan, float(size)) for plan, size in zip(plans, table.predict({})[0], strict=True)]
    return made


def row(job: Job, plan: Plan, size: float | None = None) -> Measurement:
    return Measurement(id="own-run", job=job, plan=plan, memory_bytes=size, memory_kind="allocated")


def test_fit_finds_what_a_framework_keeps() -> None:
    truth = {"logits_bytes_per_element": 14.0, "gathered_inputs_kept": 1.0, "added_gradients_share": 0.25}
    fitted = fit_memory(rows(**truth), calibration_of, "own")
    assert fitted.helps
    assert fitted.errors is not None
    assert fitted.errors[1][0] < 0.02 < fitted.errors[0][0]
    assert fitted.overrides["logits_bytes_per_element"].value == pytest.approx(14.0, rel=0.1)
    assert fitted.overrides["gathered_inputs_kept"].value == pytest.approx(1.0, abs=0.1)
    assert fitted.overrides["oom_margin_spread"].value < 0.13


def test_a_fit_that_gains_nothing_leaves_the_spread_alone() -> None:
    """One model takes a quarter more than the model says, the other a quarter less: nothing learnt of one helps with the other."""
    made = rows()
    off = [one.replace(memory_bytes=(one.memory_bytes or 0.0) * (1.25 if one.job.model.layers == 16 else 0.8)) for one in made]
    fitted = fit_memory(off, calibration_of, "own")
    assert not fitted.helps
    assert list(fitted.overrides) == ["oom_margin_spread"]
    assert fitted.overrides["oom_margin_spread"].value == pytest.approx(np.log(1.25) / 1.645, abs=0.001)


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


def with_host(calibration, bytes_):
    known = calibration.coefficients
    return calibration.model_copy(
        update={"coefficients": known | {"host_bytes_per_gpu": known["host_bytes_per_gpu"].model_copy(update={"value": bytes_})}}
    )


def test_activations_go_to_the_host_as_far_as_it_has_room():
    """All but two layers with room for all; half of what would go where it has half the room, the rest stays on the device."""
    job = moe_job()
    plain = Plan(ep=8, zero=1, micro_batch=1)
    away = dataclasses.replace(plain, offload=OFFLOADS["activations"])
    roomy = with_host(calibration_of(job), 1e15)
    held, kept = peak_memory(job, away, roomy, 0), peak_memory(job, plain, roomy, 0)
    assert float(kept.host) == 0.0
    assert float(held.host) == pytest.approx(float(kept.activations - held.activations), rel=1e-9)
    tight = peak_memory(job, away, with_host(calibration_of(job), 0.5 * float(held.host)), 0)
    assert float(tight.host) == pytest.approx(0.5 * float(held.host), rel=1e-9)
    assert float(tight.activations) == pytest.approx(float(held.activations) + 0.5 * float(held.host), rel=1e-9)


def test_an_optimizer_that_the_host_cannot_hold_does_not_run():
    job = moe_job()
    plain = Plan(ep=8, zero=1, micro_batch=1)
    away = dataclasses.replace(plain, offload=OFFLOADS["optimizer"])
    moments = float(peak_memory(job, plain, calibration_of(job), 0).optimizer)
    assert float(peak_memory(job, away, calibration_of(job), 0).host) == moments
    small = with_host(calibration_of(job), 0.9 * moments)
    assert float(estimate(job, away, small).p_oom) == 1.0
    assert "to the host" in does_not_fit(job, away, small, estimate(job, away, small))
