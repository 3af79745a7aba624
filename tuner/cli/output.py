"""Where a verb's words go: the result to stdout or a file, everything else to stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import UNSEEN, SpecError, one_problem, printable
from tuner.files import write

if TYPE_CHECKING:
    from types import TracebackType

NO_TERMINAL_WIDTH = 120


def terminal_width() -> int:
    """Return the columns of the terminal (COLUMNS wins), or 120 where stdout is none."""
    return shutil.get_terminal_size(fallback=(NO_TERMINAL_WIDTH, 24)).columns


def wants_color(no_color: bool) -> bool:
    """Whether stdout takes colours: a terminal, and neither --no-color nor NO_COLOR nor TERM=dumb."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and sys.stdout.isatty()


def json_text(record: Any) -> str:
    """Return a record as JSON text: valid JSON (no NaN), keys in their order, nothing in it that steers a terminal."""
    text = json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False)
    return UNSEEN.sub(lambda m: m[0] if m[0] == "\n" else f"\\u{ord(m[0]):04x}", text)


def seen(record: Any) -> Any:
    """Return a record for a report: its texts without what steers a terminal."""
    if isinstance(record, str):
        return "\n".join(map(printable, record.split("\n")))
    if isinstance(record, dict):
        return {name: seen(value) for name, value in record.items()}
    return [seen(value) for value in record] if isinstance(record, list) else record


def out_path(text: str) -> Path:
    """Return the path that --out names. Raises SpecError."""
    if not text.strip():
        raise one_problem("--out", "", text, "must name a file or a folder")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise one_problem("--out", "", printable(text), "must be UTF-8 text") from None
    from tuner.load import path_of  # brings pydantic

    return path_of(text, "--out")


def write_file(path: Path, text: str) -> None:
    """Write a file in one move: it is either the old one or the whole new one. What is no file (a pipe, a device) is written to,
    and a link stays one.
    """
    data = (text if text.endswith("\n") else text + "\n").encode("utf-8", "spelled")
    try:
        if (path.exists() and not path.is_file()) or path.parts[1:2] in (("dev",), ("proc",)):
            with path.open("ab") as stream:
                stream.write(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path.resolve(), data)
    except (OSError, RuntimeError, ValueError) as error:
        raise _unwritable(str(path), getattr(error, "strerror", None) or str(error)) from None


def _unwritable(path: str, why: str) -> SpecError:
    return one_problem("--out", "", path, f"cannot be written: {why}", "name a file in a folder that can be written to")


class Progress:
    """A line on stderr that tells what goes on, once it has gone on for a second; nothing when quiet or not a terminal."""

    def __init__(self, quiet: bool) -> None:
        self.active = not quiet and sys.stderr.isatty()
        self.started = self.shown = time.monotonic()
        self.width = 0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, words: str, done: int = 0, of: int = 0) -> None:
        """Show `words`, and how far it is, at most ten times a second."""
        now = time.monotonic()
        if not self.active or now - self.started < 1 or now - self.shown < 0.1:
            return
        self.shown = now
        line = f"{words} {done:,} of {of:,}" if of else words
        line = line[: shutil.get_terminal_size(fallback=(80, 24)).columns - 1]
        sys.stderr.write("\r" + line.ljust(self.width))
        sys.stderr.flush()
        self.width = len(line)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()
