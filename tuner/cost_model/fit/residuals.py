"""The kernel, noise and reach of the residual process (cost_model/residual.py), from runs with their log errors.

The variances are those that foretell left-out groups (whole series of runs) best: the sum over runs of the log density of a Student t
with ten degrees of freedom around what the other groups say (Rasmussen and Williams 2006, equations 5.10 to 5.13, for blocks). The
kernel is one for all frameworks; each has a noise of its own. A run that its neighbours contradict by more than two standard
deviations counts less (its noise is multiplied), so that broken runs steer little.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tuner.cost_model.residual import Kernel, Residual, Runs, covariance

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_RUNS = 200  # of a framework, drawn evenly, when hyperparameters are sought
TRUSTED = 2.0
WORST = 1.5  # a log error beyond this is a broken run whatever its size
FEWEST_FOR_REACH = 100
NORMAL90 = 1.645

# Where the search for the variances starts, and the doubt (standard deviation of the logarithm) about them.
START = Kernel(
    offset=0.015,
    gpu=0.01,
    release=0.005,
    recipe=0.01,
    job=0.005,
    near=0.02,
    plan=0.002,
    plan_job=0.01,
    pair=0.01,
    job_reach=50.0,
    near_reach=50.0,
    plan_job_reach=30.0,
    pair_job_reach=15.0,
    plan_reach=1.5,
    pair_reach=0.5,
)
START_NOISE = 0.06
DOUBT = 1.0
FREEDOM = 10.0
ROUNDS = 2


class HeldOut(NamedTuple):
    """Mean and standard deviation (noise included) of each run's log error as told by the runs of other groups."""

    mean: Any
    deviation: Any


def subset(runs: Runs, which: Any) -> Runs:
    """Return some of the runs."""
    columns = runs._asdict()
    ids = columns.pop("ids")
    return Runs(ids=tuple(np.array(ids)[which].tolist()), **{name: column[which] for name, column in columns.items()})


def surprise(kernel: Kernel, noise: float, runs: Runs, groups: Any) -> float:
    """Return minus the log density of the runs, each told by the runs of other groups, up to a constant."""
    held = _held_out(np.linalg.inv(covariance(kernel, runs) + np.diag(noise**2 * runs.weight)), runs, noise, groups)
    z = (np.clip(runs.log_error, -WORST, WORST) - held.mean) / held.deviation
    return float(np.sum(0.5 * (FREEDOM + 1.0) * np.log1p(z * z / FREEDOM) + np.log(held.deviation)))


def fit_kernel(frameworks: Mapping[str, tuple[Runs, Any]]) -> tuple[Kernel, dict[str, float]]:
    """Return the kernel that foretells left-out groups of several frameworks best, and each one's noise under it.

    frameworks: runs and the group of each run.
    """
    from scipy.optimize import minimize

    drawn = {name: _drawn(*of) for name, of in frameworks.items()}
    names, kernel = list(Kernel.model_fields), START
    start = np.log([getattr(START, name) for name in names])
    noise = {name: fit_noise(START, *of) for name, of in drawn.items()}
    for _ in range(ROUNDS):

        def shared(theta: Any, noise: Mapping[str, float] = noise) -> float:
            tried = Kernel(**dict(zip(names, np.exp(theta).tolist(), strict=True)))
            doubted = 0.5 * float(np.sum(((theta - start) / DOUBT) ** 2))
            return sum(surprise(tried, noise[name], *of) for name, of in drawn.items()) + doubted

        found = minimize(shared, np.log([getattr(kernel, name) for name in names]), method="L-BFGS-B", options={"maxiter": 6})
        kernel = Kernel(**{name: float(f"{value:.4g}") for name, value in zip(names, np.exp(found.x).tolist(), strict=True)})
        noise = {name: fit_noise(kernel, *of) for name, of in drawn.items()}
    return kernel, noise


def fit_noise(kernel: Kernel, runs: Runs, groups: Any) -> float:
    """Return the noise of one framework's runs under a kernel; few runs leave it near START_NOISE."""
    from scipy.optimize import minimize_scalar

    drawn, of = _drawn(runs, groups)

    def cost(log_noise: float) -> float:
        doubted = 0.5 * ((log_noise - math.log(START_NOISE)) / DOUBT) ** 2
        return surprise(kernel, math.exp(log_noise), drawn, of) + doubted

    return float(f"{math.exp(minimize_scalar(cost, bounds=(-5.5, 0.5), method='bounded', options={'xatol': 0.02}).x):.4g}")


def _drawn(runs: Runs, groups: Any) -> tuple[Runs, Any]:
    n = len(runs.ids)
    which = np.sort(np.random.default_rng(0).permutation(n)[:MOST_RUNS])
    return subset(runs, which), np.asarray(groups)[which]


def weighed(kernel: Kernel, noise: float, runs: Runs) -> Runs:
    """Return the runs with the weight of each that the others leave it: 1, or the square of how far beyond TRUSTED deviations it lies."""
    runs = runs._replace(log_error=np.clip(runs.log_error, -WORST, WORST), weight=np.ones(len(runs.ids)))
    for _ in range(3):
        inverse = np.linalg.inv(covariance(kernel, runs) + np.diag(noise**2 * runs.weight))
        off = (inverse @ runs.log_error) / np.diag(inverse)
        variance = 1.0 / np.diag(inverse) - noise**2 * (runs.weight - 1.0)
        beyond = np.abs(off) / (TRUSTED * np.sqrt(np.maximum(variance, noise**2)))
        runs = runs._replace(weight=np.maximum(1.0, beyond**2))
    return runs


def held_out(residual: Residual, groups: Any) -> HeldOut:
    """Return what the runs of all other groups say of each run."""
    solved = residual.solved
    return _held_out(solved.inverse_root.T @ solved.inverse_root, solved.runs, residual.noise, groups)


def _held_out(inverse: Any, runs: Runs, noise: float, groups: Any) -> HeldOut:
    log_error = np.clip(runs.log_error, -WORST, WORST)
    mean, deviation = np.empty(len(runs.ids)), np.empty(len(runs.ids))
    groups = np.asarray(groups)
    pulled = inverse @ log_error
    for key in np.unique(groups):
        these = np.flatnonzero(groups == key)
        mean[these], deviation[these] = without(inverse, log_error, pulled, runs.weight, noise, these)
    return HeldOut(mean, deviation)


def without(inverse: Any, log_error: Any, pulled: Any, weight: Any, noise: float, these: Any) -> HeldOut:
    """Return what all other runs say of the runs `these`; inverse: of the runs' covariance, pulled: its product with the log errors."""
    block = np.linalg.inv(inverse[np.ix_(these, these)])
    variance = np.diag(block) - noise**2 * (weight[these] - 1.0)
    return HeldOut(log_error[these] - block @ pulled[these], np.sqrt(np.maximum(variance, noise**2)))


def reach_of(log_error: Any, held: HeldOut) -> float:
    """Return how many deviations hold 90 % of the runs whose group was left out (split conformal: Lei 2018, arXiv 1604.04173)."""
    n = len(log_error)
    return float(np.quantile(np.abs(log_error - held.mean) / held.deviation, min(math.ceil(0.9 * (n + 1)) / n, 1.0)))
