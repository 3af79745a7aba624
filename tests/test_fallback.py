"""What an answer says of a plan's fallback."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import tuner
from tuner.cli.app import app
from tuner.report.estimate import estimate_text
from tuner.report.explain import explain_text
from tuner.report.search import search_text
from tuner.report.table import Page

if TYPE_CHECKING:
    from pathlib import Path

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


TIGHT: dict[str, Any] = {"model": "gpt3-20b", "cluster": "h100x64", "seq_len": 2048, "global_batch": 64}


@pytest.mark.parametrize(
    ("degree", "code", "words"),
    [
        (7, 0, r"GB, P\(OOM\) \d\.\d %: fits"),
        (6, 0, r"1\d\.\d %: may not fit, a search passes over it"),
        (4, 3, r"%: does not fit \(stage 0"),
    ],
)
def test_a_fallback_is_judged_as_a_plan_is(degree: int, code: int, words: str) -> None:
    plan = f"tp=8,zero=0,recompute=none,fallback_tp={degree}"
    answer = tuner.estimate(**TIGHT, plan=plan)
    assert answer.cost.fits and answer.legal and answer.runs == (code == 0)
    text = " ".join(estimate_text(answer.record(), Page(width=100)).split())
    assert re.search(r"its GPUs need \d+\.\d of 84\.9 GB, P\(OOM\).*", text) and re.search(words, text)
    argv = ["estimate", "-m", "gpt3-20b", "-c", "h100x64", "-s", "2048", "-b", "64", "-p", plan]
    assert CliRunner().invoke(app, argv).exit_code == code


def test_estimate_gives_the_total_of_one_lost_gpu() -> None:
    """Of 32 replicas one is reduced: it keeps 54 of 64 micro batches, and all are slower by the overhead."""
    of = tuner.estimate(**QUESTION, plan=f"{PLAN},fallback_tp=7").record()["fallback"]
    cut = (31 + of["microbatches"] / of["of"]) / 32 / (1 + of["overhead"]) - 1
    assert of["change"] == pytest.approx(max(cut, of["pace"] / (1 + of["overhead"]) - 1)) and of["dropped"] == -1 / 32
    text = " ".join(estimate_text(tuner.estimate(**TIGHT, plan="tp=8,zero=0,fallback_tp=4").record(), Page(width=100)).split())
    assert "dropping its replica would cost 12.50 %, which is better" in text


def test_a_note_says_what_runs_a_fallback_with_a_sharded_optimizer() -> None:
    for zero, count in ((0, 0), (1, 1)):
        record = tuner.estimate(**TIGHT, plan=f"tp=8,zero={zero},fallback_tp=7").record()
        assert len(record["fallback"]["notes"]) == count
        assert ("take zero 0 alone" in " ".join(estimate_text(record, Page(width=100)).split())) == (zero == 1)


def test_to_warn_of_a_fallback_is_not_to_undo_it() -> None:
    (warning,) = tuner.estimate(**TIGHT, plan="tp=8,zero=0,fallback_tp=7").broken
    assert warning.rule == "fallback-tp-experimental" and "nearest" not in warning.text


def test_explain_shows_the_fallback_and_names_no_change_of_it_where_tp_alone_changes() -> None:
    found = tuner.explain(**TIGHT, plan="tp=8,zero=0,recompute=full")
    assert found.best is not None and "fallback_tp" not in {knob for knob, *_ in found.best.changes}
    record = tuner.explain(**TIGHT, plan="tp=8,zero=0,fallback_tp=7").record()
    text = " ".join(explain_text(record, Page(width=100)).split())
    assert "goes on at tp 7 of 8" in text and "--objective goodput" in text and "fallback tp 7 -> " in text


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
    narrow = search_text(record, Page(width=60))
    assert "failing" in search_text(record, Page(width=120)) and "goodput %" in narrow
    assert re.search(r"^#.* fallback ", narrow, re.MULTILINE) and "1 GPU lost" in " ".join(narrow.split())
    for row in record["ranking"]:  # a plan that was ranked as one that drops is priced as one
        assert (row["one_gpu_lost"]["way"] == "drop") == (row["plan"]["fallback_tp"] == row["plan"]["tp"])
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


def test_a_list_of_many_files_is_a_count_where_the_page_is_narrow(tmp_path: Path) -> None:
    job = ["-m", "gpt-1.7b", "-c", "h100x16", "-s", "2048", "-b", "16", "-o", str(tmp_path / "out")]
    several = CliRunner().invoke(app, ["export", "megatron-lm,nemo,neutral", *job, "-p", "tp=8"], env={"COLUMNS": "80"})
    assert several.stderr.splitlines()[0] == f"wrote 3 files and folders under {tmp_path / 'out'}", several.output
    argv = ["export", "megatron-lm-ntp", *job]
    result = CliRunner().invoke(app, [*argv, "-p", "tp=8,fallback_tp=4", "--reduced", "1"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0] == f"wrote {tmp_path / 'out'}/megatron-lm-ntp/"
    assert "it takes zero 0 alone" in " ".join(result.stdout.split())
