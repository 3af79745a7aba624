"""A driver that dies between two of its steps: the search goes on, nothing that ended is lost or run twice."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from tests.profiling.searches import LEDGER, Scripted, candidates, ledger, opened, searched, told_trials
from tuner.launch.trial import read_result
from tuner.profiling.driver import TRIALS
from tuner.profiling.ledger import read
from tuner.profiling.storage import JOURNAL
from tuner.search.sampler import index_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUNS, COUNT = 6, 9
DEAD = f"{socket.gethostname()}:999999999:1"


class Killed(BaseException):
    """SIGKILL."""


def dying(patch: pytest.MonkeyPatch, target: str, call: int, *, before: bool) -> None:
    """Have this driver die before or after a function's `call`-th call."""
    module, _, name = target.rpartition(":")
    owner: Any = import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, last)
    calls = iter(range(1, 10_000))

    def instead(*args: Any, **options: Any) -> Any:
        now = next(calls) == call
        if now and before:
            raise Killed
        value = real(*args, **options)
        if now:
            raise Killed
        return value

    patch.setattr(owner, last, instead)


POINTS = {
    "between a trial and its claim": ("tuner.search.sampler:PlanSampler.before_trial", 3, True),
    "when some knobs are written": ("optuna.trial:Trial._suggest", 8, False),
    "between enqueuing the person's own plan and asking": ("optuna:Study.enqueue_trial", 1, False),
    "between claim and start": ("tuner.profiling.campaign:launch", 3, True),
    "between the folder's name and start": ("tuner.profiling.runs:set_attributes", 3, False),
    "right after start": ("tests.profiling.searches:Scripted.start", 3, False),
    "between the result and its tell": ("tuner.profiling.runs:tell", 3, True),
    "between two attributes of the result": ("optuna.trial:Trial.set_constraint", 3, True),
    "between END and the end": ("tuner.search.trials:_end", 3, True),
    "between tell and ledger": ("tuner.profiling.runs:keep", 3, True),
    "between the two ledgers": ("tuner.profiling.recall:_share", 3, True),
    "between a repeat's trial and its run": ("tuner.profiling.campaign:repeat", 1, False),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("torn", [False, True])
def test_a_driver_that_dies(point: str, torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, folder, shared = candidates(COUNT), tmp_path / "search", tmp_path / "shared.jsonl"
    first, second = Scripted(of), Scripted(of)
    options: dict[str, Any] = {"runs": RUNS, "first": (4,), "reference_every": 3, "shared": shared}
    monkeypatch.setattr("tuner.search.trials._UNBORN_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr("tuner.search.trials.this_driver", lambda: DEAD)
        target, call, before = POINTS[point]
        dying(patch, target, call, before=before)
        with pytest.raises(Killed):
            searched(folder, of, first, **options)
    if torn:
        for name in (LEDGER, JOURNAL):
            with (folder / name).open("ab") as file:
                file.write(b'{"key": "0')
    ended_then = {int(path.name.rpartition("-")[2]) for path in (folder / TRIALS).glob("*") if read_result(path)}
    ended = searched(folder, of, second, **options)
    told = told_trials(of, folder)
    assert (ended.why, ended.faults) == (f"{RUNS} runs done", ())
    assert len(told) == RUNS == len({index_of(of, trial.params) for trial in told})
    repeats = [entry.number for entry in ended.entries if entry.reference]
    assert ended_then <= {trial.number for trial in told} | set(repeats)
    assert sorted(entry.number for entry in ledger(folder)) == sorted([*(trial.number for trial in told), *repeats])
    assert len(first.started) + len(second.started) <= RUNS + len(repeats) + 1  # one that ran when the driver died runs again
    assert 1 <= len(repeats) <= 2 and (first.started + second.started)[0] == 4
    missing = {entry.run for entry in ledger(folder)} - {entry.run for entry in read(shared)}
    assert len(missing) <= (point == "between the two ledgers")
    again = searched(folder, of, Scripted(of), **options)
    assert [entry.run for entry in again.entries] == [entry.run for entry in sorted(ended.entries, key=lambda entry: entry.number)]


def test_a_ledger_outlives_its_study(tmp_path: Path) -> None:
    of = candidates(COUNT)
    first = searched(tmp_path, of, runs=4)
    (tmp_path / JOURNAL).unlink()
    runner = Scripted(of)
    second = searched(tmp_path, of, runner, runs=3)
    assert second.known == 4 and len(runner.started) == 3
    measured = {entry.key for entry in first.entries}
    assert not measured & {entry.key for entry in ledger(tmp_path)[4:]}
    assert len(ledger(tmp_path)) == 7  # trials of the new study have numbers of the old one


def test_the_trials_of_a_folder_that_is_gone_are_proposed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    of = candidates(COUNT)
    with monkeypatch.context() as patch:
        patch.setattr("tuner.search.trials.this_driver", lambda: DEAD)
        dying(patch, "tuner.profiling.runs:tell", 2, before=True)
        with pytest.raises(Killed):
            searched(tmp_path, of, runs=4)
    shutil.rmtree(tmp_path / TRIALS)
    ended = searched(tmp_path, of, runs=4)
    assert len(ended.entries) == 4 == len(told_trials(of, tmp_path))
    with opened(of, tmp_path) as study:
        assert not [trial for trial in study.get_trials() if not trial.state.is_finished()]
