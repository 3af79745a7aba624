"""Runs of a driver: started, looked after, told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tuner.cost_model.memory import NORMAL_90
from tuner.errors import InfrastructureError, SpecError
from tuner.launch.progress import Progress
from tuner.launch.trial import Trial
from tuner.profiling.cheap import counts_of
from tuner.profiling.driver import FOLDER, RESULT, SAID, TRIALS, Live
from tuner.profiling.ledger import INTERRUPTED, tells
from tuner.profiling.nodes import failing
from tuner.profiling.recall import keep, ran
from tuner.search.trials import REFERENCE, set_attributes, tell, tell_nothing

if TYPE_CHECKING:
    from pathlib import Path

    import optuna
    from optuna.trial import FrozenTrial

    from tuner.launch.trial import Result
    from tuner.profiling.driver import Driver
    from tuner.search.beliefs import Believed


def trial_of(driver: Driver, number: int, index: int, folder: Path | None = None) -> Trial:
    """Return what a runner is asked for: a candidate as trial `number` of the study, in this search's folder unless it has one."""
    campaign, limits = driver.campaign, driver.campaign.limits
    plan = campaign.candidates.plans[index]
    return Trial(
        number=number,
        job=campaign.candidates.job,
        plan=plan,
        folder=folder or campaign.folder / TRIALS / f"{campaign.name[-10:]}-{number:04d}",
        steps=limits.steps,
        warmup=limits.warmup,
        wall_s=limits.wall_s,
        quiet_s=limits.quiet_s,
        short=counts_of(campaign.candidates.job, plan, float(campaign.candidates.step_s[index]), limits),
        exclude=failing(driver.own()),
    )


def launch(driver: Driver, trial: optuna.Trial | FrozenTrial, index: int, said: Believed | None) -> None:
    """Start a run; what the machine does not let start is a fault of it. Raises SpecError for a plan that cannot be asked for."""
    at = trial_of(driver, trial.number, index)
    told = {FOLDER: str(at.folder.absolute())} | ({} if said is None else {SAID: _range(said, index)})
    set_attributes(driver.study, trial, told)
    try:
        at.folder.mkdir(parents=True, exist_ok=True)
        running = driver.campaign.runner.start(at)
    except SpecError:
        tell_nothing(driver.study, trial.number)
        raise
    except (InfrastructureError, OSError) as error:
        _not_started(driver, trial.number, str(error))
    else:
        driver.live.append(Live(trial, index, running, at, Progress(at), reference=REFERENCE in trial.user_attrs))


def _range(said: Believed, index: int) -> list[float]:
    """Return what is believed of a candidate's step time and the ends of its 90 % range, in seconds."""
    mean, off = float(said.log_s[index]), NORMAL_90 * float(said.deviation[index])
    return [math.exp(mean), math.exp(mean - off), math.exp(mean + off)]


def _not_started(driver: Driver, number: int, why: str) -> None:
    """Note a fault. Beside other runs (a node is theirs) nothing is started until one of them ends; alone it counts against the machine."""
    driver.unstarted.append(f"run {number} did not start: {why}")
    driver.full = bool(driver.live)
    driver.row += not driver.live
    tell_nothing(driver.study, number)


def collect(driver: Driver) -> None:
    """Tell the runs that have ended."""
    for one in list(driver.live):
        result = one.running.poll() or _worse(driver, one)
        if result is not None:
            finish(driver, one, result)


def stop(driver: Driver) -> None:
    """Stop the runs under way: they say nothing of their plans."""
    for one in list(driver.live):
        finish(driver, one, one.running.stop(INTERRUPTED))


def _worse(driver: Driver, one: Live) -> Result | None:
    """Stop a run whose steps are surely slower than the best plan's; return what it showed."""
    worse, seen = driver.campaign.limits.worse, None if one.reference else one.progress.step_s()
    if seen is None or not math.isfinite(worse):
        return None
    best = driver.best_s()
    if seen < worse * best:
        return None
    stopped = one.running.stop(f"{seen / best:.1f} times as slow as the best plan so far")
    return stopped.model_copy(update={"step_s": seen} if stopped.end == "stopped" and stopped.step_s is None else {})


def finish(driver: Driver, one: Live, result: Result) -> None:
    """Keep what a run showed: in the study first, then in the ledgers."""
    driver.live.remove(one)
    driver.full = False
    told = {RESULT: result.model_dump(mode="json")}
    if one.reference or not tells(result):
        tell_nothing(driver.study, one.at.number, told)
    else:
        of = ran(driver.campaign, one.index, result)
        tell(driver.study, one.trial, of, told | {"reason": result.reason or None})
    driver.row = driver.row + 1 if result.end == "infrastructure" else 0 if tells(result) else driver.row
    keep(driver)
