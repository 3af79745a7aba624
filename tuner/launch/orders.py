"""What the supervisor of a trial is told, as a file in the trial's folder; and the names of its other files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.files import write
from tuner.launch.trial import COMMAND, ENVIRONMENT, LOG, RESULT, TRIAL, Result, json_text, read_result

if TYPE_CHECKING:
    from pathlib import Path

ORDERS, SUPERVISOR, STOP, OWN_LOG = "orders.json", "supervisor.json", "stop.txt", "supervisor.log"
__all__ = ["COMMAND", "ENVIRONMENT", "LOG", "ORDERS", "OWN_LOG", "RESULT", "STOP", "SUPERVISOR", "TRIAL", "Orders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """argv: the command; cwd: where it runs; launcher: whose log format it writes; wall_s, quiet_s: as in Trial; grace_s: between SIGTERM
    and SIGKILL; error_s: how long a run may still write after its first OOM or traceback line, so that the log has all of it;
    attempts: runs at most, a second one for infrastructure faults only, pause_s after the first (a scheduler that ends the job ends its
    steps first); free_s: wait for accelerators' memory so long (0: no check here);
    cleanup: a command to run after each attempt; nodes: where it runs (empty: found out there).
    """

    argv: tuple[str, ...]
    cwd: str
    launcher: str
    wall_s: float
    quiet_s: float
    grace_s: float = 5.0
    error_s: float = 3.0
    attempts: int = 2
    pause_s: float = 1.0
    free_s: float = 60.0
    cleanup: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def write_orders(folder: Path, orders: Orders) -> None:
    """Write a supervisor's orders."""
    write(folder / ORDERS, json_text(dataclasses.asdict(orders)))


def read_orders(folder: Path) -> Orders:
    """Return the orders in a folder; the supervisor reads what the driver wrote."""
    data: dict[str, Any] = json.loads((folder / ORDERS).read_text(encoding="utf-8"))
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Orders(**fields)


def save_result(folder: Path, result: Result) -> Result:
    """Write a result unless there is one already; return the one that stands."""
    standing = read_result(folder)
    if standing is None:
        write(folder / RESULT, json_text(result.model_dump(mode="json")))
    return standing or result


def log_lines(folder: Path) -> list[str]:
    """Return the log's lines; [] while there is none."""
    path = folder / LOG
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def put_aside(folder: Path) -> None:
    """Keep an earlier attempt's log as log.1.txt, log.2.txt, ..."""
    path = folder / LOG
    if path.exists():
        number = next(n for n in range(1, 10_000) if not (folder / f"log.{n}.txt").exists())
        path.rename(folder / f"log.{number}.txt")


def stop_reason(folder: Path) -> str | None:
    """Return why the driver wants the trial stopped, None where it does not."""
    path = folder / STOP
    return path.read_text(encoding="utf-8") if path.exists() else None
