"""The range of a framework that was never measured: frameworks are the units, each one vote."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.terminal import ROOT
from tuner.accuracy.unmeasured import Unmeasured, half_width, unmeasured, with_spread


def test_a_framework_is_one_vote_however_many_runs_it_has():
    many, few = np.full(1000, 0.1), np.linspace(0.2, 0.6, 5)
    # half of the votes at 0.1, then a tenth each at 0.2, 0.3, ..: 0.6 of them within 0.2, 0.9 within 0.5
    assert half_width([many, few], 0.6) == pytest.approx(0.2)
    assert half_width([many, few], 0.9) == pytest.approx(0.5)
    assert half_width([many, few], 0.5) == pytest.approx(0.1)


def test_the_range_holds_a_framework_that_did_not_make_it():
    generator = np.random.default_rng(0)
    errors = {str(i): generator.normal(generator.normal(0.0, 0.2), 0.05, 40) for i in range(12)}
    found = unmeasured(errors)
    assert found is not None and found.inside >= 0.9
    assert (found.frameworks, found.runs) == (12, 480)
    assert found.spread >= math.expm1(half_width(list(errors.values()), 0.9))  # no narrower than what the frameworks themselves show


def test_few_frameworks_and_few_runs_say_nothing():
    assert unmeasured({str(i): np.zeros(10) for i in range(4)}) is None
    assert unmeasured({str(i): np.zeros(4) for i in range(40)}) is None


def test_it_is_written_with_how_it_was_made():
    prior = (ROOT / "configs/calibrations/prior.yaml").read_text()
    made = with_spread(prior, Unmeasured(0.75, 0.912, 0.1, 13, 1872))
    assert "    value: 0.75\n    source: 13 frameworks with 1,872 public runs" in made
    assert with_spread(made, Unmeasured(0.75, 0.912, 0.1, 13, 1872)) == made
    assert len(made.splitlines()) == len(prior.splitlines())
    with pytest.raises(ValueError, match="one time_spread_90"):
        with_spread("name: prior\n", Unmeasured(0.75, 0.912, 0.1, 13, 1872))


def test_what_ships_was_made_so():
    prior = (ROOT / "configs/calibrations/prior.yaml").read_text()
    entry = prior[prior.index("  time_spread_90:") :].split("\n  oom_margin", 1)[0]
    assert "each foretold as if never measured" in entry
