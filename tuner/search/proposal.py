"""Which candidate to run next: the one that is expected to gain the most for what its run costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.search.beliefs import Ran
from tuner.search.gaussian import expected_improvement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from tuner.arrays import Floats
    from tuner.search.beliefs import Beliefs, Believed

# What a run that gives no time is worth, as a share of a step: it teaches little but where memory ends.
WASTED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate to run; gain: by what share it is expected to shorten the best step known (inf while none is), weighed by the
    probability that it runs; runs: that probability.
    """

    index: int
    gain: float
    runs: float


def gains(believed: Believed, best_s: float | None) -> Floats:
    """Return each candidate's expected gain in log seconds over the best known step; without one, its expected speed, (n,)."""
    runs: Floats = np.asarray(believed.runs, dtype=float)
    if best_s is None:
        return np.exp(float(np.min(believed.log_s)) - believed.log_s) * runs
    return expected_improvement(believed.log_s, believed.deviation, math.log(best_s)) * runs


def propose(
    beliefs: Beliefs,
    ran: Sequence[Ran],
    *,
    open_: Sequence[int] | None = None,
    pending: Sequence[int] = (),
    cost_s: Callable[[Floats], Floats] | None = None,
) -> Proposal | None:
    """Return what to run next, None when every candidate ran or is running.

    ran: what is known; pending: runs under way, taken to end as believed (kriging believer, Ginsbourger 2010), so that a batch does not
    ask the same question twice; open_: the candidates that may be proposed (all where None); cost_s: seconds that a run costs for its
    step time, by which gains are divided.
    """
    known = list(ran)
    taken: AbstractSet[int] = {run.index for run in known} | set(pending)
    left = np.array([i for i in (range(len(beliefs.capacity)) if open_ is None else open_) if i not in taken], dtype=np.int64)
    if not len(left):
        return None
    for index in pending:
        said = beliefs.given(known)
        known.append(Ran(index, "ok", math.exp(float(said.log_s[index]))) if said.runs[index] >= 0.5 else Ran(index, "oom"))
    said = beliefs.given(known)
    best_s = min((run.step_s for run in known if run.step_s), default=None)
    gain = gains(said, best_s)
    worth = gain - WASTED * (1.0 - said.runs) if best_s is not None else gain
    if cost_s is not None:
        price = cost_s(np.exp(said.log_s))
        worth = np.where(worth > 0.0, worth / price, worth * price)
    chosen = int(left[int(np.argmax(worth[left]))])
    return Proposal(index=chosen, gain=math.inf if best_s is None else float(gain[chosen]), runs=float(said.runs[chosen]))
