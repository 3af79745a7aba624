"""One short run of one plan: what is asked of a runner, and what it answers. Both are plain JSON in the trial's own folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tuner.job import Job
from tuner.load import load_spec, parse_json, read_text
from tuner.plan import Plan
from tuner.spec import Spec

TRIAL, RESULT, LOG, COMMAND, ENVIRONMENT = "trial.json", "result.json", "log.txt", "command.txt", "environment.json"
End = Literal["ok", "oom", "failed", "infrastructure", "stopped"]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """number: its place in the search; folder: its own, where runner and workload write; steps: optimizer steps to run, of which the
    first `warmup` are not timed; wall_s: it is stopped past this many seconds; quiet_s: and when its log stands still this long.

    microbatches: micro batches that a step of the run holds (0: those of the job's global batch); a shorter step is a cheaper run, and
    two counts give the pinned batch's time as a + b x microbatches. exclude: nodes to leave out, where the runner chooses nodes.
    """

    number: int
    job: Job
    plan: Plan
    folder: Path
    steps: int = 8
    warmup: int = 3
    microbatches: int = 0
    wall_s: float = 600.0
    quiet_s: float = 120.0
    exclude: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the trial as JSON: what `read_trial` takes."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("job", "plan", "folder")}
        return fields | {"job": self.job.model_dump(mode="json"), "plan": dataclasses.asdict(self.plan)}


def read_trial(folder: Path) -> Trial:
    """Return the trial that stands in a folder. Raises SpecError."""
    path = folder / TRIAL
    data = dict(parse_json(read_text(path), str(path)))
    job = load_spec(Job, data.pop("job"), str(path), units=False)
    own = {"job": job, "plan": Plan(**data.pop("plan")), "folder": folder, "exclude": tuple(data.pop("exclude", ()))}
    return Trial(**data | own)


class Result(Spec):
    """How a trial ended.

    end: ok, oom (out of accelerator memory), failed (the plan's own fault: a refused configuration, a wrong loss, a traceback),
    infrastructure (a node, a link, a queue: says nothing of the plan), stopped (by the tuner: worse than what is known, or a limit).
    step_s: seconds a step (median of the timed ones), spread_s: half the distance between their quartiles, steps: how many were timed.
    memory_bytes: peak of the fullest rank, of what memory_kind says. reason: the first real line of what went wrong, or the limit that
    stopped it. nodes: where it ran; failed_nodes: those of them that failed under it, where the scheduler says so. started, ended:
    seconds since 1970. versions: of what ran it. attempts: runs it took.
    slowest_ranks: ranks whose own compute time stands out, slowest first, where the workload tells.
    """

    end: End
    step_s: Seconds | None = None
    spread_s: Seconds | None = None
    steps: Annotated[int, Field(ge=0)] = 0
    memory_bytes: Seconds | None = None
    memory_kind: Literal["allocated", "reserved", "device"] = "device"
    reason: str = ""
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    started: float = 0.0
    ended: float = 0.0
    versions: Annotated[dict[str, str], Field(default_factory=dict)]
    attempts: Annotated[int, Field(ge=1)] = 1
    failed_nodes: tuple[str, ...] = ()
    slowest_ranks: tuple[int, ...] = ()


def read_result(folder: Path) -> Result | None:
    """Return the result that stands in a trial's folder, None while there is none. Raises SpecError for one that cannot be read."""
    path = folder / RESULT
    if not path.exists():
        return None
    return load_spec(Result, parse_json(read_text(path), str(path)), str(path), units=False)


def json_text(record: dict[str, Any]) -> str:
    """Return a record as the text of its file."""
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
