"""What is believed of candidate plans' time and memory, before and after some of them ran.

Symbols: i a candidate; t seconds a step, m bytes of its fullest rank, c bytes that its accelerator has; ^ what the cost model says.

    log t_i = log t^_i + f_i + e_i    f: Gaussian with the covariance of the model's errors between plans (residual.plan_errors) and, for
                                      each knob that covariance does not see, KNOB^2 where two plans share its setting;
                                      e: the plan's own, N(0, OWN_TIME^2), or, for a share OUTLIERS of runs, N(SLOW, FAR^2)
    log m_i = log m^_i + g_i + d_i    g, d likewise, d: N(0, OWN_MEMORY^2); the plan runs out of memory where m_i > c
    a plan that fits runs without fault with probability Phi(h_i), h: Gaussian with mean SOUND

A run that ended tells t_i, that m_i <= c, and m_i itself where memory was measured; one that ran out tells m_i > c. Which runs are
outliers is the assignment of highest posterior probability; the posterior under probit likelihoods is Laplace's.
Source: Rasmussen and Williams 2006, equations 2.25, 2.26, 3.24 to 3.29 and 3.77; contaminated normal: Tukey 1960, A survey of sampling
from contaminated distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.arrays import Bools, Floats, Ints

    Between = Callable[[Ints, Ints], Floats]

# Own noise of a plan and how far outliers lie: medians and tails of the runs in the shipped calibrations, told by their neighbours
# (medians 0.4 to 6 % by framework, the coarser ones taken: a cluster that was never measured is not known to be quiet).
OWN_TIME, OWN_MEMORY = 0.06, 0.05
OUTLIERS, SLOW, FAR = 0.05, 1.0, 1.0
DEGREES = 5.0
KNOB = 0.07  # a setting no kernel sees moves the error about as much as one that it does (square root of the kernel's plan terms)
SOUND, FAULTS_SHARED, FAULTS_KNOB = 2.5, 1.0, 0.5
SLACK = 1e-9
_STEPS = 60

Sign = Literal[-1, 0, 1]


@dataclass(frozen=True, slots=True)
class Observation:
    """Of candidate `index`: sign 0: its value is `value`, give or take `spread` (one standard deviation); 1: it is below; -1: above."""

    index: int
    sign: Sign
    value: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """A Gaussian over the candidates: mean (n,), and covariance between rows and columns of them."""

    mean: Floats
    between: Between

    def given(self, seen: Sequence[Observation]) -> tuple[Floats, Floats]:
        """Return mean and variance (n,) of every candidate after these observations."""
        every = np.arange(len(self.mean))
        variance = np.array([float(self.between(i, i)[0, 0]) for i in np.split(every, len(every))])
        if not seen:
            return self.mean, variance
        at = np.array([one.index for one in seen])
        weights, root, curvature = _laplace(self.between(at, at), self.mean[at], seen)
        cross = self.between(every, at)
        solved = np.linalg.solve(root, (curvature[:, None] * cross.T))
        return self.mean + cross @ weights, np.maximum(variance - np.square(solved).sum(axis=0), SLACK)


def _laplace(prior: Floats, mean: Floats, seen: Sequence[Observation]) -> tuple[Floats, Floats, Floats]:
    """Return the weights a of the mean (f = m + K a), the Cholesky factor of B = I + W^1/2 K W^1/2, and W^1/2, at the posterior's mode."""
    from scipy.special import log_ndtr

    sign = np.array([one.sign for one in seen], dtype=float)
    value, spread = np.array([one.value for one in seen]), np.array([one.spread for one in seen])
    prior = prior + SLACK * np.eye(len(seen))
    offset, weights = np.zeros(len(seen)), np.zeros(len(seen))
    root = curvature = np.zeros(0)
    for _ in range(_STEPS):
        z = np.where(sign == 0, (value - mean - offset) / spread, sign * (value - mean - offset) / spread)
        hazard = np.exp(-0.5 * z * z - 0.5 * math.log(2.0 * math.pi) - log_ndtr(z))
        gradient = np.where(sign == 0, z / spread, -sign * hazard / spread)
        curvature = np.sqrt(np.where(sign == 0, 1.0, np.maximum(hazard * (z + hazard), 1e-12))) / spread
        root = np.linalg.cholesky(np.eye(len(seen)) + curvature[:, None] * prior * curvature[None])
        towards = curvature**2 * offset + gradient
        inner = np.linalg.solve(root, curvature * (prior @ towards))
        weights = towards - curvature * np.linalg.solve(root.T, inner)
        moved = prior @ weights - offset
        offset = offset + moved * min(1.0, 1.0 / max(float(np.abs(moved).max()), SLACK))
        if float(np.abs(moved).max()) < 1e-9:
            break
    return weights, root, curvature


def ordinary(latent: Latent, seen: Sequence[Observation]) -> tuple[list[Observation], float]:
    """Return the exact observations, those of outliers as such, and the scale of the errors (as a variance over the prior's).

    Which runs are outliers: flipped one by one while the posterior gains. The scale is that of a Student-t process with DEGREES degrees
    of freedom (Shah 2014, arXiv 1402.4306): a model that is surprised by what ran knows less of the rest.
    """
    if not seen:
        return [], 1.0
    at = np.array([one.index for one in seen])
    prior, off = latent.between(at, at), np.array([one.value for one in seen]) - latent.mean[at]
    spread = np.array([one.spread for one in seen])

    def surprise(out: Bools) -> tuple[float, float]:
        root = np.linalg.cholesky(prior + np.diag(np.where(out, FAR, spread) ** 2))
        z = np.linalg.solve(root, off - SLOW * out)
        return float(z @ z), float(np.log(np.diag(root)).sum())

    def evidence(out: Bools) -> float:
        squares, root = surprise(out)
        return float(
            -0.5 * (DEGREES + len(seen)) * math.log1p(squares / (DEGREES - 2.0))
            - root
            + np.where(out, math.log(OUTLIERS), math.log1p(-OUTLIERS)).sum()
        )

    out = np.zeros(len(seen), dtype=bool)
    best = evidence(out)
    while True:
        flipped = [out ^ (np.arange(len(seen)) == i) for i in range(len(seen))]
        found = [evidence(one) for one in flipped]
        if max(found) <= best + SLACK:
            scale = (DEGREES - 2.0 + surprise(out)[0]) / (DEGREES - 2.0 + len(seen))
            said = [
                replace(one, value=one.value - SLOW, spread=FAR) if stands else one for one, stands in zip(seen, out.tolist(), strict=True)
            ]
            return said, scale
        best, out = max(found), flipped[int(np.argmax(found))]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run of candidate `index` showed: end ok, oom or failed; step_s where it has one; memory_bytes on the device where measured.
    own: by what share more (one standard deviation) step_s may be off because the run was not of the plan itself but of its proxy, which
    does not say whether the plan fits (0: it was the plan's own).
    """

    index: int
    end: Literal["ok", "oom", "failed"]
    step_s: float | None = None
    memory_bytes: float | None = None
    own: float = 0.0


class Believed(NamedTuple):
    """Of every candidate, (n,) each: mean and standard deviation of log(step_s), that of the plan's own part among them; probability that
    it fits; that it runs without fault if it fits.
    """

    log_s: Any
    deviation: Any
    fits: Any
    sound: Any

    @property
    def runs(self) -> Any:
        """Probability that a run of it gives a time."""
        return self.fits * self.sound


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Time and memory of n candidates before any ran, as logarithms, and the logarithm of what fits, (n,); alike: their faults."""

    time: Latent
    memory: Latent
    capacity: Floats
    faults: Latent

    def given(self, ran: Sequence[Ran]) -> Believed:
        """Return what is believed after these runs."""
        from scipy.special import ndtr

        timed = [Observation(run.index, 0, math.log(run.step_s), math.hypot(OWN_TIME, run.own)) for run in ran if run.step_s]
        told, scale = ordinary(self.time, timed)
        log_s, variance = self.time.given(told)
        need, doubt = self.memory.given(self._memory(ran))
        sound, unsure = self.faults.given(
            [Observation(run.index, -1 if run.end == "ok" else 1, 0.0, 1.0) for run in ran if run.end != "oom"]
        )
        return Believed(
            log_s=log_s,
            deviation=np.sqrt(scale * (variance + OWN_TIME**2)),
            fits=ndtr((self.capacity - need) / np.sqrt(doubt + OWN_MEMORY**2)),
            sound=ndtr(sound / np.sqrt(1.0 + unsure)),
        )

    def _memory(self, ran: Sequence[Ran]) -> list[Observation]:
        seen = []
        for run in ran:
            if run.memory_bytes:
                seen.append(Observation(run.index, 0, math.log(run.memory_bytes), OWN_MEMORY))
            if run.end == "oom" or (run.end == "ok" and not run.own):
                seen.append(Observation(run.index, 1 if run.end == "ok" else -1, float(self.capacity[run.index]), OWN_MEMORY))
        return seen
