"""Steps of a few micro batches, and what they say of the whole batch: numbers by hand."""

from __future__ import annotations

import pytest

from tuner.errors import SpecError
from tuner.launch.short_steps import ShortStep, at_pinned_batch


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
