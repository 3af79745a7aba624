"""Optuna's searches see legal plans only, evaluate each once, and agree with the sweep on a small space."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.jobs import calibration_of, gpt_job
from tests.search.small import one_by_one, small_space, tiny_space
from tuner.cost_model.estimate import estimate
from tuner.cost_model.rules import distinct, legal
from tuner.errors import SpecError
from tuner.plan import Plan
from tuner.search.blocks import conditional_choices
from tuner.search.exhaustive import SweepResult, sweep
from tuner.search.gaussian import expected_improvement, features, fit_process, probability_below
from tuner.search.pool import draw_pool
from tuner.search.space import Space, SpaceSpec, build_space, default_space
from tuner.search.study import STRATEGIES, parameter, study


def studied(space: Space, **options: Any) -> SweepResult:
    return study(space.job, space, calibration_of(space.job), **options)


@pytest.fixture(scope="module")
def tiny() -> Space:
    return tiny_space()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_ends_where_the_sweep_does(tiny: Space, strategy: Any) -> None:
    whole = sweep(tiny.job, tiny, calibration_of(tiny.job))
    result = studied(tiny, strategy=strategy, trials=10_000)
    assert 20 < result.legal == whole.legal  # every legal plan, once, and no more
    for name in ("best", "pareto", "leanest", "fit"):
        assert getattr(result, name) == getattr(whole, name)


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_a_budget_bounds_the_evaluations_and_none_is_spent_twice(strategy: Any) -> None:
    space = small_space()
    plans: list[Plan] = []

    def evaluate(plan: Plan) -> tuple[float, float, float]:
        plans.append(plan)
        return 1.0 / (plan.tp * plan.micro_batch), 1e9 * plan.micro_batch, 0.0

    result = studied(space, strategy=strategy, trials=40, evaluate=evaluate)
    assert len(plans) == len(set(map(repr, plans))) == result.plans == 40
    assert all(legal(space.job, plan) and distinct(space.job, plan) for plan in plans)
    best = space.plan_at(result.best[0].index)
    assert best.micro_batch == 2
    assert best.tp >= 8


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_a_seed_repeats_a_study(strategy: Any) -> None:
    space = small_space()
    runs = [studied(space, strategy=strategy, trials=24, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].best == runs[1].best
    assert runs[0].pareto == runs[1].pareto
    assert runs[0].best != runs[2].best


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_learning_beats_drawing(strategy: Any) -> None:
    """Of 60 evaluations in a space of hundreds of thousands, the best is better than that of 60 random ones, on average of seeds."""
    job = gpt_job(attention="flash")
    axes: dict[str, Any] = {"recompute": ["none", "full", "full:4"]}
    space = build_space(job, SpaceSpec(axes=axes, fix={"offload": "none", "shard_group": 0, "cp": 1}))
    calibration = calibration_of(job)

    def random_best(seed: int) -> float:
        drawn = Plan.table([space.plan_at(int(i)) for i in draw_pool(space, seed).indices[:60]])
        of = estimate(job, drawn, calibration)
        return float(np.where(of.p_oom < 0.05, of.step_s, np.inf).min())

    learned = [study(job, space, calibration, strategy=strategy, trials=60, seed=seed).best[0].step_s for seed in range(3)]
    assert np.mean(learned) < np.mean([random_best(seed) for seed in range(30)])  # what 60 draws find differs much by seed


def test_what_does_not_fit_is_a_constraint(tiny: Space) -> None:
    bar = sorted(f.memory_bytes for f in one_by_one(tiny))[5]
    result = studied(tiny, strategy="gp", trials=10_000, max_memory=bar)
    assert all(f.memory_bytes <= bar for f in result.best)
    assert result.fit <= 6


def test_a_grid_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(SpecError, match="visits every plan"):
        studied(small_space(), strategy="grid", trials=10)


def test_a_space_without_legal_plans_ends_at_once() -> None:
    space = small_space(fix={"tp": 3})
    for strategy in STRATEGIES:
        result = studied(space, strategy=strategy, trials=50)
        assert (result.plans, result.best, result.leanest) == (0, (), None)


def test_choices_are_those_of_legal_plans(tiny: Space) -> None:
    offered: dict[str, list[str]] = {}

    def last(knob: str, words: list[str]) -> str:
        offered[knob] = words
        return words[-1]

    index = conditional_choices(tiny, last)
    assert index is not None
    plan = tiny.plan_at(index)
    assert legal(tiny.job, plan)
    assert offered["pp"] == ["1", "2", "4"]
    assert all(len(words) > 1 for words in offered.values())


def test_a_parameter_s_name_tells_its_values() -> None:
    assert parameter("tp", ["1", "2"]) == "tp of 1,2"
    long = parameter("recompute", [f"full:{n}" for n in range(99)])
    assert long.startswith("recompute of 99 (")
    assert len(long) < 100
    assert long != parameter("recompute", [f"full:{n}" for n in range(1, 100)])


def test_a_pool_is_every_plan_or_an_even_sample() -> None:
    space = small_space()
    legal_ones = [f.index for f in one_by_one(space)]
    whole = draw_pool(space, seed=0)
    assert whole.complete
    assert sorted(whole.indices.tolist()) == legal_ones
    part = draw_pool(space, seed=0, most=50)
    assert len(set(part.indices.tolist())) == 50
    assert set(part.indices.tolist()) <= set(legal_ones)
    assert part.legal == len(legal_ones)
    large = draw_pool(default_space(gpt_job(attention="flash")), seed=0, most=20_000)
    pp = np.asarray(default_space(gpt_job(attention="flash")).plans_at(large.indices.tolist()).pp)
    assert len(np.unique(pp)) == 6  # all of the space, not its first blocks


def test_a_process_goes_through_what_it_saw() -> None:
    at = np.array([[0.0], [1.0], [2.0], [4.0]])
    values = np.array([1.0, 0.0, 1.0, 9.0])
    process = fit_process(at, values)
    mean, deviation = process.predict(at)
    assert mean == pytest.approx(values, abs=0.01)
    assert (deviation < 0.1 * values.std()).all()
    far, unsure = process.predict(np.array([[100.0]]))
    assert far[0] == pytest.approx(values.mean())
    assert unsure[0] == pytest.approx(values.std())


def test_expected_improvement_by_hand() -> None:
    """mean = best: EI = s / sqrt(2 pi) = 0.39894 s; far below: best - mean; far above: 0."""
    gain = expected_improvement(np.array([1.0, -9.0, 11.0]), np.array([1.0, 1.0, 1.0]), 1.0)
    assert gain == pytest.approx([0.3989422804, 10.0, 0.0], abs=1e-9)
    assert probability_below(np.array([0.0, -1.6448536]), np.array([1.0, 1.0])) == pytest.approx([0.5, 0.95], abs=1e-6)


def test_features_tell_plans_apart() -> None:
    space = small_space()
    found = [f.index for f in one_by_one(space)]
    rows = features(space.job, space.plans_at(found))
    assert len(np.unique(rows, axis=0)) == len(found)


def test_the_sweep_needs_no_optuna() -> None:
    code = "import sys, tuner.search.exhaustive, tuner.search.study; sys.exit('optuna' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
