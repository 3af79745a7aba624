"""What failing GPUs cost: the state that repairs leave, what a policy makes of it, and the time that restarts take.

Symbols: N GPUs; a unit is the block of n GPUs that falls together (a tensor-parallel group; with experts an expert-parallel group);
m units a replica, R = N / (n m) replicas, U = R m units; f share of GPUs that are down; B GPUs that one event takes; p_j probability
that at least j GPUs of a unit are down; K_j units with at least j down, k_j = ceil(K_j / m) replicas that hold them once the worst
units are packed first; b samples of a replica a step.
Source: nonuniform tensor parallelism (arXiv 2504.06095), sections 2 and 6; Daly 2006 for restarts.

Units fail independently of each other. An event takes an aligned block of B GPUs; where B exceeds a unit, all its units fall together,
and their number is still right on average, but packing is counted as if they fell apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TAIL = 1e-12  # probabilities below it are left out of sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What a replica does in which a unit runs on `degree` GPUs in place of n.

    samples: how many of its b samples a step it finishes when the others finish theirs; boosted_samples: the same with the power that
    its GPUs may take (power: of their normal one, what it then needs); overhead, boosted_overhead: share of a step that every replica
    then spends more (resharding, longer all-reduce); fits: whether its memory suffices.
    """

    degree: int
    samples: Floats
    boosted_samples: Floats
    overhead: Floats = 0.0
    boosted_overhead: Floats = 0.0
    fits: bool = True
    power: Floats = 1.0


def failed_fraction(per_hour: float, repair_h: float, blast: int = 1) -> float:
    """Return f, the share of GPUs that are down in the long run: B lambda T / (1 + B lambda T).

    per_hour: lambda, events an hour for which a GPU is the cause; repair_h: T, hours until what an event took runs again.
    Exact for blocks that alternate between up (exponential, B lambda) and down (any distribution of mean T).
    """
    down = blast * per_hour * repair_h
    return down / (1.0 + down)


def at_least(count: int, unit: Ints, fractions: Mapping[int, float]) -> Floats:
    """Return p_j: the probability that at least `count` of a unit's GPUs are down.

    fractions: {B: share of GPUs that events of B GPUs have taken}, sizes independent of each other. A unit has max(unit / B, 1) blocks of
    B, each down with that probability: P(X >= x) of Binomial(n, f) is the regularised incomplete beta function I_f(x, n - x + 1). Smaller
    blocks count only in what larger ones leave: a GPU that two events have taken is down once.
    """
    from scipy.special import betainc

    def tail(down: int, blast: int, left: Ints) -> Floats:
        blocks = np.maximum(1.0 * left / blast, 1.0)
        possible = down <= blocks
        return np.where(possible, betainc(max(down, 1), np.where(possible, blocks - down + 1.0, 1.0), fractions[blast]), 0.0)

    def fewer(than: int, left: Ints, sizes: Sequence[int]) -> Floats:
        if not sizes:
            return 1.0
        blast, *smaller = sizes
        total: Floats = 0.0
        for down in range(-(-than // blast)):
            exactly = (1.0 if down == 0 else tail(down, blast, left)) - tail(down + 1, blast, left)
            total = total + exactly * fewer(than - down * blast, left - down * blast, smaller)
        return total

    sizes = sorted(fractions, reverse=True)
    if len(sizes) == 1:
        return tail(-(-count // sizes[0]), sizes[0], unit)
    return np.maximum(1.0 - fewer(count, unit, sizes), 0.0)


def down_share(fractions: Mapping[int, float]) -> float:
    """Return the share of GPUs that are down: 1 - product of (1 - f_B), events of B GPUs being independent of those of other sizes."""
    return 1.0 - math.prod(1.0 - each for each in fractions.values()) if len(fractions) > 1 else sum(fractions.values())


def hit_probability(fraction: float, unit: Ints, blast: int = 1) -> Floats:
    """Return p_1 = 1 - (1 - f)^(n / B): the share of units that are not whole (arXiv 2504.06095, figure 3)."""
    return at_least(1, unit, {blast: fraction})


@lru_cache(maxsize=65536)
def hit_replicas(units: float, probability: float, per_replica: float, more: int = 0) -> float:
    """Return E[ceil((K + more) / m)] = sum over j >= 0 of P(K > j m - more) for K of Binomial(U, p), terms below TAIL left out."""
    from scipy.special import betainc

    if probability <= 0.0 or units <= 0:
        return float(-(-more // per_replica))
    if probability >= 1.0 or per_replica == 1:
        return -(-(units * min(probability, 1.0) + more) // per_replica) if probability >= 1.0 else units * probability + more
    first = np.arange(0, units + more, per_replica, dtype=float) - more  # j m - more
    certain = float((first < 0).sum())
    first = first[first >= 0]
    tails = betainc(first + 1.0, units - first, probability)
    return certain + float(tails[tails >= TAIL].sum())


def expected_hit_replicas(units: Ints, probability: Floats, per_replica: Ints) -> Floats:
    """Return E[k]: how many replicas hold the units that are hit, packed as closely as can be: E[ceil(K / m)], K of Binomial(U, p)."""
    columns = np.broadcast_arrays(units, probability, per_replica)
    rows, places = np.unique(np.stack([column.ravel() for column in columns]).astype(float), axis=1, return_inverse=True)
    values = np.array([hit_replicas(*row) for row in rows.T.tolist()])
    return values[places.ravel()].reshape(columns[0].shape)


def scattered_hit_replicas(units: Ints, probability: Floats, per_replica: Ints) -> Floats:
    """Return E[k] where units stay where they are: R (1 - (1 - p)^m)."""
    from scipy.special import betainc

    return 1.0 * units / per_replica * betainc(1.0, 1.0 * per_replica, probability)


def expected_loss(
    units: Ints, per_replica: Ints, probabilities: Sequence[Floats], losses: Sequence[Floats], *, packed: bool = True
) -> Floats:
    """Return the expected share of a step's samples that is lost: (1 / R) sum over j of E[k_j] (loss_j - loss_(j-1)).

    probabilities[j - 1]: p_j; losses[j - 1]: share of its samples that a replica loses in which a unit has j GPUs down, not falling
    with j, and 1 from where the replica is dropped. Exact: the k_j - k_(j+1) replicas whose worst unit has j down lose loss_j each,
    and expectations add. Not packed: k_j of units that stay where they are.
    """
    hit_replicas = expected_hit_replicas if packed else scattered_hit_replicas
    replicas = 1.0 * units / per_replica
    lost: Floats = 0.0
    before: Floats = 0.0
    for probability, loss in zip(probabilities, losses, strict=True):
        lost = lost + hit_replicas(units, probability, per_replica) * (loss - before)
        before = loss
    return lost / replicas


def none_hit(units: Ints, probability: Floats) -> Floats:
    """Return P(K = 0) = (1 - p)^U: no unit is hit."""
    from scipy.special import betainc

    return betainc(1.0 * units, 1.0, 1.0 - probability)


def expected_samples(
    units: Ints,
    per_replica: Ints,
    probabilities: Sequence[Floats],
    losses: Sequence[Floats],
    overheads: Sequence[Floats],
    *,
    packed: bool = True,
) -> Floats:
    """Return E[phi]: the expected samples a second over those of a healthy job, restarts left out.

    overheads[j - 1]: share of a step that all replicas spend more while the worst unit of the job has j down.
    E[phi] = sum over j of E[phi ; worst = j] / (1 + overhead_j). With `worst <= j` given, units are independent again, with
    p_i' = (p_i - p_(j+1)) / (1 - p_(j+1)), so each term is an expected_loss times P(worst <= j) = (1 - p_(j+1))^U.
    """
    total: Floats = none_hit(units, probabilities[0])
    below = total
    levels = len(losses)
    for worst in range(1, levels + 1):
        beyond: Floats = probabilities[worst] if worst < levels else 0.0 * probabilities[0]
        given = [(p - beyond) / (1.0 - beyond) for p in probabilities[:worst]]
        upto = none_hit(units, beyond) * (1.0 - expected_loss(units, per_replica, given, losses[:worst], packed=packed))
        total = total + (upto - below) / (1.0 + overheads[worst - 1])
        below = upto
    return total


def chosen(reduced: Sequence[Reduced], unit: int, boosted: bool) -> list[Reduced]:
    """Return what a unit with 1, 2, .. GPUs down runs as, up to where its replica is dropped: of the degrees that its n - j GPUs allow, the
    one with the most samples, the highest of equals.
    """
    fitting = sorted((each for each in reduced if each.fits and each.degree < unit), key=lambda each: -each.degree)
    found: list[Reduced] = []
    for left in range(unit - 1, 0, -1):
        allowed = [each for each in fitting if each.degree <= left]
        if not allowed:
            break
        found.append(max(allowed, key=lambda each: float(each.boosted_samples if boosted else each.samples)))
    return found


def levels_of(reduced: Sequence[Reduced], unit: int, samples: Floats, boosted: bool) -> tuple[list[Floats], list[Floats]]:
    """Return (losses, overheads) for 1, 2, .. GPUs down of a unit, up to where the replica is dropped: there the loss is 1, and the
    overhead that of the last reduced degree, as other replicas may run at it.
    """
    runs = chosen(reduced, unit, boosted)
    losses = [1.0 - (each.boosted_samples if boosted else each.samples) / samples for each in runs]
    overheads = [each.boosted_overhead if boosted else each.overhead for each in runs]
    return [*losses, 1.0], [*overheads, overheads[-1] if overheads else 0.0]


# What a policy makes of it: phi, samples a second over those of a healthy job of the same N GPUs.


def wait_samples(units: Ints, probability: Floats) -> Floats:
    """Return E[phi] of a job that waits for every repair: P(K = 0)."""
    return none_hit(units, probability)


def spares_samples(units: Ints, probability: Floats, spares: Ints) -> Floats:
    """Return E[phi] of a job with `spares` cold units: P(K <= s) U / (U + s), K of Binomial(U + s, p)."""
    from scipy.special import betainc

    return betainc(1.0 * units, 1.0 + spares, 1.0 - probability) * (1.0 * units / (units + spares))


def drop_samples(units: Ints, per_replica: Ints, probability: Floats) -> Floats:
    """Return E[phi] of a job that drops the replicas that are hit, units packed: 1 - E[ceil(K / m)] / R."""
    return 1.0 - expected_hit_replicas(units, probability, per_replica) * per_replica / units


def fewest(enough: Callable[[int], bool]) -> int:
    """Return the least whole number from 0 that is enough, where all larger ones are."""
    low, high = -1, 0
    while not enough(high):
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def spare_units(units: int, probability: float, quantile: float) -> int:
    """Return the fewest spare units s with which U whole ones are there for `quantile` of the time: P(K <= s) of Binomial(U + s, p)."""
    from scipy.special import betainc

    return fewest(lambda spares: bool(betainc(units, spares + 1, 1.0 - probability) >= quantile))


def lost_distribution(units: int, per_replica: int, probabilities: Sequence[float], lost: Sequence[int]) -> np.ndarray:
    """Return P(the job loses x samples a step), x from 0, for single numbers.

    lost[j - 1]: samples that a replica loses in which a unit has j down. K_1 is Binomial(U, p_1); given K_j, K_(j+1) is
    Binomial(K_j, p_(j+1) / p_j); the job loses sum over j of ceil(K_j / m) (lost_j - lost_(j-1)).
    """
    from scipy.stats import binom

    def window(probability: float) -> np.ndarray:
        """Counts of units that are not beyond the tails."""
        ends = binom.ppf(TAIL, units, probability), binom.isf(TAIL, units, probability)
        return np.arange(max(int(ends[0]) - 1, 0), min(int(ends[1]) + 1, units) + 1)

    counts = window(probabilities[0])
    states = binom.pmf(counts, units, probabilities[0])[:, None]  # [count, samples lost beyond `least`]
    least, last, before = 0, probabilities[0], 0
    for probability, each in zip(probabilities, lost, strict=True):
        if each == before:
            continue
        if units * probability < TAIL:
            break
        if probability < last:
            fewer = window(probability)
            states, counts = binom.pmf(fewer[:, None], counts[None, :], probability / last) @ states, fewer
        shifts = -(-counts // per_replica) * (each - before)
        least, shifts = least + int(shifts[0]), shifts - shifts[0]
        wide = np.zeros((len(counts), states.shape[1] + int(shifts[-1])))
        for row, shift in enumerate(shifts.tolist()):
            wide[row, shift : shift + states.shape[1]] = states[row]
        states, last, before = wide, probability, each
    return np.concatenate([np.zeros(least), states.sum(axis=0)])


def spare_replicas(distribution: np.ndarray, samples: int, quantile: float) -> int:
    """Return the fewest spare replicas of `samples` samples that make up what is lost for `quantile` of the time."""
    covered = np.cumsum(distribution)
    lost = int(np.searchsorted(covered, quantile * covered[-1]))
    return -(-lost // samples)


# Restarts. Lam: interruptions an hour; u: hours until the job runs again (detection included); w: hours that a checkpoint stops the
# job; d: hours of work between two checkpoints, so that a cycle lasts d + w.


def young_interval(per_hour: float, write_h: float) -> float:
    """Return d = sqrt(2 w / Lam) (Young 1974)."""
    return float(np.sqrt(2.0 * write_h / per_hour))


def daly_interval(per_hour: float, write_h: float) -> float:
    """Return d = sqrt(2 w / Lam) - w, at least 0 (Daly 2006, first order)."""
    return max(young_interval(per_hour, write_h) - write_h, 0.0)


def available_interval(per_hour: float, write_h: float, restart_h: float) -> float:
    """Return d = sqrt(2 (1 / Lam + u) w + w^2): the best for (1 - w / (d + w)) / (1 + Lam (u + (d + w) / 2)) (arXiv 2410.18124,
    where the cycle is d + w).
    """
    return float(np.sqrt(2.0 * (1.0 / per_hour + restart_h) * write_h + write_h * write_h))


def best_interval(per_hour: float, write_h: float) -> float:
    """Return the d that is best for effective_time: Lam d = 1 + W(-exp(-1 - Lam w)), W of Lambert (Daly 2006, from equation 20)."""
    from scipy.special import lambertw

    return float((1.0 + lambertw(-np.exp(-1.0 - per_hour * write_h)).real) / per_hour)


def effective_time(per_hour: float, restart_h: float, write_h: float, interval_h: float) -> float:
    """Return A: the share of time that does work which lasts, interruptions being a Poisson process (Daly 2006, equation 20).

    A = Lam d exp(-Lam u) / (exp(Lam (d + w)) - 1): a cycle counts when it ends whole, a restart when it is not interrupted itself.
    """
    if per_hour <= 0.0:
        return interval_h / (interval_h + write_h)
    return float(per_hour * interval_h * np.exp(-per_hour * restart_h) / np.expm1(per_hour * (interval_h + write_h)))


def effective_time_small(per_hour: float, restart_h: float, write_h: float, interval_h: float) -> float:
    """Return A = (1 - Lam (u + d / 2)) / (1 + w / d), for Lam (u + d / 2) far below 1 (Meta, arXiv 2410.21680)."""
    return (1.0 - per_hour * (restart_h + interval_h / 2.0)) / (1.0 + write_h / interval_h)


def effective_time_large(per_hour: float, restart_h: float, write_h: float, interval_h: float) -> float:
    """Return A = 1 / ((1 + w / d) (1 + Lam (u + d / 2))): the same, where losses are large."""
    return 1.0 / ((1.0 + write_h / interval_h) * (1.0 + per_hour * (restart_h + interval_h / 2.0)))


def effective_time_in_place(per_hour: float, restart_h: float, step_h: float, write_h: float = 0.0, interval_h: float = 1.0) -> float:
    """Return A of a job that goes on from its peers' state: an interruption costs u and the step that was under way.

    A = x / (exp(x) - 1) exp(-Lam u) d / (d + w), x = Lam times the step: effective_time with a step for a cycle that costs nothing.
    Checkpoints are still written every d.
    """
    x = per_hour * step_h
    kept = float(x / np.expm1(x)) if x > 0.0 else 1.0
    return kept * float(np.exp(-per_hour * restart_h)) * interval_h / (interval_h + write_h)
