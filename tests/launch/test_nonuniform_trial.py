"""Runs of replicas of different degree that are refused, and the step from which survivors go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch.ntp_worker import Case
from tuner.launch.nonuniform.failover import Split, Standing, agreed
from tuner.launch.nonuniform.trial import Loss, NonuniformTrial, Phase, refusals
from tuner.model import Model, Moe

PHASE = Phase(degrees=(4, 3), samples=(3, 2), steps=3)


def trial(model: dict[str, Any] | None = None, **changes: Any) -> NonuniformTrial:
    base = Case(degrees=(4, 3), samples=(3, 2)).trial
    job = base.job.replace(model=Model(**base.job.model.model_dump() | (model or {})))
    return base.replace(job=job, **changes)


def test_what_runs_is_not_refused() -> None:
    assert refusals(trial()) == []
    assert refusals(trial({"kv_heads": 1})) == []


REFUSED: list[tuple[NonuniformTrial, str]] = [
    (trial(phases=(PHASE.replace(degrees=(9, 8)),)), "heads = 8 must be at least the largest degree, 9"),
    (trial({"ffn_hidden": 3}), "ffn_hidden = 3 must be at least the largest degree, 4"),
    (trial({"vocab": 2}), "vocab = 2 must be at least the largest degree, 4"),
    (trial({"moe": Moe(experts=4, top_k=2, expert_ffn_hidden=8).model_dump()}), "has experts"),
    (trial({"dropout": True}), "trained with dropout"),
    (trial({"mtp_layers": 1}), "has mtp_layers"),
    (trial({"positions": "alibi"}), "has positions = alibi"),
    (trial({"positions": "learned", "max_positions": 31}, sequence_parallel=True), "padded to 33 for sequence parallelism exceed"),
    (trial(zero=1), "zero = 1: replicas hold the whole optimizer state"),
    (trial(phases=(PHASE.replace(samples=(5,)),)), "must have one count for each of 2 replicas"),
    (trial(lost=(Loss(rank=7, step=1),)), "lost rank 7 in step 1: there are ranks 0 to 6"),
    (trial(lost=(Loss(rank=0, step=4),)), "and steps 1 to 3"),
    (trial(lost=(Loss(rank=0, step=1),), phases=(PHASE, PHASE)), "a run that loses ranks has one phase, not 2"),
    (trial(lost=(Loss(rank=0, step=1),), phases=(Phase(degrees=(4,), samples=(5,), steps=3),)), "there is one alone"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_refusal_says_why(asked: NonuniformTrial, said: str) -> None:
    (why,) = refusals(asked)
    assert said in why


def test_where_nobody_has_committed_the_step_is_repeated() -> None:
    assert agreed([Standing(done=2, ready=False, norm=0.5), Standing(done=2, ready=True, norm=0.5)]) == (2, 0.5)


def test_where_one_has_committed_the_others_finish_with_its_norm() -> None:
    """A rank's own norm is of the step before: that of the new step is with those that have left its sum."""
    assert agreed([Standing(done=2, ready=True, norm=0.5), Standing(done=3, ready=False, norm=0.7)]) == (3, 0.7)


def test_steps_that_cannot_be_brought_together_are_not() -> None:
    with pytest.raises(Split, match="3 steps behind it, another 2 and no gradients"):
        agreed([Standing(done=2, ready=False, norm=0.5), Standing(done=3, ready=False, norm=0.7)])
    with pytest.raises(Split):
        agreed([Standing(done=1, ready=True, norm=0.5), Standing(done=3, ready=False, norm=0.7)])
