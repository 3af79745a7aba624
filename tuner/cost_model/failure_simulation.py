"""Failing GPUs event by event: what the closed forms are checked against, and the traces that they cannot give.

Each GPU is the cause of events of B GPUs at a constant rate, but for those that an event of B GPUs has taken already: sizes of events
do not know of each other. An event takes its aligned block of B GPUs, which come back together after a repair, where no event of another
size keeps them. A policy walks through the events: an event in a replica that runs interrupts the job, which loses what it
did since the last checkpoint, restarts and packs again.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cost_model.policies import Fleet, Policy

Start = Literal["steady", "healthy"]


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of `hours`. At times[i] (times[0] = 0: how it starts) the counts became hit[i] = (K_1, K_2, ..), in replicas[i] =
    (k_1, k_2, ..) replicas where units stay where they are; before[i]: GPUs that were down of the first unit that a failure took (-1: a
    repair); down[i]: GPUs that are down.
    """

    hours: float
    times: list[float]
    hit: list[tuple[int, ...]]
    replicas: list[tuple[int, ...]]
    before: list[int]
    down: list[int]

    def durations(self) -> np.ndarray:
        """Return the hours for which each state lasted."""
        found: np.ndarray = np.diff(np.array([*self.times, self.hours]))
        return found

    def share_above(self, gpus: float) -> float:
        """Return the share of time in which more than `gpus` GPUs are down."""
        return float(self.durations()[np.array(self.down) > gpus].sum() / self.hours)


@dataclass(slots=True)
class _State:
    """Counts of a running trace, kept up with each change."""

    fleet: Fleet
    levels: int
    down: bytearray  # of each GPU: events that keep it
    units: list[int]  # GPUs down of each unit
    hit: list[int]
    in_replica: list[list[int]]  # [level][replica]: units with at least level + 1 down
    replicas: list[int]

    def change(self, gpus: range, way: int) -> int:
        """Take these GPUs, or give them back (way -1); return how many of them that changes."""
        unit, per_replica = self.fleet.unit, self.fleet.per_replica
        changed = 0
        for gpu in gpus:
            self.down[gpu] += way
            if self.down[gpu] != (1 if way > 0 else 0):
                continue
            changed += 1
            index = gpu // unit
            level = self.units[index] if way > 0 else self.units[index] - 1
            self.units[index] += way
            if level < self.levels:
                self.hit[level] += way
                held = self.in_replica[level]
                place = index // per_replica
                held[place] += way
                if held[place] == (1 if way > 0 else 0):
                    self.replicas[level] += way
        return changed


def failure_trace(
    fleet: Fleet,
    hours: float,
    rng: np.random.Generator,
    *,
    levels: int,
    spares: int = 0,
    start: Start = "steady",
    fixed_repair: bool = False,
) -> Trace:
    """Return one random trace of the units of a job and its spare ones.

    start: steady has as many GPUs down as in the long run. fixed_repair: repairs last what they last on average of their kind, in place
    of being exponential.
    """
    units = fleet.units + spares
    gpus = units * fleet.unit
    sizes = list(fleet.blasts)
    shares = np.array([share for share, _ in fleet.repairs])
    lengths = np.array([length for _, length in fleet.repairs])
    state = _State(
        fleet,
        levels,
        bytearray(gpus),
        [0] * units,
        [0] * levels,
        [[0] * -(-units // fleet.per_replica) for _ in range(levels)],
        [0] * levels,
    )
    repairs: list[tuple[float, int, int, int]] = []
    taken: dict[int, set[int]] = {size: set() for size in sizes}  # blocks that events of a size keep
    order = 0

    def take(cause: int, blast: int, back: float) -> int:
        nonlocal order
        block = cause // blast
        taken[blast].add(block)
        order += 1
        heapq.heappush(repairs, (back, order, blast, block))
        return state.change(range(block * blast, min((block + 1) * blast, gpus)), 1)

    if start == "steady":
        weights = shares * lengths / (shares * lengths).sum()  # what is under repair at an instant, is so for longer
        for blast, fraction in fleet.fractions().items():
            blocks = -(-gpus // blast)
            chosen = rng.choice(blocks, size=int(rng.binomial(blocks, fraction)), replace=False)
            left = lengths[rng.choice(len(weights), size=len(chosen), p=weights)]
            left = left * (rng.random(len(chosen)) if fixed_repair else rng.exponential(size=len(chosen)))
            for block, back in zip(chosen.tolist(), left.tolist(), strict=True):
                take(block * blast, blast, back)

    count = int(rng.poisson(gpus * fleet.events_per_hour * hours))
    moments = np.sort(rng.random(count) * hours).tolist()
    causes = rng.integers(gpus, size=count).tolist()
    blasts = rng.choice(sizes, size=count, p=np.array([fleet.blasts[size] for size in sizes])).tolist()
    lasts = lengths[rng.choice(len(shares), size=count, p=shares)]
    lasts = (lasts if fixed_repair else lasts * rng.exponential(size=count)).tolist()

    trace = Trace(hours, [0.0], [tuple(state.hit)], [tuple(state.replicas)], [-1], [sum(1 for kept in state.down if kept)])
    total = trace.down[0]

    def note(moment: float, before: int) -> None:
        trace.times.append(moment)
        trace.hit.append(tuple(state.hit))
        trace.replicas.append(tuple(state.replicas))
        trace.before.append(before)
        trace.down.append(total)

    for moment, cause, blast, last in zip([*moments, math.inf], [*causes, 0], [*blasts, sizes[0]], [*lasts, 0.0], strict=True):
        while repairs and repairs[0][0] <= min(moment, hours):
            back, _, size, block = heapq.heappop(repairs)
            taken[size].discard(block)
            total -= state.change(range(block * size, min((block + 1) * size, gpus)), -1)
            note(back, -1)
        if moment < hours and cause // blast not in taken[blast]:
            before = state.units[cause // fleet.unit]
            if fresh := take(cause, blast, moment + last):
                total += fresh
                note(moment, before)
    return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Of one trace: goodput, and samples: phi averaged over time."""

    goodput: float
    samples: float


def walk(trace: Trace, fleet: Fleet, policy: Policy, interval_h: float, rng: np.random.Generator, *, waits: bool = True) -> Walked:
    """Return what a policy makes of a trace. waits: a repaired GPU is taken in by the next interruption's restart, not by its own.

    The unit that a failure takes is any of those with as many GPUs down: which of them stand idle (spares, units of dropped replicas) is
    drawn.
    """
    restart = fleet.in_place_restart_h if policy.in_place else fleet.restart_h
    cycle = interval_h + fleet.write_h
    units = fleet.units + policy.spares

    def replicas_of(index: int) -> tuple[int, ...]:
        return tuple(-(-count // fleet.per_replica) for count in trace.hit[index]) if policy.packed else trace.replicas[index]

    def lasting(worked: float) -> float:
        """Hours of work that survive an interruption."""
        if worked <= 0.0:
            return 0.0
        if policy.in_place:
            return (worked // fleet.step_h * fleet.step_h if fleet.step_h else worked) * interval_h / cycle
        return worked // cycle * interval_h

    def idle(index: int, before: int, dropped: int) -> bool:
        """Whether the unit that a failure takes stands idle."""
        draw = rng.random()
        hit = trace.hit[index - 1]
        if policy.stands_in:
            return before > 0 or draw * (units - hit[0]) < units - hit[0] - fleet.units
        worst = hit[len(policy.losses) - 1]
        return before >= len(policy.losses) or draw * (units - worst) < dropped * fleet.per_replica - worst

    packed = replicas_of(0)
    phi = policy.phi(fleet, trace.hit[0], packed)
    ready = since = 0.0
    useful = samples = 0.0
    for index in range(1, len(trace.times)):
        moment, before = trace.times[index], trace.before[index]
        failure = before >= 0
        if phi > 0.0:
            if failure and not idle(index, before, packed[len(policy.losses) - 1] if policy.losses else 0):
                useful += phi * lasting(moment - ready)
                ready = moment + restart
            elif not failure and not waits and not policy.stands_in:
                whole, rest = divmod(max(moment - ready, 0.0), cycle)
                useful += phi * (whole * interval_h + min(rest, interval_h))
                ready = moment + restart + fleet.write_h
            else:
                continue
        packed = replicas_of(index)
        now = policy.phi(fleet, trace.hit[index], packed)
        if phi == 0.0 and now > 0.0:
            ready = moment + restart
        samples += phi * (moment - since)
        phi, since = now, moment
    samples += phi * (trace.hours - since)
    useful += phi * max(trace.hours - ready, 0.0) * interval_h / cycle
    return Walked(goodput=useful / trace.hours, samples=samples / trace.hours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Means over `runs` traces of `days` and their standard errors."""

    goodput: float
    goodput_error: float
    samples: float
    samples_error: float
    runs: int
    days: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A policy, hours of work between its checkpoints, and whether repaired GPUs wait for the next interruption."""

    policy: Policy
    interval_h: float
    waits: bool = True


def simulate(
    fleet: Fleet, walks: Sequence[Walk], *, days: float, runs: int, seed: int, progress: Callable[..., None] | None = None
) -> list[Simulated]:
    """Return the goodput of each policy over `runs` independent traces; those with as many spares meet the same traces. progress(words,
    traces done, of).
    """
    levels = max(max(len(each.policy.losses) for each in walks), 1)
    found: list[list[Walked]] = [[] for _ in walks]
    for done, child in enumerate(np.random.SeedSequence(seed).spawn(runs)):
        if progress is not None:
            progress("simulating traces", done, runs)
        streams = iter(child.spawn(2 * len(walks)))
        traces: dict[int, Trace] = {}
        for index, each in enumerate(walks):
            spares = each.policy.spares
            if spares not in traces:
                traces[spares] = failure_trace(fleet, days * 24.0, np.random.default_rng(next(streams)), levels=levels, spares=spares)
            rng = np.random.default_rng(next(streams))
            found[index].append(walk(traces[spares], fleet, each.policy, each.interval_h, rng, waits=each.waits))
    return [_mean(each, days) for each in found]


def _mean(found: Sequence[Walked], days: float) -> Simulated:
    runs = len(found)
    columns = np.array([(each.goodput, each.samples) for each in found])
    errors = columns.std(axis=0, ddof=1) / math.sqrt(runs)
    means = columns.mean(axis=0)
    return Simulated(
        goodput=float(means[0]),
        goodput_error=float(errors[0]),
        samples=float(means[1]),
        samples_error=float(errors[1]),
        runs=runs,
        days=days,
    )


def time_quantile(values: np.ndarray, durations: np.ndarray, quantile: float) -> float:
    """Return the value that is not exceeded for `quantile` of the time."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(durations[order]) / durations.sum()
    return float(values[order][min(int(np.searchsorted(share, quantile)), len(values) - 1)])
