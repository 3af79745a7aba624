"""Steps of a few micro batches, and what they say of the whole batch: numbers by hand."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.layouts import Layout
from tuner.errors import SpecError
from tuner.launch.logs.formats import WORKLOAD
from tuner.launch.logs.parsed import Parsed, Step
from tuner.launch.orders import LOG, Orders, write_orders
from tuner.launch.outcome import Ending, result_of
from tuner.launch.progress import Progress
from tuner.launch.short_steps import ShortStep, at_pinned_batch, short_counts
from tuner.launch.step_time import fitted
from tuner.launch.trial import Result, Trial
from tuner.plan import SCHEDULES, Plan
from tuner.profiling.standing import AGAIN, noise

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.job import Job


def steps(*pairs: tuple[int, float], spread_s: float = 0.0) -> list[ShortStep]:
    return [ShortStep(microbatches=m, seconds=s, spread_s=spread_s) for m, s in pairs]


def test_two_points_are_a_line() -> None:
    found = at_pinned_batch(steps((4, 3.0), (8, 5.0)), 64)  # b = 2 / 4, a = 3 - 2
    assert (found.fixed_s, found.each_s, found.seconds, found.spread_s) == (1.0, 0.5, 33.0, 0.0)


def test_the_spread_grows_with_the_distance() -> None:
    found = at_pinned_batch(steps((4, 3.0), (8, 5.0), spread_s=0.1), 64)
    # mean 6, sum of squares 2 (2^2) = 8: 0.1 sqrt(1/2 + 58^2 / 8) = 2.0518
    assert found.spread_s == pytest.approx(0.1 * (0.5 + 58**2 / 8) ** 0.5)
    assert found.spread_s == pytest.approx(2.0518, abs=1e-4)


def test_three_points_that_are_no_line_have_a_spread() -> None:
    found = at_pinned_batch(steps((1, 1.0), (2, 2.2), (3, 3.0)), 2)
    # slope 2 / 2, mean 2.0667; residuals -1/15, 2/15, -1/15: 6 / 225 over one degree of freedom, at the mean / 3
    assert found.each_s == pytest.approx(1.0)
    assert found.seconds == pytest.approx(6.2 / 3)
    assert found.spread_s == pytest.approx((6 / 225 / 3) ** 0.5)


def test_noise_makes_no_negative_time() -> None:
    falling = at_pinned_batch(steps((2, 1.1), (4, 0.9)), 16)
    assert (falling.each_s, falling.seconds) == (0.0, pytest.approx(1.0))
    steep = at_pinned_batch(steps((2, 0.1), (4, 1.9)), 16)  # a would be -1.7
    assert (steep.fixed_s, steep.seconds) == (pytest.approx(0.0), pytest.approx(16 / 3))


@pytest.mark.parametrize("counts", [(4, 4), (0, 4), (4,)])
def test_one_count_is_no_line(counts: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="two or more different counts"):
        at_pinned_batch(steps(*((m, 1.0) for m in counts)), 8)


def job_of(global_batch: int, ranks: int = 2, **changes: Any) -> Job:
    return Layout(ranks=ranks, knobs="tp=1", global_batch=global_batch, **changes).job


def test_counts_fill_the_pipeline_and_save_two_thirds() -> None:
    assert short_counts(job_of(26, ranks=1), Plan()) == (2, 4)  # 26 > 3 x 4
    assert short_counts(job_of(12, ranks=1), Plan()) is None  # 12 = 3 x 4
    assert short_counts(job_of(26, ranks=2), Plan(zero=1)) == (2, 4)  # dp 2: 13 micro batches of each replica
    assert short_counts(job_of(24, ranks=2), Plan(zero=1)) is None  # 12 of each
    assert short_counts(job_of(32, ranks=4), Plan(pp=4)) == (4, 8)
    assert short_counts(job_of(24, ranks=4), Plan(pp=4)) is None  # 24 = 3 x 8
    assert short_counts(job_of(64, ranks=4), Plan(pp=2, dp_overlap=1, zero=1, micro_batch=2)) == (2, 4)  # 64 / (2 dp x 2) = 16
    assert short_counts(job_of(32, ranks=2), Plan(pp=2, vpp=2)) == (4, 8)  # the second round of an interleaved schedule
    assert short_counts(job_of(32, ranks=2), Plan(pp=2, schedule=SCHEDULES["zb-1p"])) == (4, 8)


def test_counts_that_the_workload_refuses_are_none() -> None:
    assert short_counts(job_of(64), Plan(offload=1)) is None


def parsed_steps(*steps: tuple[int, float, int]) -> Parsed:
    return Parsed(launcher=WORKLOAD, steps=tuple(Step(number=n, seconds=s, microbatches=m) for n, s, m in steps))


def test_a_log_of_two_counts_gives_the_pinned_step() -> None:
    # t = 1 + m / 2; the first three steps are slow starts; the fourth step of 8 was disturbed
    found = fitted(
        parsed_steps((1, 9.0, 4), (2, 9.0, 8), (3, 9.0, 4), (4, 5.0, 8), (5, 3.0, 4), (6, 5.0, 8), (7, 3.0, 4), (8, 50.0, 8)), (4, 8), 64, 3
    )
    assert found is not None
    assert (found.step_s, found.steps) == (pytest.approx(33.0), 5)
    assert found.basis == "steps of 4 and 8 of 64 micro batches"


def test_the_spread_gives_the_lines_standard_error_back() -> None:
    steps = [(4, 5.0, 8), (5, 3.0, 4), (6, 5.2, 8), (7, 3.1, 4), (8, 5.4, 8), (9, 3.2, 4)]
    found = fitted(parsed_steps(*steps), (4, 8), 64, 3)
    assert found is not None
    assert found.spread_s is not None
    # medians 3.1 and 5.2, half quartile distances 0.05 and 0.1, from which the errors of the medians follow
    se = 1.25 / 0.6745 / 3**0.5 * (0.05**2 / 2 + 0.1**2 / 2) ** 0.5 * (1 / 2 + 58**2 / 8) ** 0.5
    assert found.step_s == pytest.approx(3.1 + 60 * 2.1 / 4)
    assert found.spread_s == pytest.approx(se * 6**0.5 * 0.6745 / 1.25, rel=1e-5)
    result = Result(end="ok", step_s=found.step_s, spread_s=found.spread_s, steps=found.steps)
    assert noise(result) == pytest.approx(math.hypot(se / found.step_s, AGAIN), rel=1e-5)


@pytest.mark.parametrize("steps", [[], [(4, 5.0, 8), (6, 5.0, 8)], [(1, 5.0, 8), (2, 3.0, 4)]])
def test_too_few_steps_are_no_time(steps: list[tuple[int, float, int]]) -> None:
    assert fitted(parsed_steps(*steps), (4, 8), 64, 3) is None


def test_single_steps_have_no_spread() -> None:
    found = fitted(parsed_steps((4, 5.0, 8), (5, 3.0, 4)), (4, 8), 64, 3)
    assert found is not None
    assert (found.step_s, found.spread_s, found.steps) == (33.0, None, 2)


def said(step: int, held: int) -> str:
    """Return the workload's line for a step of 1 + held / 2 seconds."""
    return "tuner-step " + json.dumps({"step": step, "seconds": 1 + held / 2, "loss": 4.0, "microbatches": held})


def test_a_log_of_the_workload_becomes_a_result(tmp_path: Path) -> None:
    trial = Trial(number=1, job=job_of(128), plan=Plan(zero=1), folder=tmp_path, steps=6, warmup=2, short=(4, 8))
    lines = [said(n, m) for n, m in enumerate((4, 8) * 3, 1)]
    result = result_of(trial, Ending(exit_code=0), lines, WORKLOAD)
    assert (result.end, result.step_s, result.steps, result.basis) == ("ok", 33.0, 4, "steps of 4 and 8 of 64 micro batches")
    cut = result_of(trial, Ending(exit_code=0), lines[:3], WORKLOAD)  # one count only behind the warm-up: no time
    assert (cut.end, cut.step_s) == ("failed", None)


def test_progress_waits_for_two_steps_of_each_count(tmp_path: Path) -> None:
    trial = Trial(number=1, job=job_of(128), plan=Plan(zero=1), folder=tmp_path, steps=8, warmup=1, short=(4, 8))
    write_orders(tmp_path, Orders(argv=("true",), cwd=".", launcher=WORKLOAD, wall_s=1.0, quiet_s=1.0))
    progress, seen = Progress(trial), []
    for number, held in enumerate((4, 8, 4, 8, 4), 1):
        with (tmp_path / LOG).open("a") as log:
            log.write(said(number, held) + "\n")
        seen.append(progress.step_s())
    assert seen == [None, None, None, None, 33.0]
