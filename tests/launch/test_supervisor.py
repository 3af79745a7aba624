"""What a supervisor does beyond the suite of runners: retries, shut-downs that hang, devices in use, its own death."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.launch.standin import ended, interpreter, small_job, trial, until
from tuner.launch.devices import Device, devices, wait_free
from tuner.launch.local import LocalRunner
from tuner.launch.outcome import Ending, result_of
from tuner.launch.processes import alive, start_time
from tuner.launch.secrets import environment_record, mask
from tuner.launch.site import Site
from tuner.launch.trial import Trial, read_result

if TYPE_CHECKING:
    from pathlib import Path


def runner(tmp: Path, word: str, **changes: str) -> LocalRunner:
    return LocalRunner(site=Site(python=interpreter(tmp), environment={"FAKE": word} | changes), grace_s=0.3, error_s=0.5)


def test_a_machines_fault_is_tried_once_more(tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "flaky").start(trial(tmp_path / "t")))
    assert (result.end, result.attempts) == ("ok", 2)
    assert "Stale file handle" in (tmp_path / "t" / "log.1.txt").read_text()


def test_a_machines_fault_is_not_tried_for_ever(tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "machine").start(trial(tmp_path / "t")))
    assert (result.end, result.attempts) == ("infrastructure", 2) and "Stale file handle" in result.reason


def test_an_exit_without_a_word_is_named(tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "silent").start(trial(tmp_path / "t")))
    assert (result.end, result.exit_code, result.reason) == ("failed", 3, "exit code 3, and no line of the log says why")


def test_all_steps_done_and_then_a_hang_is_a_measurement(tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "hang-after").start(trial(tmp_path / "t", quiet_s=1.0)))
    assert (result.end, result.step_s) == ("ok", 0.25) and "did not end by itself" in result.reason


def test_what_a_run_leaves_behind_is_ended(tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "orphans").start(trial(tmp_path / "t")))
    assert result.end == "ok"
    assert not any(map(start_time, json.loads((tmp_path / "t" / "pids.json").read_text())))


def test_a_supervisor_that_is_killed_leaves_nothing_and_a_result(tmp_path: Path) -> None:
    running = runner(tmp_path, "family").start(trial(tmp_path / "t"))
    pids = until(lambda: (tmp_path / "t" / "pids.json").exists() and json.loads((tmp_path / "t" / "pids.json").read_text()))
    os.kill(json.loads((tmp_path / "t" / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    result = ended(running)
    assert result.end == "infrastructure" and "its supervisor ended without a result" in result.reason
    assert not any(map(start_time, pids)) and read_result(tmp_path / "t") == result


def test_a_pid_that_is_used_again_is_another_process() -> None:
    own = os.getpid()
    assert alive(own, start_time(own)) and not alive(own, start_time(own) - 1) and not alive(own, 0)


def test_a_run_again_keeps_the_earlier_log(tmp_path: Path) -> None:
    asked = trial(tmp_path / "t")
    assert ended(runner(tmp_path, "failed").start(asked)).end == "failed"
    assert ended(runner(tmp_path, "ok").start(asked)).end == "ok"
    assert "ValueError" in (tmp_path / "t" / "log.1.txt").read_text()


def test_real_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install meshtuner[profile])")
    (tmp_path / "ranks.py").write_text(RANKS)
    site = Site(environment={"PYTHONPATH": str(tmp_path)}, python=sys.executable)
    asked = trial(tmp_path / "t", job=small_job(2, 4), wall_s=300.0, quiet_s=240.0)  # a cold import of torch may take a minute
    result = ended(LocalRunner(site=site, module="ranks").start(asked), 300.0)
    log = (tmp_path / "t" / "log.txt").read_text()
    assert result.end == "ok", log
    assert "threads 1" in log and all(f"rank {rank} of 2" in log for rank in (0, 1))


RANKS = """\
import os
words = "rank %s of %s threads %s" % tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))
os.write(1, (words + chr(10)).encode())  # in one piece: the ranks share a pipe
if os.environ["RANK"] == "0":
    for step in range(8):
        print('tuner-step {"step": %d, "seconds": 0.1, "loss": 1.0}' % step)
"""


def ended_with(asked: Trial, lines: list[str], launcher: str = "workload", **how: object) -> tuple[str, str]:
    result = result_of(asked, Ending(**how), lines, launcher)  # type: ignore[arg-type]
    return result.end, result.reason


STEPS = [f'tuner-step {{"step": {n}, "seconds": 0.5, "loss": 1.0}}' for n in range(8)]


def test_exit_code_0_is_not_believed_when_a_node_failed_under_srun(tmp_path: Path) -> None:
    asked = trial(tmp_path)
    cut = [*STEPS[:5], "srun: error: Node failure on n2"]
    result = result_of(asked, Ending(exit_code=0), cut, "workload")
    assert (result.end, result.failed_nodes) == ("infrastructure", ("n2",))
    assert ended_with(asked, [*STEPS, "srun: error: Node failure on n2"], exit_code=0)[0] == "ok", "all that was asked for was measured"


def test_the_workload_must_do_all_its_steps(tmp_path: Path) -> None:
    end, reason = ended_with(trial(tmp_path), STEPS[:5], exit_code=0)
    assert end == "failed" and reason.startswith("it ended by itself after 5 steps: 8 were asked for")


def test_a_shorter_step_is_told_by_its_own_sequences(tmp_path: Path) -> None:
    """tokens/s of one of 4 accelerators, 2 micro batches of 1 sequence on dp = 2: 4 sequences of 128 tokens in 128 / 64 s."""
    asked = dataclasses.replace(trial(tmp_path), microbatches=2)
    lines = [f"step: {n:2}  loss: 10.0  grad_norm: 1.0  memory: 1.00GiB(5%)  tps: 64  tflops: 1.0  mfu: 1.0%" for n in range(1, 9)]
    assert result_of(asked, Ending(exit_code=0), lines, "torchtitan").step_s == pytest.approx(128 / 64)


SMI = """\
#!/bin/bash
echo "0, GPU-aa, 3, 81559"
echo "1, GPU-bb, $(cat "$HELD"), 81559"
echo "2, GPU-cc, [N/A], [N/A]"
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretend nvidia-smi whose second card has as many MiB in use as a file says."""
    tool, held = tmp_path / "nvidia-smi", tmp_path / "held"
    tool.write_text(SMI)
    tool.chmod(0o755)
    held.write_text("70000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HELD", str(held))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return held


def test_a_trial_waits_for_memory_of_its_own_accelerators(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(d.index, d.busy) for d in devices()] == [("0", False), ("1", True)]
    assert "are in use by others after 0 s: 1 (73.4 of 85.5 GB)" in wait_free(0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert wait_free(0.0) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert wait_free(0.0) != ""


def test_waiting_ends_once_memory_is_free() -> None:
    answers = iter([[Device(index="0", uuid="a", used=7e10, total=8e10)], []])
    assert wait_free(10.0, look=lambda: next(answers), poll_s=0.0) == ""


def test_secret_names_and_values() -> None:
    secret = {
        "HF_TOKEN": "hf_abcdef",
        "DB": "postgresql://u:p4ssw0rd@h/x",
        "MY_PASSWORD": "hunter22",
        "AWS_ACCESS_KEY_ID": "AKIA1234",
        "A_PAT": "x" * 9,
    }
    plain = {"TOKENIZERS_PARALLELISM": "false", "PWD": "/home/me", "PATH": "/bin", "MONKEY": "banana"}
    record = environment_record(secret | plain)
    assert record == {"variables": dict(sorted(plain.items())), "withheld": sorted(secret)}
    assert mask(secret | plain)("x hf_abcdef postgresql://u:p4ssw0rd@h/x hunter22 false banana") == "x *** *** *** false banana"
