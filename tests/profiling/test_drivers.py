"""Several driver processes on one study: PostgreSQL, SQLite, the journal; in one folder and in folders of their own."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING

from tests.postgres import postgres
from tests.profiling.searches import candidates, drive_scripted, ledger, searched, told_trials
from tuner.profiling.ledger import tells
from tuner.search.sampler import index_of

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path


def start(folder: Path, count: int, runs: int, url: str, strategy: str = "random") -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.profiling.searches", "scipy.special", "optuna"])
    process = context.Process(target=drive_scripted, args=(str(folder), count, runs, url, strategy))
    process.start()
    return process


def join(drivers: list[ForkServerProcess]) -> None:
    for driver in drivers:
        driver.join(120)
        assert driver.exitcode == 0


def check(folders: list[Path], count: int, runs: int, url: str) -> None:
    """None lost, none doubled; every folder's ledger has each run once."""
    of = candidates(count)
    told = told_trials(of, folders[0], url)
    assert len(told) == runs == len({index_of(of, trial.params) for trial in told})
    for folder in folders:
        ended = searched(folder, of, url=url, runs=runs)
        assert sum(tells(entry.result) for entry in ended.entries) == runs
        numbers = [entry.number for entry in ledger(folder) if tells(entry.result)]
        assert sorted(numbers) == [trial.number for trial in told]
    assert len(told_trials(of, folders[0], url)) == runs


def test_postgresql_with_four_drivers(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shared", "shared", "third", "fourth")]
    with postgres() as url:
        drivers = [start(folder, 110, 100, url) for folder in folders]
        time.sleep(2.0)
        drivers[2].kill()
        drivers[2] = start(folders[2], 110, 100, url)
        join(drivers)
        check(folders[1:], 110, 100, url)


def test_sqlite_with_two_drivers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    join([start(tmp_path / "search", 20, 12, url, "residual") for _ in range(2)])
    check([tmp_path / "search"], 20, 12, url)


def test_the_journal_with_two_drivers_in_one_folder(tmp_path: Path) -> None:
    join([start(tmp_path, 20, 12, "", "residual") for _ in range(2)])
    check([tmp_path], 20, 12, "")
