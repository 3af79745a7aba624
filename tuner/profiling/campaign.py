"""The loop of a measured search: ask for a plan, run it, tell what it showed; until the budget or the gain is gone."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tuner.cost_model.estimate import peak_memory
from tuner.errors import InfrastructureError, SpecError
from tuner.launch.progress import Progress
from tuner.launch.trial import Trial
from tuner.plan_text import plan_record
from tuner.profiling.ledger import TELLING, Entry, append, key_of, read
from tuner.search.beliefs import Ran
from tuner.search.proposal import gains
from tuner.search.sampler import END, ran_of
from tuner.search.trials import add_known, ask, new_study, orphans, tell, tell_nothing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import optuna
    from optuna.storages import BaseStorage

    from tuner.launch.runner import Runner, Running
    from tuner.launch.trial import Result
    from tuner.search.beliefs import Believed
    from tuner.search.candidates import Candidates
    from tuner.search.sampler import PlanSampler

POLL_S = 0.2
STARTUP_S = 60.0  # of a run: imports, communicators, compilation; what a short run costs besides its steps
MOST_FAULTS = 3  # faults of the machine in a row after which nothing more is started
NORMAL_90 = 1.645
LEDGER, TRIALS = "measurements.jsonl", "trials"
PATIENCE_S = 5.0  # between two looks for trials whose driver died


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search ends and what a run may take. runs: how many plans run; accelerator_s: accelerator-seconds of all runs; least_gain:
    it ends when the best step is not expected to get shorter by this share (0: it does not end for that); steps, warmup, wall_s, quiet_s:
    of a trial; worse: a run is stopped once its steps are slower than the best one's by this factor (inf: never); reference_every: the
    best plan is run again after so many runs, to see drift (0: never).
    """

    runs: int | None = None
    accelerator_s: float | None = None
    least_gain: float = 0.0
    steps: int = 8
    warmup: int = 3
    wall_s: float = 600.0
    quiet_s: float = 120.0
    worse: float = 2.0
    reference_every: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A measured search. first: candidates that run before any is proposed; software: what else than job and plan a measurement
    depends on; shared: a ledger of measurements of other searches (None: they are not used).
    """

    candidates: Candidates
    runner: Runner
    folder: Path
    sampler: PlanSampler
    storage: BaseStorage
    name: str
    software: str
    limits: Limits
    first: tuple[int, ...] = ()
    shared: Path | None = None


class Ended(NamedTuple):
    """How a campaign ended. entries: what ran, in order, what other searches knew before it; why: in words; enough: whether it ended by
    its own rule rather than for want of budget; faults: what machines did wrong.
    """

    entries: tuple[Entry, ...]
    known: int
    why: str
    enough: bool
    faults: tuple[str, ...]


@dataclass(slots=True)
class _Live:
    """A trial under way."""

    trial: Any
    index: int
    running: Running
    at: Trial
    said: tuple[float, float, float] | None
    progress: Progress
    reference: bool = False


@dataclass(slots=True)
class _State:
    """What a driver holds: its study, what runs, what ended; everything that must survive it is in the study and the folders."""

    campaign: Campaign
    study: optuna.Study
    live: list[_Live] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    row: int = 0
    looked: float = 0.0


def run(campaign: Campaign, progress: Callable[[str, int, int], None] | None = None) -> Ended:
    """Run or resume a campaign; return how it ended. Raises InfrastructureError where nothing can be started at all."""
    campaign.folder.mkdir(parents=True, exist_ok=True)
    state = _State(campaign, new_study(campaign.sampler, name=campaign.name, storage=campaign.storage))
    known = _recall(state)
    try:
        while True:
            _adopt(state)
            _collect(state)
            why = _start(state)
            _tell_progress(state, progress)
            if why is not None and not state.live:
                return Ended(tuple(state.entries), known, why[0], why[1], tuple(state.faults))
            time.sleep(POLL_S if state.live else 0.0)
    except KeyboardInterrupt:
        for one in state.live:
            _finish(state, one, one.running.stop("interrupted"))
        return Ended(tuple(state.entries), known, "interrupted; the same command goes on from here", False, tuple(state.faults))


def _recall(state: _State) -> int:
    """Make trials of what this folder's ledger and the shared one know of the candidates; return how many came from elsewhere."""
    campaign = state.campaign
    places = {_key(campaign, i): i for i in range(len(campaign.candidates))}
    state.entries = [entry for entry in read(campaign.folder / LEDGER) if entry.key in places]
    told = {run.index for run in ran_of(campaign.candidates, state.study)[0]}
    count = 0
    for entry in [*state.entries, *(read(campaign.shared) if campaign.shared else [])]:
        index = places.get(entry.key)
        if index is None or index in told or entry.result.end not in TELLING or entry.reference:
            continue
        told.add(index)
        own = entry in state.entries
        count += not own
        add_known(state.study, campaign.candidates, _ran(campaign, index, entry.result), {"known": "this search" if own else "elsewhere"})
        if not own:
            state.entries.append(dataclasses.replace(entry, number=-1))
    return count


def _key(campaign: Campaign, index: int) -> str:
    return key_of(campaign.candidates.job, campaign.candidates.plans[index], campaign.software)


def _folder(campaign: Campaign, number: int) -> Path:
    return campaign.folder / TRIALS / f"{campaign.name[-10:]}-{number:04d}"


def _adopt(state: _State) -> None:
    """Take over the trials that a dead driver of this folder left: those still running or ended; the others are told as nothing."""
    if time.monotonic() - state.looked < PATIENCE_S and state.looked:
        return
    state.looked = time.monotonic()
    campaign = state.campaign
    for trial in orphans(state.study):
        at = _trial(campaign, trial.number, _place(campaign, trial))
        running = campaign.runner.attach(at) if at is not None and at.folder.exists() else None
        if running is None or at is None:
            tell_nothing(state.study, trial.number)
            continue
        said = trial.user_attrs.get("said")
        index = _place(campaign, trial)
        state.live.append(_Live(trial, index or 0, running, at, tuple(said) if said else None, Progress(at)))


def _place(campaign: Campaign, trial: Any) -> int | None:
    from tuner.search.sampler import index_of

    return index_of(campaign.candidates, trial.params)


def _trial(campaign: Campaign, number: int, index: int | None) -> Trial | None:
    if index is None:
        return None
    limits = campaign.limits
    return Trial(
        number=number,
        job=campaign.candidates.job,
        plan=campaign.candidates.plans[index],
        folder=_folder(campaign, number),
        steps=limits.steps,
        warmup=limits.warmup,
        wall_s=limits.wall_s,
        quiet_s=limits.quiet_s,
    )


def _collect(state: _State) -> None:
    """Tell the runs that have ended."""
    for one in list(state.live):
        result = one.running.poll() or _worse(state, one)
        if result is not None:
            state.live.remove(one)
            _finish(state, one, result)


def _worse(state: _State, one: _Live) -> Result | None:
    """Stop a run whose steps are surely slower than the best plan's; return what it showed."""
    limits = state.campaign.limits
    best = min((run.step_s for run in ran_of(state.campaign.candidates, state.study)[0] if run.step_s), default=math.inf)
    if not math.isfinite(best) or not math.isfinite(limits.worse) or one.reference:
        return None
    seen = one.progress.step_s()
    if seen is None or seen < limits.worse * best:
        return None
    stopped = one.running.stop(f"{seen / best:.1f} times as slow as the best plan so far")
    return stopped.model_copy(update={"step_s": seen} if stopped.step_s is None else {})


def _ran(campaign: Campaign, index: int, result: Result) -> Ran:
    end: Any = "oom" if result.end == "oom" else "ok" if result.step_s is not None else "failed"
    return Ran(index, end, result.step_s if end == "ok" else None, _device_bytes(campaign, index, result))


def _device_bytes(campaign: Campaign, index: int, result: Result) -> float | None:
    """Return what a run took on the device: of tensors or the allocator alone, what the model says lies beyond is added."""
    if not result.memory_bytes or result.end == "oom":
        return None
    of = campaign.candidates
    said = of.memory_bytes[index]
    if result.memory_kind == "device":
        return result.memory_bytes
    from tuner.cost_model.estimate import estimate

    stage = estimate(of.job, of.plans[index], of.calibration).worst_stage
    kind = float(getattr(peak_memory(of.job, of.plans[index], of.calibration, stage), result.memory_kind))
    return float(result.memory_bytes + said - kind)


def _finish(state: _State, one: _Live, result: Result) -> None:
    """Keep what a run showed: on disk first, then in the study."""
    campaign = state.campaign
    telling = result.end in TELLING and (result.end != "stopped" or result.step_s is not None)
    low, high = (None, None) if one.said is None else one.said[1:]
    entry = Entry(
        key=_key(campaign, one.index),
        number=one.at.number,
        plan=plan_record(one.at.plan, one.at.job.gpus),
        result=result,
        predicted_s=float(campaign.candidates.step_s[one.index]),
        said_s=one.said[0] if one.said else None,
        low_s=low,
        high_s=high,
        reference=one.reference,
    )
    if all(kept.number != entry.number or kept.key != entry.key or kept.reference != entry.reference for kept in state.entries):
        append(campaign.folder / LEDGER, entry)
        state.entries.append(entry)
        if campaign.shared is not None and telling and result.end != "stopped":
            append(campaign.shared, entry)
    if one.reference:
        return
    if telling:
        state.row = 0
        tell(state.study, one.trial, _ran(campaign, one.index, result), {"reason": result.reason or None})
    else:
        state.row += 1
        where = f" on {', '.join(result.nodes)}" if result.nodes else ""
        state.faults.append(f"run {one.at.number}{where}: {result.reason or result.end}")
        tell_nothing(state.study, one.at.number)


def _spent(state: _State) -> float:
    """Accelerator-seconds of the runs of this search."""
    gpus = state.campaign.candidates.job.gpus
    over = sum(max(entry.result.ended - entry.result.started, 0.0) for entry in state.entries if entry.number >= 0)
    return gpus * (over + sum(time.time() - one.at.folder.stat().st_mtime for one in state.live if one.at.folder.exists()))


def _counted(state: _State) -> int:
    """How many runs of this search were started that say something of a plan or may yet."""
    trials = state.study.get_trials(deepcopy=False)
    return sum("known" not in one.user_attrs and (not one.state.is_finished() or END in one.user_attrs) for one in trials)


def _start(state: _State) -> tuple[str, bool] | None:
    """Start runs while there is room; return why no more will start, and whether that is the search's own rule, else None."""
    campaign, limits = state.campaign, state.campaign.limits
    while len(state.live) < campaign.runner.parallel:
        if state.row >= MOST_FAULTS:
            return f"the machine failed {state.row} times in a row: {state.faults[-1]}", False
        if limits.accelerator_s is not None and _spent(state) >= limits.accelerator_s:
            return f"{limits.accelerator_s / 3600:g} accelerator-hours are spent", False
        if limits.runs is not None and _counted(state) >= limits.runs:
            return f"{limits.runs} runs are done", limits.accelerator_s is None
        said = _believed(state)
        if said is not None and _gained_out(state, said):
            return f"no plan is expected to shorten the best step by {100 * limits.least_gain:g} %", True
        if (reference := _reference(state)) is not None:
            _launch_reference(state, reference)
            continue
        asked = _asked(state)
        if asked is None:
            return "every candidate has run", True
        _launch(state, *asked, said)
    return None


def _asked(state: _State) -> tuple[optuna.Trial, int] | None:
    campaign = state.campaign
    ran, pending = ran_of(campaign.candidates, state.study)
    taken = {run.index for run in ran} | set(pending)
    first = next((index for index in campaign.first if index not in taken), None)
    if first is not None:
        state.study.enqueue_trial(dict(campaign.candidates.words[first]))
    most = campaign.limits.runs
    known = sum("known" in one.user_attrs for one in state.study.get_trials(deepcopy=False))
    return ask(state.study, campaign.candidates, None if most is None else most + known)


def _believed(state: _State) -> Believed | None:
    beliefs = state.campaign.sampler.beliefs
    return None if beliefs is None else beliefs.given(ran_of(state.campaign.candidates, state.study)[0])


def _gained_out(state: _State, said: Believed) -> bool:
    ran, pending = ran_of(state.campaign.candidates, state.study)
    best = min((run.step_s for run in ran if run.step_s), default=None)
    if best is None or not state.campaign.limits.least_gain:
        return False
    left = np.ones(len(state.campaign.candidates), dtype=bool)
    left[[run.index for run in ran] + pending] = False
    return not left.any() or float(gains(said, best)[left].max()) < state.campaign.limits.least_gain


def _launch(state: _State, trial: optuna.Trial, index: int, said: Believed | None) -> None:
    campaign = state.campaign
    at = _trial(campaign, trial.number, index)
    if at is None:
        raise AssertionError("a candidate has a trial")
    told = None
    if said is not None:
        mean, off = float(said.log_s[index]), NORMAL_90 * float(said.deviation[index])
        told = (math.exp(mean), math.exp(mean - off), math.exp(mean + off))
        trial.set_user_attr("said", list(told))
    at.folder.mkdir(parents=True, exist_ok=True)
    try:
        running = campaign.runner.start(at)
    except (InfrastructureError, SpecError):
        tell_nothing(state.study, trial.number)
        raise
    state.live.append(_Live(trial, index, running, at, told, Progress(at)))


def _reference(state: _State) -> int | None:
    """Return the candidate to run again, when it is time: the best one so far."""
    every = state.campaign.limits.reference_every
    own = [entry for entry in state.entries if entry.number >= 0]
    timed = [run for run in ran_of(state.campaign.candidates, state.study)[0] if run.step_s]
    due = len([entry for entry in own if not entry.reference]) // every if every else 0
    done = sum(entry.reference for entry in own) + sum(one.reference for one in state.live)
    return min(timed, key=lambda run: run.step_s or math.inf).index if timed and due > done else None


def _launch_reference(state: _State, index: int) -> None:
    campaign = state.campaign
    done = sum(entry.reference for entry in state.entries)
    at = _trial(campaign, done, index)
    if at is None:
        raise AssertionError("a candidate has a trial")
    at = dataclasses.replace(at, folder=campaign.folder / TRIALS / f"{campaign.name[-10:]}-reference-{done:02d}")
    at.folder.mkdir(parents=True, exist_ok=True)
    running = campaign.runner.attach(at) or campaign.runner.start(at)
    state.live.append(_Live(None, index, running, at, None, Progress(at), reference=True))


def _tell_progress(state: _State, progress: Callable[[str, int, int], None] | None) -> None:
    if progress is None:
        return
    timed = [run.step_s for run in ran_of(state.campaign.candidates, state.study)[0] if run.step_s]
    best = f", best step {min(timed):.3g} s" if timed else ""
    under_way = ", ".join(f"{one.at.number}" for one in state.live)
    runs = state.campaign.limits.runs or len(state.campaign.candidates)
    progress(f"measuring{f' (run {under_way})' if under_way else ''}{best}: run", sum(e.number >= 0 for e in state.entries), runs)
