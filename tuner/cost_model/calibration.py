"""Coefficients and efficiency curves: everything the formulas take that is neither a plan, a model nor a data sheet.

A calibration is an immutable value made of layers: `configs/calibrations/prior.yaml` (the registry of scalar coefficients) and
pooled.yaml (curves pooled over GPUs), then the file of the GPU, then that of the framework and release. Each number keeps its prior, the
source it came from, how many rows made it and the residual they left. A framework's file also has its measured runs (residual.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator

from tuner.cost_model.curves import AttentionCurve, CollectiveCurve, GemmCurve, GroupedCurve
from tuner.cost_model.residual import Kernel, Residual
from tuner.cost_model.runs import MeasuredRuns
from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.load import load_spec, load_yaml, read_text
from tuner.presets import configs_dir
from tuner.spec import Name, Spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.cluster import Gpu
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
SPREADS = ("time_spread_90", "oom_margin_spread")  # how sure the framework's own runs make the model
MEMORY = "-memory"  # ends the name of a framework's file of memory coefficients, beside that of step time
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,119}")


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
    least: Annotated[float, Field(exclude=True)] = 0.0
    most: Annotated[float, Field(exclude=True)] = 1e30


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
    kernel: Kernel
    memory_kernel: Kernel
    measured: MeasuredRuns | None = None
    measured_memory: MeasuredRuns | None = None

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

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed and nothing derived from the old ones."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("hash", "residual", "memory_residual"):
            copied.__dict__.pop(name, None)
        return copied

    @cached_property
    def residual(self) -> Residual | None:
        """What measured runs say of the error in step time; None where the calibration has none."""
        return None if self.measured is None else Residual(self.kernel, self.measured)

    @cached_property
    def memory_residual(self) -> Residual | None:
        """What measured runs say of the error in memory; None where the calibration has none."""
        return None if self.measured_memory is None else Residual(self.memory_kernel, self.measured_memory)

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

    gpus: GPU names it is for (none: it holds on any); fitted_on: those its rows came from, where it holds on any; relatives: GPUs
    without a file of their own that it stands in for; base: what it lies on when it is named: prior.yaml and pooled.yaml alone, all
    that ships for the job's GPU and framework (auto), or what ships for the GPU, with the framework's own on top (hardware).
    """

    name: Name
    gpus: tuple[Name, ...] = ()
    relatives: tuple[Name, ...] = ()
    fitted_on: tuple[Name, ...] = ()
    framework: str = ""
    release: str = ""
    base: Literal["prior", "auto", "hardware"] = "prior"
    coefficients: dict[str, Override] = Field(default_factory=dict)
    gemm: dict[str, GemmCurve] = Field(default_factory=dict)
    grouped: dict[str, GroupedCurve] = Field(default_factory=dict)
    attention: dict[str, AttentionCurve] = Field(default_factory=dict)
    collectives: dict[str, CollectiveCurve] = Field(default_factory=dict)
    measured: MeasuredRuns | None = None
    measured_memory: MeasuredRuns | None = None


class _Registered(Spec):
    """A coefficient as prior.yaml registers it, with the least and most that a formula takes (0 and a thousand times `value` where it
    does not say).
    """

    words: Annotated[str, Field(min_length=1)]
    unit: str = ""
    value: float
    least: Annotated[float, Field(ge=0)] = 0.0
    most: Annotated[float, Field(ge=0)] | None = None
    source: Annotated[str, Field(min_length=1)]


class PriorFile(Spec):
    """configs/calibrations/prior.yaml: the registry of scalar coefficients (a new name is an entry there and nothing else) and the
    kernels of the residual processes of step time and memory.
    """

    name: Name
    coefficients: dict[str, _Registered]
    kernel: Kernel
    memory_kernel: Kernel


def from_prior(prior: PriorFile, pooled: CalibrationFile) -> Calibration:
    """Return the calibration of the prior and the curves pooled over GPUs; every coefficient says source: default."""
    coefficients = {
        name: Coefficient(
            value=entry.value,
            prior=entry.value,
            words=entry.words,
            unit=entry.unit,
            source="default",
            based_on=entry.source,
            least=entry.least,
            most=1000.0 * entry.value if entry.most is None else entry.most,
        )
        for name, entry in prior.coefficients.items()
    }
    return Calibration(
        name=prior.name,
        layers=(prior.name, pooled.name),
        coefficients=coefficients,
        kernel=prior.kernel,
        memory_kernel=prior.memory_kernel,
        gemm=pooled.gemm,
        grouped=pooled.grouped,
        attention=pooled.attention,
        collectives=pooled.collectives,
    )


def layered(base: Calibration, over: CalibrationFile) -> Calibration:
    """Return `base` with what `over` states put on top; says based_on when the file was fitted on other GPUs."""
    unknown = [name for name in over.coefficients if name not in base.coefficients]
    if unknown:
        raise one_problem(
            over.name, f"coefficients.{unknown[0]}", "", "is not a registered coefficient", nearest(unknown[0], base.coefficients)
        )
    wrong = [
        Problem(where=over.name, path=f"coefficients.{name}", value=str(entry.value), rule=f"must be from {own.least:g} to {own.most:g}")
        for name, entry in over.coefficients.items()
        if not (own := base.coefficients[name]).least <= entry.value <= own.most
    ]
    if wrong:
        raise SpecError(wrong)
    changed = {
        name: base.coefficients[name].model_copy(update={"based_on": over.name, **entry.model_dump()})
        for name, entry in over.coefficients.items()
    }
    return base.model_copy(
        update={
            "name": over.name,
            "framework": over.framework or base.framework,
            "release": over.release or base.release,
            "based_on": over.name if over.gpus and base.gpu not in over.gpus else base.based_on,
            "layers": (*base.layers, over.name),
            "coefficients": {**base.coefficients, **changed},
            "gemm": {**base.gemm, **over.gemm},
            "grouped": {**base.grouped, **over.grouped},
            "attention": {**base.attention, **over.attention},
            "collectives": {**base.collectives, **over.collectives},
            "measured": over.measured or base.measured,
            "measured_memory": over.measured_memory or base.measured_memory,
        }
    )


def load_calibration(text: str, job: Job) -> Calibration:
    """Return the calibration that `text` names for `job`: see calibration_for."""
    framework = job.framework
    return calibration_for(text, job.cluster.gpu, framework=framework.name, release=job.release, relatives=framework.relatives)


def calibration_for(text: str, gpu: Gpu, *, framework: str = "", release: str = "", relatives: Sequence[str] = ()) -> Calibration:
    """Return the calibration that `text` names for a GPU, framework and release.

    "none": prior.yaml and pooled.yaml alone, so that only the data sheet tells GPUs apart; "auto": these, then the file of
    the GPU (or of a relative), then that of its framework and release; else a name in configs/calibrations or a file, on top
    of prior and pooled.
    """
    folder = configs_dir() / "calibrations"
    base = from_prior(_read_prior(folder / f"{PRIOR}.yaml"), _read(folder / f"{POOLED}.yaml")).model_copy(update={"gpu": gpu.name})
    if text in ("none", PRIOR, POOLED):
        return base
    if text == "auto":
        return _stacked(base, *_matching(folder, gpu, (framework, *relatives), release), framework)
    path = folder / f"{text}.yaml"
    if not _NAME.fullmatch(text) or not path.is_file():
        path = Path(text)
    if not _is_file(path):
        raise one_problem("calibration", "", text, "is none, auto, a name or a file", nearest(text, ["none", "auto", *_names(folder)]))
    over = _read(path)
    if over.base == "hardware":
        generic, own = _matching(folder, gpu, (framework, *relatives), release)
        return _stacked(base, [*generic, over], own, framework).model_copy(update={"name": over.name})
    if over.base == "auto":
        if over.framework != framework:
            rule = f"is of runs under {over.framework}; the job's framework is {framework or 'not given'}"
            raise one_problem("calibration", "framework", text, rule, f"--framework {over.framework}, or --calibration auto")
        base = calibration_for("auto", gpu, framework=framework, release=release, relatives=relatives)
    return layered(base, over)


def before_fit(gpu: Gpu, framework: str) -> Calibration:
    """Return what a framework's coefficients are fitted on top of: the calibration of the GPU and the framework's files that are kept by
    hand (all but its own and that of its memory, which the fit writes).
    """
    folder = configs_dir() / "calibrations"
    base = calibration_for("auto", gpu)
    for path in sorted(folder.glob(f"{framework}-*.yaml")):
        over = _read(path)
        if over.framework == framework and not over.name.endswith(MEMORY):
            base = layered(base, over)
    return base.model_copy(update={"framework": ""})


def _stacked(base: Calibration, generic: Sequence[CalibrationFile], own: Sequence[CalibrationFile], framework: str) -> Calibration:
    """Return the files of a GPU, then those of a framework, on top of a base; a relative's only stand in."""
    bare = reduce(layered, generic, base)
    of = reduce(layered, own, bare)
    return of if of.framework == framework else _standing_in(of, bare)


def _standing_in(of: Calibration, bare: Calibration) -> Calibration:
    """Return the calibration of a relative as that of a framework that was never measured: coefficients alone. The relative's runs, and
    how sure they make the model, say nothing of another framework's; `bare`: the calibration without any framework's.
    """
    coefficients = {**of.coefficients, **{name: bare.coefficients[name] for name in SPREADS}}
    return of.model_copy(update={"measured": None, "measured_memory": None, "coefficients": coefficients})


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem not in (PRIOR, POOLED))


def _matching(folder: Path, gpu: Gpu, frameworks: Sequence[str], release: str) -> tuple[list[CalibrationFile], list[CalibrationFile]]:
    """Return the files for a GPU: its own or a relative's; and, least specific first, the framework's on any GPU, the framework's on
    this one, the release's. A framework that was not measured on this GPU takes those of the first relative that was.
    """
    names = {gpu.name, *gpu.aliases}
    paths = [folder / f"{name}.yaml" for name in _names(folder)]
    mentions = (*names, *(f"framework: {name}\n" for name in frameworks if name))
    files = [_read(path) for path in paths if any(words in read_text(path) for words in mentions)]  # parsing is what takes time
    generic = [f for f in files if not f.framework]
    chosen = [f for f in generic if names & set(f.gpus)] or [f for f in generic if names & set(f.relatives)]
    stacks = [_of_framework(files, name, names, release) for name in frameworks if name]
    measured = [stack for stack in stacks if any(names & {*f.gpus, *f.fitted_on} for f in stack)]
    return chosen[:1], next(iter([*measured, *stacks[:1]]), [])


def _of_framework(files: Sequence[CalibrationFile], framework: str, gpus: set[str], release: str) -> list[CalibrationFile]:
    of_framework = [f for f in files if f.framework == framework and f.release in ("", release)]
    own = [f for f in of_framework if not f.gpus or gpus & {*f.gpus, *f.relatives}]
    return sorted(own, key=lambda f: (f.release != "", bool(f.gpus), not f.name.endswith(MEMORY), f.name))


@lru_cache(maxsize=512)
def _read(path: Path) -> CalibrationFile:
    loaded: CalibrationFile = load_spec(CalibrationFile, load_yaml(path), str(path))
    return loaded


@lru_cache(maxsize=4)
def _read_prior(path: Path) -> PriorFile:
    loaded: PriorFile = load_spec(PriorFile, load_yaml(path), str(path))
    return loaded
