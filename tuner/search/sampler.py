"""Optuna samplers over a list of candidate plans. Only this file imports Optuna at its head: it is imported where a study is run.

A trial's parameters are the knobs that tell the candidates apart, under their own names, so that a dashboard shows them; a combination
that is no candidate is never proposed, nor one that ran or is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from tuner.search.beliefs import Ran
from tuner.search.proposal import propose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from tuner.arrays import Floats
    from tuner.search.candidates import Candidates

Strategy = Literal["residual", "tpe", "gp", "random"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
END, STEP_S, MEMORY = "end", "step_s", "memory_bytes"
ENDS = ("ok", "oom", "failed", "stopped")
_TRIES = 60  # proposals of an inner sampler that are no open candidate before one is drawn


def index_of(candidates: Candidates, params: Mapping[str, Any]) -> int | None:
    """Return the candidate that a trial's parameters spell, None where it is none of them."""
    return candidates.places.get(tuple(sorted(params.items())))


def ran_of(candidates: Candidates, study: Study) -> tuple[list[Ran], list[int]]:
    """Return what the study's trials showed, and the candidates under way."""
    ran, pending = [], []
    for trial in study.get_trials(deepcopy=False):
        index = index_of(candidates, trial.params)
        if index is None:
            continue
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            pending.append(index)
        elif trial.user_attrs.get(END) in ENDS:
            end = trial.user_attrs[END]
            ran.append(Ran(index, end if end in ("oom", "failed") else "ok", trial.user_attrs.get(STEP_S), trial.user_attrs.get(MEMORY)))
    return ran, pending


def space_of(candidates: Candidates) -> dict[str, BaseDistribution]:
    """Return the values that each knob has among the candidates."""
    names = candidates.words[0]
    values = {name: sorted({words[name] for words in candidates.words}, key=lambda value: (str(type(value)), value)) for name in names}
    return {name: CategoricalDistribution(of) for name, of in values.items()}


class PlanSampler(BaseSampler):
    """Proposes candidates by what the study's trials showed (strategy residual), or what another sampler of Optuna's makes of them.

    cost_s: seconds that a run costs for its step time (None: all runs cost the same).
    """

    def __init__(
        self, candidates: Candidates, strategy: Strategy = "residual", seed: int = 0, cost_s: Callable[[Floats], Floats] | None = None
    ) -> None:
        self.candidates, self.strategy, self.cost_s = candidates, strategy, cost_s
        self.beliefs = candidates.beliefs() if strategy == "residual" else None
        self.random = np.random.default_rng(seed)
        inner = {"tpe": TPESampler, "random": RandomSampler, "gp": GPSampler}.get(strategy)
        self.inner: BaseSampler | None = None if inner is None else inner(seed=seed)
        self.space = space_of(candidates)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002 (Optuna's)
        """Return the knobs of the candidates."""
        return self.space

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Return the knobs of the candidate to run next."""
        ran, pending = ran_of(self.candidates, study)
        taken = {run.index for run in ran} | set(pending)
        open_ = [i for i in range(len(self.candidates)) if i not in taken]
        if not open_:
            return {}
        if self.beliefs is not None:
            proposal = propose(self.beliefs, ran, open_=open_, pending=pending, cost_s=self.cost_s)
            return {} if proposal is None else dict(self.candidates.words[proposal.index])
        return dict(self.candidates.words[self._inner(study, trial, search_space, open_)])

    def _inner(self, study: Study, trial: FrozenTrial, space: dict[str, BaseDistribution], open_: Sequence[int]) -> int:
        """Return the first proposal of the inner sampler that is open, else one at random."""
        inner, wanted = self.inner, set(open_)
        if self.strategy != "random" and inner is not None:
            for _ in range(_TRIES):
                relative = inner.sample_relative(study, trial, inner.infer_relative_search_space(study, trial) and space)
                params = {
                    name: relative[name] if name in relative else inner.sample_independent(study, trial, name, of)
                    for name, of in space.items()
                }
                if (index := index_of(self.candidates, params)) in wanted:
                    return int(index or 0)
        return int(self.random.choice(open_))

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Return a value of a knob on its own: what Optuna asks where no candidate is left."""
        return RandomSampler(seed=0).sample_independent(study, trial, param_name, param_distribution)
