"""What a measured search keeps to: its budget, its order, what results say, machines that fail, what is known already."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.standin import until
from tests.profiling.searches import LEDGER, Scripted, campaign, candidates, ledger, ok, opened, script_runner, searched, told_trials
from tests.profiling.test_kill import trial_processes
from tuner.errors import InfrastructureError, SpecError, one_problem
from tuner.launch.trial import Result, read_result
from tuner.profiling.campaign import run
from tuner.profiling.ledger import read
from tuner.profiling.ranked import drift_of
from tuner.search.sampler import index_of

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.launch.trial import Trial

COUNT = 9


def result(end: Any, **more: Any) -> Result:
    return Result(end=end, versions={}, **more)


def test_as_many_runs_as_asked_for_the_persons_own_plan_first(tmp_path: Path) -> None:
    of = candidates(COUNT)
    runner = Scripted(of)
    said: list[tuple[str, int, int]] = []
    ended = run(campaign(tmp_path, of, runner, runs=5, first=(7, 2)), lambda *words: said.append(words))
    assert runner.started[:2] == [7, 2] and len(set(runner.started)) == 5
    assert (ended.why, ended.enough, ended.known, ended.faults) == ("5 runs done", True, 0, ())
    assert [entry.number for entry in ended.entries] == [0, 1, 2, 3, 4]
    assert {(run.index, run.step_s) for run in ended.ran} == {(i, 1.0 + i) for i in runner.started}
    assert said[-1] == (f"measuring, best step {1.0 + min(runner.started):.3g} s: run", 5, 5)


def test_every_candidate_runs_once_where_nothing_ends_it_before(tmp_path: Path) -> None:
    of = candidates(COUNT)
    runner = Scripted(of, parallel=4, polls=2)
    ended = searched(tmp_path, of, runner)
    assert sorted(runner.started) == list(range(COUNT))
    assert (ended.why, ended.enough) == ("every candidate has run", True)


def test_a_batch_never_holds_one_plan_twice(tmp_path: Path) -> None:
    of = candidates(COUNT)
    runner = Scripted(of, parallel=3, polls=3)
    searched(tmp_path, of, runner, runs=8, strategy="residual", first=(5,))
    assert len(set(runner.started)) == len(runner.started) == 8 and runner.started[0] == 5


def test_what_results_say(tmp_path: Path) -> None:
    of = candidates(6)
    answers = {
        0: ok(2.0, memory_bytes=1e9), 1: result("oom", reason="CUDA out of memory"), 2: result("failed", reason="no", step_s=0.1),
        3: result("stopped", reason="its wall limit of 600 s"), 4: result("stopped", reason="its wall limit", step_s=9.0), 5: ok(3.0),
    }  # fmt: skip
    ended = searched(tmp_path, of, Scripted(of, lambda index, trial: answers[index]))
    assert {(run.index, run.end, run.step_s) for run in ended.ran} == {
        (0, "ok", 2.0), (1, "oom", None), (2, "failed", None), (3, "failed", None), (4, "ok", 9.0), (5, "ok", 3.0),
    }  # fmt: skip
    told = {index_of(of, trial.params): trial for trial in told_trials(of, tmp_path)}
    assert {index: trial.state.name for index, trial in told.items()} == {
        0: "COMPLETE", 1: "PRUNED", 2: "PRUNED", 3: "PRUNED", 4: "COMPLETE", 5: "COMPLETE",
    }  # fmt: skip
    assert {index for index, trial in told.items() if trial.constraints["memory"] > 0.0} == {1}
    assert told[1].user_attrs["reason"] == "CUDA out of memory"
    assert ended.faults == () and len(ledger(tmp_path)) == 6


def test_a_fault_of_the_machine_says_nothing_of_the_plan(tmp_path: Path) -> None:
    of = candidates(3)
    failed: set[int] = set()

    def answer(index: int, trial: Trial) -> Result:
        if index in failed:
            return ok(1.0 + index)
        failed.add(index)
        return result("infrastructure", reason="link down", nodes=("n1", "n2"))

    runner = Scripted(of, answer)
    ended = searched(tmp_path, of, runner, runs=3, seed=1)
    assert sorted(set(runner.started)) == [0, 1, 2] and len(runner.started) == 6
    assert ended.why == "3 runs done" and len(ended.faults) == 3
    assert "on n1, n2: link down" in ended.faults[0]
    with opened(of, tmp_path) as study:
        assert [trial.state.name for trial in study.get_trials()].count("FAIL") == 3


def test_faults_in_a_row_end_it_and_it_goes_on_later(tmp_path: Path) -> None:
    of = candidates(COUNT)
    broken = [False]

    def answer(index: int, trial: Trial) -> Result:
        broken[0] = trial.number >= 2
        return result("infrastructure", reason="no device", nodes=("n3",)) if broken[0] else ok()

    ended = searched(tmp_path, of, Scripted(of, answer), runs=6)
    assert ended.why.startswith("the machine failed 3 times in a row: run 4 on n3: no device") and not ended.enough
    assert len(ended.ran) == 2
    assert ended.faults[-1].startswith("n3 failed under several runs")
    ended = searched(tmp_path, of, runs=6)
    assert ended.why == "6 runs done" and len(ended.ran) == 6


def test_a_node_that_failed_twice_is_left_out(tmp_path: Path) -> None:
    of = candidates(COUNT)
    fault = result("infrastructure", nodes=("n1", "n2"), failed_nodes=("n2",))
    faults = iter([fault, ok(), fault])
    runner = Scripted(of, lambda index, trial: next(faults, ok()))
    searched(tmp_path, of, runner, runs=4)
    assert [trial.exclude for trial in runner.trials] == [(), (), (), ("n2",), ("n2",), ("n2",)]


def test_what_cannot_be_started(tmp_path: Path) -> None:
    of = candidates(COUNT)
    ended = searched(tmp_path / "1", of, Scripted(of, lambda index, trial: InfrastructureError("no nodes")), runs=3)
    assert ended.why == "the machine failed 3 times in a row: run 2 did not start: no nodes" and len(ended.faults) == 3
    refused = SpecError([one_problem("command", "x", 1, "is wrong").problems[0]])
    with pytest.raises(SpecError, match="is wrong"):
        searched(tmp_path / "2", of, Scripted(of, lambda index, trial: refused), runs=3)
    with opened(of, tmp_path / "2") as study:
        assert [trial.state.name for trial in study.get_trials()] == ["FAIL"]


def test_a_node_that_is_taken_is_no_fault_in_a_row(tmp_path: Path) -> None:
    of = candidates(COUNT)
    runner = Scripted(of, parallel=2, polls=2)
    runner.answer = lambda index, trial: InfrastructureError("busy") if any(not read_result(one.folder) for one in runner.trials) else ok()
    ended = searched(tmp_path, of, runner, runs=5)
    assert ended.why == "5 runs done" and len(runner.started) == 5


def test_a_budget_of_accelerator_seconds(tmp_path: Path) -> None:
    of = candidates(COUNT)
    gpus = of.job.gpus
    ended = searched(tmp_path, of, accelerator_s=gpus * 2.5)
    assert len(ended.entries) == 3 and not ended.enough  # a second each: the third begins within the budget
    assert "accelerator-hours are spent" in ended.why
    assert len(searched(tmp_path, of, accelerator_s=gpus * 4.5).entries) == 5


def test_it_ends_when_little_is_to_be_gained(tmp_path: Path) -> None:
    of = candidates(COUNT)
    runner = Scripted(of, lambda index, trial: ok(float(of.step_s[index])))
    ended = searched(tmp_path, of, runner, strategy="residual", least_gain=0.2)
    assert ended.enough and ended.why == "no plan is expected to shorten the best step by 20 %"
    assert 0 < len(runner.started) < COUNT
    last = ended.entries[-1]
    assert last.low_s and last.said_s and last.high_s and last.low_s < last.said_s < last.high_s


def test_a_run_that_is_surely_worse_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = candidates(3)
    seen = {0: 1.0, 1: 2.1, 2: 1.9}
    runner = Scripted(of, lambda index, trial: ok(seen[index]), polls=3)
    monkeypatch.setattr("tuner.launch.progress.Progress.step_s", lambda self: seen[of.plans.index(self.trial.plan)])
    ended = searched(tmp_path, of, runner, first=(0, 1, 2))
    assert [(entry.result.end, entry.result.step_s) for entry in ended.entries] == [("ok", 1.0), ("stopped", 2.1), ("ok", 1.9)]
    assert ended.entries[1].result.reason == "2.1 times as slow as the best plan so far"
    assert {run.index: run.step_s for run in ended.ran} == seen


def test_the_best_plan_is_run_again_now_and_then(tmp_path: Path) -> None:
    of = candidates(COUNT)
    runner = Scripted(of)
    runner.answer = lambda index, trial: ok((1.0 + index) * (1.0 if index not in runner.started else 1.25))
    ended = searched(tmp_path, of, runner, runs=8, reference_every=3, first=(3, 4, 5, 0))
    repeats = [entry for entry in ended.entries if entry.reference]
    assert [len(runner.started), len(ended.ran), len(repeats)] == [10, 8, 2]
    assert (runner.started[3], runner.started[7]) == (3, 0)  # the best of the three, of the six
    assert drift_of(ended) == 1.25
    assert {run.step_s for run in ended.ran} == {1.0 + run.index for run in ended.ran}


def test_measurements_that_are_known_are_not_run_again_nor_counted(tmp_path: Path) -> None:
    of, shared = candidates(COUNT), tmp_path / "cache" / "shared.jsonl"
    ends = {0: ok(1.0), 1: result("oom"), 2: result("stopped", reason="a limit", step_s=5.0)}
    searched(tmp_path / "a", of, Scripted(of, lambda index, trial: ends.pop(index, ok(7.0))), first=(0, 1, 2), runs=3, shared=shared)
    assert [entry.result.end for entry in read(shared)] == ["ok", "oom"]  # a run that a limit cut short is this search's own
    runner = Scripted(of)
    ended = searched(tmp_path / "b", of, runner, runs=4, shared=shared, first=(0,))
    assert ended.known == 2 and len(runner.started) == 4 and not {0, 1} & set(runner.started)
    assert [entry.number for entry in ended.entries] == [-1, -1, 2, 3, 4, 5]
    assert len(ledger(tmp_path / "b")) == 4 and len(read(shared)) == 6
    again = searched(tmp_path / "b", of, runner, runs=4, shared=shared)
    assert (again.known, len(again.entries), len(runner.started)) == (2, 6, 4)
    other = searched(tmp_path / "c", of, Scripted(of), runs=4, shared=shared, software="another version")
    assert other.known == 0


@pytest.mark.parametrize("place", ["/proc/none", "file", "folder"])
def test_a_cache_that_cannot_be_used_is_said_once(place: str, tmp_path: Path) -> None:
    of = candidates(COUNT)
    (tmp_path / "file").touch()
    shared = tmp_path / "folder" if place == "folder" else tmp_path / place / "tuner" / "shared.jsonl"
    (tmp_path / "folder").mkdir()
    ended = searched(tmp_path / "a", of, runs=3, shared=shared)
    assert len(ended.ran) == len(ledger(tmp_path / "a")) == 3
    assert [fault for fault in ended.faults if "not shared" in fault] == list(ended.faults) and len(ended.faults) == 1
    assert str(shared) in ended.faults[0] and "--no-cache" in ended.faults[0]


def test_another_search_in_the_folder_knows_what_the_first_measured(tmp_path: Path) -> None:
    of = candidates(COUNT)
    searched(tmp_path, of, runs=3)
    runner = Scripted(of)
    ended = searched(tmp_path, of, runner, runs=2, name="another-9876543210", accelerator_s=of.job.gpus * 1e6)
    assert (ended.known, len(ended.ran), len(runner.started)) == (3, 5, 2)
    assert [entry.study for entry in ledger(tmp_path)] == ["search-0123456789"] * 3 + ["another-9876543210"] * 2


def test_interrupted_it_keeps_what_ended_and_leaves_no_process(tmp_path: Path) -> None:
    of = candidates(COUNT)
    threading.Thread(target=lambda: (until(lambda: len(ledger(tmp_path)) >= 2), os.kill(os.getpid(), signal.SIGINT))).start()
    ended = searched(tmp_path, of, script_runner(2))
    assert ended.why.startswith("interrupted") and not ended.enough
    assert not trial_processes(tmp_path)
    assert len(ended.ran) >= 2 and {run.end for run in ended.ran} == {"ok"}
    again = searched(tmp_path, of, script_runner(2), runs=len(ended.ran) + 2)
    assert len(again.ran) == len(ended.ran) + 2 and again.faults == ()


def test_a_driver_of_another_host_that_has_long_been_silent_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = candidates(COUNT)
    with opened(of, tmp_path) as study:
        for name in ("far:7:8", "near:7:8"):
            study.add_trial(_claimed(of, name, 0 if name.startswith("far") else 1))
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    for name, age in (("far%3A7%3A8", 1000.0), ("near%3A7%3A8", 10.0)):
        (drivers / name).touch()
        os.utime(drivers / name, (time.time() - age,) * 2)
    runner = Scripted(of)
    searched(tmp_path, of, runner)
    assert sorted(runner.started) == [0, *range(2, COUNT)]


def _claimed(of: Any, driver: str, index: int) -> Any:
    import optuna

    from tuner.search.sampler import space_of

    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING, params=dict(of.words[index]), distributions=space_of(of), user_attrs={"driver": driver}
    )


def test_a_full_disk_ends_it_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = candidates(COUNT)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tuner.profiling.ledger.os.fsync", full)
        with pytest.raises(InfrastructureError, match="No space left on device"):
            searched(tmp_path, of, runs=3)
    ended = searched(tmp_path, of, runs=3)
    assert len(ended.entries) == 3 and sorted(entry.number for entry in read(tmp_path / LEDGER)) == [0, 1, 2]
