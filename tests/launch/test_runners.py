"""One suite that every runner passes: local, a person's own command, Slurm (steps in an allocation, jobs of their own), replay."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.standin import FAKE, ended, interpreter, small_job, trial, until
from tests.slurm.cluster import Cluster, slurm
from tests.terminal import ROOT
from tuner.errors import SpecError
from tuner.launch.command import Command, CommandRunner
from tuner.launch.local import LocalRunner
from tuner.launch.processes import marked, start_time
from tuner.launch.replay import ReplayRunner
from tuner.launch.runner import BUILT_IN, Runner, Setup, open_runner, runners
from tuner.launch.site import Site
from tuner.launch.slurm import SlurmRunner
from tuner.launch.slurm_queue import job_state
from tuner.launch.trial import read_result, read_trial
from tuner.measurement import Measurement
from tuner.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.launch.trial import Result

PROCESSES = ("local", "command", "slurm-steps", "slurm-jobs")


@dataclass
class Kind:
    """A kind of runner under test: `make` returns one whose trials do what a word says."""

    name: str
    make: Callable[..., Runner]

    def result(self, folder: Path, word: str, **changes: Any) -> Result:
        return ended(self.make(word).start(trial(folder, **changes)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm(nodes=4) as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.conf))
        yield started


@pytest.fixture(scope="module")
def allocation(cluster: Cluster) -> str:
    job = cluster.run("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=4", "--output=/dev/null", "--wrap", "sleep 600").strip()
    until(lambda: job_state(job).phase == "running", 20)
    return job


def site_of(tmp: Path, word: str, **more: Any) -> Site:
    return Site(python=interpreter(tmp), environment={"FAKE": word} | more)


def kind_of(name: str, tmp: Path, request: pytest.FixtureRequest) -> Kind:
    if name == "local":
        return Kind(name, lambda word, **more: LocalRunner(site=site_of(tmp, word, **more), grace_s=0.3, error_s=0.5))
    if name == "command":
        line = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} --tp {{tp}} --trial {{trial_dir}}"
        command = Command(launcher="workload", command=line)
        return Kind(name, lambda word, **more: CommandRunner(command=command, site=site_of(tmp, word, **more), grace_s=0.3, error_s=0.5))
    if name == "replay":
        times = {"ok": 0.25, "oom": None, "failed": None}
        rows = [Measurement(id=w, job=small_job(), plan=Plan(tp=2), outcome=w, step_s=s) for w, s in times.items()]  # type: ignore[arg-type]
        return Kind(name, lambda word: ReplayRunner(rows=tuple(row for row in rows if row.id == word)))
    request.getfixturevalue("cluster")
    held = request.getfixturevalue("allocation") if name == "slurm-steps" else ""
    quick = {"allocation": held, "grace_s": 0.3, "error_s": 0.5, "linger_s": 1.0, "every_s": 0.2}
    return Kind(name, lambda word, **more: SlurmRunner(site=site_of(tmp, word, **more), **quick))


@pytest.fixture(params=[*PROCESSES, "replay"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return kind_of(request.param, tmp_path, request)


@pytest.fixture(params=PROCESSES)
def process_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return kind_of(request.param, tmp_path, request)


def test_a_trial_that_ends_well(kind: Kind, tmp_path: Path) -> None:
    runner = kind.make("ok")
    asked = trial(tmp_path / "it's a $(trial) folder")
    running = runner.start(asked)
    result = ended(running)
    assert (result.end, result.step_s, result.reason) == ("ok", 0.25, "")
    assert running.poll() == result == running.stop("too late") == read_result(asked.folder)
    files = {"trial.json", "command.txt", "environment.json", "log.txt", "result.json"}
    assert files <= {path.name for path in asked.folder.iterdir()}
    assert read_trial(asked.folder) == asked
    again = runner.attach(asked)
    assert again is not None and again.poll() == result == again.stop("too late")
    assert result.started <= result.ended
    if kind.name != "replay":
        assert (result.steps, result.exit_code, result.attempts) == (5, 0, 1)
        assert (result.memory_bytes, result.slowest_ranks, result.versions) == (1e9 + 3, (2,), {"torch": "2.13"})
        assert len(result.nodes) == 1


def test_a_trial_out_of_memory_is_ended_at_once(kind: Kind, tmp_path: Path) -> None:
    result = kind.result(tmp_path / "t", "oom")
    assert result.end == "oom" and result.step_s is None
    if kind.name != "replay":
        assert "CUDA out of memory" in result.reason and result.attempts == 1


def test_a_trial_that_fails_says_why(kind: Kind, tmp_path: Path) -> None:
    result = kind.result(tmp_path / "t", "failed")
    assert result.end == "failed"
    if kind.name != "replay":
        assert result.reason == "ValueError: heads (7) must be divisible by tp (2)" and result.attempts == 1


def test_a_trial_that_says_nothing_is_stopped(process_kind: Kind, tmp_path: Path) -> None:
    result = process_kind.result(tmp_path / "t", "hang", quiet_s=1.5)
    assert (result.end, result.reason) == ("stopped", "no line in its log for 1.5 s")


def test_a_trial_past_its_wall_limit_is_stopped(process_kind: Kind, tmp_path: Path) -> None:
    result = process_kind.result(tmp_path / "t", "slow", wall_s=2.0, steps=10_000)
    assert (result.end, result.reason) == ("stopped", "its wall limit of 2 s")
    assert result.step_s == 0.25, "what was measured until then"


def pids_of(folder: Path) -> list[int]:
    return until(lambda: (folder / "pids.json").exists() and json.loads((folder / "pids.json").read_text()))


def test_stop_ends_grandchildren_that_left_and_ignore_sigterm(process_kind: Kind, tmp_path: Path) -> None:
    running = process_kind.make("family").start(trial(tmp_path / "t"))
    pids = pids_of(tmp_path / "t")
    assert all(map(start_time, pids)) and running.poll() is None
    result = running.stop("worse than what is known")
    assert (result.end, result.reason) == ("stopped", "worse than what is known")
    assert running.poll() == result
    until(lambda: not any(map(start_time, pids)), 15)


def test_two_trials_at_once(process_kind: Kind, tmp_path: Path) -> None:
    runner = process_kind.make("family")
    both = [runner.start(trial(tmp_path / name, number=i)) for i, name in enumerate("ab")]
    pids = [*pids_of(tmp_path / "a"), *pids_of(tmp_path / "b")]
    both[0].stop("first")
    assert both[1].poll() is None and start_time(pids[3]), "stopping one leaves the other alone"
    assert both[1].stop("second").end == "stopped"
    until(lambda: not any(map(start_time, pids)), 15)


DRIVER = """\
import sys, time
from pathlib import Path
from tests.launch.test_runners import *
runner, folder = eval(sys.argv[1]), Path(sys.argv[2])
running = runner.start(trial(folder))
print("started", flush=True)
while running.poll() is None:
    time.sleep(0.05)
print("ended", flush=True)
time.sleep(600)
"""


def driver(runner: Runner, folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", DRIVER, repr(runner), str(folder)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_after_the_driver_is_killed_no_process_is_left_or_the_job_goes_on(process_kind: Kind, tmp_path: Path) -> None:
    runner, folder = process_kind.make("family"), tmp_path / "t"
    process = driver(runner, folder)
    pids = pids_of(folder)
    killed(process)
    found = runner.attach(trial(folder))
    if process_kind.name == "slurm-jobs":
        assert found is not None and found.poll() is None, "a job of its own outlives its driver"
        assert found.stop("enough").end == "stopped"
    else:
        assert found is None and read_result(folder) is None
    until(lambda: not any(map(start_time, pids)), 15)


def test_a_result_outlives_the_driver(process_kind: Kind, tmp_path: Path) -> None:
    runner, folder = process_kind.make("ok"), tmp_path / "t"
    process = driver(runner, folder)
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["started", "ended"]
    killed(process)
    found = runner.attach(trial(folder))
    assert found is not None and found.poll() == read_result(folder)


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_a_driver_killed_at_any_moment_leaves_a_result_or_nothing(tmp_path: Path, request: pytest.FixtureRequest, delay_s: float) -> None:
    runner, folder = kind_of("local", tmp_path, request).make("ok"), tmp_path / "t"
    process = driver(runner, folder)
    until(folder.exists)
    time.sleep(delay_s)
    killed(process)
    found = runner.attach(trial(folder))
    assert marked(folder) == []
    if found is not None:
        assert ended(found).end == "ok"
    else:
        assert read_result(folder) is None and ended(runner.start(trial(folder))).end == "ok"


def test_driver_and_supervisor_killed_together_leave_no_process(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    runner, folder = kind_of("local", tmp_path, request).make("family"), tmp_path / "t"
    process = driver(runner, folder)
    pids = pids_of(folder)
    os.kill(json.loads((folder / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    killed(process)
    assert runner.attach(trial(folder)) is None and not any(map(start_time, pids))


def test_a_trial_of_a_living_driver_is_watched_and_not_ended(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    runner, folder = kind_of("local", tmp_path, request).make("family"), tmp_path / "t"
    process = driver(runner, folder)
    pids = pids_of(folder)
    found = runner.attach(trial(folder))
    assert found is not None and found.poll() is None and all(map(start_time, pids))
    assert found.stop("enough").end == "stopped"
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["started", "ended"]
    killed(process)


def test_attach_finds_nothing_where_nothing_ran(kind: Kind, tmp_path: Path) -> None:
    assert kind.make("ok").attach(trial(tmp_path / "never")) is None


def test_secrets_are_in_no_file(process_kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k-0123456789")
    runner = process_kind.make("secret", PET_TOKEN="whiskers-42")
    assert ended(runner.start(trial(tmp_path / "t"))).end == "ok"
    for path in (tmp_path / "t").iterdir():
        assert "whiskers-42" not in path.read_text() and "k-0123456789" not in path.read_text(), path
    assert "token is ***" in (tmp_path / "t" / "log.txt").read_text()
    record = json.loads((tmp_path / "t" / "environment.json").read_text())
    assert {"PET_TOKEN", "WANDB_API_KEY"} <= set(record["withheld"]) and "PATH" in record["variables"]


def test_replay_knows_only_its_rows(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    runner = kind_of("replay", tmp_path, request).make("ok")
    with pytest.raises(SpecError, match=r"tp=4.*is not among the 1 measured rows"):
        runner.start(trial(tmp_path / "t", plan=Plan(tp=4)))


def test_the_registry_has_all_and_makes_them(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert all(entry.error == "" for entry in runners().values() if entry.source == "built in")
    rows = kind_of("replay", tmp_path, request).make("ok").rows  # type: ignore[attr-defined]
    setup = Setup(command=Command(launcher="workload", command="true"), rows=rows, parallel=2)
    assert [open_runner(name, setup).name for name in BUILT_IN] == list(BUILT_IN)
    assert {open_runner(name, setup).parallel for name in BUILT_IN} == {2}
