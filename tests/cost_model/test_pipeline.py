from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import calibration_of, gpt, gpt_job, moe_job
from tuner import presets
from tuner.cost_model.pipeline import all_stages_seconds, bubble_seconds, in_flight, pieces, stage_layers, stage_time
from tuner.plan import SCHEDULES, Plan


def test_layers_are_dealt_evenly() -> None:
    job = gpt_job()
    assert [int(stage_layers(job, Plan(pp=8), s).total) for s in range(8)] == [12] * 8


def test_embedding_and_loss_count_as_layers() -> None:
    """96 + 2 units over 14 stages: 7 each, one of them the embedding in front and the loss behind."""
    job = gpt_job()
    plan = Plan(pp=14, embedding_layers=1, loss_layers=1)
    assert [int(stage_layers(job, plan, s).total) for s in range(14)] == [6, *[7] * 12, 6]


@given(layers=st.integers(1, 200), pp=st.integers(1, 64), e=st.integers(0, 3), n=st.integers(0, 3))
def test_every_layer_has_one_stage(layers: int, pp: int, e: int, n: int) -> None:
    job = gpt_job(gpt(layers=layers, hidden=128, heads=2))
    held = stage_layers(job, Plan(pp=pp, embedding_layers=e, loss_layers=n), np.arange(pp))
    assert int(np.sum(held.total)) == layers
    assert (held.total >= 0).all()


@given(pp=st.integers(1, 27))
def test_leading_dense_layers_lie_in_front(pp: int) -> None:
    job = moe_job()
    held = stage_layers(job, Plan(pp=pp), np.arange(pp))
    assert int(held.leading[0]) == 1
    assert int(np.sum(held.leading)) == 1


def test_in_flight_of_1f1b_by_hand() -> None:
    assert [float(in_flight(gpt_job(), Plan(pp=4), 16, s)) for s in range(4)] == [4, 3, 2, 1]
    assert [float(in_flight(gpt_job(), Plan(pp=4), 2, s)) for s in range(4)] == [2, 2, 2, 1]


def test_in_flight_of_interleaving_is_that_of_the_paper() -> None:
    """The first stage keeps 1 + (p - 1) / (p v) of a model's layers (Korthikanti 2022, section 4.2.3): p times that in micro batches."""
    p, v = 8, 3
    assert float(in_flight(gpt_job(), Plan(pp=p, vpp=v), 64, 0)) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_in_flight_of_other_schedules() -> None:
    assert float(in_flight(gpt_job(), Plan(pp=4, schedule=SCHEDULES["gpipe"]), 16, 0)) == 16
    assert float(in_flight(gpt_job(), Plan(pp=4, schedule=SCHEDULES["zb-2p"]), 16, 0)) == 7


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_bubble_of_equal_stages(vpp: int) -> None:
    """(p - 1) t / v: Narayanan 2021, section 2.2.3."""
    job = gpt_job()
    plan = Plan(tp=8, pp=8, vpp=vpp)
    calibration = calibration_of(job)
    part = pieces(job, plan, calibration)
    middle = stage_time(job, plan, part, calibration, 3)
    bubble = float(bubble_seconds(plan, 8 * middle.busy, middle))
    assert bubble == pytest.approx(7 * float(middle.busy) / vpp)


@pytest.mark.parametrize(
    "plan", [Plan(tp=8, pp=7), Plan(tp=2, pp=8, recompute=128, recompute_layers=3), Plan(pp=1), Plan(tp=4, pp=12, vpp=2)]
)
def test_sum_over_stages_needs_no_list_of_them(plan: Plan) -> None:
    for job in (gpt_job(), moe_job()):
        calibration = calibration_of(job)
        part = pieces(job, plan, calibration)
        listed = sum(float(stage_time(job, plan, part, calibration, s).busy) for s in range(plan.pp))
        # a stage that holds fewer layers than it would recompute makes the sum a little less than the short form
        tolerance = 1e-9 if plan.recompute == 0 or job.model.layers % plan.pp == 0 else 0.02
        assert float(all_stages_seconds(job, plan, part, calibration)) == pytest.approx(listed, rel=tolerance)


def test_zero_bubble_removes_what_weight_gradients_fill() -> None:
    job = gpt_job()
    calibration = calibration_of(job)
    bubbles = []
    for schedule in ("1f1b", "zb-1p", "zb-2p"):
        plan = Plan(tp=8, pp=8, schedule=SCHEDULES[schedule])
        part = pieces(job, plan, calibration)
        bubbles.append(
            float(bubble_seconds(plan, all_stages_seconds(job, plan, part, calibration), stage_time(job, plan, part, calibration, 1)))
        )
    assert bubbles[0] > bubbles[1] > bubbles[2] >= 0


@pytest.mark.parametrize("vpp", [1, 2])
def test_the_ends_of_a_pipeline_pass_on_less(vpp: int) -> None:
    """A stage sends an activation and a gradient a chunk; the first has no gradient to pass on and the last no activation."""
    job = gpt_job()
    calibration = calibration_of(job)
    plan = Plan(tp=8, pp=8, vpp=vpp)
    part = pieces(job, plan, calibration)
    sends = [float(stage_time(job, plan, part, calibration, stage).sends) for stage in (0, 3, 7)]
    hidden = 1.0 if vpp == 1 else 1 - calibration["pp_overlap_fraction"]
    assert [s / float(part.send) / hidden for s in sends] == pytest.approx([2 * vpp - 1, 2 * vpp, 2 * vpp - 1])


def test_a_framework_that_runs_all_forwards_first_keeps_all_micro_batches() -> None:
    """16 of them on each of 4 stages, in chunks too; without a pipeline one at a time."""
    job = gpt_job(framework=presets.framework("maxtext"))
    assert [float(in_flight(job, Plan(pp=4), 16, s)) for s in range(4)] == [16] * 4
    assert float(in_flight(job, Plan(pp=4, vpp=2), 16, 0)) == 16 and float(in_flight(job, Plan(), 16, 0)) == 1
