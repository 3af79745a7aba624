"""Text tables that fit a width: the least important columns go first, and a row is never wrapped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GAP = "  "
LEAST_ROOM = 20  # characters beside a head


@dataclass(frozen=True, slots=True)
class Page:
    """How wide the page is and whether it takes colours."""

    width: int = 120
    color: bool = False

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text else text

    def bold(self, text: str) -> str:
        """Return the text in bold."""
        return self._styled("1", text)

    def dim(self, text: str) -> str:
        """Return the text in grey."""
        return self._styled("2", text)

    def good(self, text: str) -> str:
        """Return the text in green."""
        return self._styled("32", text)

    def bad(self, text: str) -> str:
        """Return the text in red."""
        return self._styled("31", text)

    def warn(self, text: str) -> str:
        """Return the text in yellow."""
        return self._styled("33", text)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: right-aligned unless `left`; `rank` 0 always stays, the highest rank is dropped first."""

    title: str
    cells: Sequence[str]
    rank: int = 0
    left: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length. styles: a style for whole rows, by index; indent: spaces before each line."""

    columns: Sequence[Column]
    styles: dict[int, Callable[[str], str]] = field(default_factory=dict)
    indent: int = 0

    def lines(self, page: Page) -> list[str]:
        """Return the title line and the rows."""
        shown = self.shown(page)
        widths = [max(len(c.title), *(len(cell) for cell in c.cells)) if c.cells else len(c.title) for c in shown]
        rows = [page.bold(_row([c.title for c in shown], shown, widths, self.indent))]
        for i in range(len(shown[0].cells)):
            row = _row([c.cells[i] for c in shown], shown, widths, self.indent)
            rows.append(self.styles[i](row) if i in self.styles else row)
        return rows

    def shown(self, page: Page) -> list[Column]:
        """Return the columns that fit. A column without any text is not shown."""
        kept = [c for c in self.columns if c.rank == 0 or any(cell.strip() for cell in c.cells)]
        while _width(kept, self.indent) > page.width and any(c.rank for c in kept):
            least = max(c.rank for c in kept)
            last = max(i for i, c in enumerate(kept) if c.rank == least)
            kept = kept[:last] + kept[last + 1 :]
        return kept

    def hidden(self, page: Page) -> list[str]:
        """Return the titles of the columns that do not fit."""
        shown = self.shown(page)
        return [c.title for c in self.columns if c not in shown and any(cell.strip() for cell in c.cells)]


def hidden_note(table: Table, page: Page) -> list[str]:
    """Return the lines that name the columns for which the page has no room."""
    hidden = ", ".join(table.hidden(page))
    return [page.dim(line) for line in wrapped(f"not shown at this width: {hidden}", page)] if hidden else []


def _width(columns: Sequence[Column], indent: int) -> int:
    cells = [max([len(c.title), *(len(cell) for cell in c.cells)]) for c in columns]
    return indent + sum(cells) + len(GAP) * (len(cells) - 1)


def _row(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], indent: int) -> str:
    padded = [cell.ljust(width) if column.left else cell.rjust(width) for cell, column, width in zip(cells, columns, widths, strict=True)]
    return (" " * indent + GAP.join(padded)).rstrip()


def flow(parts: Sequence[str], page: Page, separator: str = " | ") -> list[str]:
    """Return parts joined by the separator, with a new line where the next part would not fit; one that fits no line is wrapped."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(separator) + len(part) <= page.width:
            lines[-1] += separator + part
        else:
            lines += wrapped(part, page)
    return lines


def noted(head: str, text: str, page: Page, style: Callable[[str], str] = str) -> list[str]:
    """Return the head with a sentence beside it, wrapped; below it where the page leaves too little room beside."""
    beside = page.width - len(head) >= LEAST_ROOM
    indent = " " * (len(head) if beside else len(GAP))
    first, *rest = wrapped(text, Page(width=page.width - len(indent)))
    opening = [head + style(first)] if beside else [head.rstrip(), indent + style(first)]
    return [*opening, *(indent + style(line) for line in rest)]


def wrapped(text: str, page: Page, indent: int = 0) -> list[str]:
    """Return a sentence as lines that fit the page; later lines are indented by `indent`."""
    import re
    import textwrap

    joined = re.sub(r"(\d) (%|GB|s)(?=\W|$)", "\\1\0\\2", text)  # a number and its unit stay together
    lines = textwrap.wrap(joined, width=max(page.width, 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines] or [""]


def referenced(refs: Sequence[str], page: Page) -> tuple[list[str], list[str]]:
    """Return a mark like [1] for each reference, equal ones sharing theirs, and the lines that spell them out."""
    numbers = {ref: i + 1 for i, ref in enumerate(dict.fromkeys(ref for ref in refs if ref))}
    marks = [f"[{numbers[ref]}]" if ref else "" for ref in refs]
    return marks, [page.dim(line) for ref, i in numbers.items() for line in wrapped(f"[{i}] {ref}", page, indent=4)]
