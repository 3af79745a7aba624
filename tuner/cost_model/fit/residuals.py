"""The kernel, noise and reach of the residual process (cost_model/residual.py), from runs with their log errors.

The variances are those that foretell left-out groups (whole series of runs) best: the sum over runs of the log density of a Student t
with ten degrees of freedom around what the other groups say (Rasmussen and Williams 2006, equations 5.10 to 5.13, for blocks). The
kernel is one for all frameworks; each source of runs has a noise of its own. A run that its neighbours contradict by more than two standard
deviations counts less (its noise is multiplied), so that broken runs steer little.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tuner.cost_model.residual import Kernel, covariance
from tuner.cost_model.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_RUNS = 200  # of a framework, drawn evenly, when hyperparameters are sought
TRUSTED = 2.0
WORST = 1.5  # a log error beyond this is a broken run whatever its size
FEWEST_OF_SOURCE = 20

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
HEAVY = 2.0  # degrees of freedom where the noise of runs is sought, among which some are broken
ROUNDS = 2
SWEEPS = 2


class Grouped(NamedTuple):
    """Runs with the series and the source of each, and their places in what they were drawn from."""

    runs: Runs
    series: Any
    sources: Any
    places: Any


class HeldOut(NamedTuple):
    """Mean and standard deviation (noise included) of each run's log error as told by the runs of other groups."""

    mean: Any
    deviation: Any


def subset(runs: Runs, which: Any) -> Runs:
    """Return some of the runs."""
    columns = runs._asdict()
    ids = columns.pop("ids")
    return Runs(ids=tuple(np.array(ids)[which].tolist()), **{name: column[which] for name, column in columns.items()})


def surprise(kernel: Kernel, runs: Runs, groups: Any, freedom: float = FREEDOM) -> float:
    """Return minus the log density of the runs, each told by the runs of other groups, up to a constant."""
    held = _held_out(np.linalg.inv(covariance(kernel, runs) + np.diag(runs.variance)), runs, groups)
    z = (np.clip(runs.log_error, -WORST, WORST) - held.mean) / held.deviation
    return float(np.sum(0.5 * (freedom + 1.0) * np.log1p(z * z / freedom) + np.log(held.deviation)))


def fit_kernel(frameworks: Mapping[str, Grouped]) -> Kernel:
    """Return the kernel that foretells left-out series of several frameworks best."""
    from scipy.optimize import minimize

    drawn = {name: _drawn(of) for name, of in frameworks.items()}
    names, kernel = list(Kernel.model_fields), START
    start = np.log([getattr(START, name) for name in names])
    for _ in range(ROUNDS):
        noisy = [of._replace(runs=fit_noise(kernel, of, FREEDOM)) for of in drawn.values()]

        def shared(theta: Any, noisy: Sequence[Grouped] = noisy) -> float:
            tried = Kernel(**dict(zip(names, np.exp(theta).tolist(), strict=True)))
            doubted = 0.5 * float(np.sum(((theta - start) / DOUBT) ** 2))
            return sum(surprise(tried, of.runs, of.series) for of in noisy) + doubted

        found = minimize(shared, np.log([getattr(kernel, name) for name in names]), method="L-BFGS-B", options={"maxiter": 6})
        kernel = Kernel(**{name: float(f"{value:.4g}") for name, value in zip(names, np.exp(found.x).tolist(), strict=True)})
    return kernel


def fit_noise(kernel: Kernel, of: Grouped, freedom: float = HEAVY) -> Runs:
    """Return the runs with the noise of each source that foretells left-out series best; with HEAVY tails broken runs are weighed down
    before. Few runs leave it near START_NOISE. Sources of fewer than FEWEST_OF_SOURCE runs share one.
    """
    from scipy.optimize import minimize_scalar

    drawn = _drawn(of)
    found = dict.fromkeys(np.unique(_shared_sources(of)).tolist(), START_NOISE)
    own = _shared_sources(of)[drawn.places]
    for _ in range(SWEEPS if len(found) > 1 else 1):
        for name in found:

            def cost(log_noise: float, name: str = name) -> float:
                tried = found | {name: math.exp(log_noise)}
                doubted = 0.5 * ((log_noise - math.log(START_NOISE)) / DOUBT) ** 2
                runs = drawn.runs._replace(noise=np.array([tried[of] for of in own.tolist()]))
                return surprise(kernel, weighed(kernel, runs) if freedom == HEAVY else runs, drawn.series, freedom) + doubted

            best = minimize_scalar(cost, bounds=(-5.5, 0.5), method="bounded", options={"xatol": 0.05})
            found[name] = float(f"{math.exp(best.x):.3g}")
    return of.runs._replace(noise=np.array([found[name] for name in _shared_sources(of).tolist()]))


def _shared_sources(of: Grouped) -> Any:
    """Return the source of each run, or one name for all sources with few runs."""
    counts = {name: int((of.sources == name).sum()) for name in np.unique(of.sources).tolist()}
    return np.array([name if counts[name] >= FEWEST_OF_SOURCE else "" for name in of.sources.tolist()])


def _drawn(of: Grouped) -> Grouped:
    """Return at most MOST_RUNS of the runs, an even draw of each source in turn, so that a large one does not crowd out the others."""
    mixed = np.random.default_rng(0).permutation(len(of.series))
    turn = np.empty(len(mixed), dtype=np.int64)
    for name in np.unique(of.sources):
        these = mixed[of.sources[mixed] == name]
        turn[these] = np.arange(len(these))
    which = np.sort(mixed[np.argsort(turn[mixed], kind="stable")][:MOST_RUNS])
    return Grouped(subset(of.runs, which), of.series[which], of.sources[which], which)


def weighed(kernel: Kernel, runs: Runs) -> Runs:
    """Return the runs with the weight of each that the others leave it: 1, or the square of how far beyond TRUSTED deviations it lies."""
    runs = runs._replace(log_error=np.clip(runs.log_error, -WORST, WORST), weight=np.ones(len(runs.ids)))
    for _ in range(3):
        inverse = np.linalg.inv(covariance(kernel, runs) + np.diag(runs.variance))
        off = (inverse @ runs.log_error) / np.diag(inverse)
        variance = 1.0 / np.diag(inverse) - runs.noise**2 * (runs.weight - 1.0)
        beyond = np.abs(off) / (TRUSTED * np.sqrt(np.maximum(variance, runs.noise**2)))
        runs = runs._replace(weight=np.maximum(1.0, beyond**2))
    return runs


def reaching(runs: Runs, of: Grouped, held: HeldOut) -> Runs:
    """Return the runs with the reach of their source, or of all sources with few runs, where their series was left out."""
    sources = _shared_sources(of)
    log_error = of.runs.log_error
    found = {
        name: reach_of(log_error[these], HeldOut(held.mean[these], held.deviation[these]))
        for name in np.unique(sources).tolist()
        for these in [np.flatnonzero(sources == name)]
    }
    return runs._replace(reach=np.array([found[name] for name in sources.tolist()]))


def held_out(kernel: Kernel, runs: Runs, groups: Any) -> HeldOut:
    """Return what the runs of all other groups say of each run."""
    return _held_out(np.linalg.inv(covariance(kernel, runs) + np.diag(runs.variance)), runs, groups)


def _held_out(inverse: Any, runs: Runs, groups: Any) -> HeldOut:
    log_error = np.clip(runs.log_error, -WORST, WORST)
    mean, deviation = np.empty(len(runs.ids)), np.empty(len(runs.ids))
    pulled = inverse @ log_error
    for key in np.unique(groups):
        these = np.flatnonzero(groups == key)
        mean[these], deviation[these] = without(inverse, log_error, pulled, runs, these)
    return HeldOut(mean, deviation)


def without(inverse: Any, log_error: Any, pulled: Any, runs: Runs, these: Any) -> HeldOut:
    """Return what all other runs say of the runs `these`; inverse: of the runs' covariance, pulled: its product with the log errors."""
    block = np.linalg.inv(inverse[np.ix_(these, these)])
    noise = runs.noise[these] ** 2
    variance = np.diag(block) - noise * (runs.weight[these] - 1.0)
    return HeldOut(log_error[these] - block @ pulled[these], np.sqrt(np.maximum(variance, noise)))


def reach_of(log_error: Any, held: HeldOut) -> float:
    """Return how many deviations hold 90 % of the runs whose group was left out (split conformal: Lei 2018, arXiv 1604.04173)."""
    n = len(log_error)
    return float(np.quantile(np.abs(log_error - held.mean) / held.deviation, min(math.ceil(0.9 * (n + 1)) / n, 1.0)))
