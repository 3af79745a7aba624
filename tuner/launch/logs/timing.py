"""How long a step of a run takes, from its log."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tuner.launch.logs.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tuner.launch.logs.parsed import Parsed, Step

WARMUP = 3


class Sizes(Protocol):
    """What turns a rate into seconds: tokens of a sequence, sequences of a step, accelerators. A Job has them."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""

    @property
    def gpus(self) -> int:
        """Accelerators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """step_s: median seconds of a step; spread_s: half the distance between the quartiles (None of a single one); steps: how many
    logged times these are of. basis: how step_s was made, where it is not their median.
    """

    step_s: float
    spread_s: float | None
    steps: int
    basis: str = ""


def timed(parsed: Parsed, job: Sizes, *, warmup: int = WARMUP, sequences: int | None = None) -> Timing | None:
    """Return a run's step time without the first `warmup` steps, None where no time is left. Of a log of several launches, the last one
    that has timed steps counts: those before may have been set up otherwise.

    sequences: of one step of the run (None: the job's global batch). A launcher that logs tokens a second of one accelerator, or
    sequences a second, is converted: seconds = sequences x seq_len / (gpus x rate), sequences / rate.
    """
    batch = job.global_batch if sequences is None else sequences
    times: list[float] = []
    for launch in sorted({step.launch for step in parsed.steps}, reverse=True):
        if not times:
            steps = [step for step in parsed.steps if step.launch == launch]
            times = [time for step in settled(parsed, steps, warmup) if (time := seconds_of(step, job, batch)) is not None]
    if not times:
        return None
    if len(times) == 1:
        return Timing(step_s=times[0], spread_s=None, steps=1)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(step_s=statistics.median(times), spread_s=(high - low) / 2, steps=len(times))


def seconds_of(step: Step, job: Sizes, sequences: int) -> float | None:
    """Return a step's seconds, from its rate where the log has no time."""
    if step.seconds is not None:
        return step.seconds
    if step.tokens_per_s is not None:
        return sequences * job.seq_len / (job.gpus * step.tokens_per_s)
    return None if step.samples_per_s is None else sequences / step.samples_per_s


def settled(parsed: Parsed, steps: Sequence[Step], warmup: int) -> Iterator[Step]:
    """Yield the steps of one launch whose record holds no warm-up step. Where a launcher logs the mean since its last record, the whole
    stretch counts: of records 10, 20, 30, the first holds the warm-up.
    """
    form = FORMATS.get(parsed.launcher)
    averaged = form is not None and form.averaged
    needed = max(warmup, form.settles if form else 0)
    first = first_run(steps)
    for before, step in zip([first - 1, *(s.number for s in steps)], steps, strict=False):
        if (before + 1 if averaged else step.number) - first >= needed:
            yield step


def first_run(steps: Sequence[Step]) -> int:
    """Return the first step that a launch ran: its first record ends a stretch as long as the next one, and no step is before 1 (or 0,
    where that one is logged).
    """
    first = steps[0].number
    stretch = steps[1].number - first if len(steps) > 1 else max(first, 1)
    return max(first - stretch + 1, min(first, 1))
