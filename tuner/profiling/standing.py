"""Where the candidates stand once some of them ran: measured ones by their time, the others by what the measurements make of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.cost_model.memory import NORMAL_90
from tuner.launch.step_time import MEDIAN, QUARTILE
from tuner.search.beliefs import Ran

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.launch.trial import Result
    from tuner.search.beliefs import Believed
    from tuner.search.candidates import Candidates
    from tuner.search.ranking import Basis

TRIED: tuple[Basis, ...] = ("measured", "proxy")
AGAIN = 0.005  # what repeating a run in another process moves at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A candidate after the runs: seconds a step with their 90 % range, from what (basis), probability that it fits, and that
    it runs without fault if it does; result: its run.
    """

    index: int
    step_s: float
    low_s: float
    high_s: float
    basis: Basis
    fits: float
    sound: float = 1.0
    result: Result | None = None

    def widened(self, spread: float) -> Standing:
        """Return it with a range that also holds an error of this standard deviation (as a share), which all candidates have in common."""
        off = NORMAL_90 * math.hypot(math.log(self.high_s / self.low_s) / 2 / NORMAL_90, spread)
        return replace(self, low_s=self.step_s * math.exp(-off), high_s=self.step_s * math.exp(off)) if spread else self


def noise(result: Result) -> float:
    """Return the relative standard error of a run's step time, with that of what the model extrapolated of it."""
    if not result.step_s or result.spread_s is None or not result.steps:
        return math.hypot(AGAIN * 4.0, result.extrapolated)
    return math.hypot(MEDIAN * result.spread_s / QUARTILE / result.step_s / math.sqrt(result.steps), AGAIN, result.extrapolated)


def standings(candidates: Candidates, ran: Sequence[Ran], results: Mapping[int, Result]) -> list[Standing]:
    """Return every candidate that may fit, fastest first; none that has not run comes before the best that has.

    A measured time and what the other runs say of the plan are weighed by how sure each is: a noisy run that was lucky is not the best
    plan for that.
    """
    beliefs = candidates.beliefs()
    said = beliefs.given(ran)
    found = []
    basis: Basis = "calibrated" if ran else "analytic"
    failed = {run.index for run in ran if run.end != "ok"}
    for i in range(len(candidates)):
        if i in failed:
            continue
        mean, deviation = float(said.log_s[i]), float(said.deviation[i])
        result = results.get(i)
        whole = result is not None and result.step_s and not result.extrapolated
        fits, sound = (1.0, 1.0) if whole else (float(said.fits[i]), float(said.sound[i]))
        if result is not None and result.step_s:
            mean, deviation = _measured(i, result, beliefs.given([run for run in ran if run.index != i]))
        found.append(replace(_standing(i, mean, deviation, basis, fits, result), sound=sound))
    best_s = min((one.step_s for one in found if one.basis in TRIED), default=0.0)
    return sorted(found, key=lambda one: (one.step_s, 0) if one.basis in TRIED else (max(one.step_s, best_s), 1))


def _measured(index: int, result: Result, others: Believed) -> tuple[float, float]:
    mean, deviation = float(others.log_s[index]), float(others.deviation[index])
    own = noise(result)
    weights = np.array([own**-2, deviation**-2])
    return float(weights @ [math.log(result.step_s or math.inf), mean] / weights.sum()), float(weights.sum() ** -0.5)


def _standing(index: int, mean: float, deviation: float, basis: Basis, fits: float, result: Result | None) -> Standing:
    off = NORMAL_90 * deviation
    seconds = (math.exp(mean), math.exp(mean - off), math.exp(mean + off))
    timed = result is not None and bool(result.step_s)
    return Standing(
        index=index,
        step_s=seconds[0],
        low_s=seconds[1],
        high_s=seconds[2],
        basis=basis if result is None or not timed else "proxy" if result.extrapolated else "measured",
        fits=fits,
        result=result,
    )
