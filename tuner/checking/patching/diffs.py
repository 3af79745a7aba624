"""Unified diffs that `git apply` takes."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def diff_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a unified diff that `git apply` takes, in the folder where the command was given (absolute paths: without their root)."""
    parts = []
    for name, text in after.items():
        old = before.get(name)
        if old == text:
            continue
        shown = _shown(name)
        left = [] if old is None else _lines(old)
        heads = ("/dev/null" if old is None else f"a/{shown}", f"b/{shown}")
        new_file = "new file mode 100644\n" if old is None else ""
        body = "".join(_ended(line) for line in difflib.unified_diff(left, _lines(text), *heads))
        parts.append(f"diff --git a/{shown} b/{shown}\n{new_file}{body}")
    return "".join(parts)


def _shown(name: str) -> str:
    path = Path(name)
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return str(path).lstrip("/")
    parts: Sequence[str] = [part for part in path.parts if part != "."]
    return "/".join(parts)


def _lines(text: str) -> list[str]:
    return [line + "\n" for line in text.split("\n")[:-1]] + ([text.split("\n")[-1]] if text.split("\n")[-1] else [])


def _ended(line: str) -> str:
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
