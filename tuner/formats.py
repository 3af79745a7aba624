"""Formats of an export and what is wrapped around them, as people name them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError, nearest
from tuner.launch.launchers.launcher import launchers, open_launcher
from tuner.launch.wrappers import wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tuner.job import Job

NONUNIFORM = "megatron-lm-ntp"
ANY = "generic"  # framework of a format that launches none of its own
# Accelerators that PyTorch's launchers reach neither through CUDA nor ROCm, and the formats whose files run there.
OTHERS: dict[str, tuple[str, ...]] = {"Google": ("maxtext", "neutral"), "AWS": ("neutral",), "Intel": ("neutral",)}
# What people type for them.
ALIASES = {
    "megatron": "megatron-lm",
    "mcore": "megatron-lm",
    "bridge": "megatron-bridge",
    "titan": "torchtitan",
    "ds": "deepspeed",
    "fsdp": "accelerate",
    "fsdp2": "accelerate",
    "ntp": NONUNIFORM,
    "yaml": "neutral",
    "k8s": "kubernetes",
    "sky": "skypilot",
    "sbatch": "slurm",
}


@dataclass(frozen=True, slots=True)
class Formats:
    """What is to be written: formats, and the wrappers around those of them that are launched."""

    names: tuple[str, ...]
    wraps: tuple[str, ...] = ()


def known_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return (*sorted(name for name, known in launchers().items() if known.make is not None), NONUNIFORM)


def refuse_accelerator(format_: str, job: Job) -> None:
    """Raise SpecError where a format's files do not run on the job's accelerator."""
    gpu = job.cluster.gpu
    known = OTHERS.get(gpu.vendor)
    if known is not None and format_ not in known:
        rule = "the launch needs CUDA or ROCm"
        raise SpecError([Problem(where=format_, path="gpu", value=gpu.name, rule=rule, hint=" or ".join(known))])


def framework_of(format_: str, otherwise: str) -> str:
    """Return the framework that a format launches, or `otherwise` where it launches any."""
    if format_ == NONUNIFORM:
        return "megatron-lm"
    found = open_launcher(format_).framework
    return otherwise if found == ANY else found


def read_formats(formats: Any, wrap: Any = None) -> Formats:
    """Return what texts like "megatron,deepspeed,slurm" name: a wrapper among the formats is one around the others. Raises SpecError."""
    formats_known, wraps_known = known_formats(), tuple(wrapper.BUILT_IN)
    problems: list[Problem] = []
    asked = _named(formats, (*formats_known, *wraps_known), "format", "is no format", problems)
    around = [] if wrap is None else _named(wrap, wraps_known, "wrap", "is no wrapper", problems)
    names = [name for name in asked if name in formats_known]
    if not names and not problems:
        problems.append(Problem(where="format", path="", value="", rule="is missing", hint=", ".join(formats_known)))
    if problems:
        raise SpecError(problems)
    wraps = [*(name for name in asked if name in wraps_known), *around]
    return Formats(tuple(names), tuple(dict.fromkeys(wraps)))


def _named(value: Any, known: Sequence[str], where: str, rule: str, problems: list[Problem]) -> list[str]:
    """Return the names in a text or in texts, each once."""
    texts = [value] if isinstance(value, str) else list(value or ())
    words = [word.strip() for text in texts for word in str(text).split(",") if word.strip()]
    names = [ALIASES.get(word.lower(), word.lower()) for word in words]
    problems += [
        Problem(where=where, path="", value=repr(word)[:60], rule=rule, hint=nearest(word[:60], known))
        for word, name in zip(words, names, strict=True)
        if name not in known
    ]
    return list(dict.fromkeys(names))


def read_failed(value: Any) -> dict[int, tuple[int, ...]]:
    """Return {replica: tensor-parallel slots} of a text like "0:3,1:5" or of such texts. Raises SpecError."""
    texts = [part for item in (value if isinstance(value, (list, tuple)) else [value]) for part in str(item).split(",")]
    found: dict[int, tuple[int, ...]] = {}
    problems = []
    for text in texts:
        match = re.fullmatch(r"\s*(\d{1,6}):(\d{1,6})\s*", text)
        if match is None:
            problems.append(Problem(where="failed", path="", value=repr(text)[:60], rule="must be REPLICA:SLOT", hint="like 0:3,1:5"))
        else:
            found[int(match[1])] = (*found.get(int(match[1]), ()), int(match[2]))
    if problems:
        raise SpecError(problems)
    return found


def as_knobs(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return a launcher's problems of a plan's fields as those of the knobs that a person turns."""
    found: list[Problem] = []
    for problem in problems:
        name, value = problem.path, problem.value
        if name in _PARTS:
            knob, part = _PARTS[name]
            before = found[-1] if found else None
            if before is not None and (before.path, before.rule) == (knob, problem.rule) and name == "loss_layers":
                found[-1] = dataclasses.replace(before, value=f"{before.value}+{part}{value}")
                continue
            problem = dataclasses.replace(problem, path=knob, value=f"{part}{value}")
        found.append(problem)
    return tuple(found)


_PARTS = {
    "embedding_layers": ("pipeline_layout", "embedding="),
    "loss_layers": ("pipeline_layout", "loss="),
    "recompute_layers": ("recompute", "full:"),
}


def grouped(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems with those of one cause as one: pp = 4, vpp = 2: there is no pipeline parallelism."""
    causes: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        causes.setdefault((problem.where, problem.rule), []).append(problem)
    return [found[0] if len(found) == 1 else _together(found) for found in causes.values()]


def _together(found: Sequence[Problem]) -> Problem:
    knobs = ", ".join(f"{one.path} = {one.value}" if one.value else one.path for one in found)
    ends = [one.hint.partition(", or another format") for one in found if one.hint]
    ways = ", ".join(dict.fromkeys(way for way, _, _ in ends))
    hint = f"{ways}, or another format" if any(mark for _, mark, _ in ends) else ways
    return Problem(where=found[0].where, path=knobs, value="", rule=found[0].rule, hint=hint)


def as_under(job: Job, framework: str) -> Job:
    """Return the job under this framework; a release is of the framework it was named for."""
    from tuner import presets

    if framework == job.framework.name:
        return job
    other: Job = job.model_copy(update={"framework": presets.framework(framework), "release": ""})
    return other
