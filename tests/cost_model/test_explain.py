from __future__ import annotations

import dataclasses

import pytest

from tests.jobs import calibration_of, gpt_job, llama_job, moe_job
from tuner.cost_model.estimate import estimate
from tuner.cost_model.explain import does_not_fit, knob_steps, nearest_that_fits, neighbours, stages, time_terms
from tuner.cost_model.rules import legal
from tuner.plan import FULL, Plan

GPT = Plan(tp=8, pp=8, sequence_parallel=1, recompute=1)
LLAMA = Plan(tp=8, pp=4, sequence_parallel=1, zero=1)


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        (gpt_job(), GPT),
        (gpt_job(), dataclasses.replace(GPT, recompute=FULL, recompute_layers=5, vpp=2)),
        (llama_job(), LLAMA),
        (moe_job(), Plan(ep=8, zero=1)),
    ],
)
def test_terms_of_time_sum_to_the_step(job, plan) -> None:
    calibration = calibration_of(job)
    result = estimate(job, plan, calibration)
    terms = time_terms(job, plan, calibration, result)
    assert sum(term.value for term in terms) == pytest.approx(float(result.step_s), rel=1e-12)
    assert all(term.ref and term.what and term.unit == "s" and term.value >= 0 for term in terms)
    assert len({term.name for term in terms}) == len(terms)


def test_stages_agree_with_the_estimate() -> None:
    job = llama_job()
    result = estimate(job, LLAMA, calibration_of(job))
    seen = stages(job, LLAMA, calibration_of(job))
    assert [stage.layers for stage in seen] == [20] * 4
    assert [stage.in_flight for stage in seen] == [4, 3, 2, 1]
    assert max(stage.memory_bytes for stage in seen) == float(result.memory_bytes)
    fullest = max(seen, key=lambda stage: stage.memory_bytes)
    assert fullest.index == int(result.worst_stage)
    assert sum(term.value for term in fullest.memory) == pytest.approx(fullest.memory_bytes)


def test_out_of_memory_names_stage_and_term() -> None:
    job = llama_job()
    plan = Plan(tp=1, pp=4)
    text = does_not_fit(job, plan, calibration_of(job), estimate(job, plan, calibration_of(job)))
    assert text.startswith("stage ")
    assert "GB" in text
    assert does_not_fit(job, LLAMA, calibration_of(job), estimate(job, LLAMA, calibration_of(job))) == ""


def test_steps_are_legal_and_one_knob_away() -> None:
    job = llama_job()
    steps = knob_steps(job, LLAMA, calibration_of(job))
    assert {"tp", "pp", "micro_batch", "recompute", "zero"} <= {step.knob for step in steps}
    for step in steps:
        assert step.before != step.after
        assert bool(legal(job, step.plan))
        assert step.step_s == float(estimate(job, step.plan, calibration_of(job)).step_s)


def test_nearest_that_fits_changes_little() -> None:
    job = llama_job()
    start = dataclasses.replace(LLAMA, micro_batch=8)
    assert float(estimate(job, start, calibration_of(job)).p_oom) > 0.5
    found = nearest_that_fits(job, start, calibration_of(job))
    assert found is not None
    assert float(estimate(job, found, calibration_of(job)).p_oom) < 0.05
    changed = [f.name for f in dataclasses.fields(Plan) if getattr(found, f.name) != getattr(start, f.name)]
    assert len(changed) == 1


def test_a_plan_that_fits_is_its_own_answer() -> None:
    job = llama_job()
    assert nearest_that_fits(job, LLAMA, calibration_of(job)) == LLAMA


def test_neighbours_of_a_mixture_move_experts() -> None:
    knobs = {knob for knob, _ in neighbours(moe_job(), Plan(ep=8, zero=1))}
    assert "ep" in knobs
