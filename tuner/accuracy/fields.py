"""A published row as it stands in a file, read key by key and never trusted."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tuner.errors import SpecError, one_problem
from tuner.load import read_text
from tuner.measurement import LONGEST_ID

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")

MAX_BYTES = 64 * 2**20  # a thousand rows are about 1 MB
_LARGEST = 10**12


class Unscorable(Exception):
    """Why a row cannot be scored."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not scored, and why."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Section:
    """One object of a row ("model", "config", ..). A missing or null key is None; a key of the wrong type makes the row unscorable."""

    name: str
    data: dict[str, Any]

    def _wrong(self, key: str, rule: str) -> Unscorable:
        path = f"{self.name}.{key}" if self.name else key
        return Unscorable(f"{path} = {repr(self.data[key])[:60]}: {rule}")

    def count(self, key: str, *, least: int = 1) -> int | None:
        """Return a whole number of at least `least`."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise self._wrong(key, f"must be a whole number from {least} to 10^12")
        return value

    def need(self, key: str) -> int:
        """Return a count that must be stated."""
        value = self.count(key)
        if value is None:
            raise Unscorable(f"{self.name}.{key} is not stated")
        return value

    def degree(self, key: str) -> int | None:
        """Return a count of ranks or chunks, which sources also give as 0 where it is not used."""
        value = self.count(key, least=0)
        return value if value is None else max(value, 1)

    def word(self, key: str, known: Mapping[str, T]) -> T | None:
        """Return what a word in lower or upper case means, or None for a word that is not known (see `unknown`)."""
        text = self.text(key)
        return None if text is None else known.get(text.lower())

    def unknown(self, key: str) -> str:
        """Return " (no KEY is called 'x')" where a word is stated that means nothing here, else ""."""
        text = self.text(key)
        return "" if text is None else f" (no {key.replace('_', ' ')} is called {text[:40]!r})"

    def positive(self, key: str) -> float | None:
        """Return a number above 0 that something measured can be; a 0 is a figure that its source rounded away, and so None."""
        value = self.data.get(key)
        if value is None or (value == 0 and not isinstance(value, bool)):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 / _LARGEST <= value <= _LARGEST:
            raise self._wrong(key, "must be a number from 10^-12 to 10^12")
        return float(value)

    def text(self, key: str) -> str | None:
        """Return a text, cut at 2,000 characters."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "must be text")
        return value if value is None else _whole(value[:2000])

    def flag(self, key: str) -> bool | None:
        """Return a truth value."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "must be true or false")
        return value

    def section(self, key: str) -> Section:
        """Return an inner object, empty when it is not there."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "must be an object")
        return Section(f"{self.name}.{key}" if self.name else key, value or {})


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file: `stem` is the file's name without suffix; `assumed` gathers what was not stated and had to be filled in."""

    id: str
    stem: str
    top: Section
    model: Section
    cluster: Section
    config: Section
    measured: Section
    assumed: list[str] = field(default_factory=list)

    def assume(self, what: str) -> None:
        """Note something that the source does not state."""
        self.assumed.append(what)

    @property
    def notes(self) -> str:
        """What the source says about the configuration in words."""
        return (self.config.text("notes") or "").lower()


def row_of(data: dict[str, Any], stem: str, line: int) -> Row:
    """Return the sections of a row; raises Unscorable when one is not an object."""
    top = Section("", data)
    model, cluster, config, measured = (top.section(name) for name in ("model", "cluster", "config", "measured"))
    return Row(row_id(data, stem, line), stem, top, model, cluster, config, measured)


def row_id(data: dict[str, Any], stem: str, line: int) -> str:
    """Return a row's id, or its file and line."""
    name = data.get("id")
    return _whole(name[:LONGEST_ID]) if isinstance(name, str) and name else f"{stem}:{line}"


def _whole(text: str) -> str:
    """Return a text without halves of surrogate pairs, which JSON can spell and no encoding can write."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_lines(path: Path) -> list[tuple[int, dict[str, Any] | Skipped]]:
    """Return (line number, row or why it is none) of a JSONL file.

    A file that is missing, empty, too large or without one JSON object raises SpecError; a single bad line is skipped.
    """
    stem = path.stem
    found = [(i, _parse(line, stem, i)) for i, line in enumerate(read_text(path, MAX_BYTES).split("\n"), start=1) if line.strip()]
    if all(isinstance(item, Skipped) for _, item in found):
        first = found[0][1]
        raise one_problem(
            str(path), "", None, "holds no row: each line must be a JSON object", first.why if isinstance(first, Skipped) else ""
        )
    return found


def _parse(line: str, stem: str, number: int) -> dict[str, Any] | Skipped:
    try:
        value = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or (str(error)[:80] if isinstance(error, ValueError) else "nested too deep")
        return Skipped(f"{stem}:{number}", f"line {number} is not JSON: {reason}")
    if not isinstance(value, dict):
        return Skipped(f"{stem}:{number}", f"line {number} is not a JSON object")
    return value


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is not a finite number")
    return value


def first_problem(error: SpecError) -> str:
    """Return a SpecError's first problem in one line, without its place."""
    problem = error.problems[0]
    got = f" = {problem.value}" if problem.value else ""
    return f"{problem.path}{got}: {problem.rule}".strip()[:300]
