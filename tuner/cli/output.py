"""Where a verb's words go: the result to stdout or a file, everything else to stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem

if TYPE_CHECKING:
    from types import TracebackType

NO_TERMINAL_WIDTH = 120


def silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader of our pipe has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal_width() -> int:
    """Return the columns of the terminal (COLUMNS wins), or 120 where stdout is none."""
    return shutil.get_terminal_size(fallback=(NO_TERMINAL_WIDTH, 24)).columns


def wants_color(no_color: bool) -> bool:
    """Whether stdout takes colours: a terminal, and neither --no-color nor NO_COLOR nor TERM=dumb."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and sys.stdout.isatty()


def json_text(record: Any) -> str:
    """Return a record as JSON text: valid JSON (no NaN), keys in their order."""
    return json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False)


def write_file(path: Path, text: str) -> None:
    """Write a file in one move: it is either the old one or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
        part.replace(path)
    except (OSError, ValueError) as error:
        raise one_problem("--out", "", str(path), f"cannot be written: {getattr(error, 'strerror', None) or error}") from None


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
