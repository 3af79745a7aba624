"""The closed forms of failing GPUs against numbers of the paper, numbers worked out by hand, and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from tuner.cost_model.failures import (
    Reduced,
    at_least,
    available_interval,
    best_interval,
    daly_interval,
    down_share,
    drop_samples,
    effective_time,
    effective_time_in_place,
    effective_time_large,
    effective_time_small,
    expected_hit_replicas,
    expected_loss,
    expected_samples,
    failed_fraction,
    hit_probability,
    hit_replicas,
    levels_of,
    lost_distribution,
    none_hit,
    scattered_hit_replicas,
    spare_replicas,
    spare_units,
    spares_samples,
    wait_samples,
    young_interval,
)

PAPER = {  # arXiv 2504.06095, figure 3: share of GPUs unavailable, by failed fraction and size of the NVLink domain
    0.0005: (0.0020, 0.0040, 0.0080, 0.0159, 0.0315, 0.0354),
    0.001: (0.0040, 0.0080, 0.0159, 0.0315, 0.0620, 0.0695),
    0.002: (0.0080, 0.0159, 0.0315, 0.0621, 0.1203, 0.1342),
    0.004: (0.0159, 0.0316, 0.0621, 0.1204, 0.2263, 0.2507),
}
SIZES = (4, 8, 16, 32, 64, 72)


@pytest.mark.parametrize("fraction", PAPER)
def test_unavailable_share_is_figure_3_of_the_paper(fraction: float) -> None:
    ours = hit_probability(fraction, np.array(SIZES))
    assert [round(float(x), 4) for x in ours] == list(PAPER[fraction])


def test_failed_fraction_of_llama_3() -> None:
    """419 interruptions of 16,384 GPUs in 54 days; 78 % hardware, 5 days; 22 % software, 3 hours: 61 of 32,768 GPUs are down."""
    per_hour = 419 / (16384 * 54 * 24)
    fraction = failed_fraction(per_hour, 0.78 * 120 + 0.22 * 3)
    assert 1 / per_hour == pytest.approx(50676, rel=1e-3)
    assert fraction * 32768 == pytest.approx(60.8, abs=0.1)
    assert failed_fraction(0.001, 100, blast=4) == pytest.approx(0.4 / 1.4)


def test_at_least_counts_gpus_of_a_unit() -> None:
    for count in range(1, 9):
        assert at_least(count, 8, {1: 0.03}) == pytest.approx(binom.sf(count - 1, 8, 0.03), rel=1e-9)
    assert at_least(9, 8, {1: 0.03}) == pytest.approx(0.0, abs=1e-12)
    # Blocks of 4: a unit of 8 has two, each down with 0.1, so 1 to 4 down is one thing and 5 to 8 another.
    assert at_least(3, 8, {4: 0.1}) == pytest.approx(1 - 0.9**2)
    assert at_least(5, 8, {4: 0.1}) == pytest.approx(0.1**2)
    # A block larger than the unit takes it whole.
    assert at_least(4, 4, {8: 0.1}) == pytest.approx(0.1)


def test_shares_of_events_of_several_sizes_do_not_add_up() -> None:
    """Half taken by single failures, four tenths by trays: 1 - 0.5 x 0.6 = 0.7, and never above 1."""
    assert down_share({1: 0.5, 4: 0.4}) == pytest.approx(0.7)
    assert down_share({1: 0.9, 2: 0.8, 4: 0.7}) == pytest.approx(1 - 0.1 * 0.2 * 0.3)
    assert down_share({1: 0.3}) == 0.3
    assert at_least(1, 1, {1: 0.5, 4: 0.4}) == pytest.approx(0.7)


def test_at_least_with_two_kinds_of_events() -> None:
    """Units of 4: each GPU alone with 0.1, both halves with 0.05; all 2^6 states. A GPU that both take is down once."""
    for count in range(1, 5):
        total = 0.0
        for singles in itertools.product((0, 1), repeat=4):
            for halves in itertools.product((0, 1), repeat=2):
                if sum(singles[i] or halves[i // 2] for i in range(4)) >= count:
                    total += math.prod(0.1 if x else 0.9 for x in singles) * math.prod(0.05 if x else 0.95 for x in halves)
        assert at_least(count, 4, {1: 0.1, 2: 0.05}) == pytest.approx(total, rel=1e-9)


def test_hit_replicas_by_hand() -> None:
    """U = 4, m = 2, p = 1/2: K = 0..4 with 1, 4, 6, 4, 1 sixteenths needs 0, 1, 1, 2, 2 replicas: 20/16."""
    assert expected_hit_replicas(4, 0.5, 2) == pytest.approx(20 / 16)
    assert scattered_hit_replicas(4, 0.5, 2) == pytest.approx(2 * 0.75)
    assert expected_hit_replicas(4, 0.0, 2) == 0
    assert expected_hit_replicas(4, 1.0, 2) == 2
    # One more for sure: K + 1 = 1..5 needs 1, 1, 2, 2, 3 replicas: (1 + 4 + 12 + 8 + 3) / 16.
    assert hit_replicas(4, 0.5, 2, 1) == pytest.approx(28 / 16)
    assert [hit_replicas(4, p, 2, 3) for p in (0.0, 1.0)] == [2, 4]
    assert hit_replicas(4, 0.5, 1, 3) == 5


@pytest.mark.parametrize(("units", "per_replica", "p"), [(1024, 8, 0.12), (4096, 1, 0.03), (512, 64, 0.001), (16, 16, 0.2)])
def test_hit_replicas_against_the_sum_over_all_counts(units: int, per_replica: int, p: float) -> None:
    counts = np.arange(units + 1)
    assert expected_hit_replicas(units, p, per_replica) == pytest.approx(
        float((binom.pmf(counts, units, p) * -(-counts // per_replica)).sum()), rel=1e-8
    )


def test_a_grid_and_single_numbers_agree_to_the_last_bit() -> None:
    units, per_replica = np.array([[64], [128]]), np.array([[1, 2, 8]])
    p = hit_probability(0.003, np.array([[8], [4]]))
    grid = expected_samples(units, per_replica, [p, p * 0.01], [0.125, 1.0], [0.01, 0.0])
    for i, j in itertools.product(range(2), range(3)):
        single = hit_probability(0.003, (8, 4)[i])
        one = expected_samples(int(units[i, 0]), int(per_replica[0, j]), [single, single * 0.01], [0.125, 1.0], [0.01, 0.0])
        assert float(one) == float(grid[i, j])


def _by_hand(units: int, per_replica: int, single: float, size: int, losses: list[float], overheads: list[float]) -> tuple[float, float]:
    """Return E[loss] and E[phi] by going through every state of every unit: packed by sorting, worst first."""
    lost, samples = 0.0, 0.0
    for state in itertools.product(range(size + 1), repeat=units):
        weight = math.prod(float(binom.pmf(down, size, single)) for down in state)
        ranked = sorted(state, reverse=True)
        worst = [ranked[i] for i in range(0, units, per_replica)]
        per = [0.0, *losses]
        share = sum(per[min(down, len(losses))] for down in worst) / len(worst)
        slow = [0.0, *overheads][min(max(state), len(overheads))]
        lost += weight * share
        samples += weight * (1 - share) / (1 + slow)
    return lost, samples


def test_expected_loss_and_samples_against_every_state() -> None:
    single, size, units, per_replica = 0.15, 3, 6, 2
    losses, overheads = [0.25, 0.5, 1.0], [0.04, 0.1, 0.0]
    probabilities = [at_least(j, size, {1: single}) for j in (1, 2, 3)]
    lost, samples = _by_hand(units, per_replica, single, size, losses, overheads)
    assert expected_loss(units, per_replica, probabilities, losses) == pytest.approx(lost, rel=1e-9)
    assert expected_samples(units, per_replica, probabilities, losses, overheads) == pytest.approx(samples, rel=1e-9)


def test_lost_samples_against_every_state() -> None:
    single, size, units, per_replica = 0.15, 3, 6, 2
    lost = [1, 2, 4]
    probabilities = [float(at_least(j, size, {1: single})) for j in (1, 2, 3)]
    found = lost_distribution(units, per_replica, probabilities, lost)
    expected = np.zeros(13)
    for state in itertools.product(range(size + 1), repeat=units):
        ranked = sorted(state, reverse=True)
        total = sum([0, *lost][ranked[i]] for i in range(0, units, per_replica))
        expected[total] += math.prod(float(binom.pmf(down, size, single)) for down in state)
    assert found == pytest.approx(expected, abs=1e-10)
    assert spare_replicas(np.array([0.9, 0.05, 0.04, 0.01]), 2, 0.99) == 1
    assert spare_replicas(np.array([0.9, 0.05, 0.04, 0.01]), 2, 0.995) == 2
    assert spare_replicas(np.array([1.0]), 2, 0.99) == 0


def test_lost_samples_of_many_units_have_the_expected_mean() -> None:
    """Most of 20,000 units are hit: the mean of the distribution is the expected loss."""
    p = [float(at_least(j, 64, {1: 0.03})) for j in (1, 2, 3, 4)]
    found = lost_distribution(20_000, 8, p, [1, 2, 4, 16])
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    share = float((found * np.arange(len(found))).sum()) / (2_500 * 16)
    assert share == pytest.approx(float(expected_loss(20_000, 8, p, [1 / 16, 2 / 16, 4 / 16, 1.0])), rel=1e-7)


def test_dropping_replicas_of_the_papers_job_loses_12_percent() -> None:
    """32,768 GPUs in domains of 32, eight a replica, 0.4 % down (arXiv 2504.06095, figure 6): up to 12 %."""
    p = hit_probability(0.004, 32)
    assert 1 - drop_samples(1024, 8, p) == pytest.approx(0.12, abs=0.01)
    assert scattered_hit_replicas(1024, p, 8) / 128 == pytest.approx(0.64, abs=0.005)  # packing is essential


def test_a_policy_that_finishes_every_sample_loses_none() -> None:
    probabilities = [at_least(j, 8, {1: 0.01}) for j in (1, 2)]
    assert expected_loss(64, 2, probabilities[:1], [0.0]) == 0.0
    assert expected_samples(64, 2, probabilities[:1], [1.0], [0.0]) == pytest.approx(drop_samples(64, 2, probabilities[0]), rel=1e-12)
    assert wait_samples(64, probabilities[0]) == pytest.approx((1 - probabilities[0]) ** 64)


def test_levels_follow_the_degrees_that_exist() -> None:
    reduced = [Reduced(degree=6, samples=6, boosted_samples=7, overhead=0.02), Reduced(degree=7, samples=7, boosted_samples=8)]
    assert levels_of(reduced, 8, 8, boosted=False) == ([0.125, 0.25, 1.0], [0.0, 0.02, 0.02])
    assert levels_of(reduced, 8, 8, boosted=True) == ([0.0, 0.125, 1.0], [0.0, 0.0, 0.0])
    assert levels_of([Reduced(degree=6, samples=6, boosted_samples=6)], 8, 8, boosted=False)[0] == [0.25, 0.25, 1.0]
    assert levels_of([Reduced(degree=7, samples=7, boosted_samples=7, fits=False)], 8, 8, boosted=False) == ([1.0], [0.0])


def test_spare_units() -> None:
    """One unit, p = 1/10: none spare works 0.9 of the time, one spare 0.99, two 0.999."""
    assert [spare_units(1, 0.1, q) for q in (0.9, 0.95, 0.9899, 0.9989)] == [0, 1, 1, 2]
    assert spares_samples(1, 0.1, 1) == pytest.approx(0.99 / 2)
    spares = spare_units(1024, 0.0578, 0.99)
    assert binom.cdf(spares, 1024 + spares, 0.0578) >= 0.99 > binom.cdf(spares - 1, 1023 + spares, 0.0578)


def test_none_hit() -> None:
    assert none_hit(10, 0.1) == pytest.approx(0.9**10)
    assert none_hit(10, 0.0) == 1.0


def test_intervals_between_checkpoints() -> None:
    """An interruption every 4 h, 2 min of writing, 10 min of restart."""
    lam, w, u = 0.25, 1 / 30, 1 / 6
    assert young_interval(lam, w) == pytest.approx(math.sqrt(8 / 30))
    assert daly_interval(lam, w) == pytest.approx(math.sqrt(8 / 30) - 1 / 30)
    assert available_interval(lam, w, u) == pytest.approx(math.sqrt(2 * (4 + 1 / 6) / 30 + 1 / 900))
    best = best_interval(lam, w)
    at = [effective_time(lam, u, w, best * factor) for factor in (0.98, 1.0, 1.02)]
    assert at[1] == max(at)
    assert daly_interval(lam, w) < best < young_interval(lam, w)


def test_effective_time_by_hand_and_its_limits() -> None:
    """Lam = 1/h, no restart, no writing, d = 1 h: 1 / (e - 1)."""
    assert effective_time(1.0, 0.0, 0.0, 1.0) == pytest.approx(1 / (math.e - 1))
    assert effective_time(0.0, 1.0, 0.1, 0.9) == pytest.approx(0.9)
    small = (0.002, 0.2, 0.01, 2.0)
    assert effective_time(*small) == pytest.approx(effective_time_small(*small), abs=1e-4)
    large = (1 / 1.55, 1 / 6, 30 / 3600, best_interval(1 / 1.55, 30 / 3600))
    assert effective_time(*large) == pytest.approx(effective_time_large(*large), abs=0.015)
    assert effective_time(*large) == pytest.approx(0.80, abs=0.015)
    in_place = effective_time_in_place(1 / 1.55, 1 / 60, 10 / 3600)
    assert in_place == pytest.approx(1 - (1 / 60 + 5 / 3600) / 1.55, abs=2e-4)
