"""Strict reading of the files that people write: YAML and JSON in, plain values or a validated Spec out.

Reading never runs what a file says: scalars become text, numbers, booleans or null and nothing else. Every problem is a SpecError
with file, line, dotted path, value and rule.
"""

from __future__ import annotations

import json
import math
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from tuner.errors import Problem, SpecError, nearest, one_problem, printable
from tuner.spec import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.spec import Spec

    S = TypeVar("S", bound=Spec)
    T = TypeVar("T")

MAX_BYTES = 4 * 2**20  # the largest real config.json has 60 kB
_MAX_DEPTH = 50
_MAX_VALUES = 200_000  # with aliases expanded: ten lines of aliases can mean 10^9 values

_NULLS = {"", "~", "null", "Null", "NULL"}
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_BOOLS = {form: word in _YES for word in _YES + _NO for form in (word, word.title(), word.upper())}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,29})")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)")


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """Return the text of a file of at most `limit` bytes; never reads more than that, whatever the file's size."""
    where = str(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise _refusal(where, "is a folder; a file is needed")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise _refusal(where, "is a device or a socket; a file is needed")
        if status.st_size > limit:
            raise _refusal(where, f"has {status.st_size} bytes; at most {limit} are read")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise _refusal(where, "no such file", _neighbour(path)) from None
    except (OSError, ValueError) as error:
        raise _refusal(where[:200], f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > limit:
        raise _refusal(where, f"must have at most {limit} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refusal(where, f"is not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise _refusal(where, "is a binary file")
    if not text.strip():
        raise _refusal(where, "is empty")
    return text


def path_of(text: str, where: str = "") -> Path:
    """Return the path that a text names, with ~ for the home folder. Raises SpecError."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise one_problem(where or printable(text[:100]), "", text if where else None, "names the home folder of an unknown user") from None


def load_yaml(path: Path) -> Any:
    """Return the content of a YAML file (or a JSON file, by its suffix) as dicts, lists, text, numbers, booleans and None."""
    text = read_text(path)
    return parse_json(text, str(path)) if path.suffix.lower() == ".json" else parse_yaml(text, str(path))


def load_foreign_json(path: Path) -> Any:
    """Return the content of a JSON file that another program wrote; such files hold Infinity where nothing limits a value."""
    return parse_json(read_text(path), str(path), finite=False)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text with one document. Tags, duplicate keys, NaN and infinity are refused."""
    value, problems = _read_yaml(text, where)
    if problems:
        raise SpecError(problems)
    return value


def _read_yaml(text: str, where: str) -> tuple[Any, list[Problem]]:
    """Return the value of a YAML text and what is wrong with single values in it."""
    reader = _YamlReader(text, where)
    try:
        value = reader.document()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _refusal(where + line, f"is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise _refusal(where, f"is not YAML: {str(error).splitlines()[0]}") from None
    if value is None and not reader.problems:
        raise _refusal(where, "is empty")
    return value, reader.problems


def parse_json(text: str, where: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text. Duplicate keys are refused and, if asked, NaN and infinity."""
    problems: list[Problem] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                problems.append(Problem(where=where, path=key[:80], value="", rule="stands twice"))
            found[key] = value
        return found

    def number(word: str) -> float:
        value = float(word)
        if finite and not math.isfinite(value):
            problems.append(Problem(where=where, path="", value=word[:40], rule="must be finite"))
        return value

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=number, parse_float=number, parse_int=_json_int)
    except RecursionError:
        raise _refusal(where, f"is nested deeper than {_MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise _refusal(f"{where}:{error.lineno}", f"is not JSON: {error.msg}") from None
    except ValueError as error:
        raise _refusal(where, f"is not JSON: {error}") from None
    if _depth_exceeds(value, _MAX_DEPTH):
        raise _refusal(where, f"is nested deeper than {_MAX_DEPTH}")
    if problems:
        raise SpecError(problems)
    return value


def load_spec(kind: type[S], data: Any, where: str, *, units: bool = True) -> S:
    """Return `data` validated as `kind`, or raise a SpecError that lists all its problems.

    units: a quantity must be a string with its unit, as in a file that a person writes; False for JSON that this program
    wrote, where numbers are SI.
    """
    if not isinstance(data, dict):
        known = "known: " + ", ".join(kind.model_fields)
        found = {list: "a list", str: "text", type(None): "nothing"}.get(type(data), "a single value")  # not what a wrong file holds
        raise one_problem(where, "", None, f"must be a mapping with the keys of a {kind.__name__} but is {found}", known)
    return checked(kind, data, where, units=units)


def load_file(kind: type[S], path: Path) -> S:
    """Return the Spec of `kind` in a YAML or JSON file."""
    return read_spec(path, lambda data: load_spec(kind, data, str(path)))


def read_spec(path: Path, make: Callable[[Any], T]) -> T:
    """Return what `make` makes of a file's content. What YAML itself refuses is reported together with what `make` does."""
    if path.suffix.lower() == ".json":
        return make(load_yaml(path))
    value, problems = _read_yaml(read_text(path), str(path))
    if not problems:
        return make(value)
    known = {problem.path for problem in problems}
    try:
        make(value)
    except SpecError as error:
        problems = [*problems, *(problem for problem in error.problems if problem.path not in known)]
    raise SpecError(problems)


def _refusal(where: str, rule: str, hint: str = "") -> SpecError:
    return SpecError([Problem(where=where, path="", value="", rule=rule, hint=hint)])


def _neighbour(path: Path) -> str:
    try:
        return nearest(path.name, [p.name for p in list(path.parent.iterdir())[:2000]]) if path.parent.is_dir() else ""
    except (OSError, ValueError):
        return ""


def _json_int(word: str) -> int:
    if len(word) > 30:
        raise ValueError(f"a number of {len(word)} digits")
    return int(word)


def _depth_exceeds(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    children = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_depth_exceeds(child, depth - 1) for child in children)


class _YamlReader:
    """One pass over the events of a YAML parser, which builds plain values and counts them with aliases expanded."""

    def __init__(self, text: str, where: str) -> None:
        self.parser: Any = (yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)(text)
        self.where = where
        self.problems: list[Problem] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.values = 0

    def document(self) -> Any:
        self._next(), self._next()  # stream start, document start
        if self.parser.check_event(yaml.StreamEndEvent):
            return None
        value = self._value(self._next(), "", 0)
        self._next()
        if not self.parser.check_event(yaml.StreamEndEvent):
            raise _refusal(self.where, "must hold one YAML document (there is a second behind '---')")
        return value

    def _next(self) -> Any:
        return self.parser.get_event() if not self.parser.check_event(yaml.StreamEndEvent) else None

    def _add(self, event: Any, path: str, value: str, rule: str) -> None:
        where = f"{self.where}:{event.start_mark.line + 1}"
        self.problems.append(Problem(where=where, path=path, value=value[:80], rule=rule))

    def _stop(self, event: Any, path: str, rule: str) -> SpecError:
        self._add(event, path, "", rule)
        return SpecError(self.problems)

    def _count(self, event: Any, path: str, count: int) -> None:
        self.values += count
        if self.values > _MAX_VALUES:
            raise self._stop(event, path, f"holds more than {_MAX_VALUES} values once its aliases are expanded")

    def _value(self, event: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self._stop(event, path, f"is nested deeper than {_MAX_DEPTH}")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self._stop(event, path, f"alias *{event.anchor} has no anchor before it")
            value, size = self.anchors[event.anchor]
            self._count(event, path, size)
            return value
        before = self.values
        self._count(event, path, 1)
        if event.tag is not None and event.tag != "!":
            self._add(event, path, event.tag, "tags are not allowed: write the plain value")
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(path, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = [self._value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(self._items(yaml.SequenceEndEvent))]
        else:
            value = self._scalar(event, path)
        if event.anchor:
            self.anchors[event.anchor] = value, self.values - before
        return value

    def _items(self, end: type) -> Iterator[Any]:
        while not isinstance(event := self.parser.get_event(), end):
            yield event

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for event in self._items(yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._stop(event, path, "a key must be plain text")
            key, inner = event.value, f"{path}.{event.value}" if path else event.value
            if key in found:
                self._add(event, inner, "", "stands twice")
            value = self._value(self.parser.get_event(), inner, depth + 1)
            if key == "<<" and event.implicit[0]:
                for base in reversed(value if isinstance(value, list) else [value]):
                    if not isinstance(base, dict):
                        raise self._stop(event, inner, "must name a mapping")
                    merged |= base
            else:
                found[key] = value
        return merged | found

    def _scalar(self, event: Any, path: str) -> Any:
        text = event.value
        if not event.implicit[0]:
            return text
        if text in _NULLS:
            return None
        if text in _BOOLS:
            return _BOOLS[text]
        if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if _NOT_FINITE.fullmatch(text):
            self._add(event, path, text, "must be a finite number")
        elif _FLOAT.fullmatch(text) and len(text) < 400 and not _leading_zero(text):
            value = float(text.replace("_", ""))
            if not math.isfinite(value):
                self._add(event, path, text, "must be a finite number")
            return value
        return text


def _leading_zero(text: str) -> bool:
    """Whether a whole number starts with 0: octal for some readers and decimal for others, so it stays text."""
    return text.lstrip("+-").isdigit()
