"""Searches replayed on measured sweeps: what eight runs, and four, would have found."""

from __future__ import annotations

import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from tests.published import published
from tuner import workflow
from tuner.accuracy.replay import STRATEGIES, Series, outcome, read_series
from tuner.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

SWEEPS = ("nanotron_ultrascale", "hagemann2023_layouts")


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sweeps")
    paths = [folder / f"{name}.jsonl" for name in SWEEPS]
    for path in paths:
        path.write_text("".join(json.dumps(row) + "\n" for row in published(path.stem)))
    return paths


@pytest.fixture(scope="module")
def series(sweeps: list[Path]) -> list[Series]:
    return read_series(sweeps)


def small(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Series of up to 256 GPUs whose second-best layout is within 15 %."""
    return [one for one in found if one["key"]["gpus"] <= 256 and one["second_best"] <= 1.15]


def test_eight_runs_from_hardware_figures_alone(series: list[Series]) -> None:
    found = [outcome(one, 8, "residual", 0) for one in series]
    kept = small(found)
    assert len(kept) == 19
    assert fmean(one["regret"] for one in kept) <= 0.02
    assert fmean(one["failed_runs"] for one in kept) <= 1.5
    assert fmean(one["regret"] for one in found if one["key"]["gpus"] == 512) <= 0.25


@pytest.mark.xfail(strict=True, reason="nanotron's 8.9B on 128 H100 ends 9.4 % above its best layout: docs/measured_search.md")
def test_no_series_ends_more_than_8_percent_above_its_best(series: list[Series]) -> None:
    assert max(one["regret"] for one in small([outcome(one, 8, "residual", 0) for one in series])) <= 0.08


def test_four_runs_from_hardware_figures_alone(series: list[Series]) -> None:
    assert fmean(one["regret"] for one in small([outcome(one, 4, "residual", 0) for one in series])) <= 0.05


def test_eight_runs_of_other_strategies_find_less(series: list[Series]) -> None:
    kept = [one for one in series if one.key["gpus"] <= 32]
    ours, drawn, tpe = (fmean(outcome(one, 8, name, 1)["regret"] for one in kept) for name in ("residual", "random", "tpe"))
    assert ours < drawn
    assert ours < tpe


def test_every_strategy_runs_each_layout_once(series: list[Series]) -> None:
    least = min(series, key=lambda one: len(one.layouts))
    for strategy in STRATEGIES:
        if strategy == "gp":
            continue
        found = outcome(least, 10_000, strategy, 3)
        assert found["runs"] == found["candidates"] == len(least.layouts)
        assert found["regret"] == 0.0
        assert found["failed_runs"] == sum(layout.end != "ok" for layout in least.layouts)


def test_the_document(sweeps: list[Path]) -> None:
    found = workflow.replay(sweeps[1], runs="3", strategy="analytic").record()
    assert {"series", "mean_regret", "max_regret", "mean_failed_runs"} <= set(found)
    keys = {"key", "candidates", "best_s", "chosen_s", "regret", "failed_runs", "runs", "second_best"}
    assert all(keys <= set(one) for one in found["series"])
    assert found["mean_regret"] == pytest.approx(fmean(one["regret"] for one in found["series"] if not one["apart"]))
    assert [one["apart"] for one in found["series"]] == [one["second_best"] > 1.15 for one in found["series"]]
    assert found == workflow.replay(sweeps[1], runs=3, strategy="analytic").record()


def test_the_same_series_as_validate(sweeps: list[Path], series: list[Series]) -> None:
    scored = workflow.validate(sweeps, calibration="none").record()["summary"]["series"]
    assert [one["key"] for one in scored] == [one.key for one in series]
    timed = [sum(layout.end == "ok" for layout in one.layouts) for one in series]
    assert [one["n"] for one in scored] == timed


def test_a_series_by_hand(tmp_path: Path) -> None:
    """Six layouts, one of which ran out: best 2 s, second 2.5 s (25 % behind: apart); the cost model is not asked by `random`."""
    rows = [row for row in published("bigscience_1b3_v100") if row["measured"].get("step_time_s")][:1]
    made = []
    for i, (tp, step_s) in enumerate([(1, 3.0), (2, 2.0), (4, 2.5), (8, 5.0)]):
        for mb in (1, 2):
            row = json.loads(json.dumps(rows[0])) | {"id": f"row-{i}-{mb}", "outcome": "ok"}
            row["config"] |= {"tp": tp, "pp": 1, "dp": 8 // tp, "micro_batch": mb}
            row["config"].pop("grad_accum", None)
            row["measured"] = {"step_time_s": step_s + (mb - 1)}
            made.append(row)
    made[0] = made[0] | {"measured": {}, "outcome": "oom"}
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    (found,) = workflow.replay(path, runs=100, strategy="random").record()["series"]
    assert (found["candidates"], found["best_s"], found["chosen_s"], found["failed_runs"]) == (8, 2.0, 2.0, 1)
    assert found["second_best"] == pytest.approx(1.25)
    assert found["apart"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runs": "0"}, "runs = '0'"),
        ({"runs": "many"}, "runs = 'many'"),
        ({"strategy": "luck"}, "must be one of residual"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_questions(sweeps: list[Path], given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        workflow.replay(sweeps[1], **given)


def test_a_file_without_a_series(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in published("single_runs")))
    with pytest.raises(SpecError, match="no series has 5 layouts"):
        workflow.replay(path)
