"""Whether a launch runs as it was foretold: python -m tuner.launch.verify prediction.json LOG [LOG ...].

verify.sh of an export runs the launch for a few steps and calls this. Exit codes: 0 inside the 90 % interval, 3 outside of it, 2 for files
that cannot be read, 4 where the run failed or its logs tell no step time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field

from tuner.errors import SpecError, TunerError, one_problem, printable
from tuner.launch.logs import Parsed, launcher_of, read_log, timed
from tuner.launch.logs.reader import lines_of
from tuner.load import load_file
from tuner.spec import Name, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
INSIDE, BAD, OUTSIDE, FAILED, INTERRUPTED = 0, 2, 3, 4, 130
KINDS = {"allocated": "bytes in tensors", "reserved": "bytes that the allocator holds", "device": "bytes taken on the device"}
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1, strict=True)]


class Interval(Spec):
    """A prediction with its 90 % interval, in SI units."""

    value: Positive
    low: Positive
    high: Positive


class Prediction(Spec):
    """What an export foretells of its launch. memory: of the fullest rank, by what a log may count (KINDS); basis: what it stands on."""

    name: Name
    framework: Name
    basis: Name
    calibration: Name
    gpus: Whole
    seq_len: Whole
    global_batch: Whole
    step_s: Interval
    memory: dict[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """code: the exit code; lines: what to say."""

    code: int
    lines: tuple[str, ...]


def judge(prediction: Prediction, logs: Sequence[Parsed]) -> Verdict:
    """Return whether logs of a launch's ranks (or nodes) lie inside the prediction's intervals."""
    lines = [f"{prediction.name}: {prediction.framework}, {prediction.gpus} GPUs; {prediction.basis}, calibration {prediction.calibration}"]
    errors = [log.error for log in logs if log.oom or log.error]
    timings = [found for log in logs if (found := timed(log, prediction)) is not None]
    if errors or not timings:
        why = f"the run ended with: {errors[0]}" if errors else "the logs tell no step time behind three warm-up steps"
        return Verdict(code=FAILED, lines=(*lines, why))
    best = max(timings, key=lambda timing: timing.steps)
    spread = "" if best.spread_s is None else f" +- {best.spread_s:.3g}"
    inside, line = _compared("step", best.step_s, prediction.step_s, 1.0, "s", f"{best.steps} steps timed{spread}")
    lines.append(line)
    peaks = [(max(log.memory_bytes.values()), log.memory_kind) for log in logs if log.memory_bytes]
    if not peaks:
        lines.append("memory   not in the logs")
    else:
        peak, kind = max(peaks)
        fits, line = _compared("memory", peak, prediction.memory[kind], 1e9, "GB", KINDS[kind])
        inside = inside and fits
        lines.append(line)
    lines.append("inside the 90 % interval" if inside else "OUTSIDE the 90 % interval")
    return Verdict(code=INSIDE if inside else OUTSIDE, lines=tuple(lines))


def _compared(what: str, measured: float, foretold: Interval, unit: float, word: str, detail: str) -> tuple[bool, str]:
    inside = foretold.low <= measured <= foretold.high
    error = measured / foretold.value - 1.0
    interval = f"{foretold.low / unit:.4g} to {foretold.high / unit:.4g}"
    said = f"{what:8} measured {measured / unit:.4g} {word}, predicted {foretold.value / unit:.4g} ({interval}): {error:+.1%}"
    return inside, f"{said}{'' if inside else ', OUTSIDE'} ({detail})"


def read(paths: Sequence[Path]) -> list[Parsed]:
    """Return what the logs of a run say; a log without a mark of its launcher is of the same one as the others. Raises SpecError."""
    known = [_tried(path, lambda path=path: launcher_of(lines_of(path))) for path in paths]  # type: ignore[misc]
    launcher = next((name for name in known if name is not None), None)
    if launcher is None:
        raise one_problem(", ".join(map(str, paths)), "", None, "has no line of a launcher's log that is known")
    return [_tried(path, lambda path=path, name=name: read_log(path, name or launcher)) for path, name in zip(paths, known, strict=True)]  # type: ignore[misc]


def _tried(path: Path, get: Callable[[], T]) -> T:
    try:
        return get()
    except (OSError, ValueError) as error:
        raise one_problem(str(path), "", None, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuner.launch.verify", description="Hold logs of a launch against its prediction.")
    parser.add_argument("prediction", type=Path, help="prediction.json of an export")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="logs of the run")
    asked = parser.parse_args(argv)
    try:
        prediction = load_file(Prediction, asked.prediction)
        missing = [kind for kind in KINDS if kind not in prediction.memory]
        if missing:
            raise one_problem(str(asked.prediction), "memory", None, f"lacks {', '.join(missing)}")
        verdict = judge(prediction, read(asked.logs))
    except TunerError as error:
        sys.stderr.write("\n".join(map(printable, str(error).split("\n"))) + "\n")
        return BAD if isinstance(error, SpecError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    sys.stdout.write("\n".join(map(printable, verdict.lines)) + "\n")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
