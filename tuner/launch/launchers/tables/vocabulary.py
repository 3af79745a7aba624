"""A launcher's vocabulary as a table: one entry holds a key and how its value is written and read, so that both directions agree."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError, nearest
from tuner.launch.launchers.launcher import Unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MOST = 10_000_000
SHOWN = 200  # characters of a foreign value that are shown
_WORDS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A value that a file gives a key. where: "file:line"."""

    value: Any
    where: str


def same(value: Any) -> Any:
    """Return the value as it stands."""
    return value


def whole(value: Any, least: int = 1, most: int = MOST) -> int:
    """Return a whole number. Raises ValueError."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[-+]?\d[\d_]{0,15}", text) or not least <= int(text) <= most:
        raise ValueError(f"must be a whole number from {least} to {most}")
    return int(text)


def whole_from(least: int, most: int = MOST) -> Callable[[Any], int]:
    """Return a reader of whole numbers of at least `least`."""
    return lambda value: whole(value, least, most)


def number(value: Any) -> float:
    """Return a positive finite number. Raises ValueError."""
    try:
        found = float(str(value)[:40])
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not 0 < found < 1e9:
        raise ValueError("must be a positive number")
    return found


def truth(value: Any) -> bool:
    """Return true or false, be it written as a word. Raises ValueError."""
    word = str(value).strip().lower()[:10]
    if word not in _WORDS:
        raise ValueError("must be true or false")
    return _WORDS[word]


def text(value: Any) -> str:
    """Return text. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def one_of(*words: str) -> Callable[[Any], str]:
    """Return a reader of one of these words, in any case."""
    known = {word.lower(): word for word in words}

    def read(value: Any) -> str:
        if str(value).lower() not in known:
            raise ValueError(f"must be one of {', '.join(words)}")
        return known[str(value).lower()]

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """path: the key with the sections it stands in ("parallelism.tp"); name: the setting that it spells; take: from a file's value to the
    setting, raises ValueError; put: from the setting to the file's value (None: not written); written: whether it is, or only read.
    """

    path: str
    name: str
    take: Callable[[Any], Any] = same
    put: Callable[[Any], Any] = same
    written: bool = True


def spelled(keys: Iterable[Key], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return {path: value} of the settings that the table spells, in the table's order. A setting of None is not written."""
    told = [key for key in keys if key.written and settings.get(key.name) is not None]
    return {key.path: value for key in told if (value := key.put(settings[key.name])) is not None}


@dataclass(slots=True, kw_only=True)
class Said:
    """What files say in the words of a table. settings: {name: value}; places: where each stands; unknown: keys that the table does not
    have; problems: contradictions, noted while the settings are understood.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return a setting, or `otherwise` where it was not told."""
        return self.settings.get(name, otherwise)

    def contradict(self, name: str, rule: str, hint: str = "") -> None:
        """Note that a setting breaks a rule of its framework."""
        value = str(self.settings.get(name, ""))[:80]
        self.problems.append(Problem(where=self.places.get(name, "files"), path=name, value=value, rule=rule, hint=hint))

    def ignore(self, name: str, path: str) -> None:
        """Move a setting that means nothing to the tuner to the unknown ones, as it was read."""
        value = str(self.settings.pop(name))[:SHOWN]
        self.unknown.append(Unknown(name=path, value=value, where=self.places.pop(name, "")))


def understood(keys: Iterable[Key], told: Mapping[str, Told], idle: Mapping[str, tuple[Any, ...] | None]) -> Said:
    """Return what was told in the table's words; values that cannot be parsed are its problems. idle: paths (or what they begin with,
    ending in a point) that concern nothing here, with the values for which that holds (None: any).
    """
    table = {key.path: key for key in keys}
    said = Said()
    for path, item in told.items():
        key = table.get(path)
        if key is None:
            if not _is_idle(path, item.value, idle):
                said.unknown.append(Unknown(name=path[:SHOWN], value=str(item.value)[:SHOWN], where=item.where))
            continue
        if item.value is None:
            continue
        try:
            said.settings[key.name] = key.take(item.value)
            said.places[key.name] = item.where
        except ValueError as error:
            said.problems.append(Problem(where=item.where, path=path[:80], value=repr(item.value)[:80], rule=str(error)))
    return said


def _is_idle(path: str, value: Any, idle: Mapping[str, tuple[Any, ...] | None]) -> bool:
    names = (path, *(path[: i + 1] for i, letter in enumerate(path[:SHOWN]) if letter == "."))
    return any(name in idle and (idle[name] is None or value in (idle[name] or ())) for name in names)


def understand(keys: Iterable[Key], told: Mapping[str, Told], quiet: frozenset[str] = frozenset()) -> Said:
    """Return what was told in the table's words. quiet: keys that concern no cost (where data lies, what is logged). Raises SpecError
    listing every value that cannot be parsed.
    """
    said = understood(keys, told, dict.fromkeys(quiet))
    if said.problems:
        raise SpecError(said.problems)
    return said


def refusal(launcher: str, refused: Mapping[str, tuple[Any, str]]) -> SpecError:
    """Return the error that names knobs with a value that the launcher cannot spell, and why: {knob: (value, why)}."""
    return SpecError(
        [
            Problem(where=launcher, path=name, value=str(value)[:80], rule=f"cannot be written: {why}")
            for name, (value, why) in refused.items()
        ]
    )


def known_version(launcher: str, version: str, versions: tuple[str, ...]) -> str:
    """Return the version, or raise SpecError naming those that are known."""
    if version not in versions:
        rule = f"is no version of {launcher} that is known ({', '.join(versions)})" if version else "must be told"
        hint = nearest(version, versions) if version else f"known: {', '.join(versions)}"
        raise SpecError([Problem(where="framework-version", path="", value=repr(version)[:80] if version else "", rule=rule, hint=hint)])
    return version
