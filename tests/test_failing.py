"""Questions about failures: what they are read as, and what is wrong with bad ones."""

from __future__ import annotations

from typing import Any

import pytest

import tuner
from tuner import presets
from tuner.errors import SpecError
from tuner.failing import degrees_of, units_of
from tuner.goodput import FailuresAnswer

LLAMA: dict[str, Any] = {"model": "llama3-70b", "cluster": "h100x512", "seq_len": 8192, "global_batch": 512}
PLAN = "tp=8,pp=4,sp=true,recompute=full"
MOE: dict[str, Any] = {"model": "mixtral-8x7b", "cluster": "h100x256", "seq_len": 4096, "global_batch": 1024}
EXPERTS = "tp=1,pp=2,ep=8,etp=1,zero=1,recompute=full"


def asked(**changes: Any) -> FailuresAnswer:
    return tuner.failures(**(LLAMA | {"plan": PLAN} | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"failed_fraction": 0}, "failed_fraction = 0: must be a share above 0 and below 1.*at 0 no GPU is ever down"),
        ({"failed_fraction": "100%"}, "failed_fraction = '100%': must be a share above 0 and below 1"),
        ({"failed_fraction": -0.1}, "must be a share above 0"),
        ({"failed_fraction": 0.6}, "failed_fraction: leaves 60.0 % of the GPUs down and 99.9 % of the groups of 8 hit"),
        ({"hardware_share": 0, "software_repair": 0}, "software_repair: is 0 and so are all repairs: no GPU is ever down"),
        ({"mtbf": "0 h"}, "mtbf = '0 h': must be positive"),
        ({"mtbf": "50000"}, "mtbf = '50000': must be seconds with a unit"),
        ({"mtbf": "1 h"}, "mtbf: leaves 99.0 % of the GPUs down and 100.0 % of the groups"),
        ({"rate_scale": 0}, "rate_scale = 0: must be a number from"),
        ({"repair": "-3 d"}, "repair = '-3 d': must be positive"),
        ({"hardware_share": "120%"}, "hardware_share = '120%': must be a share from 0 to 1"),
        ({"quantile": 1}, "quantile = 1: must be a share above 0 and below 1"),
        ({"power_cap": 0.9}, "power_cap = 0.9: must be a number from 1 to 3"),
        ({"failure_data": "llama4-herd"}, "no such failure data .did you mean llama3-herd"),
        ({"fallback_tp": 8}, "fallback_tp = 8: must be below the healthy degree, tp = 8 .like 7"),
        ({"fallback_tp": 0}, "fallback_tp = '0': must be a whole number from 1"),
        ({"fallback_tp": "7,nine"}, "fallback_tp = 'nine': must be a whole number"),
        (
            {"fallback_tp": 7, "blast": 4},
            "fallback_tp = 7: is passed by every failure: an event takes at least 4 GPUs and leaves 4 of a group's 8",
        ),
        ({"fallback_tp": 7, "blast": 8}, "leaves 0 of a group's 8 .no degree is left"),
        ({"fallback_ep": 4}, "llama3-70b has no expert-parallel groups .--fallback-tp"),
        ({"blast": 3}, "blast = 3: GPUs of an event must divide a group of 8 or be a multiple of it"),
        ({"blast": "1:0.5,4:0.4"}, "shares of blast must add up to 1, not 0.9"),
        ({"blast": 1024}, "blast = 1024: must be at most the job's 512 GPUs"),
        ({"domains": 1000}, "domains = 1000: must be at most the job's 512 GPUs"),
        ({"failed_fraction": 1e-18}, "failed_fraction = 1e-18: must be at least 1e-09"),
        ({"failed_fraction": 0.001, "mtbf": "1000 h"}, "mtbf = '1000 h': means nothing beside --failed-fraction"),
        ({"failed_fraction": 0.001, "rate_scale": 3}, "rate_scale = 3: means nothing beside --failed-fraction"),
        ({"days": 5}, "days = 5: means nothing without a simulation .add --simulate"),
        ({"traces": 5}, "traces = 5: means nothing without a simulation"),
        ({"seed": 5}, "seed = 5: means nothing without a simulation"),
        ({"days": "abc", "simulate": True}, "days = 'abc': must be days from 0.01 to 36500, like 60 or .60 d"),
        ({"days": "0 d", "simulate": True}, "days = '0 d': must be days from 0.01 to 36500, like 60 or .60 d"),
        ({"days": "1e9", "simulate": True}, "days = '1e9': must be days from 0.01 to 36500, like 60 or .60 d"),
        ({"days": 36500, "traces": 10_000, "simulate": True}, "simulate: would take 8.[89]e.07 failures, at most 3,000,000"),
        ({"spares": -1}, "spares = -1: must be a whole number from 0"),
        ({"traces": 1, "simulate": True}, "traces = 1: must be a whole number from 2"),
        ({"in_place": True, "plan": PLAN + ",zero=1"}, "in_place: needs zero 0: at zero 1"),
        ({"plan": "tp=3,pp=4"}, "must divide the 512 GPUs"),
    ],
)
def test_bad_questions_get_a_clear_answer(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        asked(**changes)


def test_a_group_that_does_not_line_up_with_the_domain() -> None:
    with pytest.raises(SpecError, match="groups of 6 GPUs must divide the NVLink domain of 8, or span whole ones"):
        asked(cluster="h100x96", plan="tp=6,pp=4", global_batch=128)


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        asked(mtbf="fast", quantile=2, failure_data="nothing", model="llama3-70c")
    where = {problem.where for problem in caught.value.problems}
    assert {"mtbf", "quantile", "failure data", "model"} <= where


def test_fallback_tp_of_a_mixture_of_experts() -> None:
    with pytest.raises(SpecError, match=r"mixtral-8x7b has experts in groups of their own, which fall back \(--fallback-ep\)"):
        tuner.failures(**MOE, plan=EXPERTS, fallback_tp=3)


def test_units_of_experts_tie_replicas_together() -> None:
    """ep 8 over tp 1: eight data-parallel replicas share each of the two stages' groups; 256 GPUs make 16 such, each of 64 samples."""
    answer = tuner.failures(**MOE, plan=EXPERTS)
    units = answer.units
    assert (units.axis, units.size, units.per_replica, units.spanned, units.units) == ("ep", 8, 2, 8, 32)
    assert units.samples == 64
    assert degrees_of(units, answer.question) == (7,)
    assert units_of(answer.estimate.job, answer.estimate.plan) == units


def test_what_a_question_states_replaces_the_presets_figures_and_says_so() -> None:
    data = asked(mtbf="1000 h", blast="1:0.9,2:0.1", restart="30 s", rate_scale=2, software_repair=0).question.data
    assert (data.mtbf.value, data.mtbf.source) == (3.6e6, "--mtbf")
    assert [(each.gpus, each.share.value) for each in data.blast] == [(1, 0.9), (2, 0.1)]
    assert data.restart.value == 30
    assert data.repair.source.startswith("arXiv 2504.06095")


def test_the_plans_own_fallback_is_taken() -> None:
    answer = asked(plan=PLAN + ",fallback_tp=6")
    assert [each.degree for each in answer.fallbacks] == [6]


def test_a_plan_that_drops_its_replicas_has_nothing_to_fall_back_to() -> None:
    answer = asked(plan=PLAN + ",fallback_tp=8")
    assert answer.fallbacks == ()
    assert [each.goodput.policy.name for each in answer.outcomes] == ["wait", "spares", "drop"]
    assert "the plan's fallback_tp is 0 or its tp, 8" in answer.notes[0]
    assert all("ntp" not in row.get("samples", {}) for row in answer.by_domain)


def test_domains_that_do_not_divide_the_job_leave_gpus_out() -> None:
    """Replicas of 32 GPUs are nearest to 5 groups of 7; 14 such replicas take 490 of 512 GPUs."""
    rows = asked(domains="7,72").by_domain
    assert [(row["domain"], row.get("gpus"), row["why_not"]) for row in rows] == [
        (72, None, "more GPUs than the 64 heads of a layer"),
        (7, 490, ""),
    ]


def test_the_days_of_a_simulation_are_those_of_its_peaks_too() -> None:
    answer = asked(simulate=True, days=3, traces=2)
    assert answer.peaks is not None
    assert answer.peaks.days == 3


def test_a_search_for_goodput_refuses_the_rates_that_failures_refuses() -> None:
    data = presets.failure("llama3-herd").replace(mtbf={"value": 3600.0, "source": "ours"})
    with pytest.raises(SpecError) as searched:
        tuner.search(**LLAMA, objective="goodput", failure_data=data, fix="tp=8,pp=4,dp=16")
    with pytest.raises(SpecError) as asked_for:
        asked(failure_data=data)
    rules = [error.value.problems[0].rule for error in (searched, asked_for)]
    assert rules[0] == rules[1]
    assert "no job is planned with more than 90 %" in rules[0]


def test_what_is_wrong_of_itself_is_not_told_twice() -> None:
    with pytest.raises(SpecError) as caught:
        asked(days="abc", traces=1)
    assert [problem.where for problem in caught.value.problems] == ["days", "traces"]
