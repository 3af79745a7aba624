"""Processes of Linux: who lives, who descends from whom, and the end of all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "TUNER_TRIAL"  # environment variable that every process of a trial inherits: the trial's folder
_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where it does not live (a zombie does not). A pid alone is reused."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else 0


def alive(pid: int, started: int) -> bool:
    """Whether the process that had this pid and start time still lives."""
    return started > 0 and start_time(pid) == started


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def descendants(root: int) -> list[int]:
    """Return the living processes below `root`, whatever their session or group."""
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid)) and fields[0] not in ("Z", "X")}
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found - {root})


def marked(folder: Path) -> list[int]:
    """Return the living processes, other than this one, that were started for the trial in this folder."""
    mark = f"{MARK}={folder.absolute()}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and mark in _environment(pid) and start_time(pid)]


def end_all(find: Callable[[], Iterable[int]], grace_s: float, give_up_s: float = 10.0) -> list[int]:
    """End the processes that `find` names: SIGTERM, SIGKILL after `grace_s`; return those that outlive even that by `give_up_s`."""
    told: set[int] = set()
    begun = time.monotonic()
    while pids := _seen(find):
        waited = time.monotonic() - begun
        if waited > grace_s + give_up_s:
            return pids
        for pid in pids:
            if waited >= grace_s or pid not in told:
                _signal(pid, signal.SIGKILL if waited >= grace_s else signal.SIGTERM)
        told.update(pids)
        time.sleep(0.02)
    return []


def _seen(find: Callable[[], Iterable[int]], looks: int = 3, between_s: float = 0.02) -> list[int]:
    """Return the living processes that `find` names, [] after several looks: one that forks or is just becoming another shows no mark."""
    for look in range(looks):
        time.sleep(between_s if look else 0.0)
        if pids := [pid for pid in find() if start_time(pid)]:
            return pids
    return []


def reap() -> dict[int, int]:
    """Collect ended children, adopted ones too; return their exit codes by pid (negative: the signal)."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]  # noqa: PTH208 -- thousands of names, no Path for each


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name (which may hold blanks and brackets): state, parent, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
