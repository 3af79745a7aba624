"""tuner calibrate --measure, --nccl-log and --timings, and the file of a detected cluster, as a person types them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cost_model.test_machine_fit import LOGS, answers, slower
from tests.terminal import run
from tuner import presets
from tuner.cli.app import app
from tuner.cost_model.calibration import CalibrationFile, calibration_for
from tuner.load import load_file
from tuner.timing import read_timings, timing_lines

REDUCE = str(LOGS / "all_reduce-8.log")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("columns", ["60", "120"])
def test_a_log_becomes_a_calibration(columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    path = tmp_path / "mine.yaml"
    result = invoke("calibrate", "--nccl-log", REDUCE, "--nccl-log", str(LOGS / "alltoall-old.log"), "-o", str(path))
    assert result.exit_code == 0, result.stderr
    assert "63 timings of h100-sxm-80gb, cluster dgx-h100" in result.stdout
    assert "1 rows with wrong results left out" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    file = load_file(CalibrationFile, path)
    assert set(file.collectives) <= {"all_reduce", "all_to_all"}
    assert len(read_timings(tmp_path / "mine.timings.jsonl")) == 63
    again = invoke("calibrate", "--timings", str(tmp_path / "mine.timings.jsonl"), "--json")
    assert json.loads(again.stdout)["timings"] == 63
    job = ("--model", "llama3-8b", "--cluster", "h100x8", "--seq", "4096", "--global-batch", "64", "--plan", "tp=8")
    assert invoke("estimate", *job, "--calibration", str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nccl-log", REDUCE, "--cluster", "a100x8"), "has a100-sxm-80gb; the timings are of NVIDIA H100 80GB HBM3"),
        (("--nccl-log", "no-such.log"), "no such file"),
        (("--timings", "no-such.jsonl"), "no such file"),
        (("--measure", "--budget", "soon"), "--budget = 'soon': must be a whole number"),
        (("--measure", "--precision", "fp8"), "--precision = 'fp8': must be one of bf16, fp16, fp32"),
        (("--measure", "--cluster", "h100x8"), "is not this machine"),
        (("--measure", "--cluster", "nonsense"), "no such cluster"),
        (("--budget", "60"), "is about a machine"),
        (("--measure", "--model", "tiny"), "is about runs"),
        ((), "are missing"),
    ],
)
def test_what_cannot_be_is_said(arguments: tuple[str, ...], says: str) -> None:
    result = invoke("calibrate", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_everything_wrong_is_said_at_once() -> None:
    result = invoke("calibrate", "--measure", "--budget", "x", "--precision", "y", "--nccl-log", "no.log")
    assert all(words in result.stderr for words in ("--budget", "--precision", "no.log"))


def test_rows_and_a_machine_are_two_questions() -> None:
    result = invoke("calibrate", "runs.jsonl", "--measure")
    assert result.exit_code == 2
    assert "--measure" in result.stderr


def test_the_twin_of_the_verb(tmp_path: Path) -> None:
    from tuner import workflow

    cluster = presets.cluster("h100x8")
    path = tmp_path / "t.jsonl"
    rows = [t for t in answers(cluster, slower(calibration_for("auto", cluster.gpu)), 2) if t.op == "stream"]
    path.write_text(timing_lines(rows))
    answer = workflow.calibrate_machine(timings=path, cluster="h100x8", name="mine")
    record = answer.record()
    assert [kind["operator"] for kind in record["operators"]] == ["stream"]
    assert record["coefficients"]["memory_bandwidth_efficiency"]["value"] == pytest.approx(0.5, rel=0.1)
    json.dumps(record, allow_nan=False)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_measured_here(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done = run("calibrate", "--measure", "--cluster", "local:2", "--budget", "8", "-o", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gemm +\d+ ", done.stdout, re.MULTILINE)
    job = ("--model", "tiny", "--cluster", "local:2", "--precision", "fp32", "--seq", "128", "--global-batch", "16")
    searched = run("search", *job, "--calibration", str(path), "--top", "2", cwd=tmp_path)
    assert searched.returncode == 0, searched.stderr
    assert "calibration mine #" in searched.stdout


def test_a_detected_cluster_is_a_file_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    result = invoke("presets", "cluster", "local:2", "-o", str(path))
    assert result.exit_code == 0, result.stderr
    assert "seen: " in result.stderr
    assert presets.cluster(str(path)).gpus == 2
    assert "# seen: " in path.read_text()


def test_doctor_says_what_local_means() -> None:
    checks = {check["name"]: check for check in json.loads(invoke("doctor", "--json").stdout)["checks"]}
    assert checks["--cluster local"]["status"] in ("ok", "warn")
