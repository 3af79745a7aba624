"""What a job makes of failing GPUs: policies, and the goodput of each in closed form.

A fleet is N GPUs in U units of n, m units a replica. A policy says what a replica loses with j of a unit's GPUs down, and whether the
job goes on with less, or waits. Goodput = E[phi] A: samples that last, over those of the same GPUs in a year without failures.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.cost_model.failures import (
    at_least,
    best_interval,
    down_share,
    effective_time,
    effective_time_in_place,
    expected_hit_replicas,
    expected_samples,
    failed_fraction,
    hit_replicas,
    lost_distribution,
    none_hit,
    scattered_hit_replicas,
    spares_samples,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The GPUs of a job and how they fail.

    units, unit, per_replica: U, n, m; samples: b of a replica a step; events_per_hour: of which one GPU is the cause; repairs: (share of
    events, hours); blasts: {GPUs that an event takes: share of events}; restart_h: detection included; write_h: that a checkpoint stops
    the job; step_h: of a healthy step; interval_h: work between two checkpoints, None: the best.
    """

    units: int
    unit: int
    per_replica: int
    samples: int
    events_per_hour: float
    repairs: tuple[tuple[float, float], ...]
    blasts: Mapping[int, float]
    restart_h: float
    write_h: float
    in_place_restart_h: float = 0.0
    step_h: float = 0.0
    interval_h: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the job, spares left out."""
        return self.units * self.unit

    @property
    def replicas(self) -> int:
        """Replicas of the job."""
        return self.units // self.per_replica

    @property
    def repair_h(self) -> float:
        """Mean hours until the GPUs that an event took run again."""
        return sum(share * hours for share, hours in self.repairs)

    def fractions(self, waits_h: float = 0.0) -> dict[int, float]:
        """Return {B: share of GPUs that events of B GPUs have taken}, where a repaired GPU waits for waits_h until it is used again."""
        found = {}
        for blast, share in self.blasts.items():
            found[blast] = failed_fraction(self.events_per_hour * share, self.repair_h + waits_h, blast)
        return found

    def probabilities(self, levels: int, waits_h: float = 0.0) -> list[float]:
        """Return p_1 .. p_levels: the probabilities that at least so many GPUs of a unit are down."""
        fractions = self.fractions(waits_h)
        return [float(at_least(j, self.unit, fractions)) for j in range(1, levels + 1)]

    def lumped(self) -> Fleet:
        """Return the fleet in units that fall together: larger ones, where every event takes several."""
        together = math.gcd(*(blast // self.unit if blast % self.unit == 0 else 1 for blast in self.blasts))
        if together <= 1 or self.per_replica % together:
            return self
        units, per_replica = self.units // together, self.per_replica // together
        return dataclasses.replace(self, units=units, unit=self.unit * together, per_replica=per_replica)

    def at_fraction(self, fraction: float) -> Fleet:
        """Return the fleet with the rate at which `fraction` of its GPUs are down, its repairs and the shares of its events kept."""
        low, high = 0.0, 1.0
        while down_share(self._at_rate(high).fractions()) < fraction:
            high *= 2.0
        for _ in range(200):
            middle = (low + high) / 2.0
            low, high = (middle, high) if down_share(self._at_rate(middle).fractions()) < fraction else (low, middle)
        return self._at_rate(high)

    def _at_rate(self, events_per_hour: float) -> Fleet:
        return dataclasses.replace(self, events_per_hour=events_per_hour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a job does about GPUs that are down.

    losses, overheads: for 1, 2, .. GPUs down of a unit, as failures.levels_of gives them, in samples of a replica and as share of a step;
    the last loss is the whole replica. spares: units beyond the job's that stand by; makes_up: the minibatch is fixed, and the spares, as
    whole replicas, make up what is lost, or the job waits; packed: failed units are packed into the fewest replicas at a restart;
    in_place: survivors go on with their peers' state; gpus: that a unit with 1, 2, .. down uses (0 where the replica is dropped), and
    whole_replica: whether all units of its replica then use no more.
    """

    name: str
    losses: tuple[int, ...]
    overheads: tuple[float, ...]
    spares: int = 0
    makes_up: bool = False
    packed: bool = True
    in_place: bool = False
    gpus: tuple[int, ...] = ()
    whole_replica: bool = True

    @property
    def stands_in(self) -> bool:
        """Whether spares take the place of failed units (none: the job waits for repairs)."""
        return not self.losses

    def phi(self, fleet: Fleet, hit: Sequence[int], replicas: Sequence[int]) -> float:
        """Return samples a second over those of a healthy job whose spares work as well.

        hit: K_1, K_2, ..; replicas: k_1, k_2, .. of them, packed or not.
        """
        whole = fleet.units / (fleet.units + self.spares)
        if self.stands_in:
            return whole if hit[0] <= self.spares else 0.0
        worst = sum(1 for count in hit[: len(self.losses)] if count)
        slow = 1.0 + (self.overheads[worst - 1] if worst else 0.0)
        lost = before = 0
        for count, loss in zip(replicas, self.losses, strict=False):
            lost += count * (loss - before)
            before = loss
        if self.makes_up:
            return whole / slow if lost <= self.spares // fleet.per_replica * fleet.samples else 0.0
        return (1.0 - lost / (fleet.replicas * fleet.samples)) / slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Of a policy: samples = E[phi], lasting = A, goodput their product; interruptions_per_hour: Lam; interval_h: work between two
    checkpoints; waits_h: hours that repaired GPUs wait for the restart that takes them in (0: a restart of its own, or at once);
    idle_gpus: GPUs that work but are not used, on average, spares included; down_gpus: GPUs that do not work.
    """

    policy: Policy
    samples: float
    lasting: float
    interruptions_per_hour: float
    interval_h: float
    waits_h: float
    idle_gpus: float
    down_gpus: float

    @property
    def goodput(self) -> float:
        """Samples that last, over those of as many GPUs (spares included) that never fail."""
        return self.samples * self.lasting


def goodput(fleet: Fleet, policy: Policy) -> Goodput:
    """Return the goodput of a policy in closed form.

    Where the job goes on with less, a repaired GPU comes back with the next interruption's restart, which costs nothing more, or with a
    restart of its own (u and a checkpoint): whichever gives more.
    """
    if policy.stands_in:
        return _goodput(fleet, policy, waits=False)
    found = [_goodput(fleet, policy, waits=True), _goodput(fleet, policy, waits=False)]
    return max(found, key=lambda each: each.goodput)


def _lumped(fleet: Fleet, policy: Policy) -> tuple[Fleet, Policy]:
    """Return both in units that fall together, where the spares are whole ones of these too."""
    lumped = fleet.lumped()
    spares, rest = divmod(policy.spares * fleet.unit, lumped.unit)
    return (fleet, policy) if rest else (lumped, dataclasses.replace(policy, spares=spares))


def _goodput(fleet: Fleet, policy: Policy, waits: bool) -> Goodput:
    restart = fleet.in_place_restart_h if policy.in_place else fleet.restart_h
    running = 1.0 * fleet.gpus
    waits_h = 0.0
    if not policy.stands_in:
        running = _running_gpus(fleet, policy, 0.0)
        if waits:
            waits_h = 1.0 / (running * fleet.events_per_hour)
            running = _running_gpus(fleet, policy, waits_h)
            waits_h = 1.0 / (running * fleet.events_per_hour)
    rate = running * fleet.events_per_hour
    interval = best_interval(rate, fleet.write_h) if fleet.interval_h is None else fleet.interval_h
    if policy.in_place:
        lasting = effective_time_in_place(rate, restart, fleet.step_h, fleet.write_h, interval)
    else:
        lasting = effective_time(rate, restart, fleet.write_h, interval)
    if not policy.stands_in and not waits:
        lasting /= 1.0 + rate * (restart + fleet.write_h)  # as many repairs as failures
    samples = expected_phi(fleet, policy, waits_h)
    owned = fleet.gpus + policy.spares * fleet.unit
    down = owned * down_share(fleet.fractions())
    used = samples * owned if policy.stands_in else _used_gpus(fleet, policy, waits_h)
    return Goodput(
        policy=policy,
        samples=samples,
        lasting=lasting,
        interruptions_per_hour=rate,
        interval_h=interval,
        waits_h=waits_h,
        idle_gpus=max(owned - down - used, 0.0),
        down_gpus=down,
    )


def _running_gpus(fleet: Fleet, policy: Policy, waits_h: float) -> float:
    """Return the mean number of GPUs that work in replicas that run."""
    fleet, policy = _lumped(fleet, policy)
    units = fleet.units + policy.spares
    p = fleet.probabilities(len(policy.losses), waits_h)
    replicas = expected_hit_replicas if policy.packed else scattered_hit_replicas
    dropped = float(replicas(units, p[-1], fleet.per_replica)) * fleet.per_replica
    missing = sum(units * (each - p[-1]) for each in p[:-1])
    return (units - dropped) * fleet.unit - missing


def _used_gpus(fleet: Fleet, policy: Policy, waits_h: float) -> float:
    """Return the mean number of GPUs that train; all that run where the policy does not say how many a reduced unit uses."""
    if not policy.gpus:
        return _running_gpus(fleet, policy, waits_h)
    fleet, policy = _lumped(fleet, policy)
    units = fleet.units + policy.spares
    replicas = expected_hit_replicas if policy.packed else scattered_hit_replicas
    unused, before = 0.0, fleet.unit
    for p, used in zip(fleet.probabilities(len(policy.gpus), waits_h), policy.gpus, strict=True):
        as_replica = policy.whole_replica or used == 0
        hit = float(replicas(units, p, fleet.per_replica)) * fleet.per_replica if as_replica else units * p
        unused, before = unused + hit * (before - used), used
    return units * fleet.unit - unused


def expected_phi(fleet: Fleet, policy: Policy, waits_h: float = 0.0) -> float:
    """Return E[phi] of a policy. waits_h: hours that repaired GPUs wait for an interruption to be used again (0: they do not)."""
    fleet, policy = _lumped(fleet, policy)
    if policy.stands_in:
        return float(spares_samples(fleet.units, fleet.probabilities(1)[0], policy.spares))
    if policy.makes_up:
        return _made_up(fleet, policy, waits_h > 0.0)
    if waits_h > 0.0:
        return _after_an_interruption(fleet, policy)
    p = fleet.probabilities(len(policy.losses))
    shares = [loss / fleet.samples for loss in policy.losses]
    return float(expected_samples(fleet.units, fleet.per_replica, p, shares, policy.overheads, packed=policy.packed))


def _made_up(fleet: Fleet, policy: Policy, waits: bool) -> float:
    """Return E[phi] where spare replicas make up what is lost, or the job waits: the share of time in which they suffice, slowed by what
    a reduced replica adds (waits: of the worst unit that an interruption leaves, for repaired ones come back at the next).
    """
    units, levels = fleet.units + policy.spares, len(policy.losses)
    covered = policy.spares // fleet.per_replica * fleet.samples
    p = fleet.probabilities(levels)

    def suffices(given: Sequence[float]) -> float:
        return float(lost_distribution(units, fleet.per_replica, given, policy.losses[: len(given)])[: covered + 1].sum())

    fresh = _fresh(fleet, levels, p)
    total = below = 0.0 if waits else float(none_hit(units, p[0]))
    for worst in range(1, levels + 1):
        beyond = p[worst] if worst < levels else 0.0
        if waits:
            upto = sum(weight * float(none_hit(units - more, beyond)) for weight, level, more in fresh if level <= worst)
        else:
            upto = float(none_hit(units, beyond)) * suffices([(each - beyond) / (1.0 - beyond) for each in p[:worst]])
        total += (upto - below) / (1.0 + policy.overheads[worst - 1])
        below = upto
    return total * (suffices(p) if waits else 1.0) * fleet.units / units


def _fresh(fleet: Fleet, levels: int, p: Sequence[float]) -> list[tuple[float, int, int]]:
    """Return (probability, level, units) of what an event leaves: units of that level, at most `levels`, each.

    It is as likely to be caused by any GPU that works in a unit that runs: one with x < `levels` down is hit in proportion to n - x.
    """
    found = []
    before = [1.0, *p]
    weights = [(before[x] - before[x + 1]) * (fleet.unit - x) for x in range(levels)]
    for blast, share in fleet.blasts.items():
        if blast >= fleet.unit:
            found.append((share, levels, blast // fleet.unit))
        else:
            found += [(share * weight / sum(weights), min(x + blast, levels), 1) for x, weight in enumerate(weights)]
    return found


def _after_an_interruption(fleet: Fleet, policy: Policy) -> float:
    """Return E[phi] of a job that takes repaired GPUs in at its next interruption: packed then, it runs as it is until the next one.

    What an interruption finds is what is down in the long run (Poisson arrivals see time averages), and what it took itself: K_j of
    Binomial(U - g, p_j) and g fresh units more for every level that they have. As in expected_samples, the overhead is that of the worst.
    """
    levels, m = len(policy.losses), fleet.per_replica
    p = fleet.probabilities(levels)

    def replicas(probability: float, more: int, fresh: int) -> float:
        others = fleet.units - fresh
        if policy.packed:
            return hit_replicas(others, probability, m, more)
        own = -(-fresh // m)
        alone = 1.0 - (1.0 - probability) ** (own * m - fresh)  # of replicas that the fresh units are in
        return (fleet.replicas - own) * (1.0 - (1.0 - probability) ** m) + own * (1.0 if more else alone)

    total = below = 0.0
    for worst in range(1, levels + 1):
        beyond = p[worst] if worst < levels else 0.0
        upto = 0.0
        for weight, level, fresh in _fresh(fleet, levels, p):
            if level <= worst:
                lost, before = 0.0, 0
                for j, loss in enumerate(policy.losses[:worst], start=1):
                    given = (p[j - 1] - beyond) / (1.0 - beyond)
                    lost += replicas(given, fresh if level >= j else 0, fresh) * (loss - before)
                    before = loss
                kept = 1.0 - lost / (fleet.replicas * fleet.samples)
                upto += weight * float(none_hit(fleet.units - fresh, beyond)) * kept
        total += (upto - below) / (1.0 + policy.overheads[worst - 1])
        below = upto
    return total
