"""Each verb of the command line has a function in `tuner` that gives the same answer, and the same names for its arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.published import published
from tests.terminal import run
from tests.test_cli import ROW
from tuner.cli.options import (
    KINDS,
    OBJECTIVES,
    PRECISIONS,
    STRATEGIES,
    FailureOptions,
    JobOptions,
    MeasureOptions,
    PlanOptions,
    SearchOptions,
)
from tuner.errors import SpecError
from tuner.request import FAILURE_KEYS, JOB_KEYS, MEASURE_KEYS, SEARCH_KEYS, Request

TINY: dict[str, Any] = {"model": "tiny", "cluster": "h100x8", "seq_len": 128, "global_batch": 64}
TINY_OPTIONS = ("-m", "tiny", "-c", "h100x8", "-s", "128", "-b", "64")


def printed(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def as_json(answer: Any) -> Any:
    return json.loads(json.dumps(answer.record(), allow_nan=False))


def test_search() -> None:
    ours = as_json(tuner.search(**TINY, fix={"tp": 2}, limit=["pp<=2"], top=4, all=True, current={"tp": 4}, max_memory=40e9, max_p_oom=0.2))
    theirs = printed(
        "search",
        *TINY_OPTIONS,
        "--fix",
        "tp=2",
        "--limit",
        "pp<=2",
        "--top",
        "4",
        "--all",
        "--current",
        "tp=4",
        "--max-memory",
        "40 GB",
        "--max-p-oom",
        "20%",
    )
    for record in (ours, theirs):
        assert record["space"].pop("seconds") > 0
        assert record["space"].pop("plans_per_s") > 0
    assert ours == theirs
    assert len(ours["ranking"]) == 4


def test_search_of_a_range() -> None:
    options = {"model": "tiny", "cluster": "h100", "seq_len": 128, "global_batch": 64, "tokens": 1e9, "price": 2}
    ours = tuner.search(**options, gpus="8..16", deadline=86400.0)
    theirs = printed(
        "search",
        "-m",
        "tiny",
        "-c",
        "h100",
        "-s",
        "128",
        "-b",
        "64",
        "--tokens",
        "1B",
        "--price",
        "2",
        "--gpus",
        "8..16",
        "--deadline",
        "1d",
    )
    assert [plan["plan"] for plan in theirs["ranking"]] == [plan["plan"] for plan in as_json(ours)["ranking"]]
    assert [count["gpus"] for count in theirs["counts"]] == [8, 16]
    assert theirs["job"]["gpus"] in (8, 16)


def test_estimate_and_explain() -> None:
    for verb in (tuner.estimate, tuner.explain):
        ours = as_json(verb(**TINY, plan="tp=2,pp=2", tokens="1B"))
        assert ours == printed(verb.__name__, *TINY_OPTIONS, "--plan", "tp=2,pp=2", "--tokens", "1B")
    ours = as_json(tuner.explain(**TINY, plan="tp=2,pp=2", no_search=True))
    assert ours == printed("explain", *TINY_OPTIONS, "--plan", "tp=2,pp=2", "--no-search")


def test_failures() -> None:
    ours = as_json(
        tuner.failures(**TINY, plan="tp=4,pp=2", fallback_tp=[3, 2], mtbf=3.6e6, simulate=True, days=10, traces=2, domains="4,8")
    )
    options = ("--fallback-tp", "3,2", "--mtbf", "1000 h", "--simulate", "--days", "10", "--traces", "2", "--domains", "4,8")
    assert ours == printed("failures", *TINY_OPTIONS, "--plan", "tp=4,pp=2", *options)
    assert ours["policies"][0]["simulated"]["runs"] == 2


def test_check(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: tiny\ncluster: h100x8\nplan: tp=4\n")
    ours = as_json(tuner.check(path, seq_len=128, global_batch=64, gap="20%", fix=True))
    assert ours == printed("check", str(path), "-s", "128", "-b", "64", "--gap", "20%", "--fix")
    assert ours["checked"][0]["best"]["gain"] > 1
    forced = as_json(tuner.check([path], format="request", no_search=True, seq_len=128, global_batch=64))
    assert forced == printed("check", str(path), "--format", "request", "--no-search", "-s", "128", "-b", "64")


def test_presets() -> None:
    assert as_json(tuner.presets()) == printed("presets")
    assert as_json(tuner.presets("models", "tiny")) == printed("presets", "model", "tiny")
    assert tuner.presets.names("models") == [each["name"] for each in printed("presets", "models")]


def test_validate(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert as_json(tuner.validate(path)) == printed("validate", str(path))
    assert as_json(tuner.validate([path], calibration="none")) == printed("validate", str(path), "--calibration", "none")


def test_replay(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    rows = published("hagemann2023_layouts")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["model"]["name"] == "llama-30b"))
    ours = as_json(tuner.replay(path, runs=3, strategy="analytic"))
    assert ours == printed("replay", str(path), "--runs", "3", "--strategy", "analytic")


def test_doctor() -> None:
    ours, theirs = as_json(tuner.doctor()), printed("doctor")
    assert [check["name"] for check in ours["checks"]] == [check["name"] for check in theirs["checks"]]


def test_command_line_and_request_have_the_same_names() -> None:
    def names(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert names(JobOptions) == set(JOB_KEYS)
    assert names(SearchOptions) == set(SEARCH_KEYS)
    assert names(MeasureOptions) | {"folder"} == set(MEASURE_KEYS)
    assert names(FailureOptions) == set(FAILURE_KEYS)
    assert names(Request) == names(JobOptions) | names(SearchOptions) | set(MEASURE_KEYS) | names(PlanOptions) | names(FailureOptions)


def test_words_of_the_help_pages_are_those_of_the_program() -> None:
    from tuner import job, presets, searching
    from tuner.search import exhaustive

    assert PRECISIONS == job.PRECISIONS
    assert STRATEGIES == searching.STRATEGIES
    assert OBJECTIVES == exhaustive.OBJECTIVES
    assert KINDS == presets.KINDS


def test_an_unknown_argument_offers_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean seq_len"):
        tuner.search(**TINY, seqlen=5)


def test_specs_are_taken_as_they_are() -> None:
    from tuner.plan import Plan
    from tuner.search.space import SpaceSpec

    model, cluster = tuner.presets.model("tiny"), tuner.presets.cluster("h100x8")
    sizes = {"seq_len": 128, "global_batch": 64}
    assert tuner.estimate(model=model, cluster=cluster, plan=Plan(tp=2), **sizes).plan == Plan(tp=2)
    found = tuner.search(model=model, cluster=cluster, space=SpaceSpec(fix={"tp": 2}), **sizes)
    assert {plan.row.plan.tp for plan in found.ranking} == {2}
