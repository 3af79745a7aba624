"""What is known before a search and after each run: ledgers become trials of the study, trials that ended become lines of ledgers.

The study is the truth: a run is told there first. Its line in the folder's ledger, and in the one that searches share, follows, at the
latest when the search is resumed; each folder of a study's drivers gets the lines of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.cost_model.estimate import estimate, peak_memory
from tuner.errors import InfrastructureError
from tuner.launch.trial import Result
from tuner.load import load_spec
from tuner.plan_text import plan_record
from tuner.profiling.driver import LEDGER, RESULT, SAID
from tuner.profiling.ledger import Entry, append, read, tells
from tuner.search.beliefs import Ran
from tuner.search.trials import KNOWN, REFERENCE, add_known

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from tuner.profiling.driver import Campaign, Driver


def recall(driver: Driver) -> int:
    """Make trials of what the folder's ledger and the shared one know of candidates, and read all that ended; return how many candidates
    are known from elsewhere.
    """
    campaign = driver.campaign
    places = {campaign.key(i): i for i in range(len(campaign.candidates))}
    here = read(campaign.folder / LEDGER, places)  # before the study: what is in it then was told there
    with driver.lock:
        _add(driver, here, places)
    keep(driver, {entry.run for entry in here})
    return sum(entry.number < 0 for entry in driver.entries)


def _add(driver: Driver, here: list[Entry], places: dict[str, int]) -> None:
    campaign = driver.campaign
    taken = driver.taken()
    for entry in [*here, *_shared(driver, places)]:
        index = places[entry.key]
        if index in taken or entry.reference or not tells(entry.result):
            continue
        taken.add(index)
        told = {KNOWN: entry.study or "elsewhere", RESULT: entry.result.model_dump(mode="json")}
        add_known(driver.study, campaign.candidates, ran(campaign, index, entry.result), told)


def _shared(driver: Driver, places: dict[str, int]) -> list[Entry]:
    """Return what other searches measured; none where their ledger cannot be read."""
    path = driver.campaign.shared
    try:
        return [] if path is None else read(path, places)
    except InfrastructureError as error:
        _not_shared(driver, error)
        return []


def keep(driver: Driver, written: set[tuple[str, int, float]] | None = None) -> None:
    """Take up the trials that ended since the last time, those of other drivers too, and see them in the ledgers. written: runs that stand
    there already.
    """
    campaign = driver.campaign
    known = {entry.key for entry in driver.entries if entry.number < 0}
    for trial in driver.trials():
        index = driver.place(trial)
        if not trial.state.is_finished() or RESULT not in trial.user_attrs or trial.number in driver.kept or index is None:
            continue
        driver.kept.add(trial.number)
        entry = _entry(campaign, trial, index)
        if entry.number < 0 and entry.key in known:
            continue  # two drivers that started at once both added it
        known.add(entry.key) if entry.number < 0 else None
        driver.entries.append(entry)
        if entry.number >= 0 and entry.run not in (written or ()) and append(campaign.folder / LEDGER, entry):
            _share(driver, entry)


def _share(driver: Driver, entry: Entry) -> None:
    """Pass a measurement on to other searches: not of a run that was cut short, whose limits were this search's."""
    path = driver.campaign.shared
    if path is None or driver.unshared or not tells(entry.result) or entry.result.end == "stopped":
        return
    try:
        append(path, entry)
    except InfrastructureError as error:
        _not_shared(driver, error)


def _not_shared(driver: Driver, error: InfrastructureError) -> None:
    """Note, once, why measurements are not shared: a search goes on without."""
    driver.unshared = driver.unshared or f"measurements are not shared: {error} (--no-cache asks for that)"


def _entry(campaign: Campaign, trial: FrozenTrial, index: int) -> Entry:
    attributes, of = trial.user_attrs, campaign.candidates
    said_s, low_s, high_s = attributes.get(SAID, (None, None, None))
    return Entry(
        key=campaign.key(index),
        study=campaign.name,
        number=-1 if KNOWN in attributes else trial.number,
        plan=plan_record(of.plans[index], of.job.gpus),
        result=load_spec(Result, attributes[RESULT], f"trial {trial.number}", units=False),
        predicted_s=float(of.step_s[index]),
        said_s=said_s,
        low_s=low_s,
        high_s=high_s,
        reference=REFERENCE in attributes,
    )


def ran(campaign: Campaign, index: int, result: Result) -> Ran:
    """Return what a result says of a candidate."""
    end: Any = "oom" if result.end == "oom" else "ok" if result.step_s and result.end != "failed" else "failed"
    return Ran(index, end, result.step_s if end == "ok" else None, _device_bytes(campaign, index, result), result.extrapolated)


def _device_bytes(campaign: Campaign, index: int, result: Result) -> float | None:
    """Return what a run took on the device: of tensors or the allocator alone, what the model says lies beyond is added."""
    if not result.memory_bytes or result.end == "oom":
        return None
    if result.memory_kind == "device":
        return result.memory_bytes
    of = campaign.candidates
    stage = estimate(of.job, of.plans[index], of.calibration).worst_stage
    kind = float(getattr(peak_memory(of.job, of.plans[index], of.calibration, stage), result.memory_kind))
    return float(result.memory_bytes + of.memory_bytes[index] - kind)
