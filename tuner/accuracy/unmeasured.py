"""How far off the model is on a framework that was never measured: `time_spread_90` of prior.yaml.

Each framework is foretold as if none of its runs were known: by its GPUs' curves and the coefficients of the relative that would stand
in. A framework counts as one vote, shared among its runs, however many it has. The half-width is the smallest one that, made without a
framework, holds 90 % of that framework's runs in the mean over frameworks (cross-conformal: Vovk 2015, Annals of Mathematics and
Artificial Intelligence 74, with frameworks as the units).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FEWEST_RUNS = 5  # a framework with fewer has no vote
FEWEST_FRAMEWORKS = 5
INSIDE = 0.9
LEVELS = np.linspace(INSIDE, 1.0, 101)


class Unmeasured(NamedTuple):
    """What frameworks left out show: the half-width (0.5: from 1/1.5 to 1.5 times the figure), the share of their runs inside the range
    made without them, the median over frameworks of their median |predicted / measured - 1|, frameworks and runs.
    """

    spread: float
    inside: float
    error: float
    frameworks: int
    runs: int


def unmeasured(errors: Mapping[str, Any]) -> Unmeasured | None:
    """Return what log(measured / predicted) of each framework's runs, foretold as if it had none, say; None of too few frameworks."""
    voting = [np.asarray(of) for of in errors.values() if len(of) >= FEWEST_RUNS]
    if len(voting) < FEWEST_FRAMEWORKS:
        return None
    level = next((level for level in LEVELS.tolist() if _inside(voting, level) >= INSIDE), 1.0)
    off = [float(np.median(np.abs(np.expm1(-of)))) for of in voting]
    spread = math.expm1(half_width(voting, level))
    return Unmeasured(spread, _inside(voting, level), float(np.median(off)), len(voting), sum(map(len, voting)))


def half_width(frameworks: Sequence[Any], level: float) -> float:
    """Return the least |log error| that `level` of the votes lie within."""
    off = np.abs(np.concatenate(frameworks))
    votes = np.concatenate([np.full(len(of), 1.0 / len(of)) for of in frameworks])
    order = np.argsort(off)
    reached = np.cumsum(votes[order]) / votes.sum()
    return float(off[order][min(int(np.searchsorted(reached, level - 1e-9)), len(off) - 1)])


def _inside(frameworks: Sequence[Any], level: float) -> float:
    """Return the share of a framework's runs inside what the others make, in the mean over frameworks."""
    rest = [[other for other in frameworks if other is not of] for of in frameworks]
    return float(np.mean([np.mean(np.abs(of) <= half_width(others, level)) for of, others in zip(frameworks, rest, strict=True)]))


def with_spread(prior: str, found: Unmeasured) -> str:
    """Return the text of prior.yaml with this spread, and how it was made, as its time_spread_90."""
    source = (
        f"{found.frameworks} frameworks with {found.runs:,} public runs, each foretold as if never measured and each one vote; made "
        f"without a framework it holds {100 * found.inside:.1f} % of its runs in the mean (accuracy/unmeasured.py)"
    )
    lines = rf"\g<1>    value: {found.spread:.3g}\n    source: {source}\n"
    made, n = re.subn(r"(\n  time_spread_90:\n    words: [^\n]*\n)    value: [^\n]*\n    source: [^\n]*\n(?:      [^\n]*\n)*", lines, prior)
    if n != 1:
        raise ValueError("prior.yaml must have one time_spread_90 with words, value and source")
    return made
