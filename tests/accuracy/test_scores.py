"""Scores against numbers computed by hand and against SciPy."""

import math
import random

import pytest

from tuner.accuracy import scores


def test_errors_by_hand():
    """Measured 1, 2, 4, 10 and predicted 1.1, 1.6, 4, 15: +10 %, -20 %, 0 %, +50 %."""
    found = scores.errors([(1.0, 1.1), (2.0, 1.6), (4.0, 4.0), (10.0, 15.0)], [True, False, True, None])
    assert found["n"] == 4
    assert found["median_abs_err"] == pytest.approx(0.15)
    assert found["p90_abs_err"] == pytest.approx(0.2 + 0.7 * 0.3)  # rank 2.7 of 0, .1, .2, .5
    assert found["bias"] == pytest.approx(0.1)
    assert found["coverage90"] == pytest.approx(2 / 3)


def test_errors_of_nothing_are_none():
    assert scores.errors([]) == {"n": 0, "median_abs_err": None, "p90_abs_err": None, "bias": None, "coverage90": None}


def test_kendall_by_hand():
    assert scores.kendall_tau([1, 2, 3], [1, 2, 3]) == 1.0
    assert scores.kendall_tau([1, 2, 3], [3, 2, 1]) == -1.0
    assert scores.kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert scores.kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))  # one tie among three pairs
    assert scores.kendall_tau([1, 1, 1], [1, 2, 3]) is None


def test_kendall_is_scipys_tau_b():
    from scipy.stats import kendalltau

    dice = random.Random(5)
    for _ in range(30):
        first, second = ([dice.randrange(8) for _ in range(12)] for _ in range(2))
        assert scores.kendall_tau(first, second) == pytest.approx(kendalltau(first, second).statistic)


def test_regret_by_hand():
    assert scores.regret([10.0, 12.0, 15.0], [3.0, 1.0, 2.0]) == pytest.approx(0.2)
    assert scores.regret([10.0, 12.0], [1.0, 2.0]) == 0.0
    assert scores.regret([10.0, 12.0], [1.0, 1.0]) == pytest.approx(0.1)  # a tie counts by its mean
    assert scores.regret([], []) is None


def test_confusion():
    cases = [(False, 0.1), (False, 0.5), (True, 0.49), (True, 0.9), (True, 1.0)]
    assert scores.confusion(cases) == {"true_fit": 1, "false_fit": 1, "true_oom": 2, "false_oom": 1}


def test_series_merges_equal_layouts_and_needs_five():
    key, short = {"source": "a", "gpus": 8}, {"source": "b", "gpus": 8}
    cases = [(key, layout, float(layout), float(layout)) for layout in range(1, 6)]
    cases += [(key, 5, 7.0, 5.0), (key, 5, 9.0, 5.0)]  # layout 5 ran three times: 5, 7, 9
    cases += [(short, layout, 1.0, 1.0) for layout in range(4)]
    found = scores.series(cases)
    assert [(one["key"], one["n"], one["kendall_tau"], one["regret"]) for one in found] == [(key, 5, 1.0, 0.0)]
    cases[0] = (key, 1, 8.0, 0.5)  # predicted fastest, measured slowest: the best measured is layout 2
    found = scores.series(cases)
    assert found[0]["regret"] == pytest.approx(3.0)
    assert found[0]["kendall_tau"] == pytest.approx((6 - 4) / 10)


def test_mean_leaves_out_what_is_not_there():
    assert scores.mean([1.0, None, 3.0]) == 2.0
    assert scores.mean([None]) is None
