"""A measured search against the exhaustive sweep of its space, really run: 20 minutes, so only with TUNER_SLOW=1.

docs/measured_search.md has the table of the last run; `python benchmarks/measured_search.py --write docs/measured_search.md` makes it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(os.environ.get("TUNER_SLOW") != "1", reason="takes 20 minutes: TUNER_SLOW=1 runs it")
def test_the_pick_of_eight_runs_is_within_a_tenth_of_the_best_plan(tmp_path: Path) -> None:
    from benchmarks.measured_search import compare

    assert compare(tmp_path, 8)[1] <= 0.10
