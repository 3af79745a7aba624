"""Coefficients and efficiency curves: everything the formulas take that is neither a plan, a model nor a data sheet.

A calibration is an immutable value made of layers: `configs/calibrations/prior.yaml` (the registry of scalar coefficients) and
pooled.yaml (curves pooled over GPUs), then the file of the GPU, then that of the framework and release. Each number keeps its prior, the
source it came from, how many rows made it and the residual they left.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from tuner.errors import nearest, one_problem
from tuner.spec import Name, Spec

if TYPE_CHECKING:
    from tuner.job import Job

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DTYPES = ("bfloat16", "fp8", "fp8_block", "nvfp4")

# The curve of each precision of a job (tuner.job.PRECISIONS).
DTYPE_OF: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "fp32": "bfloat16",
    "fp8": "fp8",
    "fp8-rowwise": "fp8",
    "fp8-blockwise": "fp8_block",
    "mxfp8": "fp8",
    "nvfp4": "nvfp4",
}
PRIOR = "prior"
POOLED = "pooled"
_positive = Annotated[float, Field(gt=0, le=1e30)]
_fraction = Annotated[float, Field(gt=0, le=1)]
_seconds = Annotated[float, Field(ge=0, le=10)]


class Fit(Spec):
    """How well a curve describes the points it was fitted to: n points, median and 90th percentile of |error|; the same two
    for points held out of the fit (`held_out`: which ones), where that was tried.
    """

    source: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=0)] = 0
    median: Annotated[float, Field(ge=0)] | None = None
    p90: Annotated[float, Field(ge=0)] | None = None
    held_out: str = ""
    held_out_median: Annotated[float, Field(ge=0)] | None = None
    held_out_p90: Annotated[float, Field(ge=0)] | None = None


class Coefficient(Spec):
    """One scalar: its value, the value before any fit, where it came from ("default" when nothing was fitted), the number of
    rows behind it and the residual they left.
    """

    value: float
    prior: float
    words: str
    unit: str = ""
    source: str
    n: Annotated[int, Field(ge=0)] = 0
    residual: Annotated[float, Field(ge=0)] | None = None
    based_on: str = ""


class Grid(Spec):
    """A factor over one to three axes, interpolated linearly between breakpoints and held constant outside.

    axes: increasing breakpoints of each axis; values: one line of numbers for each combination of the leading axes (row
    major), as text, because a YAML parser needs a hundred times longer for a list of numbers.
    """

    axes: tuple[tuple[float, ...], ...] = Field(min_length=1, max_length=3)
    values: str

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for axis in self.axes:
            if len(axis) < 2 or any(b <= a for a, b in pairwise(axis)):
                raise ValueError("each axis needs at least two breakpoints, increasing")
        try:
            table = np.array(self.values.split(), dtype=float)
        except ValueError as error:
            raise ValueError(f"values must be numbers: {error}") from None
        shape = tuple(len(axis) for axis in self.axes)
        if table.size != int(np.prod(shape)) or not np.isfinite(table).all() or (table <= 0).any():
            raise ValueError(f"values must be {' x '.join(map(str, shape))} positive numbers, not {table.size}")
        return self

    @cached_property
    def table(self) -> Any:
        """The values as an array with one axis for each of `axes`; read only."""
        table = np.array(self.values.split(), dtype=float).reshape([len(axis) for axis in self.axes])
        table.setflags(write=False)
        return table

    @cached_property
    def _breaks(self) -> tuple[tuple[Any, Any, Any, int], ...]:
        made = []
        for axis in self.axes:
            points = np.array(axis, dtype=float)
            made.append((points, points[1:], 1.0 / np.diff(points), len(axis) - 2))
        return tuple(made)

    def __call__(self, *columns: Any) -> Any:
        """Return the factor at `columns` (one for each axis, broadcastable). Scalar and vector agree to the last bit: only
        IEEE + - * and comparisons are used.
        """
        weights, lows = [], []
        for (points, inner, inverse, last), x in zip(self._breaks, columns, strict=True):
            clipped = np.minimum(np.maximum(x, points[0]), points[-1]) * 1.0
            low = np.minimum(np.searchsorted(inner, clipped, side="right"), last)
            lows.append(low)
            weights.append((clipped - points[low]) * inverse[low])
        return _multilinear(self.table, lows, weights)


def _multilinear(table: Any, lows: list[Any], weights: list[Any]) -> Any:
    """Return `table` interpolated linearly along each axis between index low and low + 1."""
    if len(lows) == 1:
        low, weight = lows[0], weights[0]
        return table[low] * (1.0 - weight) + table[low + 1] * weight
    if len(lows) == 2:
        (i, j), (u, v) = lows, weights
        near = table[i, j] * (1.0 - v) + table[i, j + 1] * v
        far = table[i + 1, j] * (1.0 - v) + table[i + 1, j + 1] * v
        return near * (1.0 - u) + far * u
    (i, j, k), (u, v, w) = lows, weights
    near = (table[i, j, k] * (1.0 - w) + table[i, j, k + 1] * w) * (1.0 - v)
    near = near + (table[i, j + 1, k] * (1.0 - w) + table[i, j + 1, k + 1] * w) * v
    far = (table[i + 1, j, k] * (1.0 - w) + table[i + 1, j, k + 1] * w) * (1.0 - v)
    far = far + (table[i + 1, j + 1, k] * (1.0 - w) + table[i + 1, j + 1, k + 1] * w) * v
    return near * (1.0 - u) + far * u


class Tile(Spec):
    """A block of output that one multiprocessor computes at once, the parts that k is split into, and the fraction of the
    multiprocessor's peak that it reaches in the long run.
    """

    m: Annotated[int, Field(ge=1)]
    n: Annotated[int, Field(ge=1)]
    splits: Annotated[int, Field(ge=1, le=64)] = 1
    efficiency: _fraction


class GemmCurve(Spec):
    """Matrix products of one dtype (roofline.products_seconds says how these enter).

    launch_s: fixed time; prologue_k: filling and draining of the pipeline in units of k; partial_wave: how much of an
    incomplete last wave is paid (0: its share, 1: a full wave); memory: fraction of the HBM bandwidth; reduction: passes over
    fp32 partial sums for each split of k; power: factor on the efficiency over watts per dense bf16 TFLOP/s, because a card
    with less power for its peak clocks lower under load; correction: factor on the time over (m, n, k).
    """

    launch_s: _seconds
    tiles: tuple[Tile, ...] = Field(min_length=1, max_length=8)
    prologue_k: Annotated[float, Field(ge=0, le=1e5)]
    partial_wave: Annotated[float, Field(ge=0, le=1)]
    memory: _fraction
    reduction: Annotated[float, Field(ge=0, le=100)] = 1.0
    power: Grid | None = None
    correction: Grid | None = None
    fit: Fit


class GroupedCurve(Spec):
    """Grouped products: factor on the time of the GEMM curve at the same rows in each group, over (rows, groups).

    routing_s, routing_passes: what the measured MoE operator does beside its products (fixed time; passes over the tokens'
    hidden states), needed to compare with the tables and left out of grouped_gemm_seconds.
    """

    factor: Grid
    routing_s: _seconds = 0.0
    routing_passes: Annotated[float, Field(ge=0, le=1000)] = 0.0
    fit: Fit


class AttentionCurve(Spec):
    """A fused attention kernel, forward (roofline.attention_seconds says how these enter).

    efficiency: fraction of the bf16 peak over head dimension (QK); half_length: cost of starting a block of queries, in keys,
    over head dimension; block: queries in a block; correction: factor on the time over (batch x heads, queries, head dimension).
    """

    launch_s: _seconds
    efficiency: Grid
    half_length: Grid
    block: Annotated[int, Field(ge=1, le=1024)]
    partial_wave: Annotated[float, Field(ge=0, le=1)]
    memory: _fraction
    correction: Grid | None = None
    fit: Fit


class CollectiveCurve(Spec):
    """One collective inside the innermost domain: latency in seconds over members; fraction of the link's bandwidth that the
    bus reaches over (members, bytes).
    """

    latency: Grid
    efficiency: Grid
    fit: Fit


class Calibration(Spec):
    """The merged layers. `calibration["name"]` is a scalar coefficient; an unknown name is a bug, hence KeyError."""

    name: Name
    gpu: str = ""
    framework: str = ""
    release: str = ""
    based_on: str = ""
    layers: tuple[str, ...] = ()
    coefficients: dict[str, Coefficient]
    gemm: dict[str, GemmCurve]
    grouped: dict[str, GroupedCurve]
    attention: dict[str, AttentionCurve]
    collectives: dict[str, CollectiveCurve]

    @field_validator("gemm", "grouped")
    @classmethod
    def _known_dtypes(cls, curves: dict[str, Any]) -> dict[str, Any]:
        return _known(curves, DTYPES)

    @field_validator("collectives")
    @classmethod
    def _known_collectives(cls, curves: dict[str, Any]) -> dict[str, Any]:
        return _known(curves, COLLECTIVES)

    def __getitem__(self, name: str) -> float:
        return self.coefficients[name].value

    @cached_property
    def hash(self) -> str:
        """A short id of every number in here; it stands beside each figure made with them."""
        dumped = json.dumps(self.model_dump(mode="json", exclude={"name", "layers"}), sort_keys=True)
        return hashlib.sha256(dumped.encode()).hexdigest()[:8]


def _known(curves: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    for name in curves:
        if name not in names:
            raise ValueError(f"{name} is not one of {', '.join(names)}")
    return curves


class Override(Spec):
    """A coefficient as a file after the prior states it."""

    value: float
    source: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=0)] = 0
    residual: Annotated[float, Field(ge=0)] | None = None


class CalibrationFile(Spec):
    """A file of configs/calibrations: what it overrides of the layers before it.

    gpus: GPU names it was fitted on; relatives: GPUs without a file of their own that it stands in for.
    """

    name: Name
    gpus: tuple[Name, ...] = ()
    relatives: tuple[Name, ...] = ()
    framework: str = ""
    release: str = ""
    coefficients: dict[str, Override] = Field(default_factory=dict)
    gemm: dict[str, GemmCurve] = Field(default_factory=dict)
    grouped: dict[str, GroupedCurve] = Field(default_factory=dict)
    attention: dict[str, AttentionCurve] = Field(default_factory=dict)
    collectives: dict[str, CollectiveCurve] = Field(default_factory=dict)


class _Registered(Spec):
    """A coefficient as prior.yaml registers it."""

    words: Annotated[str, Field(min_length=1)]
    unit: str = ""
    value: float
    source: Annotated[str, Field(min_length=1)]


class PriorFile(Spec):
    """configs/calibrations/prior.yaml: the registry of scalar coefficients. A new name is an entry there and nothing else."""

    name: Name
    coefficients: dict[str, _Registered]


def from_prior(prior: PriorFile, pooled: CalibrationFile) -> Calibration:
    """Return the calibration of the prior and the curves pooled over GPUs; every coefficient says source: default."""
    coefficients = {
        name: Coefficient(value=entry.value, prior=entry.value, words=entry.words, unit=entry.unit, source="default", based_on=entry.source)
        for name, entry in prior.coefficients.items()
    }
    return Calibration(
        name=prior.name,
        layers=(prior.name, pooled.name),
        coefficients=coefficients,
        gemm=pooled.gemm,
        grouped=pooled.grouped,
        attention=pooled.attention,
        collectives=pooled.collectives,
    )


def layered(base: Calibration, over: CalibrationFile, *, gpu: str = "") -> Calibration:
    """Return `base` with what `over` states put on top; says based_on when `gpu` is only a relative of the file's GPUs."""
    unknown = [name for name in over.coefficients if name not in base.coefficients]
    if unknown:
        raise one_problem(
            over.name, f"coefficients.{unknown[0]}", "", "is not a registered coefficient", nearest(unknown[0], base.coefficients)
        )
    changed = {
        name: base.coefficients[name].model_copy(update={"based_on": over.name, **entry.model_dump()})
        for name, entry in over.coefficients.items()
    }
    return base.model_copy(
        update={
            "name": over.name,
            "gpu": gpu or base.gpu,
            "framework": over.framework or base.framework,
            "release": over.release or base.release,
            "based_on": over.name if gpu and gpu not in over.gpus else base.based_on,
            "layers": (*base.layers, over.name),
            "coefficients": {**base.coefficients, **changed},
            "gemm": {**base.gemm, **over.gemm},
            "grouped": {**base.grouped, **over.grouped},
            "attention": {**base.attention, **over.attention},
            "collectives": {**base.collectives, **over.collectives},
        }
    )


def load_calibration(text: str, job: Job) -> Calibration:
    """Return the calibration that `text` names for `job`.

    "none": prior.yaml and pooled.yaml alone, so that only the data sheet tells GPUs apart; "auto": these, then the file of the GPU
    (or of a relative), then that of its framework and release; else a name in configs/calibrations or a file, on the prior.
    """
    from tuner.presets import configs_dir

    folder = configs_dir() / "calibrations"
    base = from_prior(_read_prior(folder / f"{PRIOR}.yaml"), _read(folder / f"{POOLED}.yaml"))
    gpu = job.cluster.gpu.name
    if text in ("none", PRIOR):
        return base.model_copy(update={"gpu": gpu})
    if text == "auto":
        for over in _matching(folder, job):
            base = layered(base, over, gpu=gpu)
        return base.model_copy(update={"gpu": gpu})
    path = folder / f"{text}.yaml"
    if not path.is_file():
        path = Path(text)
    if not path.is_file():
        known = [PRIOR, *sorted(p.stem for p in folder.glob("*.yaml") if p.stem not in (PRIOR, POOLED))]
        raise one_problem("--calibration", "", text, "is none, auto, a name or a file", nearest(text, known))
    return layered(base, _read(path), gpu=gpu)


def _matching(folder: Path, job: Job) -> list[CalibrationFile]:
    """Return the files for the job, least specific first: GPU or relative, then framework, then release."""
    gpu = job.cluster.gpu.name
    names = {gpu, *job.cluster.gpu.aliases}
    files = [_read(path) for path in sorted(folder.glob("*.yaml")) if path.stem not in (PRIOR, POOLED)]
    generic = [f for f in files if not f.framework]
    chosen = [f for f in generic if names & set(f.gpus)] or [f for f in generic if names & set(f.relatives)]
    own = [
        f for f in files if f.framework == job.framework.name and names & set({*f.gpus, *f.relatives}) and f.release in ("", job.release)
    ]
    return chosen[:1] + sorted(own, key=lambda f: (f.release != "", f.name))


@lru_cache(maxsize=64)
def _read(path: Path) -> CalibrationFile:
    from tuner.load import load_spec, load_yaml

    loaded: CalibrationFile = load_spec(CalibrationFile, load_yaml(path), str(path))
    return loaded


@lru_cache(maxsize=4)
def _read_prior(path: Path) -> PriorFile:
    from tuner.load import load_spec, load_yaml

    loaded: PriorFile = load_spec(PriorFile, load_yaml(path), str(path))
    return loaded
