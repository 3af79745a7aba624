"""Optuna samplers over a list of candidate plans. Only this file imports Optuna at its head: it is imported where a study is run.

A trial's parameters are the knobs that tell the candidates apart, under their own names, so that a dashboard shows them; a combination
that is no candidate is never proposed, nor one that ran or is under way.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from tuner.errors import one_problem
from tuner.search.beliefs import Ran
from tuner.search.proposal import propose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from tuner.arrays import Floats
    from tuner.search.candidates import Candidates

Strategy = Literal["residual", "tpe", "gp", "random"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
END, STEP_S, MEMORY = "end", "step_s", "memory_bytes"
ENDS = ("ok", "oom", "failed", "stopped")
# Proposals of an inner sampler that are no open candidate before one is drawn. The Gaussian process proposes where its acquisition peaks:
# asked again it says the same, after another fit.
_TRIES = {"tpe": 60, "gp": 1}


def index_of(candidates: Candidates, params: Mapping[str, Any]) -> int | None:
    """Return the candidate that a trial's parameters spell, None where it is none of them."""
    return candidates.places.get(tuple(sorted(params.items())))


def ran_of(candidates: Candidates, study: Study) -> tuple[list[Ran], list[int]]:
    """Return what the study's trials showed, each candidate once (drivers that start at once may both add what is known of it), and the
    candidates under way.
    """
    ran: dict[int, Ran] = {}
    pending = []
    for trial in study.get_trials(deepcopy=False):
        index = index_of(candidates, trial.params)
        if index is None:
            continue
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            pending.append(index)
        elif index not in ran and trial.user_attrs.get(END) in ENDS:
            ran[index] = _ran(index, trial.user_attrs)
    return list(ran.values()), pending


def _ran(index: int, told: Mapping[str, Any]) -> Ran:
    end = told[END]
    return Ran(index, end if end in ("oom", "failed") else "ok", told.get(STEP_S), told.get(MEMORY))


def space_of(candidates: Candidates) -> dict[str, BaseDistribution]:
    """Return the values that each knob has among the candidates."""
    names = candidates.words[0]
    values = {name: sorted({words[name] for words in candidates.words}, key=lambda value: (str(type(value)), value)) for name in names}
    return {name: CategoricalDistribution(of) for name, of in values.items()}


class PlanSampler(BaseSampler):
    """Proposes candidates by what the study's trials showed (strategy residual), or what another sampler of Optuna's makes of them.

    cost_s: seconds that a run costs for its step time (None: all runs cost the same). Raises SpecError where a package is missing.
    """

    def __init__(
        self, candidates: Candidates, strategy: Strategy = "residual", seed: int = 0, cost_s: Callable[[Floats], Floats] | None = None
    ) -> None:
        if strategy == "gp" and find_spec("torch") is None:
            raise one_problem("strategy", "", strategy, "needs torch, which is not installed", "pip install torch, or --strategy residual")
        self.candidates, self.strategy, self.cost_s = candidates, strategy, cost_s
        self.beliefs = candidates.beliefs() if strategy == "residual" else None
        self.random = np.random.default_rng(seed)
        inner = {"tpe": TPESampler, "random": RandomSampler, "gp": GPSampler}.get(strategy)
        self.inner: BaseSampler | None = None if inner is None else inner(seed=seed)
        self.space = space_of(candidates)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Claim a new trial for this driver at once: proposing its knobs may take seconds."""
        from tuner.search.trials import DRIVER, this_driver

        if trial.state == TrialState.RUNNING and DRIVER not in trial.user_attrs:
            study._storage.set_trial_user_attr(trial._trial_id, DRIVER, this_driver())

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002 (Optuna's)
        """Return the knobs of the candidates."""
        return self.space

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Return the knobs of the candidate to run next."""
        ran, pending = ran_of(self.candidates, study)
        open_ = self._open(trial, {run.index for run in ran} | set(pending))
        if not open_:
            return {}
        if self.beliefs is None:
            return dict(self.candidates.words[self._inner(study, trial, search_space, open_)])
        proposal = propose(self.beliefs, ran, open_=open_, pending=pending, cost_s=self.cost_s)
        return {} if proposal is None else dict(self.candidates.words[proposal.index])

    def _open(self, trial: FrozenTrial, taken: AbstractSet[int]) -> list[int]:
        """Return the candidates that neither ran nor run and have the knobs that a person set when enqueuing the trial."""
        fixed = trial.system_attrs.get("fixed_params", {}).items()
        return [i for i, words in enumerate(self.candidates.words) if i not in taken and fixed <= words.items()]

    def _inner(self, study: Study, trial: FrozenTrial, space: dict[str, BaseDistribution], open_: Sequence[int]) -> int:
        """Return the first proposal of the inner sampler that is open; else, for a process, the open candidate that shares most knobs
        with it, for the others one at random.
        """
        wanted, params = set(open_), {}
        for _ in range(_TRIES.get(self.strategy, 0)):
            params = self._proposed(study, trial, space)
            index = index_of(self.candidates, params)
            if index is not None and index in wanted:
                return index
        if self.strategy == "gp":
            shared = np.array([sum(params[name] == value for name, value in self.candidates.words[i].items()) for i in open_])
            return int(self.random.choice(np.array(open_)[shared == shared.max()]))
        return int(self.random.choice(open_))

    def _proposed(self, study: Study, trial: FrozenTrial, space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Return the knobs that the inner sampler proposes, together where it can, one by one where not."""
        assert self.inner is not None  # noqa: S101 -- who asks has one
        together = self.inner.infer_relative_search_space(study, trial)
        relative = self.inner.sample_relative(study, trial, space if together else {})
        return {
            name: relative[name] if name in relative else self.inner.sample_independent(study, trial, name, of)
            for name, of in space.items()
        }

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Return a value of a knob on its own: what Optuna asks where no candidate is left."""
        return RandomSampler(seed=0).sample_independent(study, trial, param_name, param_distribution)
