"""What is believed of candidates, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from tuner.search.beliefs import DEGREES, OWN_MEMORY, OWN_TIME, Beliefs, Latent, Observation, Ran, ordinary


def latent(mean: list[float], covariance: list[list[float]]) -> Latent:
    of = np.array(covariance)
    return Latent(mean=np.array(mean), between=lambda rows, columns: of[np.ix_(rows, columns)])


def test_an_exact_observation_by_hand() -> None:
    """Two values of variance 1 and covariance 0.8; the first is seen as 1 with noise 0.5: the gain is 1 / 1.25.

    Its mean becomes 0.8, its variance 1 - 1 / 1.25 = 0.2; the other's mean 0.8 x 0.8 = 0.64, its variance 1 - 0.64 / 1.25 = 0.488.
    """
    mean, variance = latent([0.0, 0.0], [[1.0, 0.8], [0.8, 1.0]]).given([Observation(0, 0, 1.0, 0.5)])
    assert mean == pytest.approx([0.8, 0.64], abs=1e-6)
    assert variance == pytest.approx([0.2, 0.488], abs=1e-6)


def test_nothing_seen_leaves_the_prior() -> None:
    mean, variance = latent([1.0, 2.0], [[0.5, 0.1], [0.1, 0.7]]).given([])
    assert mean.tolist() == [1.0, 2.0]
    assert variance == pytest.approx([0.5, 0.7])


@pytest.mark.parametrize(("sign", "value"), [(1, 0.3), (-1, 0.3), (-1, -1.0), (1, 2.0), (-1, 3.0)])
def test_a_bound_moves_the_mean_to_the_mode_of_the_posterior(sign: int, value: float) -> None:
    """A standard normal value of which it is known that it lies below, or above, a bound blurred by 0.3: Laplace's mean is the maximum of
    the posterior, found on a grid, and its variance the inverse curvature there.
    """
    mean, variance = latent([0.0], [[1.0]]).given([Observation(0, sign, value, 0.3)])  # type: ignore[arg-type]
    grid = np.linspace(-4, 6, 100_001)
    log = norm.logpdf(grid) + norm.logcdf(sign * (value - grid) / 0.3)
    at = int(np.argmax(log))
    step = grid[1] - grid[0]
    curvature = -(log[at + 100] - 2 * log[at] + log[at - 100]) / (100 * step) ** 2
    assert float(mean[0]) == pytest.approx(grid[at], abs=2e-4)
    assert float(variance[0]) == pytest.approx(1 / curvature, rel=0.01)


def test_bounds_that_say_nothing_leave_the_prior() -> None:
    mean, variance = latent([0.0], [[1.0]]).given([Observation(0, 1, 9.0, 0.3)])
    assert float(mean[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(variance[0]) == pytest.approx(1.0, abs=1e-6)


ALIKE = [[0.09, 0.08, 0.08], [0.08, 0.09, 0.08], [0.08, 0.08, 0.09]]


def test_a_run_far_slower_than_its_neighbour_is_an_outlier_and_one_far_faster_is_news() -> None:
    prior = latent([0.0, 0.0, 0.0], ALIKE)
    slow, _ = ordinary(prior, [Observation(0, 0, 0.05, OWN_TIME), Observation(1, 0, 2.5, OWN_TIME)])
    assert slow[0].spread == OWN_TIME
    assert slow[1].spread > 10 * OWN_TIME
    fast, _ = ordinary(prior, [Observation(0, 0, -0.5, OWN_TIME), Observation(1, 0, -0.55, OWN_TIME)])
    assert [one.spread for one in fast] == [OWN_TIME, OWN_TIME]


def test_a_cluster_that_is_slower_throughout_has_no_outliers() -> None:
    seen = [Observation(i, 0, 0.6 + 0.02 * i, OWN_TIME) for i in range(3)]
    assert ordinary(latent([0.0, 0.0, 0.0], ALIKE), seen)[0] == seen


def test_the_scale_by_hand() -> None:
    """One run, 1 standard deviation off (variance 0.09 + 0.06^2): scale (nu - 2 + 1) / (nu - 2 + 1) = 1; 2 off: (nu - 2 + 4) / (nu - 1)."""
    prior = latent([0.0], [[0.09]])
    deviation = math.sqrt(0.09 + OWN_TIME**2)
    assert ordinary(prior, [Observation(0, 0, deviation, OWN_TIME)])[1] == pytest.approx(1.0)
    assert ordinary(prior, [Observation(0, 0, -2 * deviation, OWN_TIME)])[1] == pytest.approx((DEGREES + 2) / (DEGREES - 1))


def beliefs(n: int = 3, memory: float = math.log(70.0), capacity: float = math.log(80.0)) -> Beliefs:
    shared = [[0.09 if i == j else 0.08 for j in range(n)] for i in range(n)]
    faults = [[1.5 if i == j else 1.0 for j in range(n)] for i in range(n)]
    return Beliefs(
        time=latent([0.0] * n, shared),
        memory=latent([memory] * n, shared),
        capacity=np.full(n, capacity),
        faults=latent([2.5] * n, faults),
    )


def test_the_probability_of_fitting_by_hand() -> None:
    """70 of 80 GB, log error of variance 0.09 + 0.05^2: Phi(log(8 / 7) / 0.304)."""
    said = beliefs().given([])
    assert said.fits == pytest.approx(norm.cdf(math.log(80 / 70) / math.sqrt(0.09 + OWN_MEMORY**2)))
    assert said.log_s == pytest.approx(0.0)
    assert said.deviation == pytest.approx(math.sqrt(0.09 + OWN_TIME**2))


def test_what_runs_teach_of_memory() -> None:
    before = beliefs().given([])
    after_oom = beliefs().given([Ran(0, "oom")])
    after_ok = beliefs().given([Ran(0, "ok", 1.0)])
    measured = beliefs().given([Ran(0, "ok", 1.0, memory_bytes=50.0)])
    assert after_oom.fits[1] < before.fits[1] < after_ok.fits[1] < measured.fits[1]
    assert after_oom.sound[1] == before.sound[1]  # running out of memory is no fault


def test_a_fault_makes_its_likes_doubtful_and_says_nothing_of_their_memory() -> None:
    before, after = beliefs().given([]), beliefs().given([Ran(0, "failed")])
    assert after.sound[1] < before.sound[1]
    assert after.fits[1] == pytest.approx(before.fits[1])
    assert (after.runs <= after.fits).all()


def test_a_time_moves_its_likes() -> None:
    said = beliefs().given([Ran(0, "ok", math.exp(0.3))])
    assert said.log_s[1] == pytest.approx(0.3 * 0.08 / (0.09 + OWN_TIME**2), abs=1e-6)
    assert said.deviation[1] < beliefs().given([]).deviation[1] * 1.2
