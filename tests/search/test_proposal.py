"""Which candidate runs next."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.search.test_beliefs import beliefs, latent
from tuner.search.beliefs import Beliefs, Ran
from tuner.search.proposal import WASTED, gains, propose


def apart(log_s: list[float], log_bytes: list[float]) -> Beliefs:
    """Candidates that tell nothing of each other, on an accelerator of e^0 bytes."""
    n = len(log_s)
    single = np.eye(n).tolist()
    small = (np.eye(n) * 0.01).tolist()
    return Beliefs(time=latent(log_s, small), memory=latent(log_bytes, small), capacity=np.zeros(n), faults=latent([4.0] * n, single))


def test_the_first_is_the_fastest_that_likely_fits() -> None:
    first = propose(apart([0.0, 0.1, 0.3], [1.0, -1.0, -1.0]), [])
    assert first is not None
    assert (first.index, first.gain) == (1, math.inf)
    assert first.runs == pytest.approx(1.0, abs=0.01)


def test_the_gain_by_hand() -> None:
    """Best step 1 s; a candidate expected at 1 s with deviation d: EI = d phi(0) = 0.3989 d, times the probability that it runs."""
    of = apart([0.0, 0.0], [-1.0, -1.0])
    said = of.given([])
    gain = gains(said, 1.0)
    assert gain == pytest.approx(0.39894 * said.deviation * said.runs, rel=1e-4)


def test_what_surely_runs_out_is_not_worth_a_run() -> None:
    chosen = propose(apart([0.0, -0.05, 0.02], [-1.0, 1.0, -1.0]), [Ran(0, "ok", 1.0)])
    assert chosen is not None
    assert chosen.index == 2
    assert WASTED > 0


def test_a_batch_asks_different_questions() -> None:
    first = propose(beliefs(), [Ran(0, "ok", 1.0)])
    assert first is not None
    second = propose(beliefs(), [Ran(0, "ok", 1.0)], pending=[first.index])
    assert second is not None
    assert second.index not in (0, first.index)
    assert propose(beliefs(), [Ran(0, "ok", 1.0)], pending=[1, 2]) is None


def test_dear_runs_must_gain_more() -> None:
    of = apart([0.0, -0.01, 0.005], [-1.0] * 3)
    free = propose(of, [Ran(0, "ok", 1.0)])
    dear = propose(of, [Ran(0, "ok", 1.0)], cost_s=lambda step_s: np.where(step_s < 1.0, 100.0, 1.0))
    assert free is not None
    assert dear is not None
    assert (free.index, dear.index) == (1, 2)


def test_only_open_candidates() -> None:
    of = apart([0.0, -0.5, 0.1], [-1.0] * 3)
    chosen = propose(of, [], open_=[0, 2])
    assert chosen is not None
    assert chosen.index == 0
    assert propose(of, [Ran(0, "oom")], open_=[0]) is None
