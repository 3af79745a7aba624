"""What was measured, one line of JSON a run, appended as it comes: what a later search with the same job, software and machines need not
run again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import InfrastructureError, SpecError
from tuner.launch.trial import Result
from tuner.load import load_spec
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from tuner.job import Job
    from tuner.plan import Plan

INTERRUPTED = "interrupted"  # why a run was stopped that says nothing of its plan
_FIELDS = ("key", "study", "number", "plan", "predicted_s", "said_s", "low_s", "high_s", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run. key: what it is a measurement of (see `key_of`); study, number: its search and its trial there (-1: it is known from another
    search); predicted_s: what the cost model said, said_s: what was believed just before it ran, low_s and high_s: the ends of the 90 %
    range of that; reference: it was run again to see drift.
    """

    key: str
    study: str = ""
    number: int
    plan: dict[str, Any]
    result: Result
    predicted_s: float | None = None
    said_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    reference: bool = False

    @property
    def run(self) -> tuple[str, int, float]:
        """What no other run has: its study, its trial and when it started (a study that was lost begins at trial 0 again)."""
        return self.study, self.number, self.result.started

    def record(self) -> dict[str, Any]:
        """Return the entry as a line of its file holds it."""
        return {name: getattr(self, name) for name in _FIELDS} | {"result": self.result.model_dump(mode="json")}


def tells(result: Result) -> bool:
    """Whether a result says something of its plan: a time, that it does not fit or fails, that it does not end within a limit."""
    return result.end != "infrastructure" and not (result.end == "stopped" and result.reason == INTERRUPTED)


def key_of(job: Job, plan: Plan, software: str) -> str:
    """Return a name of what a run of this plan measures: the same job on the same kind of cluster, plan and software (runner, command,
    image, version) give the same one.
    """
    of = job.model_dump(mode="json", exclude={"tokens": True, "ramp_up": True, "cluster": {"price_per_gpu_hour"}})
    told = {"job": of, "plan": plan_record(plan, job.gpus), "software": software}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]


def append(path: Path, entry: Entry) -> bool:
    """Append a run, unless it stands there already, and see it on disk; return whether it was appended. A line that a kill left
    half-written is ended first; drivers that share the file wait for each other. Raises InfrastructureError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes
            file.seek(0)
            data = file.read()
            if any(_run(line) == entry.run for line in data.split(b"\n")):
                return False
            line = json.dumps(entry.record(), ensure_ascii=False, allow_nan=False).encode()
            file.write((b"\n" if data and not data.endswith(b"\n") else b"") + line + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InfrastructureError(f"{path}: the measurement cannot be kept: {error.strerror or error}") from None
    return True


def read(path: Path, keys: Container[str] | None = None) -> list[Entry]:
    """Return the entries of a file, in order, those of these keys only; none where there is no file. A line that is no entry (cut short,
    or of another version) is passed over: what it measured is measured again.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise InfrastructureError(f"{path}: cannot be read: {error.strerror or error}") from None
    records = [record for line in lines if (record := _record(line)) and (keys is None or record.get("key") in keys)]
    return [entry for record in records if (entry := _entry(record)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("key"), str) and isinstance(data.get("result"), dict) else None


def _run(line: bytes) -> tuple[Any, ...]:
    record = _record(line)
    return () if record is None else (record.get("study"), record.get("number"), record["result"].get("started"))


def _entry(record: dict[str, Any]) -> Entry | None:
    result, rest = record["result"], {name: value for name, value in record.items() if name != "result"}
    if not all(name in _KINDS and _KINDS[name](value) for name, value in rest.items()) or not all(map(_timed, result.items())):
        return None
    try:
        return Entry(result=load_spec(Result, result, "ledger", units=False), **rest)
    except (TypeError, ValueError, OverflowError, SpecError):
        return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _seconds(value: Any) -> bool:
    """Whether it is a step's time, or None."""
    return value is None or (_number(value) and value >= _LEAST_STEP_S)


def _timed(item: tuple[str, Any]) -> bool:
    """Whether a figure of a result is one: what else stands in it, Result checks."""
    name, value = item
    if name == "step_s":
        return _seconds(value)
    return name not in _FIGURES or value is None or _number(value)


_LEAST_STEP_S, _MOST = 1e-9, 1e18
_FIGURES = ("spread_s", "steps", "memory_bytes", "started", "ended", "extrapolated", "attempts")
_KINDS: dict[str, Callable[[Any], bool]] = {
    "key": lambda value: isinstance(value, str),
    "study": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int) and not isinstance(value, bool) and -1 <= value < _MOST,
    "plan": lambda value: isinstance(value, dict),
    "reference": lambda value: isinstance(value, bool),
} | dict.fromkeys(("predicted_s", "said_s", "low_s", "high_s"), lambda value: value is None or (_number(value) and value >= 0))
