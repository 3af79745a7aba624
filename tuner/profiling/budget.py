"""Whether a search goes on: its budget in runs and accelerator-seconds, the gain that is still expected, machines that fail."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.profiling.driver import told
from tuner.profiling.limits import MOST_FAULTS
from tuner.search.proposal import gains
from tuner.search.trials import DRIVER, KNOWN, REFERENCE

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from tuner.profiling.driver import Driver
    from tuner.search.beliefs import Believed


class Why(NamedTuple):
    """Why a search ends: in words, and whether by its own rule rather than for want of budget."""

    words: str
    enough: bool


EVERY = Why("every candidate has run", True)


def over(driver: Driver, said: Believed | None) -> Why | None:
    """Return why no more runs start, None where they may."""
    limits = driver.campaign.limits
    if driver.row >= MOST_FAULTS:
        return Why(f"the machine failed {driver.row} times in a row: {faults_of(driver)[-1]}", False)
    if limits.accelerator_s is not None and spent(driver) >= limits.accelerator_s:
        return Why(f"{limits.accelerator_s / 3600:g} accelerator-hours are spent", False)
    if limits.runs is not None and counted(driver) >= limits.runs:
        return Why(f"{limits.runs} run{'' if limits.runs == 1 else 's'} done", limits.accelerator_s is None)
    if said is not None and _gained_out(driver, said):
        return Why(f"no plan is expected to shorten the best step by {100 * limits.least_gain:g} %", True)
    return None


def spent(driver: Driver) -> float:
    """Return the accelerator-seconds of the search's runs, of those under way so far."""
    ended = sum(max(entry.result.ended - entry.result.started, 0.0) for entry in driver.own())
    running = sum(time.time() - one.datetime_start.timestamp() for one in _running(driver) if one.datetime_start)
    return (driver.campaign.run_gpus or driver.campaign.candidates.job.gpus) * (ended + running)


def counted(driver: Driver) -> int:
    """Return how many runs of this search said something of a plan or may yet; repeats and what was known do not count."""
    ended = sum(told(one) for one in driver.trials() if one.state.is_finished())
    return ended + sum(REFERENCE not in one.user_attrs for one in _running(driver))


def _running(driver: Driver) -> list[FrozenTrial]:
    return [one for one in driver.trials() if DRIVER in one.user_attrs and not one.state.is_finished()]


def most(driver: Driver) -> int | None:
    """Return how many candidates may be known or under way at most."""
    runs = driver.campaign.limits.runs
    known = {driver.place(one) for one in driver.trials() if KNOWN in one.user_attrs}
    return None if runs is None else runs + len(known)


def due(driver: Driver) -> int | None:
    """Return the candidate to run again, when it is time: the best one so far."""
    every, trials = driver.campaign.limits.reference_every, driver.trials()
    timed = [run for run in driver.ran() if run.step_s]
    wanted = sum(told(one) for one in trials if one.state.is_finished()) // every if every else 0
    done = sum(REFERENCE in one.user_attrs and (not one.state.is_finished() or "result" in one.user_attrs) for one in trials)
    return min(timed, key=lambda run: run.step_s or math.inf).index if timed and wanted > done else None


def _gained_out(driver: Driver, said: Believed) -> bool:
    least, best = driver.campaign.limits.least_gain, driver.best_s()
    if not least or not math.isfinite(best):
        return False
    left = np.ones(len(driver.campaign.candidates), dtype=bool)
    left[list(driver.taken())] = False
    return not left.any() or float(gains(said, best)[left].max()) < least


def faults_of(driver: Driver) -> list[str]:
    """Return in words what the machine did wrong in this search."""
    met = [entry for entry in driver.own() if entry.result.end == "infrastructure"]
    said = []
    for entry in met:
        where = f" on {', '.join(entry.result.nodes)}" if entry.result.nodes else ""
        said.append(f"run {entry.number}{where}: {entry.result.reason or entry.result.end}")
    return said + driver.unstarted
