"""Measured searches over a few plans: with a runner that answers at once, and with a shell script for a training program."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.jobs import calibration_of
from tests.search.small import small_job
from tuner.cost_model.rules import legal
from tuner.files import write
from tuner.launch.command import Command, CommandRunner
from tuner.launch.orders import save_result
from tuner.launch.trial import Result, json_text, read_result
from tuner.plan import Plan
from tuner.profiling import campaign as search_loop
from tuner.profiling.campaign import Ended, run
from tuner.profiling.driver import LEDGER, Campaign
from tuner.profiling.ledger import Entry, read
from tuner.profiling.limits import Limits
from tuner.profiling.storage import close_storage, open_storage
from tuner.search.candidates import Candidates
from tuner.search.sampler import END, PlanSampler
from tuner.search.trials import KNOWN, new_study

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import optuna
    from optuna.trial import FrozenTrial

    from tuner.launch.trial import Trial

NAME = "search-0123456789"
WORKLOAD = Path(__file__).with_name("workload.sh")


def candidates(count: int) -> Candidates:
    """Return `count` legal plans of Llama-3 8B on 16 H100."""
    job = small_job()
    axes = itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (0, 1, 3), (0, 1))
    plans = [Plan(tp=tp, pp=pp, micro_batch=mb, zero=zero, sequence_parallel=sp) for tp, pp, mb, zero, sp in axes if tp > 1 or not sp]
    legal_ones = [plan for plan in plans if legal(job, plan)][:count]
    assert len(legal_ones) == count
    return Candidates.of(job, legal_ones, calibration_of(job))


def ok(step_s: float = 1.0, **more: Any) -> Result:
    return Result(end="ok", step_s=step_s, steps=5, spread_s=0.01, versions={}, **more)


@dataclass
class Quick:
    """A run of Scripted's: answers after so many polls."""

    folder: Path
    result: Result
    polls: int = 0
    stopped: str = ""

    def poll(self) -> Result | None:
        if self.polls > 0:
            self.polls -= 1
            return None
        return save_result(self.folder, self.result)

    def stop(self, why: str) -> Result:
        self.stopped = why
        return save_result(self.folder, Result(end="stopped", reason=why, versions={}))


@dataclass
class Scripted:
    """A runner whose trials end as `answer` says of a candidate's place and the trial. It keeps what it was asked for."""

    of: Candidates
    answer: Callable[[int, Trial], Result | Exception] = lambda index, trial: ok(1.0 + index)
    parallel: int = 1
    polls: int = 0
    started: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    runs: list[Quick] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "scripted"

    def start(self, trial: Trial) -> Quick:
        index = self.of.plans.index(trial.plan)
        result = self.answer(index, trial)
        if isinstance(result, Exception):
            raise result
        self.started.append(index)
        self.trials.append(trial)
        write(trial.folder / "trial.json", json_text(trial.record()))
        now = time.time()
        timed = (
            result if result.ended else result.replace(started=now + 1e-3 * len(self.started), ended=now + 1e-3 * len(self.started) + 1.0)
        )
        self.runs.append(Quick(trial.folder, timed, self.polls))
        return self.runs[-1]

    def attach(self, trial: Trial) -> Quick | None:
        result = read_result(trial.folder)
        return None if result is None else Quick(trial.folder, result)


def campaign(
    folder: Path, of: Candidates, runner: Any = None, *, url: str = "", strategy: Any = "random", seed: int = 0, **more: Any
) -> Campaign:
    """Return a search; fields of Limits among `more` are its limits."""
    folder.mkdir(parents=True, exist_ok=True)
    names = Limits.__slots__
    limits = Limits(**({"reference_every": 0} | {name: more.pop(name) for name in names if name in more}))
    fields: dict[str, Any] = {
        "candidates": of, "runner": runner or Scripted(of), "folder": folder, "sampler": PlanSampler(of, strategy, seed),
        "storage": open_storage(url, folder), "name": NAME, "software": "test", "limits": limits,
    }  # fmt: skip
    return Campaign(**(fields | more))


def searched(folder: Path, of: Candidates, runner: Any = None, **more: Any) -> Ended:
    asked = campaign(folder, of, runner, **more)
    try:
        return run(asked)
    finally:
        close_storage(asked.storage)


@contextlib.contextmanager
def opened(of: Candidates, folder: Path, url: str = "") -> Iterator[optuna.Study]:
    """Open the study of a search."""
    storage = open_storage(url, folder)
    try:
        yield new_study(PlanSampler(of, "random"), name=NAME, storage=storage)
    finally:
        close_storage(storage)


def told_trials(of: Candidates, folder: Path, url: str = "") -> list[FrozenTrial]:
    """Return the trials of the search that said something of their plans."""
    with opened(of, folder, url) as study:
        return [one for one in study.get_trials() if one.state.is_finished() and END in one.user_attrs and KNOWN not in one.user_attrs]


def ledger(folder: Path) -> list[Entry]:
    return read(folder / LEDGER)


def script_runner(parallel: int = 1) -> CommandRunner:
    """Return a runner of workload.sh: each trial has a child and a grandchild that would outlive it."""
    command = Command(launcher="workload", command=f"exec bash {shlex.quote(str(WORKLOAD))} {{tp}} {{pp}} {{micro_batch}}")
    return CommandRunner(command=command, parallel=parallel, grace_s=0.2, error_s=0.2)


def drive(folder: str, count: int, runs: int, url: str, parallel: int = 1, seed: int = 0, strategy: str = "random") -> None:
    """Run or resume a search with the script; what a driver process of a test does."""
    of = candidates(count)
    ended = searched(Path(folder), of, script_runner(parallel), url=url, runs=runs, seed=seed, strategy=strategy)
    print(ended.why, ended.faults, flush=True)


def drive_scripted(folder: str, count: int, runs: int, url: str, strategy: str = "random") -> None:
    """Run or resume a search whose trials end at once; in a process of its own."""
    search_loop.POLL_S = 0.02
    searched(Path(folder), candidates(count), url=url, runs=runs, strategy=strategy)
