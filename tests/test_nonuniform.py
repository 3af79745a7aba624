"""`tuner profile --ntp`: a nonuniform step really run on this machine, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tuner
from tests.terminal import ROOT
from tuner import presets
from tuner.cli.app import app
from tuner.nonuniform import _reason, read_degrees, state_bytes
from tuner.report.nonuniform import nonuniform_text
from tuner.report.table import Page

SMALL = {"name": "small", "layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 96}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_a_nonuniform_step_beside_a_uniform_one(model: str, tmp_path: Path) -> None:
    argv = ["profile", "--ntp", "--degrees", "2,1", "-m", model, "-s", "15", "-b", "3", "--steps", "3", "-q", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out/profile.json").read_text())
    assert (record["uniform"]["degrees"], record["nonuniform"]["degrees"], record["processes"]) == ([2, 2], [2, 1], 4)
    assert record["uniform"]["samples"] == [2, 1] and record["nonuniform"]["samples"] == [2, 1]
    assert record["losses_apart"] < 1e-5, "both train the same model"
    assert record["uniform"]["step_s"] > 0 and record["nonuniform"]["steps"] == 2
    core, spare = record["ranks"]
    assert (core["spare"], spare["spare"]) == (False, True)
    assert spare["before_sent"] == core["before_received"] == pytest.approx(spare["formula"])  # all widths are even
    assert spare["before_sent"] < spare["after_received"], "with the replicated gradients"
    assert all(one["total_s"] >= 0 and one["exposed_s"] >= 0 for one in record["reshard"].values())
    text = nonuniform_text(record, Page(width=60))
    assert "gets back kB" in text  # as a column, or named as not shown
    assert "reshard before the sum" in text and all(len(line) <= 60 for line in text.splitlines())
    assert (tmp_path / "out/log.txt").read_text().count("tuner-step") == 18


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"degrees": ""}, "two replicas or more, of different degree"),
        ({"model": ""}, "no such model"),
        ({"precision": ""}, "must be one of fp32, bf16"),
        ({"degrees": "4"}, "two replicas or more, of different degree"),
        ({"degrees": "4,4"}, "of different degree"),
        ({"degrees": "3,4"}, "the first replica is the healthy one: no degree may exceed its 3"),
        ({"degrees": "4,0"}, "degrees"),
        ({"precision": "fp8"}, "must be one of fp32, bf16"),
        ({"trial_time": "soon"}, "must be seconds with a unit"),
        ({"lose": "x"}, "lose"),
        ({"degrees": "4,4", "lose": 8}, "lost rank 8 in step 3: there are ranks 0 to 7 and steps 1 to 6"),
        ({"folder": "/dev/null/x"}, "cannot be a folder"),
        ({"degrees": "4,x"}, "degrees"),
        ({"degrees": "8,7", "global_batch": 1}, "one for each of 2 replicas"),
        ({"model": "mixtral-8x7b"}, "runs dense models alone"),
        ({"model": "deepseek-v3"}, "experts"),
        ({"model": "nothing"}, "no such model"),
        ({"degrees": "64,1"}, "heads"),
        ({"steps": 2}, "warm-up"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"layers": 2}, "is no argument of this verb"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], words: str) -> None:
    with pytest.raises(tuner.SpecError, match=words):
        tuner.profile_ntp(**given)


def test_a_model_that_memory_cannot_hold_is_refused_with_the_bytes() -> None:
    """405.9 billion parameters, 16 bytes each in fp32 (weights, sums, two moments), two replicas: 12.99 TB."""
    large = presets.model("llama3-405b")
    need = state_bytes(large, "fp32", (4, 3), cpu=True)
    assert need == pytest.approx(2 * 16 * 405.9e9, rel=0.001)
    assert state_bytes(large, "bf16", (4, 3), cpu=False) == pytest.approx(18 * 405.9e9 / 3, rel=0.001)
    with pytest.raises(tuner.SpecError, match=r"need 13 TB at least, and .* has .*a smaller model"):
        tuner.profile_ntp(model="llama3-405b")


def test_sigterm_leaves_no_folder_and_no_process(model: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", "from tuner.cli import main; main()", "profile", "--ntp", "-m", model, "--steps", "100000", "-q"]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("tuner-ntp-*/log.txt")) and time.monotonic() < until:
            time.sleep(0.1)
        (folder,) = tmp_path.glob("tuner-ntp-*")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not folder.exists()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(str(folder).encode() in command for command in commands)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(tuner.SpecError) as caught:
        tuner.profile_ntp(degrees="3,4", steps=1, precision="int4", micro_batch=-1, trial_time="soon", model="tinny")
    assert len(caught.value.problems) == 6


def test_a_killed_rank_is_gone_on_without(model: str) -> None:
    given = {"model": model, "seq_len": 15, "global_batch": 6, "steps": 4}
    record = tuner.profile_ntp(degrees=(2, 2), lose=1, **given).record()
    failover = record["failover"]
    assert (failover["lost"], failover["degrees"], failover["degrees_left"]) == ([1], [2, 2], [1, 2])
    assert (failover["samples_left"], failover["in_step"], failover["steps_repeated"]) == ([2, 4], 2, 1)
    assert failover["restored_s"] >= failover["entered_s"] > 0
    assert failover["moved_bytes"] > 0
    assert record["losses_apart"] < 1e-5
    text = " ".join(nonuniform_text(record, Page(width=100)).split())
    assert "tp 2+2 goes on as tp 1+2, with samples 2+4" in text


def test_a_run_that_takes_too_long_is_stopped(model: str, tmp_path: Path) -> None:
    with pytest.raises(tuner.InfrastructureError, match=r"was stopped after 0\.5 s"):
        tuner.profile_ntp(degrees=(2, 1), model=model, seq_len=15, global_batch=3, trial_time=0.5, folder=tmp_path)


def test_the_reason_is_the_line_that_tells_it() -> None:
    log = 'tuner-step {"step": 1}\nTraceback (most recent call last):\ntuner-failed: rank 2 was ended by SIGKILL\n\n'
    assert _reason(log) == "rank 2 was ended by SIGKILL"
    assert _reason('tuner-step {"step": 1}\nRuntimeError: no\n') == "RuntimeError: no"
    assert _reason("") == "it said nothing"


def test_degrees() -> None:
    assert read_degrees("4, 3,2") == (4, 3, 2) == read_degrees([4, 3, 2])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["profile"], "DIR: is missing"),
        (["profile", "out", "--ntp"], "means nothing to --ntp"),
        (["profile", "--ntp", "--profile", "8"], "means nothing to --ntp"),
        (["profile", "out", "--degrees", "4,3"], "concerns --ntp alone"),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], words: str) -> None:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 2 and words in result.stderr.replace("= 'out'", "")
