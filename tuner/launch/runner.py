"""What runs trials: the protocol, and the registry of those that are known (built in, then entry points `tuner.runners`)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from tuner.errors import TunerError, nearest, one_problem
from tuner.launch.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.launch.command import Command
    from tuner.launch.trial import Result, Trial
    from tuner.measurement import Measurement

GROUP = "tuner.runners"
BUILT_IN = {name: f"tuner.launch.{name}" for name in ("local", "slurm", "command", "replay")}


class Running(Protocol):
    """A trial under way."""

    def poll(self) -> Result | None:
        """Return the result once there is one: never waits. Asking again gives the same result."""

    def stop(self, why: str) -> Result:
        """End the trial and all its processes, wherever they are; return the result (what was measured so far, end "stopped")."""


class Runner(Protocol):
    """Starts trials. A runner keeps no state of its own: all that a resumed search needs is in the trials' folders."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    @property
    def parallel(self) -> int:
        """How many trials may run at once."""

    def start(self, trial: Trial) -> Running:
        """Start a trial: its folder gets trial.json, command.txt, environment.json (without secrets), log.txt and, at the end,
        result.json, each written atomically. Raises InfrastructureError where nothing can be started.
        """

    def attach(self, trial: Trial) -> Running | None:
        """Return the run of this trial that an interrupted search left behind, still going or ended; None where it must be run again
        (no process of it is alive then).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a runner is made from. command: a person's own launch command (None: the built-in workload); rows: what replay answers from;
    allocation: the Slurm job whose nodes trials run on ("": that of this shell, if it is in one), separate_jobs: each trial is a job of
    its own all the same; exclude: nodes to leave out; parallel: trials at once; options: further settings, for plugins.
    """

    site: Site = field(default_factory=Site)
    command: Command | None = None
    rows: tuple[Measurement, ...] = ()
    allocation: str = ""
    separate_jobs: bool = False
    exclude: tuple[str, ...] = ()
    parallel: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A runner that the registry knows. source: "built in" or the package it comes from; error: why it cannot be used ("": it can)."""

    name: str
    source: str
    make: Callable[[Setup], Runner] | None = None
    error: str = ""


def runners() -> dict[str, Known]:
    """Return the runners by name. One that cannot be loaded is listed with its error; none stops the others."""
    found = {name: _load(name, "built in", partial(_factory, module)) for name, module in BUILT_IN.items()}
    for point in metadata.entry_points(group=GROUP):
        source = point.dist.name if point.dist else point.value
        if point.name not in found:
            found[point.name] = _load(point.name, source, point.load)
        else:
            taken = Known(name=point.name, source=source, error=f"there is a runner of this name already ({found[point.name].source})")
            found[f"{point.name} of {source}"] = taken
    return found


def open_runner(name: str, setup: Setup) -> Runner:
    """Return the runner of this name. Raises SpecError for one that is unknown, or that cannot be loaded or made."""
    known = runners()
    if name not in known:
        raise one_problem("--runner", "", name, "is no runner", nearest(name, known))
    entry = known[name]
    if entry.make is None:
        raise one_problem("--runner", "", name, f"cannot be loaded: {entry.error}", f"it comes from {entry.source}")
    try:
        return entry.make(setup)
    except TunerError:
        raise
    except Exception as error:
        if entry.source == "built in":
            raise
        raise one_problem("--runner", "", name, f"cannot be made: {_words(error)}", f"it comes from {entry.source}") from error


def _factory(module: str) -> Any:
    return importlib.import_module(module).open_runner


def _load(name: str, source: str, load: Callable[[], Any]) -> Known:
    try:
        make = load()
    except (Exception, SystemExit) as error:
        return Known(name=name, source=source, error=_words(error))
    if not callable(make):
        return Known(name=name, source=source, error="is not callable: it must take a Setup and return a Runner")
    return Known(name=name, source=source, make=make)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
