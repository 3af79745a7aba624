"""A Gaussian process over plans, to propose the next one worth its price. Needs NumPy and SciPy only.

Kernel: Matern 5/2 over scaled features, one length for all of them, chosen by marginal likelihood (Rasmussen and Williams 2006,
equations 2.25, 2.26, 2.30 and 4.17). Acquisition: expected improvement times the probability of fitting (Gardner 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.plan import CP_KINDS, FULL, OFFLOADS, RECOMPUTE_MODULES, SCHEDULES

if TYPE_CHECKING:
    from tuner.arrays import Floats
    from tuner.job import Job
    from tuner.plan import Plan

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
NOISE = 1e-4


def features(job: Job, plan: Plan) -> Floats:
    """Return one row of numbers for each plan of a table: logarithms of degrees, shares, and 0 or 1 for what is on."""
    degrees = (plan.tp, plan.pp, plan.vpp, plan.cp, plan.ep, plan.etp, plan.micro_batch, plan.shard_group + 1)
    full = (plan.recompute & FULL) > 0
    stage = job.model.layers / np.maximum(plan.pp, 1)
    columns = [np.log2(np.asarray(degree, dtype=float)) for degree in degrees]
    columns += [plan.sequence_parallel, plan.zero, plan.embedding_layers, plan.loss_layers]
    columns += [(plan.recompute & bit) > 0 for bit in RECOMPUTE_MODULES.values()]
    columns += [np.where(full, np.minimum(plan.recompute_layers / stage, 1.0), 0.0)]
    columns += [(plan.offload & bit) > 0 for bit in (OFFLOADS["optimizer"], OFFLOADS["activations"])]
    columns += [plan.schedule == code for code in SCHEDULES.values()] + [plan.cp_kind == code for code in CP_KINDS.values()]
    columns += [plan.tp_overlap, plan.dp_overlap, plan.ep_overlap, plan.cuda_graphs]
    rows = max(np.size(column) for column in columns)
    return np.stack([np.broadcast_to(np.asarray(column, dtype=float), rows) for column in columns], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianProcess:
    """A posterior: where it was observed (scaled features), the weights of the mean, the Cholesky factor, and the scales."""

    seen: Floats
    weights: Floats
    factor: Floats
    length: float
    centre: float
    spread: float

    def predict(self, at: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of the latent function at these rows of features."""
        from scipy.linalg import solve_triangular

        cross = _matern(_distances(at, self.seen), self.length)
        solved = solve_triangular(self.factor, cross.T, lower=True)
        variance = np.maximum(1.0 - (solved**2).sum(axis=0), 1e-12)
        return self.centre + self.spread * (cross @ self.weights), self.spread * np.sqrt(variance)


def fit_process(at: Floats, values: Floats) -> GaussianProcess:
    """Return the process through (at, values), with the length of the highest marginal likelihood."""
    centre, spread = float(values.mean()), float(values.std()) or 1.0
    scaled = (values - centre) / spread
    distances = _distances(at, at)
    unit = float(np.sqrt(at.shape[1]))
    best: tuple[float, float, Floats, Floats] | None = None
    for length in LENGTHS:
        factor = np.linalg.cholesky(_matern(distances, length * unit) + NOISE * np.eye(len(at)))
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, scaled))
        likelihood = -0.5 * float(scaled @ weights) - float(np.log(np.diag(factor)).sum())
        if best is None or likelihood > best[0]:
            best = (likelihood, length * unit, factor, weights)
    if best is None:
        raise AssertionError("LENGTHS is not empty")
    return GaussianProcess(seen=at, weights=best[3], factor=best[2], length=best[1], centre=centre, spread=spread)


def _distances(a: Floats, b: Floats) -> Floats:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
    return np.sqrt(np.maximum(squares, 0.0))


def _matern(distances: Floats, length: float) -> Floats:
    scaled = np.sqrt(5.0) * distances / length
    return (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)


def expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """Return by how much each value is expected to fall below `best` (Jones 1998, equation 15)."""
    from scipy.special import ndtr

    z = (best - mean) / deviation
    return (best - mean) * ndtr(z) + deviation * np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)


def probability_below(mean: Floats, deviation: Floats, bar: float = 0.0) -> Floats:
    """Return the probability that a normal variable lies below `bar`."""
    from scipy.special import ndtr

    return ndtr((bar - mean) / deviation)
