"""What a launcher's log says of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step as logged. seconds: of one step (an average over the launcher's log interval where it logs one); tokens_per_s:
    of one accelerator, where the launcher gives a rate instead of a time. loss: None where it is not logged.
    """

    number: int
    seconds: float | None = None
    tokens_per_s: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """steps: in the order of their numbers, each once; memory_bytes: peak by rank (rank -1 where the log does not say whose);
    oom: whether an accelerator ran out of memory; error: first line that says what really went wrong ("" where nothing did);
    infrastructure: whether that is the machine's fault rather than the plan's (a lost node, a link, a file system).
    """

    steps: tuple[Step, ...] = ()
    memory_bytes: Mapping[int, float] = field(default_factory=dict)
    memory_kind: Literal["allocated", "reserved", "device"] = "device"
    oom: bool = False
    error: str = ""
    infrastructure: bool = False
