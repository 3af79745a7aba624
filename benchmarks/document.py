"""Blocks of a document that a benchmark writes, between marks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def marks(name: str) -> tuple[str, str]:
    """Return what stands around a block of a document."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def write_block(path: Path, name: str, lines: Sequence[str]) -> None:
    """Put lines between the marks of a block. Exits when the file has not both marks, once each and in order."""
    text = path.read_text(encoding="utf-8")
    first, last = marks(name)
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        sys.exit(f"{path}: must hold {first} and then {last}, once each")
    before, after = text[: text.index(first) + len(first)], text[text.index(last) :]
    path.write_text("\n".join([before, *lines, after]), encoding="utf-8")
