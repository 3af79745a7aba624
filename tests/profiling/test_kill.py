"""The driver is killed with SIGKILL at random moments: nothing that ended is lost or run twice, no process stays behind."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path

from tests.launch.standin import until
from tests.profiling.searches import NAME, candidates, drive, ledger, told_trials
from tuner.launch.processes import MARK
from tuner.launch.trial import read_result
from tuner.profiling.driver import LEDGER, TRIALS
from tuner.profiling.ledger import tells
from tuner.profiling.storage import JOURNAL
from tuner.search.sampler import index_of

KILLS, RUNS, COUNT = 20, 40, 60


def trial_processes(folder: Path) -> list[int]:
    """Return the living processes of trials in a folder."""
    mark, found = f"{MARK}={folder.absolute()}/".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(word.startswith(mark) for word in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def tear(folder: Path, turn: int) -> None:
    """Leave half a line at the end of the ledger or the journal, as a crash of the machine does."""
    name, half = ((LEDGER, b'{"key": "0123'), (JOURNAL, b'{"op_code":6,"worker_id":"x'))[turn % 2]
    if (folder / name).exists():
        with (folder / name).open("ab") as file:
            file.write(half)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.profiling.searches", "scipy.special", "optuna"])
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    moments = random.Random(seed)
    arguments = (str(tmp_path), COUNT, RUNS, "", 2)
    killed = 0
    for turn in range(KILLS):
        driver = context.Process(target=drive, args=arguments)
        driver.start()
        time.sleep(moments.uniform(0.0, 1.6))
        killed += driver.is_alive()
        driver.kill()
        driver.join()
        if moments.random() < 0.5:
            tear(tmp_path, turn)
    last = context.Process(target=drive, args=arguments)
    last.start()
    last.join(60)
    assert last.exitcode == 0, f"seed {seed}"
    assert killed > 0
    check(tmp_path, seed)


def check(folder: Path, seed: int) -> None:
    of = candidates(COUNT)
    told = told_trials(of, folder)
    assert len(told) == RUNS, f"seed {seed}"
    assert max(Counter(index_of(of, trial.params) for trial in told).values()) == 1, f"seed {seed}"
    numbers = {trial.number for trial in told}
    for place in (folder / TRIALS).iterdir():
        result = read_result(place)
        assert result is None or not tells(result) or int(place.name.rpartition("-")[2]) in numbers, f"seed {seed}: {place} is lost"
    kept = [entry for entry in ledger(folder) if tells(entry.result)]
    assert sorted(entry.number for entry in kept) == sorted(numbers), f"seed {seed}"
    assert {entry.study for entry in kept} == {NAME}
    assert {entry.result.end for entry in kept} == {"ok"}
    until(lambda: not trial_processes(folder), 20)
