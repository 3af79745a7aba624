"""The keys of YAML, JSON and TOML texts with their lines, and TOML as it is written. Of a key that stands twice, the last counts."""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem
from tuner.launch.launchers.tables.vocabulary import Told
from tuner.load import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KEY = re.compile(r"( *)(?:- )?([\"']?)([A-Za-z_][\w.-]{0,120})\2\s{0,9}:")
_TABLE = re.compile(r"\s{0,40}\[\s{0,9}([A-Za-z_][\w.\s\"'-]{0,160})\]")
_ENTRY = re.compile(r"\s{0,40}([A-Za-z_][\w.-]{0,120})\s{0,40}=")


def flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; lists are values, and an empty mapping says nothing."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{above}.{key}" if above else str(key))
    else:
        yield above, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} as nested mappings, in order."""
    document: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return document


def mapping(value: Any, name: str) -> dict[str, Any]:
    """Return a document that is a mapping, or raise SpecError."""
    if not isinstance(value, dict):
        raise one_problem(f"{name}:1", "", None, "must be a mapping")
    return value


def from_yaml(text: str, name: str) -> dict[str, Told]:
    """Return the keys of a YAML text. Raises SpecError."""
    return placed(mapping(parse_yaml(text, name), name), text, name)


def placed(document: Mapping[str, Any], text: str, name: str) -> dict[str, Told]:
    """Return the keys of a document with the lines that they stand in, in a YAML or indented JSON text."""
    lines = _key_lines(text)
    return {
        key: Told(value=value, where=f"{name}:{lines.get(key) or lines.get(key.rpartition('.')[2]) or 1}") for key, value in flat(document)
    }


def _key_lines(text: str) -> dict[str, int]:
    """Return the line of each key by its dotted path and by the key alone (its first line)."""
    found: dict[str, int] = {}
    above: list[tuple[int, str]] = []
    for count, line in enumerate(text.splitlines(), 1):
        match = _KEY.match(line[:400])
        if match is None:
            continue
        indent = len(match[1])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match[3]))
        found.setdefault(".".join(key for _, key in above), count)
        found.setdefault(match[3], count)
    return found


def from_toml(text: str, name: str) -> dict[str, Told]:
    """Return the keys of a TOML text. Raises SpecError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        raise one_problem(f"{name}:{at[1]}" if at else name, "", None, f"is not TOML: {str(error)[:200]}") from None
    except RecursionError:
        raise one_problem(name, "", None, "is nested too deep") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise one_problem(name, "", None, f"is not TOML: {str(error)[:200]}") from None
    lines: dict[str, int] = {}
    section = ""
    for count, line in enumerate(text.splitlines(), 1):
        if table := _TABLE.match(line[:400]):
            section = table[1].strip() + "."
        elif entry := _ENTRY.match(line[:400]):
            lines[section + entry[1]] = count
    try:
        return {key: Told(value=value, where=f"{name}:{lines.get(key, 1)}") for key, value in flat(data)}
    except RecursionError:
        raise one_problem(name, "", None, "is nested too deep") from None


def toml_text(document: Mapping[str, Any]) -> str:
    """Return {dotted key: value} as TOML, a table a section. Strings are TOML basic strings, whose escapes are JSON's."""
    sections: dict[str, list[str]] = {}
    for path, value in document.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {_toml(value)}")
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
