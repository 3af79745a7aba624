"""The standard streams as a shell may leave them: closed, full, or in an encoding that lacks letters. Nothing of it is a traceback."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

from tuner.errors import printable


class _Closed(io.TextIOBase):
    """A standard output that the shell closed (`>&-`): writing to it fails as it would in any program."""

    def write(self, text: str) -> int:  # noqa: ARG002
        """Fail, as a closed descriptor does."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _spelled(error: UnicodeError) -> tuple[str, int]:
    r"""Spell out letters that an encoding lacks as JSON does: \u00e9, and pairs beyond \uffff."""
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 (only writing uses it)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)), error.end


codecs.register_error("spelled", _spelled)


def prepare() -> None:
    """Make the standard streams safe to write to, once, before anything is written."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # a closed descriptor below 3 would be given to the next file that is opened
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (for the rest of the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")


def silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere: nobody reads what is left."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Write lines to stderr; where it cannot be written to, nobody listens."""
    with suppress(OSError, ValueError):
        for line in text.split("\n"):
            sys.stderr.write(f"tuner: {printable(line)}\n")


def failure(error: OSError) -> str:
    """Return in words what the machine refused."""
    at = f" ({error.filename})" if error.filename is not None else ""
    return f"the machine failed: {error.strerror or error}{at}"
