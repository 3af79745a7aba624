"""The loop of a measured search: ask for a plan, run it, tell what it showed; until the budget or the gain is gone."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from tuner.errors import InfrastructureError, TunerError
from tuner.profiling.adoption import adopt, unclaimed
from tuner.profiling.budget import EVERY, Why, due, faults_of, most, over
from tuner.profiling.driver import LOCK, Campaign, Driver
from tuner.profiling.interruption import held_back
from tuner.profiling.ledger import INTERRUPTED, tells
from tuner.profiling.nodes import failing
from tuner.profiling.recall import keep, recall
from tuner.profiling.runs import collect, launch, stop
from tuner.profiling.storage import FileLock, StorageError, said
from tuner.search.trials import ask, new_study, repeat

if TYPE_CHECKING:
    from collections.abc import Callable

    import optuna

    from tuner.profiling.ledger import Entry
    from tuner.search.beliefs import Ran

    Tell = Callable[[str, int, int], None]

POLL_S = 0.2


class Ended(NamedTuple):
    """How a campaign ended. entries: what ran, in order, with what was known before it (number -1); known: how many that are; why: in
    words; enough: whether it ended by its own rule rather than for want of budget; faults: what machines did wrong, which are left out,
    and why measurements are not shared; ran: what is known of candidates.
    """

    entries: tuple[Entry, ...]
    known: int
    why: str
    enough: bool
    faults: tuple[str, ...]
    ran: tuple[Ran, ...] = ()


def run(campaign: Campaign, progress: Tell | None = None) -> Ended:
    """Run or resume a campaign; return how it ended. Raises SpecError for a plan that the runner cannot be asked for, InfrastructureError
    where results cannot be kept; no run is left behind.
    """
    try:
        campaign.folder.mkdir(parents=True, exist_ok=True)
        study = new_study(campaign.sampler, name=campaign.name, storage=campaign.storage)
        driver = Driver(campaign, study, FileLock(campaign.folder / LOCK))
        with held_back() as interrupted:
            return _ended(driver, recall(driver), _driven(driver, interrupted, progress))
    except StorageError as error:
        raise InfrastructureError(f"the storage of trials failed: {said(error)}: the same command goes on from here") from error
    except OSError as error:
        raise InfrastructureError(f"{error.filename or campaign.folder}: {error.strerror or error}") from None


def _driven(driver: Driver, interrupted: Callable[[], bool], progress: Tell | None) -> Why:
    """Run trials until none is to start and none runs; return why."""
    try:
        while not interrupted():
            adopt(driver)
            collect(driver)
            why = _start(driver)
            _tell_progress(driver, progress)
            if why is not None and not driver.live and not unclaimed(driver):
                return why
            time.sleep(POLL_S)
        stop(driver)
    except (TunerError, StorageError, OSError, KeyboardInterrupt):
        for one in driver.live:  # without telling: the study may be what failed
            one.running.stop(INTERRUPTED)
        raise
    return Why(f"{INTERRUPTED}; the same command goes on from here", False)


def _ended(driver: Driver, known: int, why: Why) -> Ended:
    keep(driver)
    out = tuple(f"{node} failed under several runs: later ones leave it out where nodes can be chosen" for node in failing(driver.own()))
    faults = (*faults_of(driver), *out, *((driver.unshared,) if driver.unshared else ()))
    return Ended(tuple(driver.entries), known, why.words, why.enough, faults, tuple(driver.ran()))


def _start(driver: Driver) -> Why | None:
    """Start runs while there is room; return why no more will start, else None."""
    while len(driver.live) < driver.campaign.runner.parallel and not driver.full:
        said = driver.believed()
        if (why := over(driver, said)) is not None:
            return why
        if (reference := due(driver)) is not None:
            launch(driver, repeat(driver.study, reference), reference, None)
            continue
        asked = _asked(driver)
        if asked is None:
            return over(driver, said) or EVERY  # another driver may have taken what was left
        launch(driver, *asked, said)
    return None


def _asked(driver: Driver) -> tuple[optuna.Trial, int] | None:
    """Ask for a trial: the plans that come first, then what the sampler proposes. One driver of a folder at a time."""
    campaign = driver.campaign
    with driver.lock:
        taken = driver.taken()
        first = next((index for index in campaign.first if index not in taken), None)
        if first is not None:
            driver.study.enqueue_trial(dict(campaign.candidates.words[first]))
        return ask(driver.study, campaign.candidates, most(driver))


def _tell_progress(driver: Driver, progress: Tell | None) -> None:
    if progress is None:
        return
    best = driver.best_s()
    words = f", best step {best:.3g} s" if math.isfinite(best) else ""
    under_way = ", ".join(f"{one.at.number}" for one in driver.live)
    runs = driver.campaign.limits.runs or len(driver.campaign.candidates)
    done = sum(not entry.reference and tells(entry.result) for entry in driver.own())
    progress(f"measuring{f' (run {under_way})' if under_way else ''}{words}: run", done, runs)
