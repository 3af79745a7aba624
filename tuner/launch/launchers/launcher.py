"""What a launcher's vocabulary is: the protocol, what is written, what is read, and the registry of those that are known.

A launcher writes a job and a plan as the files of one framework, and reads such files back. Its two tables account for every field of a
plan: `says` (how the field is spelled) or `cannot` (why it has no spelling); the conformance suite checks both against what is written.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from tuner.errors import Problem, SpecError, TunerError, nearest, one_problem
from tuner.plan import ALL_LAYERS, Plan
from tuner.plan_text import idle_record, plan_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.job import Job

GROUP = "tuner.launchers"
BUILT_IN: dict[str, str] = {
    "accelerate": "tuner.launch.launchers.accelerate",
    "deepspeed": "tuner.launch.launchers.deepspeed",
    "maxtext": "tuner.launch.launchers.maxtext",
    "megatron-bridge": "tuner.launch.launchers.megatron_bridge",
    "megatron-lm": "tuner.launch.launchers.megatron_lm",
    "nanotron": "tuner.launch.launchers.nanotron",
    "nemo": "tuner.launch.launchers.nemo",
    "neutral": "tuner.launch.launchers.neutral",
    "primus": "tuner.launch.launchers.primus",
    "torchtitan": "tuner.launch.launchers.torchtitan",
}
# What a plan's field is when the plan does not use it: no launcher has to spell that.
IDLE: Mapping[str, int] = {f.name: f.default for f in dataclasses.fields(Plan)}  # type: ignore[misc]
DERIVED = ("idle_tp",)  # of a plan that nobody launches: that of a replica which lost GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files of a launch, by their path inside the folder they go to. programs: those to be executable; start: the command that launches,
    run in that folder; notes: what a person must know or do (a checkpoint that cannot be resharded, a knob that is set in code).
    """

    files: Mapping[str, str]
    programs: tuple[str, ...] = ()
    start: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A flag or key that was read but means nothing to the tuner: kept as it stands. where: file and line, like "train.sh:12"."""

    name: str
    value: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What files of a launcher say.

    framework: the preset whose rules and defaults hold; release: of it ("" unless told); model: fields of Model, as far as told
    ("preset": a preset's name); job: seq_len, global_batch, precision, ..., as a request spells them; plan: knobs as plan_text spells
    them; gpus, gpus_per_node: None unless told; gpu: its kind ("" unless told); unknown: what was not understood; assumed: {what: why}
    that the framework does when not told; problems: what is contradictory.
    """

    framework: str
    release: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str = ""
    unknown: tuple[Unknown, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def unknown_names(self) -> frozenset[str]:
        """Return the names of what was not understood."""
        return frozenset(item.name for item in self.unknown)


class Launcher(Protocol):
    """One launcher's vocabulary. It keeps no state: everything is a function of its arguments."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    @property
    def framework(self) -> str:
        """The framework preset whose rules and defaults hold."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Releases between which spellings differ, oldest first; () where they do not. The last is written unless another is named."""

    @property
    def says(self) -> Mapping[str, str]:
        """{field of Plan: how it is spelled}."""

    @property
    def cannot(self) -> Mapping[str, str]:
        """{field of Plan: why it has no spelling}."""

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return the files that launch `plan` (a single plan, legal for the job). Raises SpecError listing every knob of it that cannot
        be spelled.
        """

    def reads(self, name: str, text: str) -> bool:
        """Whether a file looks like one of this launcher's; a glance, never an exception."""

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what these files say ({path as the person gave it: text}). Nothing is executed. Raises SpecError for text that cannot be
        read at all.
        """


def used(plan: Plan) -> dict[str, int]:
    """Return the fields of a single plan that are not idle: dependent ones only where what they depend on is used."""
    found = {name: int(getattr(plan, name)) for name in IDLE if int(getattr(plan, name)) != IDLE[name]}
    if plan.cp == 1:
        found.pop("cp_kind", None)
    if plan.pp == 1:
        for name in ("embedding_layers", "loss_layers", "schedule"):
            found.pop(name, None)
    if plan.fallback == plan.tp:
        found.pop("fallback_tp", None)
    if int(plan.recompute_layers) >= ALL_LAYERS:
        found.pop("recompute_layers", None)
    return found


def unspelled(launcher: Launcher, plan: Plan) -> list[Problem]:
    """Return every used knob of the plan that the launcher cannot spell: why, and the value that needs no spelling."""
    return [
        refused(launcher.name, name, _word(plan, name), launcher.cannot[name], _idle_text(name))
        for name in used(plan)
        if name in launcher.cannot
    ]


def _word(plan: Plan, name: str) -> str:
    """Return a field's value as a person writes it."""
    value = plan_record(plan, 1).get(name, getattr(plan, name))
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_unspelled(launcher: Launcher, plan: Plan) -> None:
    """Raise SpecError listing every used knob of the plan that the launcher cannot spell."""
    problems = unspelled(launcher, plan)
    if problems:
        raise SpecError(problems)


def _idle_text(name: str) -> str:
    layout = {
        "embedding_layers": "pipeline_layout=even",
        "loss_layers": "pipeline_layout=even",
        "recompute_layers": "recompute=full or none",
    }
    if name in layout:
        return layout[name]
    value = idle_record(1).get(name, 0)
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}, or another format"


def refused(where: str, knob: str, value: object, why: str, way_out: str = "") -> Problem:
    """Return the problem of a knob that has a spelling, but not for this value or beside these others."""
    return Problem(where=where, path=knob, value=str(value), rule=f"cannot be written: {why}", hint=way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A launcher that the registry knows. source: "built in" or the package it comes from; error: why it cannot be used ("": it can)."""

    name: str
    source: str
    make: Callable[[], Launcher] | None = None
    error: str = ""


def launchers() -> dict[str, Known]:
    """Return the launchers by name. One that cannot be loaded is listed with its error; none stops the others."""
    found = {name: _load(name, "built in", partial(_factory, module)) for name, module in BUILT_IN.items()}
    for point in metadata.entry_points(group=GROUP):
        source = point.dist.name if point.dist else point.value
        if point.name not in found:
            found[point.name] = _load(point.name, source, point.load)
        else:
            error = f"there is a launcher of this name already ({found[point.name].source})"
            found[f"{point.name} of {source}"] = Known(name=point.name, source=source, error=error)
    return found


def open_launcher(name: str) -> Launcher:
    """Return the launcher of this name. Raises SpecError for one that is unknown, or that cannot be loaded."""
    known = launchers()
    if name not in known:
        raise one_problem("format", "", name, "is no launcher", nearest(name, known))
    entry = known[name]
    if entry.make is None:
        raise one_problem("format", "", name, f"cannot be loaded: {entry.error}", f"it comes from {entry.source}")
    return entry.make()


def chosen(launcher: Launcher, version: str) -> str:
    """Return the version to write: the one named, or the last. Raises SpecError for one that is unknown."""
    if version and version not in launcher.versions:
        choices = ", ".join(launcher.versions) or "no versions are told apart"
        raise one_problem("framework-version", "", version, f"is no version of {launcher.name} that is known", choices)
    return version or (launcher.versions[-1] if launcher.versions else "")


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mappings as one; of keys that stand twice the last counts, as on a command line."""
    out: dict[str, Any] = {}
    for part in parts:
        out |= part
    return out


def _factory(module: str) -> Any:
    return importlib.import_module(module).open_launcher


def _load(name: str, source: str, load: Callable[[], Any]) -> Known:
    try:
        make = load()
    except TunerError as error:
        return Known(name=name, source=source, error=str(error))
    except (Exception, SystemExit) as error:
        return Known(name=name, source=source, error=f"{type(error).__name__}: {error}")
    if not callable(make):
        return Known(name=name, source=source, error="is not callable: it must return a Launcher")
    return Known(name=name, source=source, make=make)
