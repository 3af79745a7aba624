"""Searches that evaluate one plan at a time, for when an evaluation costs seconds: a grid, TPE and a Gaussian process, kept by Optuna.

All draw from the same space and see legal plans only. A plan is evaluated once; the budget counts evaluations.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tuner.cost_model.estimate import estimate
from tuner.errors import one_problem
from tuner.search.blocks import conditional_choices
from tuner.search.exhaustive import MAX_P_OOM, Found, Kept, Rows, SweepResult
from tuner.search.gaussian import expected_improvement, features, fit_process, probability_below
from tuner.search.groups import grouping
from tuner.search.pool import Pool, draw_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    import optuna

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.search.exhaustive import Objective
    from tuner.search.space import Space

    Evaluate = Callable[[Plan], tuple[float, float, float]]

Strategy = Literal["grid", "tpe", "gp"]
STRATEGIES: tuple[Strategy, ...] = ("grid", "tpe", "gp")
LARGEST_GRID = 5_000
_STARTUP = 16
_REPEATS = 4  # proposals of a plan already seen, in a row, before an unseen one is drawn
_CANDIDATES = 4_096


def study(
    job: Job,
    space: Space,
    calibration: Calibration,
    *,
    strategy: Strategy,
    trials: int = 200,
    seed: int = 0,
    objective: Objective = "throughput",
    top_k: int = 10,
    max_p_oom: float = MAX_P_OOM,
    max_memory: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
    evaluate: Evaluate | None = None,
    distinct: bool = False,
) -> SweepResult:
    """Return what `trials` evaluations found, in the form of a sweep's result (plans and legal count the evaluated ones).

    evaluate(plan) returns step seconds, bytes and the probability of running out; the cost model when not given. A plan that does
    not fit is a constraint that is violated, not an error. The same seed gives the same result.
    """
    if evaluate is None:

        def evaluate(plan: Plan) -> tuple[float, float, float]:
            of = estimate(job, plan, calibration)
            return float(of.step_s), float(of.memory_bytes), float(of.p_oom)

    start = time.perf_counter()
    pool = draw_pool(space, seed)
    if strategy == "grid" and (not pool.complete or pool.legal > min(trials, LARGEST_GRID)):
        most = min(trials, LARGEST_GRID)
        raise one_problem(
            "--strategy",
            "",
            strategy,
            f"visits every plan: {pool.legal:,} are legal, {most:,} the budget",
            "narrow the space, or exhaustive",
        )
    run = _Run(space=space, job=job, evaluate=evaluate, objective=objective, max_p_oom=max_p_oom, max_memory=max_memory)
    budget = min(trials, pool.legal)
    proposals = _PROPOSERS[strategy](run, pool, seed)
    while len(run.seen) < budget:
        run.tell(*proposals.ask())
        if progress is not None:
            progress(len(run.seen), budget)
    return run.result(top_k, time.perf_counter() - start, distinct)


@dataclass(slots=True, kw_only=True)
class _Run:
    """The evaluations so far, by index of the plan, and the Optuna study that keeps them."""

    space: Space
    job: Job
    evaluate: Evaluate
    objective: Objective
    max_p_oom: float
    max_memory: float
    seen: dict[int, Found] = field(default_factory=dict)
    study: optuna.Study = field(init=False)

    def value(self, found: Found) -> float:
        return found.memory_bytes if self.objective == "memory" else found.step_s

    def fits(self, found: Found) -> bool:
        return found.p_oom < self.max_p_oom and found.memory_bytes <= self.max_memory

    def excess(self, found: Found) -> float:
        """By how much a plan misses fitting: 0 where it fits, else positive."""
        if self.fits(found):
            return 0.0
        return max(found.p_oom - self.max_p_oom, found.memory_bytes / self.max_memory - 1.0, 1e-9)

    def tell(self, trial: optuna.Trial, index: int | None) -> None:
        """Evaluate the plan and tell Optuna. A trial that led to no plan, or to one already seen, teaches nothing: it failed."""
        import optuna

        if index is None:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        if index not in self.seen:
            self.seen[index] = Found(index, *self.evaluate(self.space.plan_at(index)))
        found = self.seen[index]
        trial.set_user_attr("plan", index)
        trial.set_constraint("memory", self.excess(found))
        self.study.tell(trial, self.value(found))

    def result(self, top_k: int, seconds: float, distinct: bool) -> SweepResult:
        kept = Kept(self.objective, max(top_k, 1), grouping(self.space) if distinct else None)
        rows = Rows.of(list(self.seen.values()))
        fitting = rows.take(np.flatnonzero([self.fits(found) for found in self.seen.values()]))
        if len(fitting.index):
            kept.see_fitting(fitting)
        if len(rows.index):
            kept.see_legal(rows)
        return SweepResult(
            space=self.space,
            objective=self.objective,
            combinations=self.space.size,
            plans=len(self.seen),
            legal=len(self.seen),
            fit=len(fitting.index),
            seconds=seconds,
            best=kept.best.found()[:top_k],
            pareto=kept.front.found(),
            leanest=next(iter(kept.leanest.found()), None),
            like=kept.like()[:top_k],
        )


def _optuna_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize", sampler=sampler)


class _Grid:
    """Every legal plan in the order of the space, put to Optuna one by one (its GridSampler knows products only)."""

    def __init__(self, run: _Run, pool: Pool, seed: int) -> None:
        from optuna.samplers import RandomSampler

        run.study = _optuna_study(RandomSampler(seed=seed))
        self.run, self.left = run, iter(np.sort(pool.indices).tolist())

    def ask(self) -> tuple[optuna.Trial, int]:
        index = next(self.left)
        return _trial_of(self.run, index), index


class _Tpe:
    """Tree-structured Parzen estimator: knob by knob, each offered the values that some legal plan still has.

    A parameter's name tells the values it was offered, so that its distribution never changes.
    """

    def __init__(self, run: _Run, pool: Pool, seed: int) -> None:
        from optuna.samplers import TPESampler

        run.study = _optuna_study(TPESampler(seed=seed, n_startup_trials=_STARTUP, multivariate=False))
        self.run, self.unseen, self.repeats = run, iter(pool.indices.tolist()), 0

    def ask(self) -> tuple[optuna.Trial, int | None]:
        if self.repeats >= _REPEATS:
            self.repeats = 0
            return self._draw()
        trial = self.run.study.ask()
        index = conditional_choices(self.run.space, lambda knob, words: str(trial.suggest_categorical(parameter(knob, words), words)))
        self.repeats = self.repeats + 1 if index is None or index in self.run.seen else 0
        return trial, index

    def _draw(self) -> tuple[optuna.Trial, int | None]:
        """Return a trial of the next unseen plan of the pool."""
        index = next((i for i in self.unseen if i not in self.run.seen), None)
        if index is None:
            return self.run.study.ask(), None
        return _trial_of(self.run, index), index


def parameter(knob: str, words: list[str]) -> str:
    """Return the name of the parameter that offers these values of a knob."""
    spelled = f"{knob} of {','.join(words)}"
    return spelled if len(spelled) <= 100 else f"{knob} of {len(words)} ({hashlib.sha256(spelled.encode()).hexdigest()[:12]})"


def _trial_of(run: _Run, index: int) -> optuna.Trial:
    """Return a trial with the parameters that lead to this plan."""
    wanted = run.space.words_at(index)
    chosen: dict[str, str] = {}

    def choose(knob: str, words: list[str]) -> str:
        chosen[parameter(knob, words)] = wanted[knob]
        return wanted[knob]

    conditional_choices(run.space, choose)
    run.study.enqueue_trial(chosen)
    trial = run.study.ask()
    conditional_choices(run.space, lambda knob, words: str(trial.suggest_categorical(parameter(knob, words), words)))
    return trial


class _Gp:
    """A Gaussian process on the logarithm of the objective, and one on fitting, over the plans of the pool."""

    def __init__(self, run: _Run, pool: Pool, seed: int) -> None:
        from optuna.samplers import RandomSampler

        run.study = _optuna_study(RandomSampler(seed=seed))
        self.run, self.pool = run, pool
        self.random = np.random.default_rng(seed)
        self.at = features(run.job, run.space.plans_at(pool.indices.tolist())) if len(pool.indices) else np.empty((0, 1))
        scale = self.at.std(axis=0) if len(self.at) else np.ones(1)
        self.at = self.at / np.where(scale > 0, scale, 1.0)
        self.left = np.ones(len(pool.indices), dtype=bool)
        self.order: list[int] = []

    def ask(self) -> tuple[optuna.Trial, int]:
        place = len(self.order) if len(self.order) < _STARTUP else self._propose()
        self.left[place] = False
        self.order.append(place)
        index = int(self.pool.indices[place])
        return _trial_of(self.run, index), index

    def _propose(self) -> int:
        """Return the place in the pool of the candidate with the most to gain."""
        found = [self.run.seen[int(self.pool.indices[place])] for place in self.order]
        fits = np.array([self.run.fits(f) for f in found])
        values = np.log([self.run.value(f) for f in found])
        open_ = np.flatnonzero(self.left)
        candidates = open_ if len(open_) <= _CANDIDATES else self._candidates(open_, values, fits)
        seen, at = self.at[self.order], self.at[candidates]
        gain = np.ones(len(candidates))
        if fits.any():
            mean, deviation = fit_process(seen, values).predict(at)
            gain = expected_improvement(mean, deviation, float(values[fits].min()))
        if not fits.all():
            mean, deviation = fit_process(seen, np.where(fits, -1.0, 1.0)).predict(at)
            gain = gain * probability_below(mean, deviation)
        return int(candidates[np.argmax(gain)])

    def _candidates(self, open_: Any, values: Any, fits: Any) -> Any:
        """Return half of the candidates near the best plan so far, half at random."""
        best = self.order[int(np.argmin(np.where(fits, values, values + 1e6)))]
        distance = ((self.at[open_] - self.at[best]) ** 2).sum(axis=1)
        near = open_[np.argsort(distance, kind="stable")[: _CANDIDATES // 2]]
        return np.union1d(near, self.random.choice(open_, _CANDIDATES // 2, replace=False))


_PROPOSERS: dict[Strategy, type[_Grid] | type[_Tpe] | type[_Gp]] = {"grid": _Grid, "tpe": _Tpe, "gp": _Gp}
