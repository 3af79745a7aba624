"""Every way a verb can end, as a message and an exit code: no traceback reaches a person."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tuner.cli.options import ARGUMENTS
from tuner.cli.output import json_text
from tuner.cli.streams import failure, say, silence_stdout
from tuner.errors import Problem, SpecError, TunerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.cli.options import Show

SHOWN = 40


def guarded(run: Callable[[], int], show: Show) -> None:
    """Run a verb to its exit code, and turn what it raises into a message on stderr (and a record on stdout with --json)."""
    try:
        code = _answered(run, show)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        code = 141
    except KeyboardInterrupt:
        say("interrupted")
        code = 130
    except MemoryError:
        say("this machine has too little memory for it")
        code = 4
    except OSError as error:
        silence_stdout()
        say(failure(error))
        _trace(show)
        code = 4
    except Exception as error:
        say(f"internal error: {_one_line(error)}. Please report it with the command line; -vv shows where it happened")
        _trace(show)
        code = 4
    raise typer.Exit(code)


def _answered(run: Callable[[], int], show: Show) -> int:
    """Return the verb's exit code, or that of a failure that a person can act on, once it has been reported."""
    try:
        return run()
    except TunerError as error:
        lines = [str(_spelled(p)) for p in error.problems] if isinstance(error, SpecError) else str(error).splitlines() or [""]
        say("\n".join(lines[:SHOWN] + ([f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])))
        _trace(show)
        _record(show, error)
        return error.exit_code


def _spelled(problem: Problem) -> Problem:
    """Return a problem; where it names an argument, as the option of the command line."""
    option = {"seq_len": "--seq"}.get(problem.where, "--" + problem.where.replace("_", "-"))
    return dataclasses.replace(problem, where=option) if problem.where in ARGUMENTS else problem


def _record(show: Show, error: TunerError) -> None:
    if not show.json:
        return
    fields = ("where", "path", "value", "rule", "hint")
    problems = [{name: getattr(p, name) for name in fields} for p in error.problems] if isinstance(error, SpecError) else []
    record: dict[str, Any] = {"error": {"kind": type(error).__name__, "message": str(error), "problems": problems}}
    sys.stdout.write(json_text(record) + "\n")


def _one_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    words = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}{': ' if words else ''}{words}{place}"


def _trace(show: Show) -> None:
    if show.verbose >= 2:
        traceback.print_exc(file=sys.stderr)
