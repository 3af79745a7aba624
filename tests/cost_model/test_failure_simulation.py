"""The closed forms and the simulation agree within the simulation's error, for every policy; a wrong closed form does not."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from tuner.cost_model.failure_simulation import Walk, failure_trace, simulate, time_quantile
from tuner.cost_model.failures import down_share, spare_units
from tuner.cost_model.policies import Fleet, Policy, expected_phi, goodput

FLEET = Fleet(
    units=256,
    unit=8,
    per_replica=4,
    samples=8,
    events_per_hour=1 / 20_000,
    repairs=((0.78, 48.0), (0.22, 3.0)),
    blasts={1: 1.0},
    restart_h=0.2,
    write_h=0.01,
    in_place_restart_h=0.02,
    step_h=0.01,
)
POLICIES = {
    "wait": Policy(name="wait", losses=(), overheads=()),
    "spares": Policy(name="spares", losses=(), overheads=(), spares=6),
    "drop": Policy(name="drop", losses=(8,), overheads=(0.0,)),
    "ntp": Policy(name="ntp", losses=(1, 3, 8), overheads=(0.01, 0.03, 0.03)),
    "boost": Policy(name="boost", losses=(0, 1, 8), overheads=(0.01, 0.01, 0.01)),
    "in place": Policy(name="in place", losses=(1, 8), overheads=(0.01, 0.01), in_place=True),
    "unpacked": Policy(name="unpacked", losses=(1, 8), overheads=(0.0, 0.0), packed=False),
    "made up": Policy(name="made up", losses=(1, 3, 8), overheads=(0.01, 0.03, 0.03), spares=4, makes_up=True),
}
RATES = (1 / 200_000, 1 / 20_000, 1 / 6_000)


def apart(fleet: Fleet, policy: Policy, *, seed: int = 11, against: Policy | None = None) -> float:
    """Return by how many standard errors of the simulation the closed form (of `against`, if given) is off."""
    told = goodput(fleet, policy)
    walk = Walk(policy=policy, interval_h=told.interval_h, waits=told.waits_h > 0 or policy.stands_in)
    seen = simulate(fleet, [walk], days=120, runs=32, seed=seed)[0]
    expected = told if against is None else goodput(fleet, against)
    return max(
        abs(seen.goodput - expected.goodput) / max(seen.goodput_error, 3e-5),
        abs(seen.samples - expected.samples) / max(seen.samples_error, 3e-5),
    )


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", POLICIES)
def test_closed_form_and_simulation_agree(name: str, rate: float) -> None:
    assert apart(dataclasses.replace(FLEET, events_per_hour=rate), POLICIES[name]) < 3


@pytest.mark.parametrize("blasts", [{2: 1.0}, {8: 1.0}, {16: 1.0}, {1: 0.8, 4: 0.2}])
def test_they_agree_for_events_that_take_more(blasts: dict[int, float]) -> None:
    fleet = dataclasses.replace(FLEET, events_per_hour=1 / 40_000, blasts=blasts)
    assert apart(fleet, POLICIES["ntp"]) < 3
    assert apart(fleet, POLICIES["spares"]) < 3
    assert apart(fleet, POLICIES["made up"]) < 3


def test_a_trace_of_two_kinds_of_events_has_what_is_down_in_the_long_run_where_most_is() -> None:
    """Rates at which the shares of both kinds add up to 65 %: what is down is 1 - (1 - f1) (1 - f4)."""
    fleet = dataclasses.replace(FLEET, blasts={1: 0.8, 4: 0.2})
    rates = (dataclasses.replace(fleet, events_per_hour=float(rate)) for rate in np.geomspace(1e-4, 1.0, 400))
    fleet = next(each for each in rates if sum(each.fractions().values()) > 0.65)
    seen = []
    for seed in range(8):
        trace = failure_trace(fleet, 240.0, np.random.default_rng(seed), levels=1)
        seen.append(float((trace.durations() * np.array(trace.down)).sum() / trace.hours / fleet.gpus))
    error = np.std(seen, ddof=1) / len(seen) ** 0.5
    expected = down_share(fleet.fractions())
    assert abs(np.mean(seen) - expected) < 3 * error
    assert abs(np.mean(seen) - 0.65) > 5 * error


def test_where_most_groups_are_hit_the_closed_form_of_waiting_is_a_little_high() -> None:
    """5 % of the GPUs down, a third of the groups: failures are rarer while fewer run, so bad states last; 59.6 instead of 58.3 %."""
    fleet = dataclasses.replace(FLEET, units=32).at_fraction(0.05)
    analytic = goodput(fleet, POLICIES["drop"])
    assert analytic.waits_h > 0
    seen = simulate(fleet, [Walk(policy=POLICIES["drop"], interval_h=analytic.interval_h)], days=60, runs=40, seed=1)[0]
    assert 0 < analytic.samples - seen.samples < 0.02


@pytest.mark.parametrize("blasts", [{1: 1.0}, {1: 0.8, 4: 0.2}])
def test_samples_agree_with_half_of_the_gpus_down_where_repaired_ones_return_at_once(blasts: dict[int, float]) -> None:
    fleet = dataclasses.replace(FLEET, unit=2, per_replica=1, units=128, blasts=blasts).at_fraction(0.5)
    policy = Policy(name="drop", losses=(8,), overheads=(0.0,))
    seen = simulate(fleet, [Walk(policy=policy, interval_h=1.0, waits=False)], days=60, runs=40, seed=1)[0]
    assert abs(seen.samples - expected_phi(fleet, policy)) < 3 * seen.samples_error


def test_spares_that_suffice_for_all_but_rare_times_agree_over_many_traces() -> None:
    """A hundredth of the time is a few excursions of a few traces: few traces scatter by more than their own standard error says."""
    fleet = dataclasses.replace(FLEET, events_per_hour=1 / 40_000)
    spares = spare_units(fleet.units, fleet.probabilities(1)[0], 0.99)
    policy = Policy(name="spares", losses=(), overheads=(), spares=spares)
    seen = simulate(fleet, [Walk(policy=policy, interval_h=1.0)], days=60, runs=600, seed=3)[0]
    assert abs(seen.samples - goodput(fleet, policy).samples) < 3 * seen.samples_error


def test_a_closed_form_without_packing_is_found_out() -> None:
    fleet = dataclasses.replace(FLEET, events_per_hour=1 / 6_000)
    assert apart(fleet, POLICIES["ntp"], against=dataclasses.replace(POLICIES["ntp"], packed=False)) > 10
    assert apart(fleet, POLICIES["unpacked"], against=dataclasses.replace(POLICIES["unpacked"], packed=True)) > 10


def test_a_wrong_number_of_units_in_a_replica_is_found_out() -> None:
    fleet = dataclasses.replace(FLEET, events_per_hour=1 / 6_000)
    told = goodput(dataclasses.replace(fleet, per_replica=8), POLICIES["drop"])
    seen = simulate(fleet, [Walk(policy=POLICIES["drop"], interval_h=told.interval_h)], days=120, runs=12, seed=11)[0]
    assert abs(seen.samples - told.samples) > 5 * seen.samples_error


def test_a_seed_gives_the_same_numbers_again() -> None:
    walks = [Walk(policy=POLICIES[name], interval_h=0.5) for name in ("drop", "spares", "ntp")]
    one, again, other = (simulate(FLEET, walks, days=10, runs=3, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


PAPER = dataclasses.replace(
    FLEET, units=1024, unit=32, per_replica=8, events_per_hour=1 / 50_676, repairs=((0.78, 120.0), (0.22, 3.0)), restart_h=1 / 6
)


def test_the_papers_trace_has_more_than_a_thousandth_down_for_81_percent_of_15_days() -> None:
    """arXiv 2504.06095, figure 4: Llama 3's rates on 32K GPUs from a healthy start, repairs of 5 days."""
    shares = []
    for seed in range(8):
        trace = failure_trace(PAPER, 15 * 24.0, np.random.default_rng(seed), levels=1, start="healthy", fixed_repair=True)
        shares.append(trace.share_above(0.001 * PAPER.gpus))
    assert float(np.mean(shares)) == pytest.approx(0.81, abs=0.03)


def test_a_steady_trace_has_what_is_down_in_the_long_run() -> None:
    traces = [failure_trace(PAPER, 15 * 24.0, np.random.default_rng(seed), levels=4) for seed in range(10)]
    means = [float((np.array(trace.down) * trace.durations()).sum() / trace.hours) for trace in traces]
    error = float(np.std(means, ddof=1)) / 10**0.5
    assert float(np.mean(means)) == pytest.approx(32768 * sum(PAPER.fractions().values()), abs=3 * error)
    for trace in traces:
        assert trace.times == sorted(trace.times)
        assert all(a >= b >= c >= 0 for a, b, c, _ in trace.hit)
        assert min(trace.down) >= 0


def test_two_months_of_32k_gpus_take_about_a_second() -> None:
    start = time.perf_counter()
    simulate(PAPER, [Walk(policy=POLICIES["drop"], interval_h=0.15)], days=60, runs=4, seed=0)
    assert time.perf_counter() - start < 8  # with room for a busy machine


def test_time_quantiles() -> None:
    values, durations = np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0])
    assert [time_quantile(values, durations, q) for q in (0.5, 0.8, 0.85, 0.95)] == [1.0, 1.0, 2.0, 3.0]
