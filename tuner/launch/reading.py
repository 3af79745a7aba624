"""What a running trial's log says so far, line by line, and what it says in the end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.launch.logs.parsed import Parsed, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

WORKLOAD = "tuner"  # the launcher name of our own workload
_OOM = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_MACHINE = re.compile(
    r"Node failure|NodeFail|No space left on device|Stale file handle|uncorrectable ECC|unhandled system error|Address already in use"
    r"|Input/output error|Transport endpoint is not connected"
)
_ERROR = re.compile(r"^(?:\[?rank\d+\]?:?\s*)?(?:\w+\.)*\w*(?:Error|Exception)\b.*")
_LINE = re.compile(r"tuner-(step|rank|versions) (\{.*\})")


@dataclass(slots=True)
class Reader:
    """Reads a log while it is written. oom: an accelerator ran out of memory; traceback: the first line of one; steps: seen so far."""

    oom: bool = False
    traceback: str = ""
    steps: int = 0

    def feed(self, line: str) -> None:
        """Take the next line."""
        self.oom |= bool(_OOM.search(line))
        if not self.traceback and _TRACEBACK.search(line):
            self.traceback = line.strip()
        self.steps += "tuner-step {" in line


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What only our own workload tells: compute_s by rank (seconds of a step's own work), versions of its software."""

    compute_s: dict[int, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def parse(lines: Iterable[str], launcher: str) -> Parsed:
    """Return what a whole log says. launcher: whose format it has."""
    steps: dict[int, Step] = {}
    memory: dict[int, float] = {}
    oom, error = "", ""
    for line in lines:
        kind, record = _record(line) if launcher == WORKLOAD else ("", {})
        if kind == "step":
            steps[record["step"]] = Step(number=record["step"], seconds=record["seconds"], loss=record.get("loss"))
        elif kind == "rank":
            memory[record["rank"]] = record.get("max_allocated_bytes") or record.get("host_peak_bytes") or 0.0
        elif _OOM.search(line):
            oom = oom or line.strip()
        elif not error and (_ERROR.match(line.strip()) or _MACHINE.search(line)):
            error = line.strip()
    ordered = tuple(steps[number] for number in sorted(steps))
    return Parsed(
        steps=ordered, memory_bytes=memory, memory_kind="allocated", oom=bool(oom), error=oom or error,
        infrastructure=not oom and bool(_MACHINE.search(error)),
    )  # fmt: skip


def facts(lines: Iterable[str]) -> Facts:
    """Return what our own workload adds to steps and memory."""
    found: dict[str, list[dict[str, Any]]] = {"step": [], "rank": [], "versions": []}
    for line in lines:
        kind, record = _record(line)
        if kind:
            found[kind].append(record)
    compute = {int(r["rank"]): float(r["compute_s"]) for r in found["rank"] if "rank" in r and r.get("compute_s") is not None}
    return Facts(compute_s=compute, versions={str(k): str(v) for r in found["versions"] for k, v in r.items()})


def _record(line: str) -> tuple[str, dict[str, Any]]:
    match = _LINE.search(line)
    if not match:
        return "", {}
    try:
        record = json.loads(match[2])
    except ValueError:
        return "", {}  # a line that another rank's output cut through
    return match[1], record
