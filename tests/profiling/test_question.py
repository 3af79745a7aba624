"""What a measured search refuses, keeps and answers, as a person meets it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from tuner.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

JOB = ("-m", "tiny", "-c", "local:2", "-s", "512", "-b", "8")
STEPS = """for i in 1 2 3 4 5 6 7 8; do echo 'tuner-step {"step": '$i', "seconds": 0.5, "loss": 1.0}'; done"""


def tuner(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def command(folder: Path, text: str) -> str:
    """A launch command that prints the steps of the built-in workload, or something else."""
    script, path = folder / "trainer.sh", folder / "cmd.yaml"
    script.write_text(text)
    path.write_text(json.dumps({"launcher": "workload", "command": f"bash {script}"}))
    return str(path)


def test_the_workload_is_not_started_for_another_cluster(tmp_path: Path) -> None:
    result = tuner("search", "-m", "llama3-8b", "-c", "h100x16", "-s", "8k", "-b", "128", "--profile", "1", "-o", str(tmp_path / "o"))
    assert result.exit_code == 2
    assert "is not this machine" in result.stderr
    assert "--runner slurm" in result.stderr
    assert not (tmp_path / "o" / "job.yaml").exists()


def test_a_folder_without_runs_to_make(tmp_path: Path) -> None:
    assert tuner("search", *JOB, "-o", str(tmp_path / "plain"), "--top", "1").exit_code == 0
    result = tuner("profile", str(tmp_path / "plain"))
    assert result.exit_code == 2
    assert "--profile N" in result.stderr
    assert "has no job.yaml" in tuner("profile", str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profile", "0"), "--profile = '0'"),
        (("--budget", "12"), "like 12gpu-h"),
        (("--profile", "1", "--strategy", "luck"), "must be one of residual"),
        (("--profile", "1", "--allocation", "12"), "is of Slurm's"),
        (("--profile", "1", "--storage", "postgresql+psycopg://u:***@h/x"), "TUNER_STORAGE"),
        (("--profile", "1", "--site", "nowhere.yaml"), "no such file"),
        (("--profile", "1", "--parallel", "none"), "--parallel = 'none'"),
    ],
)
def test_bad_options(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    result = tuner("search", *JOB, *options, "-o", str(tmp_path / "o"))
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "o").exists()


def test_a_search_keeps_to_its_job_and_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    asked = ("--profile", "1", "--command", command(tmp_path, STEPS), "-o", str(out), "--no-cache")
    first = tuner("search", *JOB, *asked, "--json")
    assert first.exit_code == 0, first.stderr
    record = json.loads(first.stdout)
    assert (record["measured"]["runs"], record["measured"]["failed_runs"]) == (1, 0)
    assert record["ranking"][0]["basis"] == "measured"
    assert record["tied"] <= len(record["ranking"])
    other = tuner("search", *JOB[:-1], "16", *asked)
    assert other.exit_code == 2
    assert "holds measurements of another job" in other.stderr
    refused = tuner("search", *JOB, *asked, "--storage", "postgresql+psycopg://u:hunter2@127.0.0.1:1/x")
    assert refused.exit_code in (2, 4)
    assert "hunter2" not in refused.stderr + (out / "job.yaml").read_text()
    monkeypatch.chdir(tmp_path.parent)  # what job.yaml names is found from anywhere
    again = tuner("profile", str(out), "--profile", "2", "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["measured"]["runs"] == 2


def test_no_run_gave_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = tuner("search", *JOB, "--profile", "1", "--command", command(tmp_path, "exit 3"), "-o", str(tmp_path / "o"), "--no-cache")
    assert result.exit_code == 1
    assert "failed" in result.stdout
