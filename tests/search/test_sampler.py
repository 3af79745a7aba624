"""One suite that every strategy passes, and what each refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.profiling.searches import candidates
from tuner.errors import SpecError
from tuner.search import sampler
from tuner.search.beliefs import Ran
from tuner.search.sampler import STRATEGIES, PlanSampler, index_of, ran_of
from tuner.search.trials import add_known, ask, new_study, tell

if TYPE_CHECKING:
    from tuner.search.candidates import Candidates

COUNT = 14


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    if request.param == "gp":
        pytest.importorskip("torch")
    return request.param


def order(of: Candidates, strategy: Any, seed: int, most: int | None = None, study: Any = None) -> list[int]:
    """Return the candidates in the order in which a study runs them; one in five runs out of memory."""
    study = study or new_study(PlanSampler(of, strategy, seed))
    found: list[int] = []
    while (asked := ask(study, of, most)) is not None:
        trial, index = asked
        assert trial.params == of.words[index]
        found.append(index)
        tell(study, trial, Ran(index, "oom") if index % 5 == 4 else Ran(index, "ok", 1.0 + (index * 7 % COUNT)))
    return found


def test_every_candidate_is_visited_once_in_the_seeds_order(strategy: Any) -> None:
    of = candidates(COUNT)
    first = order(of, strategy, 3)
    assert sorted(first) == list(range(COUNT))
    assert order(of, strategy, 3) == first


def test_a_study_that_is_resumed_goes_on(strategy: Any) -> None:
    of = candidates(COUNT)
    study = new_study(PlanSampler(of, strategy, 0), name="one")
    before = order(of, strategy, 0, 5, study)
    study.sampler = PlanSampler(of, strategy, 0)
    after = order(of, strategy, 0, None, study)
    assert len(before) == 5 and sorted(before + after) == list(range(COUNT))


def test_plans_that_are_enqueued_come_first(strategy: Any) -> None:
    of = candidates(COUNT)
    study = new_study(PlanSampler(of, strategy, 0))
    study.enqueue_trial(dict(of.words[9]))
    part = {"micro_batch": of.words[2]["micro_batch"]}
    study.enqueue_trial(part)  # the rest of it is the strategy's to choose
    found = order(of, strategy, 0, 4, study)
    assert found[0] == 9 and of.words[found[1]]["micro_batch"] == part["micro_batch"]


def test_what_is_under_way_is_not_proposed(strategy: Any) -> None:
    of = candidates(COUNT)
    study = new_study(PlanSampler(of, strategy, 0))
    found = []
    while (asked := ask(study, of)) is not None:
        found.append(asked[1])
    assert sorted(found) == list(range(COUNT))
    assert sorted(ran_of(of, study)[1]) == list(range(COUNT))


def test_strategies_are_not_one() -> None:
    of = candidates(COUNT)
    assert order(of, "random", 0) != order(of, "random", 1)
    assert order(of, "residual", 0) == order(of, "residual", 1)  # nothing of it is random
    assert len({tuple(order(of, one, 0)) for one in ("residual", "tpe", "random")}) == 3


def test_gp_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"strategy.*gp.*needs torch, which is not installed.*--strategy residual"):
        PlanSampler(candidates(3), "gp")
    PlanSampler(candidates(3), "tpe")


def test_what_two_drivers_both_add_counts_once() -> None:
    of = candidates(COUNT)
    study = new_study(PlanSampler(of))
    for _ in range(2):
        add_known(study, of, Ran(3, "ok", 2.0, 1e9), {"known": "elsewhere"})
    assert ran_of(of, study) == ([Ran(3, "ok", 2.0, 1e9)], [])


def test_trials_of_other_plans_are_none_of_the_candidates() -> None:
    of = candidates(COUNT)
    assert index_of(of, {"tp": 64}) is None
    assert [index_of(of, words) for words in of.words] == list(range(COUNT))
