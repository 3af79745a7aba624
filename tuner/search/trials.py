"""Trials of a measured search as Optuna keeps them: asked for, claimed by one driver among several, told.

A trial that showed something of its plan carries END among its user attributes; one without it (a fault of the machine, a driver that
died, a repeat to see drift) says nothing, and its plan may be proposed again.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

from tuner.launch.processes import alive as lives
from tuner.launch.processes import start_time
from tuner.search.beliefs import Ran

if TYPE_CHECKING:
    from collections.abc import Mapping

    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from tuner.search.candidates import Candidates
    from tuner.search.sampler import PlanSampler

DRIVER = "driver"
REFERENCE = "reference"  # the candidate that a repeat runs: its trial has no knobs, so that no sampler takes it for a proposal
KNOWN = "known"
_UNBORN_S = 2.0  # a trial that nobody claims by then belongs to a driver that died between two writes


def new_study(sampler: PlanSampler, *, name: str | None = None, storage: BaseStorage | None = None) -> optuna.Study:
    """Return the study of this name (in memory where there is no storage), made or resumed."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize", sampler=sampler, study_name=name, storage=storage, load_if_exists=True)


def this_driver() -> str:
    """Return a name of this process that no other has, before or after it, on any host: a process's number comes again."""
    return f"{socket.gethostname()}:{os.getpid()}:{start_time(os.getpid())}"


def alive(driver: str) -> bool:
    """Whether a driver may still be running: one of another host may; "" is none."""
    host, _, rest = driver.partition(":")
    pid, _, since = rest.partition(":")
    elsewhere = bool(host) and host != socket.gethostname()
    return elsewhere or (pid.isdigit() and since.isdigit() and lives(int(pid), int(since)))


def ask(study: optuna.Study, candidates: Candidates, most: int | None = None) -> tuple[optuna.Trial, int] | None:
    """Return a trial to run and its candidate; None when no candidate is left or `most` trials say something of one or are under way.

    Drivers that share a study may be offered one candidate at once: it is the one's whose trial has the lowest number.
    """
    from tuner.search.sampler import index_of, ran_of

    while True:
        ran, pending = ran_of(candidates, study)
        taken = {run.index for run in ran} | set(pending)
        if len(taken) >= len(candidates) or (most is not None and len(taken) >= most):
            return None
        trial = _asked(study, candidates)
        if trial is None:
            continue
        index = index_of(candidates, trial.params)
        before = {index_of(candidates, one.params) for one in _before(study, trial.number, candidates)} - {None}
        if index is not None and index not in before and (most is None or len(before) < most):
            return trial, index
        tell_nothing(study, trial.number)


def _asked(study: optuna.Study, candidates: Candidates) -> optuna.Trial | None:
    """Return a new trial, which the sampler claims for this driver; None for one that a person enqueued with a value that no candidate
    has, and for one that other drivers gave up because this one was stopped for long before it claimed it.
    """
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    from tuner.search.sampler import space_of

    try:
        return study.ask(space_of(candidates))
    except (ValueError, UpdateFinishedTrialError):
        for one in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if one.user_attrs.get(DRIVER) == this_driver() and _asks(one, candidates):
                tell_nothing(study, one.number)
        return None


def _before(study: optuna.Study, number: int, candidates: Candidates) -> list[FrozenTrial]:
    """Return the trials of lower numbers that run or say something of their plan, once the knobs of each are written."""
    from optuna.trial import TrialState

    from tuner.search.sampler import END

    while True:
        earlier = [one for one in study.get_trials(deepcopy=False) if one.number < number and one.state != TrialState.WAITING]
        if not any(_asks(one, candidates) and (unborn(one) or alive(one.user_attrs.get(DRIVER, ""))) for one in earlier):
            return [one for one in earlier if not one.state.is_finished() or END in one.user_attrs]
        time.sleep(0.02)


def _asks(trial: FrozenTrial, candidates: Candidates) -> bool:
    """Whether a driver is about to write a trial's knobs."""
    return not trial.state.is_finished() and REFERENCE not in trial.user_attrs and len(trial.params) < len(candidates.words[0])


def unborn(trial: FrozenTrial) -> bool:
    """Whether an unfinished trial is in the moment between being made and being claimed."""
    begun = trial.datetime_start
    return DRIVER not in trial.user_attrs and begun is not None and time.time() - begun.timestamp() <= _UNBORN_S


def claim(study: optuna.Study, trial: FrozenTrial) -> None:
    """Make this process the driver of a trial."""
    set_attributes(study, trial, {DRIVER: this_driver()})


def set_attributes(study: optuna.Study, trial: optuna.Trial | FrozenTrial, attributes: Mapping[str, Any]) -> None:
    """Set attributes of a trial under way, those that are not None."""
    live = _live(study, trial)
    for name, value in attributes.items():
        if value is not None:
            live.set_user_attr(name, value)


def repeat(study: optuna.Study, index: int) -> FrozenTrial:
    """Return a new trial of this driver that runs a candidate once more."""
    import optuna
    from optuna.trial import TrialState

    attributes = {REFERENCE: index, DRIVER: this_driver()}
    study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes))
    own = [one for one in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)) if attributes.items() <= one.user_attrs.items()]
    return own[-1]


def tell(study: optuna.Study, trial: optuna.Trial | FrozenTrial, ran: Ran, attributes: Mapping[str, Any] | None = None) -> None:
    """Tell how a trial ended: a time, out of memory (a constraint that is violated: pruned) or a fault of the plan (pruned). A trial that
    has ended already stays as it is.
    """
    from tuner.search.sampler import END, MEMORY, STEP_S

    if _finished(study, trial.number):
        return
    live = _live(study, trial)
    set_attributes(study, live, {STEP_S: ran.step_s, MEMORY: ran.memory_bytes, **(attributes or {})})
    live.set_constraint("memory", 1.0 if ran.end == "oom" else 0.0)
    live.set_user_attr(END, ran.end)
    _end(study, trial.number, ran.end, ran.step_s)


def tell_rest(study: optuna.Study, trial: FrozenTrial) -> None:
    """End a trial that carries END already: its driver died between the two."""
    from tuner.search.sampler import END, STEP_S

    _end(study, trial.number, trial.user_attrs[END], trial.user_attrs.get(STEP_S))


def _end(study: optuna.Study, number: int, end: str, step_s: float | None) -> None:
    from optuna.trial import TrialState

    if end == "ok" and step_s is not None:
        study.tell(number, step_s, skip_if_finished=True)
    else:
        study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)


def tell_nothing(study: optuna.Study, number: int, attributes: Mapping[str, Any] | None = None) -> None:
    """Tell that a trial says nothing of its plan: the machine's fault, or nobody runs it any more."""
    from optuna.trial import TrialState

    if attributes and not _finished(study, number):
        set_attributes(study, study.get_trials(deepcopy=False)[number], attributes)
    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _live(study: optuna.Study, trial: optuna.Trial | FrozenTrial) -> optuna.Trial:
    import optuna

    return trial if isinstance(trial, optuna.Trial) else optuna.Trial(study, trial._trial_id)


def _finished(study: optuna.Study, number: int) -> bool:
    return study.get_trials(deepcopy=False)[number].state.is_finished()


def add_known(study: optuna.Study, candidates: Candidates, ran: Ran, attributes: Mapping[str, Any]) -> None:
    """Add a run that is known from elsewhere as a trial."""
    import optuna
    from optuna.trial import TrialState

    from tuner.search.sampler import END, MEMORY, STEP_S, space_of

    told = {END: ran.end, STEP_S: ran.step_s, MEMORY: ran.memory_bytes, **attributes}
    timed = ran.end == "ok" and ran.step_s is not None
    study.add_trial(
        optuna.trial.create_trial(
            params=dict(candidates.words[ran.index]),
            distributions=dict(space_of(candidates)),
            value=ran.step_s if timed else None,
            state=TrialState.COMPLETE if timed else TrialState.PRUNED,
            user_attrs={name: value for name, value in told.items() if value is not None},
            constraints={"memory": 1.0 if ran.end == "oom" else 0.0},
        )
    )


def orphans(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials under way whose driver is known to be dead, or that have none."""
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if not alive(trial.user_attrs.get(DRIVER, "")) and not unborn(trial)]
