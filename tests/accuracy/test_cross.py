"""Rows foretold without what they leave out: nothing of what is left out may leak into it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import tuner
from tests.published import published
from tuner.accuracy.cross import LEFT, left_out, linearised, refitted, told_without
from tuner.accuracy.validate import Scored, calibrations, score_files
from tuner.errors import SpecError


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> list[Scored]:
    path = tmp_path_factory.mktemp("rows") / "internevo.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in published("internevo")))
    return score_files([path])[0]


def test_what_is_left_out_does_not_leak(scored: list[Scored]) -> None:
    """Make one series ten times slower: what the others say of it stays as it was, in seconds."""
    told = told_without(scored, calibrations("auto"))["series"]
    key = left_out(scored[0], "series")
    slow = [
        dataclasses.replace(item, row=item.row.model_copy(update={"step_s": 10 * (item.row.step_s or 0)}))
        if left_out(item, "series") == key
        else item
        for item in scored
    ]
    again = told_without(slow, calibrations("auto"))["series"]
    same = [(a.said.step_s, b.said.step_s) for a, b in zip(told, again, strict=True) if left_out(a, "series") == key]
    assert same
    for before, after in same:
        assert after == pytest.approx(before, rel=0.1)  # its own noise and weight are fitted with it


def test_every_way_tells_every_row_and_a_wider_gap_is_no_surer(scored: list[Scored]) -> None:
    told = told_without(scored, calibrations("auto"))
    assert tuple(told) == LEFT
    wide = {left: np.median([item.said.high_s / item.said.low_s for item in items]) for left, items in told.items()}
    assert wide["series"] <= wide["source"]
    assert all(len(items) == len(scored) for items in told.values())
    assert all(item.said.memory_bytes == own.said.memory_bytes for item, own in zip(told["series"], scored, strict=True))  # no figures


def test_memory_is_told_without_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "torchtitan.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in published("torchtitan")))
    scored = score_files([path])[0]
    told = told_without(scored, calibrations("auto"))

    def off(items: list[Scored]) -> float:
        return float(np.median([abs(i.said.memory_bytes / i.row.memory_bytes - 1) for i in items if i.row.memory_bytes]))

    assert off(scored) < off(told["series"]) < off(told["model"]) < off(told["source"]) < 0.35


def test_without_any_row_the_prior_is_left(scored: list[Scored]) -> None:
    of = linearised(scored, calibrations("auto"))
    assert np.array_equal(refitted(of, np.arange(2)), of.bare)
    every = refitted(of, np.arange(len(of.items)))
    assert float(np.median(np.abs(every))) < float(np.median(np.abs(of.bare)))


def test_the_verb_adds_the_summaries(tmp_path: Path) -> None:
    path = tmp_path / "internevo.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in published("internevo")))
    record = tuner.validate(path, cross=True).record()
    assert list(record["cross"]) == list(LEFT)
    for summary in record["cross"].values():
        assert summary["time"]["n"] == record["summary"]["time"]["n"] > 0
    assert "cross" not in tuner.validate(path).record()


def test_a_handful_of_rows_helps_or_is_declined(tmp_path: Path) -> None:
    rows = [row | {"framework": "megatron-lm"} for row in published("hagemann2023_layouts") if row["measured"]][:40:4]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = tuner.calibrate(path, name="ours")
    record = answer.record()
    shipped, *others = record["tried"]
    assert shipped["way"] == "shipped"
    assert record["helps"]
    assert min(way["median_abs_err"] for way in others) < 0.9 * shipped["median_abs_err"]
    file = tmp_path / "ours.yaml"
    file.write_text(answer.text)
    before = tuner.validate(path).record()["summary"]["time"]["median_abs_err"]
    after = tuner.validate(path, calibration=str(file)).record()["summary"]["time"]["median_abs_err"]
    assert after < 0.7 * before
    with pytest.raises(SpecError, match="is of runs under megatron-lm; the job's framework is internevo"):
        tuner.estimate(
            model="tiny", cluster="h100x8", seq_len=128, global_batch=8, framework="internevo", plan="tp=1", calibration=str(file)
        )


def test_rows_that_teach_nothing_are_declined(tmp_path: Path) -> None:
    """Measured runs that the shipped calibration already knows: nothing clearly better is to be had."""
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in published("nemo_24.07")))
    answer = tuner.calibrate(path)
    assert not answer.record()["helps"]
    assert answer.text == ""


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        (["korthikanti2022", "internevo"], "must be one framework"),
        (["mt_nlg_530b"], "3 runs, all skipped.*suspect"),
        (["zero_bubble", "far"], "is too far off to be this job"),
    ],
)
def test_rows_that_cannot_calibrate_are_refused(tmp_path: Path, rows: list[str], words: str) -> None:
    path = tmp_path / "own.jsonl"
    found = [row for name in rows for row in published(name)]
    if "far" in rows:  # milliseconds
        found = [row | {"measured": {key: value / 1000 for key, value in row["measured"].items()}} for row in found]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    with pytest.raises(SpecError, match=words):
        tuner.calibrate(path)
