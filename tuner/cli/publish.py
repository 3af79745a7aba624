"""Hand an answer over: text or JSON to stdout, and to a file with --out."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.output import json_text, out_path, seen, terminal_width, wants_color, write_file
from tuner.errors import SpecError, printable
from tuner.report.table import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.cli.options import Show


def note(text: str, show: Show, level: int = 0) -> None:
    """Say something on stderr: always but with --quiet, from -v on (level 1) or -vv on (level 2)."""
    if not show.quiet and show.verbose >= level:
        with suppress(OSError, ValueError):
            sys.stderr.write(printable(text) + "\n")


def page_for(show: Show) -> Page:
    """Return the page that stdout is."""
    return Page(width=terminal_width(), color=wants_color(show.no_color))


def publish(record: Any, text: Callable[[Any, Page], str], show: Show, write_folder: Callable[[Path], list[str]] | None = None) -> None:
    """Print the record (as JSON with --json), and write it to --out.

    A file is JSON when its name ends in .json or with --json, else text; a verb with several files (`write_folder`) takes a folder,
    or a name ending in .json for its record alone.
    """
    failed = None
    if show.out is not None:
        try:
            _write(record, text, show, out_path(show.out), write_folder)
        except SpecError as error:  # the answer is printed all the same
            failed = error
    sys.stdout.write((json_text(record) if show.json else text(seen(record), page_for(show))) + "\n")
    if failed is not None:
        raise failed


def _write(record: Any, text: Callable[[Any, Page], str], show: Show, path: Path, write_folder: Callable[[Path], list[str]] | None) -> None:
    if write_folder is not None and path.suffix.lower() != ".json":
        names = write_folder(path)
        listed = f"wrote {path}/{names[0]}" if len(names) == 1 else f"wrote {path}/{{{','.join(names)}}}"
        short = len(names) == 1 or len(listed) <= terminal_width()
        note(listed if short else f"wrote {len(names)} files and folders under {path}", show)
        return
    as_json = show.json or path.suffix.lower() == ".json"
    write_file(path, json_text(record) if as_json else text(seen(record), Page()))
    note(f"wrote {path}", show)
