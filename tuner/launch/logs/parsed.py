"""What a launcher's log says of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step as logged. seconds: of one step (an average over the launcher's log interval where it logs one); tokens_per_s:
    of one accelerator, samples_per_s: sequences of the whole job, where the launcher gives a rate instead of a time. loss: None where it
    is not logged. microbatches: that it held, where the log says so. launch: 0, and one more each time the log starts over from an
    earlier step.
    """

    number: int
    seconds: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    microbatches: int | None = None
    launch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """launcher: whose log it is; steps: in the order of their numbers, each once, as of the last launch that ran it; memory_bytes: peak
    by rank (rank -1 where the log does not say whose); oom: whether an accelerator ran out of memory; error: first line that says what
    really went wrong in the last launch ("" where nothing did); infrastructure: whether that is the machine's fault rather than the
    plan's (a lost node, a link, a file system). stated: what the log says of the job and plan (seq_len, global_batch, gpus, tp, ...);
    versions: of what ran it; compute_s: seconds that each rank computed, where the log tells.
    """

    launcher: str = ""
    steps: tuple[Step, ...] = ()
    memory_bytes: Mapping[int, float] = field(default_factory=dict)
    memory_kind: MemoryKind = "device"
    oom: bool = False
    error: str = ""
    infrastructure: bool = False
    stated: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    compute_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def bad_losses(self) -> tuple[int, ...]:
        """Numbers of the steps whose loss is no finite number: such a run computes, but does not train."""
        return tuple(step.number for step in self.steps if step.loss is not None and not math.isfinite(step.loss))
