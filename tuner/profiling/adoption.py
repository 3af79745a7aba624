"""Trials that a dead driver left: those that still run or ended are taken over, the others may be proposed again.

On a driver's own host its process tells whether it lives; on other hosts a file does that it touches now and then in the search's folder.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tuner.launch.progress import Progress
from tuner.profiling.driver import FOLDER, Live
from tuner.profiling.recall import keep
from tuner.profiling.runs import trial_of
from tuner.search.sampler import END
from tuner.search.trials import DRIVER, REFERENCE, claim, orphans, tell_nothing, tell_rest, this_driver, unborn

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from tuner.profiling.driver import Driver

EVERY_S = 2.0  # between two looks
SILENT_S = 300.0  # a driver whose file is older than another's by this is dead; stopping or submitting a run may keep it busy for minutes
DRIVERS = "drivers"


def adopt(driver: Driver) -> None:
    """Take over the trials of dead drivers, now and then."""
    if time.monotonic() - driver.looked < EVERY_S:
        return
    driver.looked = time.monotonic()
    _beat(driver)
    for trial in _claimed(driver):
        _take(driver, trial)


def unclaimed(driver: Driver) -> bool:
    """Whether a trial was asked for and not claimed yet: by a driver at work, or by one that died just then."""
    return any(not trial.state.is_finished() and unborn(trial) for trial in driver.trials())


def _claimed(driver: Driver) -> list[FrozenTrial]:
    """Return the orphans, which are this driver's from here on: drivers that look at once do not both take one."""
    with driver.lock:
        found = [*orphans(driver.study), *_silent(driver)]
        for trial in found:
            claim(driver.study, trial)
    return found


def _take(driver: Driver, trial: FrozenTrial) -> None:
    index = driver.place(trial)
    if END in trial.user_attrs:
        tell_rest(driver.study, trial)
        keep(driver)
        return
    folder = Path(trial.user_attrs.get(FOLDER, ""))
    at = (
        None if index is None else trial_of(driver, trial.number, index, folder if FOLDER in trial.user_attrs and folder.exists() else None)
    )
    running = driver.campaign.runner.attach(at) if at is not None and at.folder.exists() else None
    if at is None or index is None or running is None:
        tell_nothing(driver.study, trial.number)
    else:
        driver.live.append(Live(trial, index, running, at, Progress(at), reference=REFERENCE in trial.user_attrs))


def _beat(driver: Driver) -> None:
    path = _file(driver, this_driver())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _silent(driver: Driver) -> list[FrozenTrial]:
    """Return the trials of drivers on other hosts that have been silent for long by the clock of the file system."""
    now = _file(driver, this_driver()).stat().st_mtime
    running = [one for one in driver.trials() if not one.state.is_finished() and DRIVER in one.user_attrs]
    files = {one.number: _file(driver, one.user_attrs[DRIVER]) for one in running}
    mine = {one.at.number for one in driver.live}
    old = {number for number, path in files.items() if number not in mine and path.exists() and now - path.stat().st_mtime > SILENT_S}
    return [one for one in running if one.number in old]


def _file(driver: Driver, name: str) -> Path:
    return driver.campaign.folder / DRIVERS / quote(name, safe="")
