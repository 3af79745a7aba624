"""What an answer says of a plan's fallback."""

from __future__ import annotations

from typing import Any

import pytest

import tuner
from tuner.report.estimate import estimate_text
from tuner.report.search import search_text
from tuner.report.table import Page

QUESTION: dict[str, Any] = {"model": "llama3-405b", "cluster": "h100x4096", "seq_len": 8192, "global_batch": 2048}
PLAN = "tp=8,pp=16,zero=1,pipeline_layout=embedding=1+loss=1,dp_overlap=1,recompute=full"


def test_estimate_itemises_the_fallback() -> None:
    record = tuner.estimate(**QUESTION, plan=f"{PLAN},fallback_tp=7").record()
    of = record["fallback"]
    assert (of["tp"], of["to"], of["balanced"]) == (8, 7, 8 / 7)
    assert of["imbalance"] == {"heads": 19 * 8 / 128, "kv_heads": 2.0, "ffn": 7607 * 8 / 53248}  # 128 heads in 8 groups, 8 -> 7
    assert of["added_s"] == pytest.approx(of["before_s"] + of["after_s"] + of["reduce_s"])
    assert of["overhead"] == pytest.approx(of["added_s"] / of["healthy_s"]) and of["overhead"] < 0.01
    assert 1.0 < of["power"] < 1.3 and of["healthy_s"] == pytest.approx(record["step_s"])
    text = " ".join(estimate_text(record, Page(width=100)).split())
    assert "goes on at tp 7 of 8" in text and "2.00x the kv heads" in text and "no released framework runs nonuniform" in text


def test_a_plan_without_a_fallback_says_nothing_of_it() -> None:
    for knob in ("", ",fallback_tp=8", ",fallback_tp=0"):
        record = tuner.estimate(**QUESTION, plan=PLAN + knob).record()
        assert record["fallback"] is None and record["plan"]["fallback_tp"] == 8
        assert "fallback" not in estimate_text(record, Page(width=100))


def test_every_ranked_row_says_what_one_lost_gpu_costs() -> None:
    record = tuner.search(
        model="llama3-70b", cluster="h100x256", seq_len=8192, global_batch=512, current="tp=8,pp=4,recompute=full"
    ).record()
    rows = [*record["ranking"], record["current"]]
    assert all(-1.0 <= row["one_gpu_lost"]["change"] < 0.0 for row in rows)
    text = search_text(record, Page(width=250))
    assert "1 GPU lost" in text and "losing" in text
    for row in rows:
        lost = row["one_gpu_lost"]
        assert f"drop {100 * lost['change']:.1f} %" in text or f"{lost['way']} {lost['degree']}->{lost['to']}" in text


def test_a_search_for_goodput_says_what_it_counts() -> None:
    question = {"model": "llama3-70b", "cluster": "h100x256", "seq_len": 8192, "global_batch": 512, "fix": "cp=1", "top": 5}
    record = tuner.search(**question, objective="goodput").record()
    kept = [row["goodput"] for row in record["ranking"]]
    speeds = [row["tokens_per_s_per_gpu"] * share for row, share in zip(record["ranking"], kept, strict=True)]
    assert all(0.5 < share < 1.0 for share in kept) and speeds == sorted(speeds, reverse=True)
    assert record["failures"]["name"] == "llama3-herd" and record["failures"]["failed_fraction"] == pytest.approx(0.00186, rel=0.01)
    assert "failing" in search_text(record, Page(width=120)) and "goodput %" in search_text(record, Page(width=60))
    worse = tuner.search(**question, objective="goodput", failure_data="gb200-nvl72").record()
    assert worse["ranking"][0]["goodput"] < kept[0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"failure_data": "llama3-herd"}, "means nothing to objective throughput"),
        ({"objective": "goodput", "failure_data": "llama3-hurd"}, "llama3-herd"),
        ({"objective": "goodput", "strategy": "tpe"}, "ranks predictions of every plan"),
        ({"objective": "goodput", "profile": 4}, "ranks predictions of every plan"),
    ],
)
def test_goodput_refuses_what_it_cannot_count(more: dict[str, Any], words: str) -> None:
    with pytest.raises(tuner.SpecError, match=words):
        tuner.search(model="llama3-8b", cluster="h100x64", seq_len=8192, global_batch=256, **more)
