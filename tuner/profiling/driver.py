"""A measured search as it is asked for, and what one driver of it holds. What must survive a driver is in the study and the folders."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.profiling.ledger import key_of
from tuner.search.sampler import END, index_of, ran_of
from tuner.search.trials import KNOWN, REFERENCE

if TYPE_CHECKING:
    from pathlib import Path

    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from tuner.launch.progress import Progress
    from tuner.launch.runner import Runner, Running
    from tuner.launch.trial import Trial
    from tuner.profiling.ledger import Entry
    from tuner.profiling.limits import Limits
    from tuner.profiling.storage import FileLock
    from tuner.search.beliefs import Believed, Ran
    from tuner.search.candidates import Candidates
    from tuner.search.sampler import PlanSampler

LEDGER, TRIALS, LOCK = "measurements.jsonl", "trials", "drivers.lock"
SAID, RESULT, FOLDER = "said", "result", "folder"  # of a trial of Optuna's: what was believed, how it ended, where it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A measured search. folder: where its trials, ledger and lock lie; drivers that share the study may share it (on a file system that
    all see) or have one each. first: candidates that run before any is proposed; software: what else than job and plan a measurement
    depends on; shared: a ledger of measurements of other searches (None: they are not used); run_gpus: accelerators that a
    run takes (0: the job's).
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
    run_gpus: int = 0

    def key(self, index: int) -> str:
        """Return what a run of a candidate is a measurement of."""
        return key_of(self.candidates.job, self.candidates.plans[index], self.software)


@dataclass(slots=True)
class Live:
    """A run under way: its trial in the study, its candidate, its run and how far that is; reference: it repeats a plan to see drift."""

    trial: Any
    index: int
    running: Running
    at: Trial
    progress: Progress
    reference: bool = False


@dataclass(slots=True)
class Driver:
    """entries: every run of the study that ended, and what was known before; kept: the numbers of their trials; unstarted: runs that the
    machine did not let start; unshared: why the ledger that searches share is not used any more; row: faults of the machine in a row;
    looked: when it last looked for trials of dead drivers; full: a start failed beside other runs, so that it waits for one to end.
    """

    campaign: Campaign
    study: optuna.Study
    lock: FileLock
    live: list[Live] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    unstarted: list[str] = field(default_factory=list)
    unshared: str = ""
    row: int = 0
    looked: float = -math.inf
    full: bool = False

    def trials(self) -> list[FrozenTrial]:
        """Return the study's trials by number, those of other drivers too."""
        return self.study.get_trials(deepcopy=False)

    def ran(self) -> list[Ran]:
        """Return what is known of the candidates."""
        return ran_of(self.campaign.candidates, self.study)[0]

    def taken(self) -> set[int]:
        """Return the candidates that are known or under way."""
        ran, pending = ran_of(self.campaign.candidates, self.study)
        return {run.index for run in ran} | set(pending)

    def best_s(self) -> float:
        """Return the shortest step known, inf while there is none."""
        return min((run.step_s for run in self.ran() if run.step_s), default=math.inf)

    def believed(self) -> Believed | None:
        """Return what is believed of the candidates; None for strategies that believe nothing."""
        beliefs = self.campaign.sampler.beliefs
        return None if beliefs is None else beliefs.given(self.ran())

    def place(self, trial: FrozenTrial) -> int | None:
        """Return the candidate that a trial runs, None for one that runs none."""
        index = trial.user_attrs.get(REFERENCE)
        return index_of(self.campaign.candidates, trial.params) if index is None else int(index)

    def own(self) -> list[Entry]:
        """Return the runs of this search that ended."""
        return [entry for entry in self.entries if entry.number >= 0]


def told(trial: FrozenTrial) -> bool:
    """Whether a trial of this search said something of its plan."""
    return END in trial.user_attrs and KNOWN not in trial.user_attrs
