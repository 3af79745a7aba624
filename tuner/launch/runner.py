"""What runs trials: the protocol, and the registry of those that are known (built in, then entry points `tuner.runners`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tuner.launch.trial import Result, Trial


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
