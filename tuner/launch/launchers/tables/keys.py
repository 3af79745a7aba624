"""Vocabularies as tables: an entry is a key of a file, what it means, and how its value is written and read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem
from tuner.launch.launchers.launcher import Unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_LARGEST = 10_000_000
_KEY = re.compile(r"(?P<indent> {0,200})(?:- )?(?P<quote>[\"']?)(?P<key>[A-Za-z_][\w.-]{0,120})(?P=quote)\s{0,9}:")
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
SHOWN = 200


def same(value: Any) -> Any:
    """Return the value as it is."""
    return value


def count(value: Any) -> int:
    """Return a number of at least 1, be it written as a text. Raises ValueError."""
    if isinstance(value, bool) or not re.fullmatch(r"\+?\d{1,12}", str(value).strip()) or not 1 <= int(str(value)) <= _LARGEST:
        raise ValueError(f"must be a whole number from 1 to {_LARGEST}")
    return int(str(value))


def flag(value: Any) -> bool:
    """Return a truth value, be it written as a word. Raises ValueError."""
    word = str(value).strip().lower()
    if word not in _WORDS:
        raise ValueError("must be true or false")
    return _WORDS[word]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """path: the key with those it stands under ("zero_optimization.stage"), or a flag; name: the setting it spells; put: setting to value
    (None: not written); take: value to setting, raises ValueError; written: whether it is written, or only read.
    """

    path: str
    name: str
    put: Callable[[Any], Any] = same
    take: Callable[[Any], Any] = same
    written: bool = True


def nested(keys: Iterable[Key], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a document of nested mappings, in the order of the table."""
    document: dict[str, Any] = {}
    for key in keys:
        if not key.written or settings.get(key.name) is None or (value := key.put(settings[key.name])) is None:
            continue
        *parents, last = key.path.split(".")
        inner = document
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return document


def flat(document: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of a document's leaves; a list is a leaf, an empty mapping has none."""
    if not isinstance(document, dict):
        yield above, document
        return
    for key, value in document.items():
        yield from flat(value, f"{above}.{key}" if above else str(key))


def key_lines(text: str) -> dict[str, int]:
    """Return the line of each key of a YAML or indented JSON text, by dotted path and by the key alone (its first line)."""
    found: dict[str, int] = {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if (match := _KEY.match(line)) is None:
            continue
        indent = len(match["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match["key"]))
        found.setdefault(".".join(name for _, name in above), number)
        found.setdefault(match["key"], number)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a document says: settings, the path that each comes from, what was not understood, and what cannot be parsed."""

    settings: dict[str, Any]
    places: dict[str, str]
    unknown: tuple[Unknown, ...]
    problems: tuple[Problem, ...]


def take(keys: Iterable[Key], document: Any, where: str, text: str, idle: Mapping[str, tuple[Any, ...] | None]) -> Taken:
    """Return what a document of nested mappings says. idle: paths (or what they begin with, ending in a point) that concern nothing here,
    with the values for which that holds (None: any).
    """
    table = {key.path: key for key in keys}
    lines = key_lines(text)
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    unknown, problems = [], []
    for path, value in flat(document):
        line = lines.get(path) or lines.get(path.rpartition(".")[2]) or 1
        place = f"{where}:{line}"
        if path in table:
            key = table[path]
            try:
                settings[key.name] = key.take(value)
                places[key.name] = place
            except ValueError as error:
                problems.append(Problem(where=place, path=path, value=repr(value)[:80], rule=str(error)))
        elif not _idle(path, value, idle):
            unknown.append(Unknown(name=path[:SHOWN], value=str(value)[:SHOWN], where=place))
    return Taken(settings=settings, places=places, unknown=tuple(unknown), problems=tuple(problems))


def _idle(path: str, value: Any, idle: Mapping[str, tuple[Any, ...] | None]) -> bool:
    for name, values in idle.items():
        if (path == name or (name.endswith(".") and path.startswith(name))) and (values is None or value in values):
            return True
    return False
