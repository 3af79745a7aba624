"""From a log and the way a run ended to its result."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tuner.launch.logs import parse_log
from tuner.launch.logs.formats import WORKLOAD
from tuner.launch.step_time import step_time
from tuner.launch.trial import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.launch.logs import Parsed
    from tuner.launch.trial import End, Trial

BUSY = 75  # exit code (sysexits.h, EX_TEMPFAIL) of a trial whose accelerators were not free
STANDS_OUT = 1.1  # a rank whose own compute time is this many times the median

_NODE = re.compile(r"[Nn]ode failure on ([A-Za-z0-9_.-]+)")

Cut = Literal["", "stop", "wall", "quiet", "error", "infrastructure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended. exit_code: of its first process (negative: the signal; None: it was never started); cut: why it was ended before
    its time ("" where it ended by itself), why: the same in words; nodes: where it ran; started, ended: seconds since 1970.
    """

    exit_code: int | None = None
    cut: Cut = ""
    why: str = ""
    nodes: tuple[str, ...] = ()
    started: float = 0.0
    ended: float = 0.0
    attempts: int = 1


def result_of(trial: Trial, ending: Ending, lines: Sequence[str], launcher: str) -> Result:
    """Return the result of a run with this log, which was written in the format of `launcher`."""
    parsed = parse_log(lines, launcher)
    timing = step_time(trial, parsed)
    end, reason = _end(trial, ending, parsed, timing is not None)
    return Result(
        end=end, reason=reason[:2000], exit_code=ending.exit_code, steps=timing.steps if timing else 0,
        step_s=timing.step_s if timing else None, spread_s=timing.spread_s if timing else None,
        memory_bytes=max(parsed.memory_bytes.values(), default=None), memory_kind=parsed.memory_kind, nodes=ending.nodes,
        started=ending.started, ended=ending.ended, attempts=ending.attempts,
        basis=timing.basis if timing else "", versions=dict(parsed.versions), slowest_ranks=slowest(parsed.compute_s),
        failed_nodes=tuple(dict.fromkeys(_NODE.findall(reason))) if end == "infrastructure" else (),
    )  # fmt: skip


def slowest(compute_s: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks whose compute time stands out, slowest first."""
    usual = statistics.median(compute_s.values()) if compute_s else 0.0
    return tuple(sorted((r for r, s in compute_s.items() if s > STANDS_OUT * usual), key=lambda r: -compute_s[r]))


def _end(trial: Trial, ending: Ending, parsed: Parsed, timed: bool) -> tuple[End, str]:
    """Return how a run ended and why; an own stop comes before what the log says after it, memory before other errors."""
    if ending.cut == "stop":
        return "stopped", ending.why
    if parsed.oom:
        return "oom", parsed.error
    if ending.cut == "infrastructure" or ending.exit_code == BUSY:
        return "infrastructure", ending.why or parsed.error or "the accelerators were not free"
    if ending.cut in ("wall", "quiet"):
        return _at_limit(trial, ending, parsed)
    if ending.exit_code == 0 and timed and (_all_steps(trial, parsed) or not _broke_off(parsed)):
        return "ok", ""
    fault: End = "infrastructure" if parsed.infrastructure else "failed"
    short = (
        f"it ended by itself after {len(parsed.steps)} steps: {trial.steps} were asked for, of which the first {trial.warmup} are warm-up"
    )
    return fault, parsed.error or ending.why or (short if ending.exit_code == 0 else exit_text(ending.exit_code))


def _broke_off(parsed: Parsed) -> bool:
    """Whether exit code 0 must not be believed: srun ends with it when a node fails; our own workload always does all its steps."""
    return parsed.infrastructure or parsed.launcher == WORKLOAD


def _all_steps(trial: Trial, parsed: Parsed) -> bool:
    return bool(parsed.steps) and parsed.steps[-1].number - parsed.steps[0].number + 1 >= trial.steps


def _at_limit(trial: Trial, ending: Ending, parsed: Parsed) -> tuple[End, str]:
    """A run that did all its steps and then hung while it shut down was measured all the same."""
    if _all_steps(trial, parsed) and not parsed.error:
        return "ok", f"all {trial.steps} steps were done, but it did not end by itself: {ending.why}"
    if ending.cut == "quiet" and parsed.infrastructure:
        return "infrastructure", parsed.error
    return "stopped", ending.why


def exit_text(code: int | None) -> str:
    """Return an exit code in words."""
    if code is None:
        return "it could not be started"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}, and no line of the log says why"
