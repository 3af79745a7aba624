"""When a measured search ends, and what a run of it may take."""

from __future__ import annotations

from dataclasses import dataclass

STARTUP_S = 60.0  # of a run: imports, communicators, compilation; what a short run costs besides its steps
MOST_FAULTS = 3  # faults of the machine in a row after which nothing more is started


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """runs: how many plans run; accelerator_s: accelerator-seconds of all runs; least_gain: the search ends when the best step is not
    expected to get shorter by this share (0: it does not end for that); steps, warmup, wall_s, quiet_s: of a trial; short: its
    steps may hold a few micro batches where that saves much of it (see cheap.py); worse: a run is
    stopped once its steps are slower than the best one's by this factor (inf: never); reference_every: the best plan is run again after
    so many runs, to see drift (0: never).
    """

    runs: int | None = None
    accelerator_s: float | None = None
    least_gain: float = 0.0
    steps: int = 8
    warmup: int = 3
    wall_s: float = 600.0
    quiet_s: float = 120.0
    short: bool = False
    worse: float = 2.0
    reference_every: int = 8
