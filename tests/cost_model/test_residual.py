"""The residual process, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tests.jobs import calibration_of, gpt_job
from tuner.cost_model.estimate import estimate
from tuner.cost_model.residual import PAIRS, Kernel, Residual, correction, covariance, known_release, ratio_spread90, spread90
from tuner.cost_model.runs import COLUMNS, KNOBS, MeasuredRuns, read_runs, runs_lines, runs_text
from tuner.plan import FULL, Plan

KERNEL = Kernel(
    offset=0.01,
    gpu=0.02,
    release=0.0,
    recipe=0.0,
    job=0.0,
    near=0.03,
    plan=0.001,
    plan_job=0.002,
    pair=0.004,
    job_reach=10.0,
    near_reach=20.0,
    plan_job_reach=8.0,
    pair_job_reach=4.0,
    plan_reach=2.0,
    pair_reach=0.5,
)


def line(log_error: float, **changes: Any) -> list[Any]:
    """A run of the GPT of tests.jobs, unless changed."""
    job = gpt_job()
    values: dict[str, Any] = {
        "id": "a",
        "gpu": job.cluster.gpu.name,
        "release": "",
        "precision": job.precision,
        "hidden": job.model.hidden,
        "layers": job.model.layers,
        "seq_len": job.seq_len,
        "gpus": job.gpus,
        "global_batch": job.global_batch,
        "domain": job.cluster.sizes[0],
        "moe": 0,
        "mla": 0,
        **{name: getattr(Plan(), name) for name, _ in KNOBS},
        "log_error": log_error,
        "noise": 0.1,
        "weight": 1,
        "reach": 1.645,
    }
    return [(values | changes)[name] for name in COLUMNS]


def residual_of(*lines: list[Any], kernel: Kernel = KERNEL) -> Residual:
    return Residual(kernel, MeasuredRuns(runs=runs_text(lines)))


# What a run shares with itself: 0.01 + 0.02 + 0.03 + (0.001 + 0.002) x 10 knobs + 0.004 x 3 pairs.
PRIOR = 0.01 + 0.02 + 0.03 + 0.003 * 10 + 0.004 * 3


def test_the_prior_is_the_sum_of_its_parts() -> None:
    assert (len(KNOBS), len(PAIRS)) == (10, 3)
    assert KERNEL.prior == pytest.approx(PRIOR)
    assert covariance(KERNEL, read_runs(runs_text([line(0.2)]))) == pytest.approx(np.array([[PRIOR]]))


def test_one_run_pulls_its_own_plan_by_the_share_of_signal() -> None:
    """Mean k / (k + noise^2) y, variance k - k^2 / (k + noise^2): Rasmussen and Williams 2006, equations 2.25 and 2.26."""
    job, residual = gpt_job(), residual_of(line(0.2))
    assert float(correction(job, Plan(), residual)) == pytest.approx(math.exp(PRIOR / (PRIOR + 0.01) * 0.2))
    variance = PRIOR - PRIOR**2 / (PRIOR + 0.01) + 0.01
    assert float(spread90(job, Plan(), residual)) == pytest.approx(math.exp(1.645 * math.sqrt(variance)))


def test_a_plan_one_knob_away_shares_the_other_knobs() -> None:
    """tp 4 is two doublings from tp 1: rho = exp(-4 / 4) for the knob and exp(-4 / 1) in the two pairs that have tp."""
    shared = 0.06 + 0.003 * (9 + math.exp(-1)) + 0.004 * (1 + 2 * math.exp(-4))
    assert float(correction(gpt_job(), Plan(tp=4), residual_of(line(0.2)))) == pytest.approx(math.exp(shared / (PRIOR + 0.01) * 0.2))


def test_another_job_shares_less() -> None:
    """Four times the hidden size is a squared distance of 4; another precision leaves 0.3 of `near`."""
    residual = residual_of(line(0.2, hidden=4 * gpt_job().model.hidden, precision="fp8"))
    same = 0.01 + 0.02 + 0.03 * 0.3 * math.exp(-4 / 40)
    shared = same + (0.001 + 0.002 * math.exp(-4 / 16)) * 10 + 0.004 * math.exp(-4 / 8) * 3
    assert float(correction(gpt_job(), Plan(), residual)) == pytest.approx(math.exp(shared / (PRIOR + 0.01) * 0.2))


def test_a_job_that_grows_with_its_batch_is_hardly_another() -> None:
    """Four times the GPUs and the batch: an eighth of a doubling for each of two, squared 1/16. The same batch on four times the GPUs is
    two doublings of work for each GPU away as well.
    """
    job = gpt_job()

    def told(of: Residual) -> float:
        return float(correction(job, Plan(), of))

    def shared(squared: float) -> float:
        same = 0.03 + 0.03 * math.exp(-squared / 40)
        return same + (0.001 + 0.002 * math.exp(-squared / 16)) * 10 + 0.004 * math.exp(-squared / 8) * 3

    assert job.gpus > job.cluster.sizes[0]  # both are beyond a domain
    weak = residual_of(line(0.2, gpus=4 * job.gpus, global_batch=4 * job.global_batch))
    strong = residual_of(line(0.2, gpus=4 * job.gpus))
    assert told(weak) == pytest.approx(math.exp(shared(1 / 16) / (PRIOR + 0.01) * 0.2))
    assert told(strong) == pytest.approx(math.exp(shared(4 + 1 / 16) / (PRIOR + 0.01) * 0.2))


def test_far_from_every_run_nothing_is_corrected_and_the_interval_is_the_priors() -> None:
    alone = KERNEL.model_copy(update={"offset": 0.0, "gpu": 0.0, "plan": 0.0})
    residual = residual_of(line(0.2, hidden=2**29, seq_len=2**29, layers=2**29, gpus=2**29), kernel=alone)
    assert float(correction(gpt_job(), Plan(tp=8), residual)) == pytest.approx(1.0, abs=1e-6)
    assert float(spread90(gpt_job(), Plan(tp=8), residual)) == pytest.approx(math.exp(1.645 * math.sqrt(alone.prior + 0.01)))


def test_a_grid_a_table_and_single_plans_agree_to_the_bit() -> None:
    lines = [line(0.01 * i - 0.1, tp=1 << i % 4, micro_batch=1 << i % 3, recompute=(0, 1, FULL)[i % 3], zero=i % 2) for i in range(20)]
    job, residual = gpt_job(), residual_of(*lines)
    grid = Plan(
        tp=np.array([1, 2, 4, 8]).reshape(4, 1, 1),
        micro_batch=np.array([1, 2, 4]).reshape(1, 3, 1),
        recompute=np.array([0, 1, FULL]).reshape(1, 1, 3),
    )
    factors, spreads = correction(job, grid, residual), spread90(job, grid, residual)
    assert np.shape(factors) == np.shape(spreads) == (4, 3, 3)
    flat = [Plan(tp=t, micro_batch=m, recompute=r) for t in (1, 2, 4, 8) for m in (1, 2, 4) for r in (0, 1, FULL)]
    assert np.ravel(factors).tolist() == [float(correction(job, plan, residual)) for plan in flat]
    assert np.ravel(spreads).tolist() == [float(spread90(job, plan, residual)) for plan in flat]
    assert np.ravel(factors).tolist() == correction(job, Plan.table(flat), residual).tolist()


def test_the_ratio_of_two_plans_is_known_better_than_either() -> None:
    """A plan against itself has only its own noise, twice; one far away cannot be closer than that."""
    job, residual = gpt_job(), residual_of(line(0.2))
    plans = Plan.table([Plan(), Plan(), Plan(tp=8, micro_batch=8)])
    known = ratio_spread90(job, plans, 3, residual)
    assert known[:2].tolist() == pytest.approx([math.exp(1.645 * math.sqrt(2) * 0.1)] * 2)
    assert known[2] > known[0]


def test_noise_is_that_of_the_nearest_runs() -> None:
    job = gpt_job()
    quiet, loud = line(0.0, noise=0.01), line(0.0, hidden=job.model.hidden * 1024, noise=0.5)
    near = float(spread90(job, Plan(), residual_of(quiet, loud)))
    assert near < math.exp(1.645 * 0.2)
    assert float(spread90(job, Plan(), residual_of(line(0.0, noise=0.5), line(0.0, hidden=job.model.hidden * 1024, noise=0.01)))) > 2.0


def test_a_weight_quiets_a_run() -> None:
    full, weak = (float(correction(gpt_job(), Plan(), residual_of(line(0.2, weight=w)))) for w in (1, 100))
    assert 1.0 < weak < full


def test_an_estimate_has_the_correction_as_a_term() -> None:
    job, plan = gpt_job(), Plan(tp=2)
    bare = calibration_of(job, "none")
    learned = bare.model_copy(update={"measured": MeasuredRuns(runs=runs_text([line(0.2, tp=2)])), "kernel": KERNEL})
    before, after = estimate(job, plan, bare), estimate(job, plan, learned)
    factor = math.exp(PRIOR / (PRIOR + 0.01) * 0.2)
    assert float(after.step_s) == pytest.approx(float(before.step_s) * factor)
    assert float(after.step.measured_runs) == pytest.approx(float(before.step_s) * (factor - 1))
    assert float(before.step.measured_runs) == 0.0
    assert float(after.high_s / after.step_s) == pytest.approx(float(after.step_s / after.low_s))
    assert after.calibration != before.calibration


def test_runs_are_read_and_wrong_ones_refused() -> None:
    text = runs_text([line(0.1), line(-0.1, tp=8)])
    runs = read_runs(text)
    assert runs.log_error.tolist() == [0.1, -0.1]
    assert runs.knobs[1, 0] == 3.0
    assert [row[0] for row in runs_lines(text)] == ["a", "a"]
    head = text.splitlines()[0]
    for wrong, words in (
        ("", "must be CSV"),
        ("id,gpu\na,b\n", "column 3 is release, not 'nothing'"),
        (text.replace("release", "relaese", 1), "column 3 is release, not 'relaese'"),
        (head + ",tp\n", "must be CSV"),
        (text.replace("\na,", "\na,a,", 1), "line 2: has 26 values for 25 columns"),
        ("x" * 200_000 + "\ny", "is not CSV"),
        (runs_text([line(float("nan"))]), "line 2: log_error must be a number from -5 to 5, not 'nan'"),
        (runs_text([line(50.0)]), "log_error must be a number from -5 to 5"),
        (runs_text([line(0.1, tp=0)]), "tp must be a whole number from 1 to 1e"),
        (runs_text([line(0.1, tp=1.5)]), "tp must be a whole number"),
        (runs_text([line(0.1), line(0.1, noise=0)]), "line 3: noise must be a number from 0.001 to 5, not '0'"),
        (runs_text([line(0.1, reach=1e308)]), "reach must be"),
        (runs_text([line(0.1, moe=1e300)]), "moe must be a whole number from 0 to 1"),
        (runs_text([line(0.1, hidden="x")]), "line 2: hidden must be a whole number from 1 to 1e"),
    ):
        with pytest.raises(ValueError, match=words):
            read_runs(wrong)


def test_every_knob_is_a_field_of_a_plan() -> None:
    assert {name for name, _ in KNOBS} <= {field.name for field in dataclasses.fields(Plan)}


def test_a_copy_keeps_nothing_derived_from_what_it_changes() -> None:
    job = gpt_job()
    learned = calibration_of(job, "none").model_copy(update={"measured": MeasuredRuns(runs=runs_text([line(0.2)]))})
    assert learned.residual is not None
    bare = learned.model_copy(update={"measured": None})
    assert bare.residual is None
    assert bare.hash != learned.hash


def test_a_part_of_a_releases_name_will_do_where_it_is_the_only_one() -> None:
    known = ["NeMo 26.06 container", "NeMo 26.02 container", "NeMo 26.02.01 container", ""]
    assert known_release("26.06", known) == "NeMo 26.06 container"
    assert known_release("26.02", known) == "26.02"  # two have it
    assert known_release("NeMo 26.02 container", known) == "NeMo 26.02 container"
    assert known_release("", known) == "" and known_release("banana", known) == "banana"
