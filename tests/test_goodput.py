"""What failing GPUs cost: the paper's numbers, from the cost model, and what each policy's answer must hold."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

import tuner
from tests.test_failing import EXPERTS, LLAMA, MOE, asked
from tuner.goodput import FailuresAnswer
from tuner.report.failures import failures_text
from tuner.report.search import search_text
from tuner.report.table import Page


@cache
def paper(**changes: Any) -> FailuresAnswer:
    return tuner.failures(job="ntp-paper", **changes)


def test_losses_of_the_papers_job_at_four_thousandths() -> None:
    """arXiv 2504.06095, figure 6, 32K GPUs in domains of 32: dropping replicas loses up to 12 %, falling back 3 %, with boost below 1 %."""
    row = next(row for row in paper().by_fraction if row["failed_fraction"] == 0.004)
    loss = {name: 1 - kept for name, kept in row["samples"].items()}
    assert loss["drop"] == pytest.approx(0.12, abs=0.01)
    assert 0 < loss["ntp"] <= 0.03
    assert 0 < loss["ntp+boost"] < 0.01
    assert row["hit"] == pytest.approx(0.12, abs=0.005)  # "at worst 12 % of domains are boosted"


def test_spares_of_the_papers_job_at_a_fixed_minibatch() -> None:
    """Figure 7: 90 domains for dropping replicas, 16 for falling back, 0 with boost; Llama 3's rates, repairs of 5 days, 99 % of time."""
    needed = {each.goodput.policy.name: each.spares_needed for each in paper(fixed_batch=True).outcomes}
    assert 60 <= needed["spares"] <= 110
    assert 8 <= needed["ntp"] <= 24
    assert needed["ntp+boost"] == 0


def test_what_reduced_groups_of_the_papers_job_do() -> None:
    thirty, twenty_eight = paper().fallbacks
    assert (thirty.degree, thirty.samples, thirty.of, thirty.boosted_samples) == (30, 7, 8, 8)
    assert (twenty_eight.degree, twenty_eight.boosted_samples) == (28, 8)
    assert 1.05 < thirty.power < twenty_eight.power < 1.3
    assert 0 < thirty.overhead < twenty_eight.overhead < 0.01


def test_the_analytic_form_and_the_simulation_agree_for_the_papers_job() -> None:
    answer = paper(simulate=True, traces=12, seed=1)
    for each in answer.outcomes:
        assert each.simulated is not None
        error = max(each.simulated.goodput_error, 1e-4)
        assert abs(each.simulated.goodput - each.goodput.goodput) < 3 * error, each.goodput.policy.name
    peaks = answer.peaks
    assert peaks is not None
    assert 60 <= peaks.never_waits["drop"][0] <= 110
    assert 8 <= peaks.never_waits["ntp"][0] <= 24
    assert peaks.never_waits["ntp+boost"] == (0, 0)
    assert peaks.above_a_thousandth_from_healthy == pytest.approx(0.81, abs=0.03)


def test_larger_domains_lose_more_and_falling_back_saves_most_of_it() -> None:
    rows = {row["domain"]: row for row in paper().by_domain}
    assert list(rows) == [8, 16, 32, 64, 72]
    drops = [1 - row["samples"]["drop"] for row in rows.values()]
    assert drops == sorted(drops)
    assert all(1 - row["samples"]["ntp"] < 0.3 * (1 - row["samples"]["drop"]) for size, row in rows.items() if size >= 16)
    assert rows[72]["gpus"] == 113 * 4 * 72  # what does not make a whole replica is left out, and said
    assert rows[32]["samples"]["drop"] == pytest.approx(1 - 0.0612, abs=0.0005)


def test_policies_in_order_of_what_they_keep() -> None:
    kept = {each.goodput.policy.name: each.goodput.goodput for each in paper().outcomes}
    assert kept["wait"] < kept["drop"] < kept["ntp"] < kept["ntp+boost"] < 1
    assert {"wait", "spares", "drop", "ntp", "ntp+boost"} == set(kept)


def test_in_place_recovery_saves_restarts_but_not_samples() -> None:
    usual, in_place = (asked(fallback_tp=7, in_place=flag) for flag in (False, True))
    found = [{each.goodput.policy.name: each.goodput for each in answer.outcomes} for answer in (usual, in_place)]
    assert found[1]["ntp"].lasting > found[0]["ntp"].lasting
    assert found[1]["drop"] == found[0]["drop"]


def test_without_packing_more_is_lost() -> None:
    packed, scattered = (paper(no_packing=flag) for flag in (False, True))
    for one, other in zip(packed.outcomes, scattered.outcomes, strict=True):
        if one.goodput.policy.losses:
            assert other.goodput.samples < one.goodput.samples


def test_a_degree_that_does_not_fit_names_stage_and_term() -> None:
    answer = asked(cluster="dgx-a100-40gbx512", plan="tp=8,pp=4,sp=true,zero=1,recompute=full:14", fallback_tp="7,6,5")
    seven, six, five = answer.fallbacks
    assert answer.estimate.cost.fits
    assert not answer.runs
    assert seven.why_not == ""
    assert 0.05 < six.p_oom < 0.5 and "P(OOM) 15.6 %, and policies rely on less than 5 %" in six.why_not
    assert re.match(r"stage \d needs 4\d\.\d of 4\d\.\d GB \(\w+", five.why_not)
    ntp = next(each.goodput.policy for each in answer.outcomes if each.goodput.policy.name == "ntp")
    assert len(ntp.losses) == 2  # one GPU down: tp 7; two: the replica is dropped
    assert "does not run: stage" in failures_text(answer.record(), Page())


def test_sharded_gradients_leave_nothing_to_fall_back_to() -> None:
    answer = asked(plan="tp=8,pp=1,zero=3,recompute=full", framework="torchtitan")
    assert all("zero = 3" in each.why_not for each in answer.fallbacks)


def test_experts_fall_back_too() -> None:
    answer = tuner.failures(**MOE, plan=EXPERTS)
    (seven,) = answer.fallbacks
    assert (seven.degree, seven.gpus) == (7, 7)
    assert 0 < seven.samples <= 56  # of 64: a data-parallel replica is gone, the others slow down
    names = {each.goodput.policy.name for each in answer.outcomes}
    assert {"drop", "ntp"} <= names
    assert any("expert-parallel groups fall together" in note for note in answer.notes)


def test_events_that_pass_the_floor_leave_only_dropping() -> None:
    answer = asked(blast=4)  # tp 8 falls back to 7 where nothing is said
    assert [each.goodput.policy.name for each in answer.outcomes] == ["wait", "spares", "drop"]
    assert any("an event of 4 GPUs passes the floor, 7 of 8" in note for note in answer.notes)


def test_one_gpu_wide_groups_have_nothing_to_fall_back_to() -> None:
    answer = tuner.failures(model="tiny", cluster="h100x8", seq_len=128, global_batch=64, plan="tp=1,pp=2")
    assert answer.fallbacks == ()
    assert any("nothing to fall back to: tp is 1" in note for note in answer.notes)
    assert answer.runs


def test_a_reduced_group_keeps_its_samples_and_all_wait_where_that_costs_less() -> None:
    """Two replicas of one sample: a reduced one that is cut has none left, which is half of all; waiting for it costs a quarter."""
    answer = asked(cluster="h100x64", global_batch=2, fallback_tp=6)
    (six,) = answer.fallbacks
    assert (six.samples, six.of, six.waits) == (1, 1, True)
    moved = (six.before_s + six.after_s + six.reduce_s) / answer.estimate.cost.step_s
    assert six.overhead == pytest.approx((1 + moved) / six.pace - 1)
    assert six.overhead < 1
    assert "all wait" in failures_text(answer.record(), Page())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(
    "changes", [{"job": "ntp-paper", "simulate": True, "days": 5, "traces": 2}, {**MOE, "plan": EXPERTS, "fixed_batch": True}]
)
def test_reports_fit_the_page_and_have_bars(width: int, changes: dict[str, Any]) -> None:
    text = failures_text(tuner.failures(**changes).record(), Page(width=width))
    assert max(map(len, text.splitlines())) <= width
    assert "####" in text
    assert "\x1b" not in text
    for word in ("fall back", "goodput %", "arXiv 2407.21783"):
        assert word in " ".join(text.split())


def test_a_failed_fraction_that_is_stated_is_what_is_down() -> None:
    answer = asked(failed_fraction="0.4%")
    assert sum(answer.fleet.fractions().values()) == pytest.approx(0.004, rel=1e-9)
    assert answer.record()["failures"]["stated"]


@pytest.mark.parametrize("knobs", ["tp=8,pp=4,sp=true,recompute=full,fallback_tp=7", "tp=4,pp=8,sp=true,recompute=full,fallback_tp=3"])
def test_goodput_is_the_same_thing_in_a_search_and_in_failures(knobs: str) -> None:
    """Samples left times the time whose work lasts. A search lets repaired GPUs come back for nothing: here 0.2 % of the time."""
    searched = tuner.search(**LLAMA, objective="goodput", current=knobs, fix="tp=8,pp=4,dp=16", top=1).record()
    own, lasting = searched["current"], searched["failures"]["lasting"]
    ntp = next(each.goodput for each in asked(plan=knobs).outcomes if each.goodput.policy.name == "ntp")
    assert own["goodput"] / lasting == pytest.approx(ntp.samples, abs=2e-4)
    assert own["goodput"] == pytest.approx(ntp.goodput, abs=0.003)
    assert own["goodput"] < ntp.samples - 0.01


def test_a_search_for_goodput_ranks_by_what_it_shows() -> None:
    record = tuner.search(**LLAMA, objective="goodput", fix="cp=1,mb=1,offload=none", limit="tp*pp<=32", top=5).record()
    rows = record["ranking"]
    good = [row["good_tokens_per_s_per_gpu"] for row in rows]
    assert good == sorted(good, reverse=True)
    assert good == [row["tokens_per_s_per_gpu"] * row["goodput"] for row in rows]
    for width in (60, 80, 120):
        lines = search_text(record, Page(width=width)).splitlines()
        assert max(map(len, lines)) <= width
        assert any("goodput %" in line and "good tok/s" in line for line in lines)
