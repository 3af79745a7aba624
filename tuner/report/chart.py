"""Bars in plain characters, readable without colours and on any terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.report.table import Page

SHORTEST = 8  # characters of the longest bar, on however narrow a page


def bars(title: str, rows: Sequence[tuple[str, str, float, str]], page: Page) -> list[str]:
    """Return one bar a row: (group, name, value, the value in words), the longest as wide as the page allows.

    A group's name stands at its first row; values are not negative. A value above nothing has at least a dot.
    """
    groups = max(len(group) for group, _, _, _ in rows)
    names = max(len(name) for _, name, _, _ in rows)
    words = max(len(word) for _, _, _, word in rows)
    room = max(page.width - groups - names - words - 6, SHORTEST)
    most = max(value for _, _, value, _ in rows) or 1.0
    lines, last = [page.bold(title)], ""
    for group, name, value, word in rows:
        length = round(value / most * room)
        bar = "#" * length if length or value <= 0 else "."
        lines.append(f"{'' if group == last else group:>{groups}}  {name:<{names}}  {bar}{' ' if bar else ''}{word}".rstrip())
        last = group
    return lines
