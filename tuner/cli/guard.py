"""Every way a verb can end, as a message and an exit code: no traceback reaches a person."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tuner.cli.options import ARGUMENTS
from tuner.cli.output import json_text, silence_stdout
from tuner.errors import Problem, SpecError, TunerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.cli.options import Show

SHOWN = 40


def guarded(run: Callable[[], int], show: Show) -> None:
    """Run a verb to its exit code, and turn what it raises into a message on stderr (and a record on stdout with --json)."""
    try:
        code = run()
        sys.stdout.flush()
    except TunerError as error:
        _say("\n".join(map(_spelled, error.problems)) if isinstance(error, SpecError) else str(error), limit=SHOWN)
        _trace(show)
        _record(show, error)
        code = error.exit_code
    except BrokenPipeError:
        silence_stdout()
        code = 141
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except MemoryError:
        _say("this machine has too little memory for it")
        code = 4
    except Exception as error:
        _say(f"internal error: {_one_line(error)}. Please report it with the command line; -vv shows where it happened")
        _trace(show)
        code = 4
    raise typer.Exit(code)


def _spelled(problem: Problem) -> str:
    """Return a problem's text; where it names an argument, as the option of the command line."""
    option = {"seq_len": "--seq"}.get(problem.where, "--" + problem.where.replace("_", "-"))
    return str(dataclasses.replace(problem, where=option) if problem.where in ARGUMENTS else problem)


def _record(show: Show, error: TunerError) -> None:
    if not show.json:
        return
    fields = ("where", "path", "value", "rule", "hint")
    problems = [{name: getattr(p, name) for name in fields} for p in error.problems] if isinstance(error, SpecError) else []
    record: dict[str, Any] = {"error": {"kind": type(error).__name__, "message": str(error), "problems": problems}}
    sys.stdout.write(json_text(record) + "\n")


def _say(text: str, limit: int = 1) -> None:
    lines = text.splitlines() or [""]
    shown = lines[:limit] + ([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])
    for line in shown:
        sys.stderr.write(f"tuner: {line}\n")


def _one_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    words = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}{': ' if words else ''}{words}{place}"


def _trace(show: Show) -> None:
    if show.verbose >= 2:
        traceback.print_exc(file=sys.stderr)
