"""Settings between a launcher's words and what they mean: typed values with the place they were read at, and aspects that write and read
several of them together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tuner.errors import Problem, SpecError
from tuner.launch.launchers.launcher import Unknown, merged
from tuner.launch.launchers.tables.vocabulary import SHOWN, truth, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tuner.job import Job
    from tuner.plan import Plan

Kind = Literal["count", "number", "flag", "text", "words"]
LARGEST = 100_000_000
_NONE = ("", "null", "none", "~")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value (None: told to be nothing) and where it stands; spelled: the name in the file."""

    value: Any
    where: str
    spelled: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What was told, by the name that all launchers of a family share; otherwise: what holds where nothing is told; gpus: of the job, None
    unless told.
    """

    told: Mapping[str, Setting]
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    gpus: int | None = None

    def get(self, name: str) -> Any:
        """Return what is told or holds otherwise; None where neither is known."""
        return self.told[name].value if name in self.told else self.otherwise.get(name)

    def has(self, *names: str) -> bool:
        """Whether any of these is told."""
        return any(name in self.told for name in names)

    def problem(self, name: str, rule: str, hint: str = "") -> Problem:
        """Return what is wrong with a setting that is told."""
        setting = self.told[name]
        return Problem(where=setting.where, path=setting.spelled, value=shown(setting.value), rule=rule, hint=hint)

    def unknown(self, name: str) -> Unknown:
        """Return a told setting as one that means nothing to the tuner."""
        setting = self.told[name]
        return Unknown(name=setting.spelled, value=shown(setting.value), where=setting.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What settings mean: parts of a Found."""

    model: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[Unknown, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a launcher differs from its family. traits: what differs, by name."""

    launcher: str
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be written, and in which dialect."""

    job: Job
    plan: Plan
    dialect: Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class Aspect:
    """Settings that mean something together. group: under which heading; keys: their names; put: job and plan to settings (None: left
    out); take: settings to their meaning.
    """

    group: str
    keys: tuple[str, ...]
    put: Callable[[Ask], Mapping[str, Any]]
    take: Callable[[Values], Meaning]


def together(meanings: Sequence[Meaning]) -> Meaning:
    """Return the meanings as one."""
    return Meaning(
        model=_nested([m.model for m in meanings]),
        job=merged([m.job for m in meanings]),
        plan=merged([m.plan for m in meanings]),
        unknown=tuple(u for m in meanings for u in m.unknown),
        assumed=merged([m.assumed for m in meanings]),
        problems=tuple(p for m in meanings for p in m.problems),
    )


def _nested(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = {**out[key], **value} if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def typed(kind: Kind, value: Any) -> Any:
    """Return a value read from a file, of its kind; None where it is told to be nothing. Raises ValueError."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE and kind != "words"):
        return None
    if kind == "flag":
        return truth(value)
    if kind == "count":
        return whole(value, 0, LARGEST)
    if kind == "number":
        return _number(value)
    if kind == "words":
        return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]
    if isinstance(value, (list, tuple, dict)):
        raise ValueError("must be one value")
    return str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not re.fullmatch(r"[-+]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][-+]?\d{1,3})?", str(value).strip()):
        raise ValueError("must be a number")
    return float(value)


def checked_values(told: Mapping[str, Setting], kinds: Mapping[str, Kind]) -> dict[str, Setting]:
    """Return the settings with typed values. Raises SpecError listing each value that cannot be read, with file and line."""
    found, problems = {}, []
    for name, setting in told.items():
        try:
            found[name] = replace(setting, value=typed(kinds[name], setting.value))
        except ValueError as error:
            problems.append(Problem(where=setting.where, path=setting.spelled, value=shown(setting.value), rule=str(error)))
    if problems:
        raise SpecError(problems)
    return found


def shown(value: Any) -> str:
    """Return a value for a person, of bounded length."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def written(aspects: Iterable[Aspect], ask: Ask) -> dict[str, dict[str, Any]]:
    """Return {group: settings} of all aspects; what is None is left out. Raises SpecError listing every problem."""
    groups: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for aspect in aspects:
        try:
            settings = aspect.put(ask)
        except SpecError as error:
            problems += error.problems
            continue
        groups.setdefault(aspect.group, {}).update({name: value for name, value in settings.items() if value is not None})
    if problems:
        raise SpecError(problems)
    return groups


def refusal(dialect: Dialect, path: str, value: object, why: str, hint: str = "") -> SpecError:
    """Return the error of something that a launcher cannot spell."""
    return SpecError([Problem(where=dialect.launcher, path=path, value=str(value)[:80], rule=f"cannot be written: {why}", hint=hint)])
