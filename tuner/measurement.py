"""A plan that really ran: what was measured, by whom, on what. Our own trials and published rows are the same type."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tuner.job import Job
from tuner.plan import Plan
from tuner.spec import Spec

LONGEST_ID = 500
Outcome = Literal["ok", "oom", "failed"]


class Measurement(Spec):
    """step_s: seconds a step (median); memory_bytes: peak of the fullest rank, of what memory_kind says (bytes in tensors, held by the
    caching allocator, or taken on the device); None where not measured. framework: as the source
    calls it; assumed: knobs the source did not state and that took the framework's default; superseded: its publisher replaced it
    later; source: the file it came from; series: what its layouts are compared within.
    """

    model_config = Spec.model_config | {"arbitrary_types_allowed": True}

    id: Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
    framework: str = ""
    job: Job
    plan: Plan
    step_s: float | None = None
    memory_bytes: float | None = None
    memory_kind: Literal["allocated", "reserved", "device"] = "device"
    outcome: Outcome = "ok"
    superseded: bool = False
    assumed: tuple[str, ...] = ()
    source: str = ""
    series: Annotated[dict[str, Any], Field(default_factory=dict)]
