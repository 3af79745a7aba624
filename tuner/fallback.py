"""What groups do at a lower degree, and the policies that a job has for GPUs that fail."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.answers import SEARCHED_BELOW
from tuner.cost_model.degraded import degraded, degraded_experts
from tuner.cost_model.estimate import estimate
from tuner.cost_model.explain import does_not_fit
from tuner.cost_model.failures import Reduced, chosen, fewest, levels_of, lost_distribution, spare_units
from tuner.cost_model.policies import Fleet, Policy
from tuner.cost_model.rules import broken
from tuner.errors import one_problem
from tuner.failing import refuse_where_hardly_a_group_is_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.degraded import Degraded
    from tuner.cost_model.estimate import Estimate
    from tuner.failing import Question, Units
    from tuner.job import Job
    from tuner.plan import Plan

STAYS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A group that goes on at `degree` (of tp or ep), on `gpus` GPUs, once GPUs of it are down.

    samples: that its replica finishes a step, `of` those of a healthy one, while the others finish theirs; waits: it keeps all of them and
    the others wait, which costs less; boosted_samples, boosted_waits: the same with as much power as the rack gives; power: of the normal
    one, that it would need to keep step with all; pace: its speed with all, of the others'; overhead: share of a step that all replicas
    spend more; before_s, after_s, reduce_s: of that, moving shards before and after gradients are reduced, and reducing larger ones;
    why_not: why it cannot run, "" where it can.
    """

    degree: int
    gpus: int
    samples: int
    of: int
    waits: bool
    boosted_samples: int
    boosted_waits: bool
    power: float
    pace: float
    overhead: float
    boosted_overhead: float
    before_s: float
    after_s: float
    reduce_s: float
    step_s: float
    memory_bytes: float
    p_oom: float
    why_not: str

    def reduced(self) -> Reduced:
        """Return it as the closed forms take it."""
        return Reduced(
            degree=self.gpus,
            samples=self.samples,
            boosted_samples=self.boosted_samples,
            overhead=self.overhead,
            boosted_overhead=self.boosted_overhead,
            fits=not self.why_not,
            power=self.power,
        )


def fallback(job: Job, plan: Plan, calibration: Calibration, units: Units, degree: int, question: Question, healthy: Estimate) -> Fallback:
    """Return what a group does at a degree."""
    data = question.data
    lost = 0
    if units.axis == "ep":
        found: Degraded = degraded_experts(job, plan, calibration, degree, healthy=healthy)
        lost = min((units.degree - degree) * units.rank_gpus, units.spanned)  # each GPU that is down may be of another replica
        why = "" if lost < units.spanned else "no data-parallel replica of the group is left"
    else:
        chosen = dataclasses.replace(plan, fallback_tp=degree)
        found = degraded(job, chosen, calibration, healthy=healthy)
        why = "; ".join(text for rule, text in broken(job, chosen) if rule.severity == "error" and rule.id.startswith("fallback"))
    why = why or does_not_fit(job, found.plan, calibration, estimate(job, found.plan, calibration)) or _unsure(job, found)
    whole = units.samples // units.spanned  # of one data-parallel replica
    kept = int(found.microbatches) * plan.micro_batch
    alpha, cap = data.power_exponent.value, data.power_cap.value
    pace, boosted = float(found.pace), float(found.boosted_pace(cap, alpha))
    served = units.spanned - lost
    replicas = units.units // units.per_replica
    usual = float(found.overhead)

    def best(finished: int, speed: float) -> tuple[int, bool, float]:
        """Return the samples, whether all wait, and the overhead: whichever costs a job with one such replica less."""
        cut = (1.0 - (units.samples - served * finished) / (replicas * units.samples)) / (1.0 + usual)
        wait = (1.0 - (units.samples - served * whole) / (replicas * units.samples)) / (1.0 + usual) * speed
        if finished < whole and wait > cut:
            return served * whole, True, (1.0 + usual) / speed - 1.0
        return served * finished, False, usual

    keeps_all = boosted >= 1.0 - STAYS
    boosted_kept = whole if keeps_all else max(kept, int(found.of * boosted + STAYS) * plan.micro_batch)
    samples, waits, overhead = best(min(kept, whole), pace)
    boosted_samples, boosted_waits, boosted_overhead = best(min(boosted_kept, whole), boosted)
    return Fallback(
        degree=degree,
        gpus=degree * units.rank_gpus,
        samples=samples,
        of=units.samples,
        waits=waits,
        boosted_samples=boosted_samples,
        boosted_waits=boosted_waits,
        power=float(found.power(alpha)),
        pace=pace,
        overhead=overhead,
        boosted_overhead=boosted_overhead,
        before_s=float(found.before_s),
        after_s=float(found.after_s),
        reduce_s=float(found.reduce_s),
        step_s=float(found.reduced_s),
        memory_bytes=float(found.memory_bytes),
        p_oom=float(found.p_oom),
        why_not=why,
    )


def _unsure(job: Job, found: Degraded) -> str:
    """Return why a policy does not rely on a group that more likely fits than not: the limit by which a search lists plans."""
    if float(found.p_oom) < SEARCHED_BELOW:
        return ""
    need = f"{float(found.memory_bytes) / 1e9:.1f} of {job.cluster.gpu.memory.value / 1e9:.1f} GB"
    return f"it may not fit: {need}, P(OOM) {100 * float(found.p_oom):.1f} %, and policies rely on less than {100 * SEARCHED_BELOW:g} %"


def fallbacks(
    job: Job, plan: Plan, calibration: Calibration, units: Units, degrees: Sequence[int], question: Question
) -> tuple[Fallback, ...]:
    """Return what a group does at each of these degrees."""
    if not degrees or (units.axis == "tp" and job.model.moe is not None):
        return ()
    healthy = estimate(job, plan, calibration)
    return tuple(fallback(job, plan, calibration, units, degree, question, healthy) for degree in degrees)


def fleet_of(units: Units, question: Question, step_s: float) -> Fleet:
    """Return the GPUs of a job with the failures that a question states. Raises SpecError where hardly a group would be whole."""
    data = question.data
    fleet = Fleet(
        units=units.units,
        unit=units.size,
        per_replica=units.per_replica,
        samples=units.samples,
        events_per_hour=data.events_per_hour * question.rate_scale,
        repairs=data.repair_hours,
        blasts={blast.gpus: blast.share.value for blast in data.blast if blast.share.value > 0},
        restart_h=(data.detection.value + data.restart.value) / 3600.0,
        write_h=data.checkpoint_write.value / 3600.0,
        in_place_restart_h=(data.detection.value + data.in_place_restart.value) / 3600.0,
        step_h=step_s / 3600.0,
        interval_h=question.interval_h,
    )
    if fleet.repair_h <= 0.0:
        raise one_problem("software_repair", "", None, "is 0 and so are all repairs: no GPU is ever down", "a time above 0")
    if question.failed_fraction is not None:
        fleet = fleet.at_fraction(question.failed_fraction)
    name = "failed_fraction" if question.failed_fraction is not None else "mtbf"
    refuse_where_hardly_a_group_is_whole(name, fleet.fractions(), fleet.unit, fleet.events_per_hour, fleet.repair_h)
    return fleet


def _levels(kind: str, found: Sequence[Fallback], unit: int, samples: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return (losses in samples, overheads) of dropping replicas ("drop"), of falling back ("ntp") or of that with boost."""
    of = [] if kind == "drop" else [each.reduced() for each in found]
    losses, overheads = levels_of(of, unit, samples, boosted=kind == "ntp+boost")
    whole = np.maximum.accumulate(np.rint(np.array(losses) * samples).astype(int))
    return tuple(whole.tolist()), tuple(float(each) for each in overheads)


def _used(kind: str, found: Sequence[Fallback], unit: int) -> tuple[int, ...]:
    """Return the GPUs that a unit with 1, 2, .. down uses; the last drops its replica."""
    runs = [] if kind == "drop" else chosen([each.reduced() for each in found], unit, boosted=kind == "ntp+boost")
    return (*(each.degree for each in runs), 0)


def spares_needed(fleet: Fleet, losses: Sequence[int], quantile: float) -> int:
    """Return the units that must stand by so that no sample is lost for `quantile` of the time: whole units in place of failed ones where
    a failed one drops its replica, else whole replicas that make up what reduced ones lose.
    """
    if all(loss == fleet.samples for loss in losses):
        return spare_units(fleet.units, fleet.probabilities(1)[0], quantile)
    p = fleet.probabilities(len(losses))

    def enough(replicas: int) -> bool:
        lost = lost_distribution(fleet.units + replicas * fleet.per_replica, fleet.per_replica, p, losses)
        return float(lost[: replicas * fleet.samples + 1].sum()) >= quantile * (1.0 - 1e-9)

    return fewest(enough) * fleet.per_replica


def policies_of(fleet: Fleet, found: Sequence[Fallback], question: Question) -> list[tuple[Policy, int]]:
    """Return the policies, each with the spare units that it needs; spares are as many as the question says, or as are needed."""
    made: list[tuple[Policy, int]] = []
    units_needed = spares_needed(fleet, (), question.quantile)
    stands_by = units_needed if question.spares is None else question.spares
    made.append((Policy(name="wait", losses=(), overheads=()), units_needed))
    made.append((Policy(name="spares", losses=(), overheads=(), spares=stands_by), units_needed))
    running = [each.gpus for each in found if not each.why_not]
    reached = bool(running) and min(fleet.blasts) <= fleet.unit - min(running)  # else every event passes the floor
    kinds = ["drop", "ntp", "ntp+boost"] if reached else ["drop"]
    if question.data.power_cap.value <= 1.0 and reached:
        kinds.remove("ntp+boost")
    for kind in kinds:
        losses, overheads = _levels(kind, found, fleet.unit, fleet.samples)
        needed = spares_needed(fleet, losses, question.quantile)
        fixed = question.fixed_batch and kind != "drop"
        given = needed if question.spares is None else question.spares // fleet.per_replica * fleet.per_replica
        policy = Policy(
            name=kind,
            losses=losses,
            overheads=overheads,
            spares=given if fixed else 0,
            makes_up=fixed,
            packed=question.packed,
            in_place=question.in_place and kind != "drop",
            gpus=_used(kind, found, fleet.unit),
            whole_replica=kind == "ntp",
        )
        if not (question.fixed_batch and kind == "drop"):  # with a fixed minibatch that is `spares`
            made.append((policy, needed))
    return made
