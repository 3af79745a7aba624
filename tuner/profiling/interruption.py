"""Ctrl-C between two steps of a search, not within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C back, so that no step is cut in two (a run started and not noted, a lock taken and not given back); yield
    what tells whether it came. A second one is as ever. Where SIGINT is ignored, or not this thread's, nothing is changed.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before != signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, _: object) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
