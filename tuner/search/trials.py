"""Trials of a measured search as Optuna keeps them: asked for, claimed by one driver among several, told.

A trial that showed something of its plan carries END among its user attributes; one without it (a fault of the machine, a driver that
died) says nothing, and its plan may be proposed again.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

from tuner.search.beliefs import Ran

if TYPE_CHECKING:
    from collections.abc import Mapping

    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from tuner.search.candidates import Candidates
    from tuner.search.sampler import PlanSampler

DRIVER = "driver"
_UNBORN_S = 5.0  # a trial whose knobs are not written by then belongs to a driver that died


def new_study(sampler: PlanSampler, *, name: str | None = None, storage: BaseStorage | None = None) -> optuna.Study:
    """Return the study of this name (in memory where there is no storage), made or resumed."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize", sampler=sampler, study_name=name, storage=storage, load_if_exists=True)


def this_driver() -> str:
    """Return a name of this process that no other has, before or after it, on any host."""
    return f"{socket.gethostname()}:{os.getpid()}:{started(os.getpid())}"


def started(pid: int) -> str:
    """Return when a process of this host started, in the kernel's ticks ("" where there is none): a number of it may come again."""
    from pathlib import Path

    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def alive(driver: str) -> bool:
    """Whether a driver may still be running: one of another host may."""
    host, _, rest = driver.partition(":")
    pid, _, since = rest.partition(":")
    return host != socket.gethostname() or (pid.isdigit() and bool(since) and started(int(pid)) == since)


def ask(study: optuna.Study, candidates: Candidates, most: int | None = None) -> tuple[optuna.Trial, int] | None:
    """Return a trial to run and its candidate; None when no candidate is left or `most` trials say something of one or are under way.

    Drivers that share a study may be offered one candidate at once: it is the one's whose trial has the lowest number.
    """
    from optuna.trial import TrialState

    from tuner.search.sampler import index_of, ran_of, space_of

    while True:
        ran, pending = ran_of(candidates, study)
        taken = {run.index for run in ran} | set(pending)
        if len(taken) >= len(candidates) or (most is not None and len(taken) >= most):
            return None
        trial = study.ask(space_of(candidates))
        index = index_of(candidates, trial.params)
        if index is None:
            raise AssertionError(f"the sampler proposed {trial.params}, which is no candidate")
        trial.set_user_attr(DRIVER, this_driver())
        before = [index_of(candidates, one.params) for one in _before(study, trial.number)]
        if index not in before and (most is None or len(set(before) - {None}) < most):
            return trial, index
        study.tell(trial, state=TrialState.FAIL)


def _before(study: optuna.Study, number: int) -> list[FrozenTrial]:
    """Return the trials of lower numbers that run or say something of their plan, once the knobs of each are written."""
    from tuner.search.sampler import END

    deadline = time.monotonic() + _UNBORN_S
    while True:
        earlier = [one for one in study.get_trials(deepcopy=False) if one.number < number]
        kept = [one for one in earlier if not one.state.is_finished() or END in one.user_attrs]
        unborn = [one for one in kept if not one.state.is_finished() and DRIVER not in one.user_attrs]
        if not unborn or time.monotonic() > deadline:
            return [one for one in kept if one not in unborn]
        time.sleep(0.02)


def tell(study: optuna.Study, trial: optuna.Trial | FrozenTrial, ran: Ran, attributes: Mapping[str, Any] | None = None) -> None:
    """Tell how a trial ended: a time, out of memory (a constraint that is violated: pruned) or a fault of the plan (pruned)."""
    import optuna
    from optuna.trial import TrialState

    from tuner.search.sampler import END, MEMORY, STEP_S

    live = trial if isinstance(trial, optuna.Trial) else optuna.Trial(study, trial._trial_id)
    told = {STEP_S: ran.step_s, MEMORY: ran.memory_bytes, **(attributes or {})}
    for name, value in told.items():
        if value is not None:
            live.set_user_attr(name, value)
    live.set_constraint("memory", 1.0 if ran.end == "oom" else 0.0)
    live.set_user_attr(END, ran.end)
    if ran.end == "ok" and ran.step_s is not None:
        study.tell(live.number, ran.step_s)
    else:
        study.tell(live.number, state=TrialState.PRUNED)


def tell_nothing(study: optuna.Study, number: int) -> None:
    """Tell that a trial says nothing of its plan: the machine's fault, or nobody runs it any more."""
    from optuna.trial import TrialState

    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


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
        )
    )


def orphans(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials under way whose driver is known to be dead, or that have none."""
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if not alive(trial.user_attrs.get(DRIVER, "")) and _old_enough(trial)]


def _old_enough(trial: FrozenTrial) -> bool:
    """Whether a trial without a driver is past the moment between being asked for and being claimed."""
    begun = trial.datetime_start
    return DRIVER in trial.user_attrs or begun is None or time.time() - begun.timestamp() > _UNBORN_S
