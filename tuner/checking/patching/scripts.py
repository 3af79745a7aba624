"""Changes of single flags, overrides and variables of a shell script, where they stand."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from tuner.checking.patching.settings import ANCHORS, REMOVED, VARIABLE

if TYPE_CHECKING:
    from tuner.checking.patching.settings import Setting

_WORD = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\\()\"';|&<>]+)"


def _spot(text: str, key: str, count: int) -> tuple[int, int, int, bool] | None:
    """Return (start of the flag, start of its values, end, whether = joins them) of the last place where a flag or override stands."""
    spelled = re.sub(r"[_-]", "[-_]", re.escape(key).replace("\\-", "-"))
    pattern = re.compile(rf"(?<![\w$./-])(?:--?{spelled}(?![\w.-])|\+{{0,2}}{re.escape(key)}(?==))")
    found = None
    for match in pattern.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not line.lstrip().startswith("#") and " #" not in line:
            found = match
    if found is None:
        return None
    end = found.end()
    quote = text[found.start() - 1 : found.start()]
    if text[end : end + 1] == "=" and quote and quote in "\"'" and not _inside(text, found.start() - 1, quote):
        return found.start() - 1, end + 1, _word_end(text, found.start() - 1), True
    if text[end : end + 1] == "=":
        word = re.compile(_WORD).match(text, end + 1)
        return found.start(), end + 1, word.end() if word else end + 1, True
    start = stop = end
    for index in range(count):
        word = re.compile(rf"[ \t]+(?:\\\r?\n[ \t]*)?({_WORD})").match(text, stop)
        if word is None:
            return None
        start = word.start(1) if index == 0 else start
        stop = word.end()
    return found.start(), start, stop, False


def _word_end(text: str, start: int) -> int:
    """Return where a word of a shell ends that begins here, quotes and all."""
    quote, at = "", start
    while at < len(text) and (quote or text[at] not in " \t\r\n);|&"):
        if quote:
            quote = "" if text[at] == quote else quote
        elif text[at] in "\"'":
            quote = text[at]
        at += 1
    return at


def _inside(text: str, at: int, quote: str) -> bool:
    """Whether a quote at this place closes one that was opened on its line (the word behind it is then not quoted by it)."""
    return text[text.rfind("\n", 0, at) + 1 : at].count(quote) % 2 == 1


def _words(value: Setting) -> list[str]:
    return [] if value is True else [shlex.quote(str(item)) for item in (value if isinstance(value, list) else [value])]


def script_changed(text: str, key: str, value: Setting, old: Setting, variables: bool) -> str | None:
    """Return a script with a flag, an override or a variable of the environment set or removed where it stands (through the variable that
    its value is, if asked); None where it cannot be found.
    """
    if key.startswith("$"):
        line = next(match for match in VARIABLE.finditer(text) if match[2] == key[1:])
        return text[: line.start()] + (text[line.end() + 1 :] if value is REMOVED else str(value) + text[line.end() :])
    count = 0 if old is True else len(old) if isinstance(old, list) else 1
    spot = _spot(text, key, count)
    if spot is None:
        return None
    start, first, end, joined = spot
    if value is REMOVED or (value is False and not joined):
        return _cut(text, start, end)
    words = " ".join(_words(value))
    if joined and text[start] in "\"'":
        return text[:start] + shlex.quote(f"{key}={value}") + text[end:]
    if not joined and count == 0:
        return text[:end] + (f" {words}" if words else "") + text[end:]
    through = _through_variable(text, text[first:end], words) if variables else None
    return text[:first] + words + text[end:] if through is None else through


def _through_variable(text: str, raw: str, words: str) -> str | None:
    """Return the text with the variable set to the new value that the value is, where it is assigned once as a plain word."""
    name = re.fullmatch(r"[\"']?\$\{?([A-Za-z_]\w{0,80})\}?[\"']?", raw)
    if name is None:
        return None
    assigned = re.compile(rf"^([ \t]*(?:export[ \t]+)?{name[1]}=)(.*?)([ \t]*(?:#.*)?\r?)$", re.MULTILINE)
    places = list(assigned.finditer(text))
    if len(places) != 1:
        return None
    (place,) = places
    default = re.fullmatch(r"([\"']?\$\{\w{1,80}:?-)([^{}$]*)(\}[\"']?)", place[2])
    if default is not None:
        new = default[1] + words + default[3]
    elif re.fullmatch(r"[\"']?[\w.,-]*[\"']?", place[2]):
        new = words
    else:
        return None
    return text[: place.start(2)] + new + text[place.end(2) :]


def _cut(text: str, start: int, end: int) -> str:
    """Return the text without a flag and its values; a line that held nothing else goes with it."""
    line = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    rest = text[line:start] + text[end:stop]
    if rest.strip() not in ("", "\\"):
        start -= len(text[line:start]) - len(text[line:start].rstrip(" \t")) if text[line:start].strip() else 0
        return text[:start] + text[end:]
    head = text[:line]
    if not rest.strip() and re.search(r"\\\r?\n\Z", head):  # the last of continued lines: the one before it ends the command now
        head = re.sub(r"[ \t]*\\(\r?\n)\Z", r"\1", head)
    return head + text[stop + 1 :]


def script_added(text: str, key: str, value: Setting) -> str | None:
    """Return a script with a new flag behind one that spells a plan; None where there is none."""
    if value is False:
        return text
    if key.startswith("$"):
        lines = text.split("\n")
        heads = [i for i, line in enumerate(lines) if line.startswith(("#!", "#SBATCH"))]
        lines.insert(heads[-1] + 1 if heads else 0, str(value))
        return "\n".join(lines)
    for near in ANCHORS:
        for count in (1, 0):
            spot = _spot(text, near, count)
            if spot is not None:
                return _inserted(text, spot, key, value)
    return None


def _inserted(text: str, spot: tuple[int, int, int, bool], key: str, value: Setting) -> str:
    start, _, end, joined = spot
    dashed = text[start] == "-"
    if dashed:
        style = "_" if "_" in text[start:end].split("=")[0].split()[0] and "." not in key else "-"
        flag = "--" + (key if "." in key else key.replace("_", style))
        new = flag + ("=" if joined else " ") + " ".join(_words(value)) if _words(value) else flag
    else:
        new = f"{key}={' '.join(_words(value)) or 'true'}"
    line = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    tail = text[end:stop]
    indent = text[line : line + len(text[line:start]) - len(text[line:start].lstrip())]
    before = text[:line].rstrip(" \t\r\n")
    alone = not text[line:start].strip()
    if alone and re.fullmatch(r"[ \t]*\\\r?", tail):
        return text[: stop + 1] + f"{indent}{new}{tail}\n" + text[stop + 1 :]
    if alone and not tail.strip() and not before.endswith("\\"):
        return text[:stop] + f"\n{indent}{new}" + text[stop:]
    return text[:end] + f" {new}" + text[end:]
