"""What measured runs near a job and plan say of the model's error there: a Gaussian process over log(measured / predicted).

Symbols: i, j runs of one framework; [G], [R], [P] whether two runs share GPU, release and precision; kj(l) = exp(-|x - x'|^2 / 2l) over
the job's features x; rho_k(l) = exp(-(z_k - z'_k)^2 / 2l) over one knob z_k of the plan (degrees and batch in doublings).

    k = offset + gpu [G] + release [R] + recipe [R][G][P] + job (1 + [R]) / 2 kj(job_reach) + near [G] (0.3 + 0.7 [P]) kj(near_reach)
        + (plan + plan_job (1 + [G]) / 2 kj(plan_job_reach)) sum_k rho_k(plan_reach)
        + pair (1 + [G]) / 2 kj(pair_job_reach) sum over pairs (k, l) of rho_k(pair_reach) rho_l(pair_reach)

The correction is a sum over knobs and a few pairs of them, so on an open grid it is small tables over one or two axes, and one formula
serves a plan and a grid. Far from every run it fades to what all runs of the framework and GPU share, and the interval widens to the
prior's.
Source: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, equations 2.25 and 2.26; additive kernels: Duvenaud 2011,
arXiv 1112.4394.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from tuner.cost_model.runs import FIELDS, KNOBS, MeasuredRuns, Runs, coordinates, job_axes, read_runs, width
from tuner.errors import one_problem
from tuner.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.arrays import Floats
    from tuner.job import Job
    from tuner.plan import Plan

# Pairs of knobs (places in KNOBS) that act together: the size of products and messages, and how the pipeline fills.
PAIRS = ((0, 5), (1, 5), (0, 1))
NOISE_REACH = 4.0  # squared doublings over which runs are taken to be as noisy as each other


class Kernel(Spec):
    """Variances of log(measured / predicted) by what runs share, and the squared reaches over jobs and knobs."""

    offset: Annotated[float, Field(ge=0)]
    gpu: Annotated[float, Field(ge=0)]
    release: Annotated[float, Field(ge=0)]
    recipe: Annotated[float, Field(ge=0)]
    job: Annotated[float, Field(ge=0)]
    near: Annotated[float, Field(ge=0)]
    plan: Annotated[float, Field(ge=0)]
    plan_job: Annotated[float, Field(ge=0)]
    pair: Annotated[float, Field(ge=0)]
    job_reach: Annotated[float, Field(gt=0)]
    near_reach: Annotated[float, Field(gt=0)]
    plan_job_reach: Annotated[float, Field(gt=0)]
    pair_job_reach: Annotated[float, Field(gt=0)]
    plan_reach: Annotated[float, Field(gt=0)]
    pair_reach: Annotated[float, Field(gt=0)]

    @property
    def prior(self) -> float:
        """Variance of the correction of a job and plan that no run is near."""
        same = self.offset + self.gpu + self.release + self.recipe + self.job + self.near
        return same + (self.plan + self.plan_job) * len(KNOBS) + self.pair * len(PAIRS)


class Residual(NamedTuple):
    """A framework's runs under the kernel."""

    kernel: Kernel
    measured: MeasuredRuns

    @property
    def solved(self) -> Solved:
        """The runs with their covariance factored."""
        return _solved(self.kernel, self.measured.runs)


@dataclass(frozen=True, slots=True)
class Solved:
    """Runs, the inverse L^-1 of their covariance's Cholesky factor, and the weights K^-1 y."""

    runs: Runs
    inverse_root: Any
    weights: Any


@lru_cache(maxsize=32)
def _solved(kernel: Kernel, text: str) -> Solved:
    runs = read_runs(text)
    try:
        inverse_root = np.linalg.inv(np.linalg.cholesky(covariance(kernel, runs) + np.diag(runs.variance)))
    except np.linalg.LinAlgError:
        raise one_problem(
            "calibration", "measured.runs", "", "holds runs that are the same but for rounding", "raise their noise"
        ) from None
    return Solved(runs, inverse_root, inverse_root.T @ (inverse_root @ runs.log_error))


def job_features(job: Job) -> Any:
    """Return the (8,) coordinates of a job."""
    model = job.model
    sizes = (model.hidden, model.layers, job.seq_len, job.gpus, job.global_batch, job.cluster.sizes[0])
    return np.array(job_axes(*sizes, float(model.moe is not None), float(model.mla is not None)))


def _squared(a: Any, b: Any) -> Any:
    """Return the (n, m) squared distances of (n, d) and (m, d) points."""
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2.0 * (a @ b.T), 0.0)


class Shared(NamedTuple):
    """What two runs share: whatever their plans, and the factors of the sums over knobs and over pairs of knobs."""

    same: Any
    knobs: Any
    pairs: Any


def _shared(kernel: Kernel, gpu: Any, release: Any, precision: Any, squared: Any) -> Shared:
    def alike(reach: float) -> Any:
        return np.exp(-squared / (2.0 * reach))

    same = kernel.offset + kernel.gpu * gpu + kernel.release * release + kernel.recipe * (release * gpu * precision)
    same = same + kernel.job * (0.5 + 0.5 * release) * alike(kernel.job_reach)
    same = same + kernel.near * gpu * (0.3 + 0.7 * precision) * alike(kernel.near_reach)
    here = 0.5 + 0.5 * gpu
    knobs = kernel.plan + kernel.plan_job * here * alike(kernel.plan_job_reach)
    return Shared(same, knobs, kernel.pair * here * alike(kernel.pair_job_reach))


def _rho(reach: float, a: Any, b: Any) -> Any:
    return np.exp(-((a - b) ** 2) / (2.0 * reach))


def _between(kernel: Kernel, shared: Shared, a: Any, b: Any) -> Any:
    """Return the covariance of plans whose knobs are the last axes of a and b (broadcast), given what their runs share."""
    knobs = sum(_rho(kernel.plan_reach, a[..., k], b[..., k]) for k in range(len(KNOBS)))
    short = [_rho(kernel.pair_reach, a[..., k], b[..., k]) for k in range(max(map(max, PAIRS)) + 1)]
    pairs = sum(short[k] * short[other] for k, other in PAIRS)
    return shared.same + shared.knobs * knobs + shared.pairs * pairs


def covariance(kernel: Kernel, runs: Runs) -> Any:
    """Return the (n, n) prior covariance of the runs of one framework."""
    equal = [1.0 * (column[:, None] == column[None]) for column in (runs.gpu, runs.release, runs.precision)]
    shared = _shared(kernel, equal[0], equal[1], equal[2], _squared(runs.job, runs.job))
    return _between(kernel, shared, runs.knobs[:, None], runs.knobs[None])


def _to_runs(residual: Residual, job: Job) -> Shared:
    """Return what a job shares with each run, (n,) each."""
    runs, gpu = residual.solved.runs, job.cluster.gpu
    on_gpu = 1.0 * np.isin(runs.gpu, [gpu.name, *gpu.aliases])
    release = 1.0 * (runs.release == known_release(job.release, runs.release.tolist()))
    precision = 1.0 * (runs.precision == width(job.precision))
    return _shared(residual.kernel, on_gpu, release, precision, ((runs.job - job_features(job)) ** 2).sum(axis=-1))


def known_release(release: str, known: Sequence[str]) -> str:
    """Return the one known release whose name has this as a part ("26.06" of "NeMo 26.06 container"), else the release as it is."""
    if release in known or not release:
        return release
    parts = sorted({name for name in known if release.lower() in name.lower()})
    return parts[0] if len(parts) == 1 else release


def correction(job: Job, plan: Plan, residual: Residual) -> Floats:
    """Return the factor of the figure that the runs speak for: the exponential of the process's mean, broadcasting as the plan."""
    kernel, weights, runs = residual.kernel, residual.solved.weights, residual.solved.runs
    shared = _to_runs(residual, job)
    slopes = weights * shared.knobs
    found: Floats = math.exp(float(np.sum(weights * shared.same)))
    for k, (name, at) in enumerate(KNOBS):
        field = getattr(plan, name)
        values, where = np.unique(field, return_inverse=True)
        table = [_factor(slopes * _rho(kernel.plan_reach, at(value), runs.knobs[:, k])) for value in values.tolist()]
        found = found * np.array(table)[where].reshape(np.shape(field))
    for pair in PAIRS:
        found = found * _of_pair(plan, residual, weights * shared.pairs, pair)
    return found


def _factor(shares: Any) -> float:
    return math.exp(float(np.sum(shares)))


def _of_pair(plan: Plan, residual: Residual, slopes: Any, pair: tuple[int, int]) -> Floats:
    """Return the factor of a pair of knobs: a table over the distinct values of both."""
    rho, places = [], []
    for k in pair:
        name, at = KNOBS[k]
        field = getattr(plan, name)
        values, where = np.unique(field, return_inverse=True)
        rho.append([_rho(residual.kernel.pair_reach, at(value), residual.solved.runs.knobs[:, k]) for value in values.tolist()])
        places.append(where.reshape(np.shape(field)))
    table = np.array([[_factor(slopes * (one * other)) for other in rho[1]] for one in rho[0]])
    return table[places[0], places[1]]


def _points(plan: Plan, shape: tuple[int, ...]) -> Any:
    """Return the (plans, 10) knobs of plans that broadcast to `shape`."""
    columns = (coordinates(getattr(plan, name), at) for name, at in KNOBS)
    return np.stack([np.broadcast_to(column, shape).reshape(-1) for column in columns], axis=-1)


def _whitened(residual: Residual, job: Job, points: Any) -> Any:
    """Return L^-1 k(runs, point) for each point, (points, runs): its squares are what the runs take off the prior's variance.

    One product a point, so that a point's figures do not depend on which others are asked for.
    """
    shared, runs, root = _to_runs(residual, job), residual.solved.runs, residual.solved.inverse_root
    return np.stack([root @ _between(residual.kernel, shared, runs.knobs, point) for point in points])


def spread90(job: Job, plan: Plan, residual: Residual) -> Floats:
    """Return the factor by which the step time divided and multiplied spans its 90 % interval, in the plan's broadcast shape."""
    shape = np.broadcast_shapes(*(np.shape(getattr(plan, name)) for name in FIELDS))
    distinct, where = np.unique(_points(plan, shape), axis=0, return_inverse=True)
    taken = np.square(_whitened(residual, job, distinct)).sum(axis=-1)
    noise, reach = _noise_near(residual, job)
    return _reaching(reach, np.maximum(residual.kernel.prior - taken, 0.0) + noise * noise)[where].reshape(shape)


def ratio_spread90(job: Job, plans: Plan, n: int, residual: Residual) -> Any:
    """Return, for each of a table of n plans, the factor that holds the ratio of its step time to the first's in 90 % of cases.

    Plans of one job share most of their error, so a ratio is known better than either time; each keeps its own noise.
    """
    points = _points(plans, (n,))
    white = _whitened(residual, job, points)
    shared = _shared(residual.kernel, 1.0, 1.0, 1.0, 0.0)
    apart = 2.0 * (residual.kernel.prior - _between(residual.kernel, shared, points, points[0])) - np.square(white - white[0]).sum(axis=-1)
    noise, reach = _noise_near(residual, job)
    return _reaching(reach, np.maximum(apart, 0.0) + 2.0 * noise * noise)


def noise_of(job: Job, residual: Residual) -> float:
    """Return the standard deviation of log(step time) between runs of one plan of a job, as the runs near it have it."""
    return _noise_near(residual, job)[0]


def _reaching(reach: float, variance: Any) -> Any:
    """Return the factor that 90 % of errors of this variance lie within."""
    return np.array([math.exp(reach * math.sqrt(of)) for of in variance.tolist()])


def _noise_near(residual: Residual, job: Job) -> tuple[float, float]:
    """Return the noise and reach of the runs near a job: geometric means, weighed by nearness."""
    runs, gpu = residual.solved.runs, job.cluster.gpu
    squared = ((runs.job - job_features(job)) ** 2).sum(axis=-1)
    weight = np.exp(-np.minimum(squared - squared.min(), 600.0) / (2.0 * NOISE_REACH))
    weight = (
        weight
        * np.where(np.isin(runs.gpu, [gpu.name, *gpu.aliases]), 1.0, 0.1)
        * np.where(runs.precision == width(job.precision), 1.0, 0.3)
    )
    weight = weight / weight.sum()
    return math.exp(float(np.sum(weight * np.log(runs.noise)))), math.exp(float(np.sum(weight * np.log(runs.reach))))


def plan_errors(job: Job, plans: Plan, n: int, kernel: Kernel, residual: Residual | None) -> Callable[[Any, Any], Any]:
    """Return the covariance of log(measured / predicted) between a table of n plans of one job, by (rows, columns): the kernel's, less
    what measured runs already tell. A plan's own noise is not in it.
    """
    points = _points(plans, (n,))
    white = None if residual is None else _whitened(residual, job, points)
    same = _shared(kernel, 1.0, 1.0, 1.0, 0.0)

    def between(rows: Any, columns: Any) -> Any:
        told = 0.0 if white is None else white[rows] @ white[columns].T
        return _between(kernel, same, points[rows][:, None], points[columns][None]) - told

    return between
