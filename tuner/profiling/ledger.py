"""What was measured, one line of JSON a run, appended as it comes: what a later search with the same job, software and machines need not
run again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import InfrastructureError, SpecError
from tuner.launch.trial import Result
from tuner.load import load_spec
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.job import Job
    from tuner.plan import Plan

TELLING = ("ok", "oom", "failed", "stopped")  # ends that say something of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run. key: what it is a measurement of (see `key_of`); number: its place in its search; predicted_s: what the cost model said,
    said_s: what was believed just before it ran, low_s and high_s: the ends of the 90 % range of that; reference: it was run again to
    see drift.
    """

    key: str
    number: int
    plan: dict[str, Any]
    result: Result
    predicted_s: float | None = None
    said_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    reference: bool = False

    def record(self) -> dict[str, Any]:
        """Return the entry as a line of its file holds it."""
        names = ("key", "number", "plan", "predicted_s", "said_s", "low_s", "high_s", "reference")
        return {name: getattr(self, name) for name in names} | {"result": self.result.model_dump(mode="json")}


def key_of(job: Job, plan: Plan, software: str) -> str:
    """Return a name of what a run of this plan measures: the same job on the same kind of cluster, plan and software (runner, command,
    image, version) give the same one.
    """
    of = job.model_dump(mode="json", exclude={"tokens": True, "ramp_up": True, "cluster": {"price_per_gpu_hour"}})
    told = {"job": of, "plan": plan_record(plan, job.gpus), "software": software}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]


def append(path: Path, entry: Entry) -> None:
    """Append a line and see it on disk; a line that a kill left half-written is ended first. Raises InfrastructureError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            line = json.dumps(entry.record(), ensure_ascii=False, allow_nan=False)
            file.write((b"\n" if torn else b"") + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InfrastructureError(f"{path}: the measurement cannot be kept: {error.strerror or error}") from None


def read(path: Path) -> list[Entry]:
    """Return the entries of a file, in order; none where there is no file. A line that is no entry (cut short, or of another version) is
    passed over: what it measured is measured again.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise InfrastructureError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [entry for line in lines if line.strip() and (entry := _entry(line)) is not None]


def _entry(line: bytes) -> Entry | None:
    try:
        data = json.loads(line)
        result = load_spec(Result, data.pop("result"), "ledger", units=False)
        return Entry(result=result, **data)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, SpecError):
        return None
