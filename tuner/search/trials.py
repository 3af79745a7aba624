"""Trials of a measured search as Optuna keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.search.beliefs import Ran

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage

    from tuner.search.candidates import Candidates
    from tuner.search.sampler import PlanSampler


def new_study(sampler: PlanSampler, *, name: str | None = None, storage: BaseStorage | None = None) -> optuna.Study:
    """Return the study of this name (in memory where there is no storage), made or resumed."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize", sampler=sampler, study_name=name, storage=storage, load_if_exists=True)


def ask(study: optuna.Study, candidates: Candidates) -> tuple[optuna.Trial, int] | None:
    """Return a trial to run and its candidate; None when none is left."""
    from tuner.search.sampler import index_of, ran_of, space_of

    ran, pending = ran_of(candidates, study)
    if len({run.index for run in ran} | set(pending)) >= len(candidates):
        return None
    trial = study.ask(space_of(candidates))
    index = index_of(candidates, trial.params)
    if index is None:
        raise AssertionError(f"the sampler proposed {trial.params}, which is no candidate")
    return trial, index


def tell(study: optuna.Study, trial: optuna.Trial, ran: Ran) -> None:
    """Tell how a trial ended: a time, out of memory (a constraint that is violated: pruned) or a fault of the plan (pruned)."""
    from optuna.trial import TrialState

    from tuner.search.sampler import END, MEMORY, STEP_S

    trial.set_user_attr(END, ran.end)
    for name, value in ((STEP_S, ran.step_s), (MEMORY, ran.memory_bytes)):
        if value is not None:
            trial.set_user_attr(name, value)
    trial.set_constraint("memory", 1.0 if ran.end == "oom" else 0.0)
    if ran.end == "ok" and ran.step_s is not None:
        study.tell(trial, ran.step_s)
    else:
        study.tell(trial, state=TrialState.PRUNED)
