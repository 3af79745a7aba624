"""Changes of single keys of YAML, JSON, TOML and Python, where they stand."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from tuner.checking.patching.settings import ANCHORS, GROUPS, REMOVED

if TYPE_CHECKING:
    from tuner.checking.patching.settings import Setting

_YAML_KEY = re.compile(r"^(?P<indent> *)(?P<quote>[\"']?)(?P<key>[A-Za-z_][\w.-]{0,120})(?P=quote)(?P<colon>\s*:)(?P<rest>.*)$")
_SECTION = re.compile(r"^\s*\[([A-Za-z_][\w.-]{0,120})\]\s*(?:#.*)?$")


def _scalar(value: Setting) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...").strip()


def _yaml_places(text: str) -> tuple[list[str], dict[str, tuple[int, re.Match[str]]]]:
    """Return the lines, and of each key by its dotted path its line and how that is made."""
    lines = text.split("\n")
    found: dict[str, tuple[int, re.Match[str]]] = {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        match = _YAML_KEY.match(line.rstrip("\r"))
        if match is None or len(line) > 2000:
            continue
        indent = len(match["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match["key"]))
        found.setdefault(".".join(name for _, name in above), (number, match))
    return lines, found


def yaml_changed(text: str, key: str, value: Setting) -> str | None:
    """Return a YAML text with one key set or removed; None where it is not written as one value on its line."""
    lines, places = _yaml_places(text)
    if key not in places:
        return None
    number, match = places[key]
    rest = re.match(r"^(\s+)(.*?)(\s+#.*|\s*)$", match["rest"])
    if rest is None or not rest[2] or rest[2][0] in "&*|>{!" or (rest[2][0] == "[" and not rest[2].endswith("]")):
        return None
    if value is REMOVED:
        return "\n".join(lines[:number] + lines[number + 1 :])
    ending = "\r" if lines[number].endswith("\r") else ""
    lines[number] = (
        f"{match['indent']}{match['quote']}{match['key']}{match['quote']}{match['colon']}{rest[1]}{_scalar(value)}{rest[3]}{ending}"
    )
    return "\n".join(lines)


def yaml_added(text: str, key: str, value: Setting) -> str | None:
    """Return a YAML text with a new key behind its last plain sibling; None where there is none."""
    lines, places = _yaml_places(text)
    parent, _, last = key.rpartition(".")
    siblings = [place for path, place in places.items() if path.rpartition(".")[0] == parent]
    if not siblings:
        if parent and parent not in places and "." not in parent:
            body = text if text.endswith("\n") else text + "\n"
            return f"{body}{parent}:\n  {last}: {_scalar(value)}\n"
        return None
    simple = [place for place in siblings if place[1]["rest"].strip() and place[1]["rest"].strip()[0] not in "&|>{["]
    if not simple:
        return None
    number, match = max(simple, key=lambda place: place[0])
    lines.insert(number + 1, f"{match['indent']}{last}: {_scalar(value)}" + ("\r" if lines[number].endswith("\r") else ""))
    return "\n".join(lines)


def json_changed(text: str, key: str, value: Setting) -> str | None:
    """Return a JSON text with one key set or removed, indented as it was; None where what it stands under is no object."""
    document = json.loads(text)
    *parents, last = key.split(".")
    inner = document
    for parent in parents:
        inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        return None
    if value is REMOVED:
        inner.pop(last, None)
    else:
        inner[last] = value
    indent = re.search(r"\n([ \t]+)\"", text)
    shape: Any = indent[1] if indent else None
    return json.dumps(document, indent=shape, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def _toml_text(value: Setting) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False)


def _toml_places(text: str) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Return the lines, the line of each key by its dotted path, and the last line of each section that says something."""
    lines, keys, ends = text.split("\n"), {}, {"": 0}
    section = ""
    for number, line in enumerate(lines):
        if (title := _SECTION.match(line.rstrip("\r"))) is not None:
            section = title[1]
            ends[section] = number
        elif (entry := re.match(r"^\s*([A-Za-z_][\w.-]*)\s*=", line)) is not None:
            keys[f"{section}.{entry[1]}" if section else entry[1]] = number
            ends[section] = number
    return lines, keys, ends


def toml_changed(text: str, key: str, value: Setting) -> str | None:
    """Return a TOML text with one key set or removed; None where it is not one value on its line."""
    lines, keys, _ = _toml_places(text)
    if key not in keys:
        return None
    number = keys[key]
    match = re.match(r"^(\s*[\w.-]+\s*=\s*)(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[^#\s]+)(.*)$", lines[number])
    if match is None:
        return None
    if value is REMOVED:
        return "\n".join(lines[:number] + lines[number + 1 :])
    lines[number] = match[1] + _toml_text(value) + match[3]
    return "\n".join(lines)


def toml_added(text: str, key: str, value: Setting) -> str | None:
    """Return a TOML text with a new key at the end of its table."""
    lines, _, ends = _toml_places(text)
    section, _, last = key.rpartition(".")
    if section not in ends:
        return text + ("" if text.endswith("\n") else "\n") + f"\n[{section}]\n{last} = {_toml_text(value)}\n"
    lines.insert(ends[section] + 1, f"{last} = {_toml_text(value)}")
    return "\n".join(lines)


def _python_places(text: str, key: str) -> list[re.Match[str]]:
    """Return where a key is given a plain value: as an argument or by an assignment."""
    value = r"[\w.+-]+|\"[^\"\n]*\"|'[^'\n]*'"
    return list(re.finditer(rf"(?m)^(?!\s*#)(.*?(?<![\w.]){re.escape(key)}\s*=\s*)({value})(?=\s*(?:,|\)|#|$))", text))


def python_changed(text: str, key: str, value: Setting) -> str | None:
    """Return a Python text with one argument or assignment set or removed; None where it stands more than once."""
    places = _python_places(text, key)
    if len(places) != 1:
        return None
    (place,) = places
    if value is not REMOVED:
        return text[: place.start(2)] + str(value) + text[place.end(2) :]
    start, end = place.start(), text.find("\n", place.end())
    alone = text[start:end].strip().removesuffix(",") == place[0].strip()
    if end >= 0 and alone and place[1].strip().startswith(key):
        return text[:start] + text[end + 1 :]
    first = place.end(1) - len(place[1]) + place[1].rfind(key)
    if (behind := re.compile(r"\s*,\s*").match(text, place.end())) is not None:
        return text[:first] + text[behind.end() :]
    ahead = re.search(r",\s*\Z", text[:first])
    return text[: ahead.start()] + text[place.end() :] if ahead else text[:first] + text[place.end() :] if text[first - 1] == "(" else None


def python_added(text: str, key: str, value: Setting) -> str | None:
    """Return the text with a statement behind the last one about the same object, or an argument behind one that stands for a plan."""
    parent = key.rpartition(".")[0]
    if parent:
        near = list(re.finditer(rf"(?m)^([ \t]*){re.escape(parent)}\.\w+\s*=[^\n]*$", text))
        if not near:
            return None
        return text[: near[-1].end()] + f"\n{near[-1][1]}{key} = {value}" + text[near[-1].end() :]
    for anchor in (*GROUPS.get(key, ()), *ANCHORS):
        places = _python_places(text, anchor)
        if len(places) == 1:
            end = places[0].end(2)
            alone = places[0][1].strip() == f"{anchor}=" and text[end : end + 2] == ",\n"
            indent = places[0][1][: len(places[0][1]) - len(places[0][1].lstrip())]
            new = f",\n{indent}{key}={value}" if alone else f", {key}={value}"
            return text[:end] + new + text[end:]
    return None
