"""The answer of `tuner failures`: what a job loses to failing GPUs under each policy, how many spares it needs, and how that grows with
the share of GPUs that are down and with the size of what falls together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.answers import answer_estimate, plain
from tuner.cost_model.failures import available_interval, best_interval, daly_interval, down_share, young_interval
from tuner.cost_model.policies import goodput
from tuner.domains import by_domain, by_fraction
from tuner.errors import one_problem
from tuner.failing import check_units, degrees_of, units_of
from tuner.fallback import fallbacks, fleet_of, policies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.answers import EstimateAnswer
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.failure_simulation import Simulated
    from tuner.cost_model.policies import Fleet, Goodput, Policy
    from tuner.failing import Question, Units
    from tuner.fallback import Fallback
    from tuner.job import Job
    from tuner.plan import Plan

    Progress = Callable[..., None]

MOST_EVENTS = 3_000_000  # that are simulated, at some 70 us each: about four minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A policy, its goodput, the spare units it needs, and what a simulation gives (None: not asked for)."""

    goodput: Goodput
    spares_needed: int
    simulated: Simulated | None

    def record(self, fleet: Fleet) -> dict[str, Any]:
        """Return it as JSON's types."""
        of = self.goodput
        figures = ("samples", "lasting", "goodput", "interruptions_per_hour", "idle_gpus", "down_gpus")
        return {
            "policy": of.policy.name,
            "spares": of.policy.spares,
            "spares_needed": self.spares_needed,
            "spare_gpus_needed": self.spares_needed * fleet.unit,
            **{name: getattr(of, name) for name in figures},
            "checkpoint_every_s": of.interval_h * 3600.0,
            "repaired_wait_s": of.waits_h * 3600.0,
            "losses": of.policy.losses,
            "overheads": of.policy.overheads,
            "simulated": None if self.simulated is None else dataclasses.asdict(self.simulated),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Of simulated traces of `days`: units with a GPU down that are exceeded for 1 - quantile of the time, the mean and the highest
    peak of a trace, spare units that each policy needs never to wait (the mean and the highest of the traces), and the share of time in
    which more than a thousandth of the GPUs is down, from a steady and from a healthy start.
    """

    days: float
    traces: int
    quantile_units: float
    peak_units: float
    most_units: int
    never_waits: dict[str, tuple[float, int]]
    above_a_thousandth: float
    above_a_thousandth_from_healthy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresAnswer:
    """What failing GPUs cost a job. by_fraction, by_domain: rows of JSON's types, restarts left out of their samples; notes: what was
    assumed on the way.
    """

    estimate: EstimateAnswer
    question: Question
    units: Units
    fleet: Fleet
    fallbacks: tuple[Fallback, ...]
    outcomes: tuple[Outcome, ...]
    by_fraction: tuple[dict[str, Any], ...]
    by_domain: tuple[dict[str, Any], ...]
    peaks: Peaks | None
    notes: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether the plan is legal and fits, and so do the degrees that were asked for."""
        return self.estimate.legal and self.estimate.cost.fits and not (self.question.fallback and any(f.why_not for f in self.fallbacks))

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        whole, fleet, units = self.estimate.record(), self.fleet, self.units
        names = ("job", "calibration", "plan", "assumed", "legal", "fits", "broken", "step_s", "basis", "memory_bytes", "p_oom")
        down = down_share(fleet.fractions())
        rate = fleet.gpus * fleet.events_per_hour
        intervals = {
            "young": young_interval(rate, fleet.write_h),
            "daly": daly_interval(rate, fleet.write_h),
            "available": available_interval(rate, fleet.write_h, fleet.restart_h),
            "best": best_interval(rate, fleet.write_h),
        }
        record = {
            **{name: whole[name] for name in names},
            "data": self.question.data.model_dump(mode="json") | {"rate_scale": self.question.rate_scale},
            "units": {
                "axis": units.axis,
                "gpus": units.size,
                "units": fleet.units,
                "per_replica": fleet.per_replica,
                "replicas": fleet.replicas,
                "samples": units.samples,
                "packed": self.question.packed,
                "hit": fleet.probabilities(1)[0],
            },
            "failures": {
                "mtbf_s": 3600.0 / fleet.events_per_hour,
                "job_mtbf_s": 3600.0 / rate,
                "repair_s": fleet.repair_h * 3600.0,
                "failed_fraction": down,
                "failed_gpus": down * fleet.gpus,
                "stated": self.question.failed_fraction is not None,
            },
            "checkpoint_every_s": {name: hours * 3600.0 for name, hours in intervals.items()},
            "fixed_batch": self.question.fixed_batch,
            "quantile": self.question.quantile,
            "fallbacks": [dataclasses.asdict(each) for each in self.fallbacks],
            "policies": [each.record(fleet) for each in self.outcomes],
            "by_fraction": self.by_fraction,
            "by_domain": self.by_domain,
            "peaks": None if self.peaks is None else dataclasses.asdict(self.peaks),
            "notes": self.notes,
        }
        return dict(plain(record))


def _peaks(fleet: Fleet, policies: Sequence[Policy], question: Question, progress: Progress | None) -> Peaks:
    """Return the peaks of simulated traces."""
    from tuner.cost_model.failure_simulation import failure_trace, time_quantile

    levels = max((len(policy.losses) for policy in policies), default=1) or 1
    hits, quantiles, steady, fresh = [], [], [], []
    needs: dict[str, list[int]] = {policy.name: [] for policy in policies if policy.losses}
    for index, child in enumerate(np.random.SeedSequence(question.seed).spawn(question.traces)):
        rng = np.random.default_rng(child)
        trace = failure_trace(fleet, question.peak_days * 24.0, rng, levels=levels)
        first = np.array([hit[0] for hit in trace.hit])
        hits.append(int(first.max()))
        quantiles.append(time_quantile(first.astype(float), trace.durations(), question.quantile))
        steady.append(trace.share_above(0.001 * fleet.gpus))
        healthy = failure_trace(fleet, question.peak_days * 24.0, rng, levels=1, start="healthy", fixed_repair=True)
        fresh.append(healthy.share_above(0.001 * fleet.gpus))
        packed = -(-np.array(trace.hit) // fleet.per_replica)
        for policy in policies:
            if len(policy.losses) == 1:
                needs[policy.name].append(hits[-1])
            elif policy.losses:
                lost = packed[:, : len(policy.losses)] @ np.diff(np.array([0, *policy.losses]))
                needs[policy.name].append(int(-(-lost.max() // fleet.samples)) * fleet.per_replica)
        if progress is not None:
            progress("traces", index + 1, question.traces)
    return Peaks(
        days=question.peak_days,
        traces=question.traces,
        quantile_units=float(np.mean(quantiles)),
        peak_units=float(np.mean(hits)),
        most_units=max(hits),
        never_waits={name: (float(np.mean(each)), max(each)) for name, each in needs.items()},
        above_a_thousandth=float(np.mean(steady)),
        above_a_thousandth_from_healthy=float(np.mean(fresh)),
    )


def answer_failures(
    job: Job,
    plan: Plan,
    assumed: tuple[str, ...],
    calibration: Calibration,
    question: Question,
    *,
    stated: str | None = None,
    progress: Progress | None = None,
) -> FailuresAnswer:
    """Return the answer for a single plan. stated: the axis ("tp", "ep") whose degrees the question states."""
    from tuner.cost_model.failure_simulation import Walk, simulate

    answer = answer_estimate(job, plan, assumed, calibration)
    units = units_of(job, plan)
    check_units(job, plan, units, question, stated)
    fleet = fleet_of(units, question, answer.cost.step_s)
    found = fallbacks(job, plan, calibration, units, degrees_of(units, question), question)
    policies = policies_of(fleet, found, question)
    told = [goodput(fleet, policy) for policy, _ in policies]
    seen: Sequence[Simulated | None] = [None] * len(told)
    if question.simulate:
        _check_events(fleet, question)
        walks = [Walk(policy=each.policy, interval_h=each.interval_h, waits=each.waits_h > 0.0 or each.policy.stands_in) for each in told]
        seen = simulate(fleet, walks, days=question.days, runs=question.traces, seed=question.seed, progress=progress)
    outcomes = [Outcome(goodput=of, spares_needed=needed, simulated=sim) for of, (_, needed), sim in zip(told, policies, seen, strict=True)]
    return FailuresAnswer(
        estimate=answer,
        question=question,
        units=units,
        fleet=fleet,
        fallbacks=found,
        outcomes=tuple(outcomes),
        by_fraction=tuple(by_fraction(fleet, found, question)),
        by_domain=tuple(by_domain(job, plan, calibration, fleet, question)),
        peaks=_peaks(fleet, [policy for policy, _ in policies], question, progress) if question.simulate else None,
        notes=tuple(_notes(job, plan, units, fleet, found, question)),
    )


def _check_events(fleet: Fleet, question: Question) -> None:
    """Raise SpecError where a simulation would take more than some minutes."""
    events = fleet.gpus * fleet.events_per_hour * 24.0 * max(question.days, question.peak_days) * question.traces
    if events > MOST_EVENTS:
        rule = f"would take {events:.2g} failures, at most {MOST_EVENTS:,} are simulated, which takes minutes"
        raise one_problem("simulate", "", None, rule, "fewer --traces or --days")


def _notes(job: Job, plan: Plan, units: Units, fleet: Fleet, found: Sequence[Fallback], question: Question) -> list[str]:
    """Return what a reader must know of how the figures came about."""
    said = []
    if units.axis == "ep":
        said.append(
            f"expert-parallel groups fall together: each ties together {units.spanned} data-parallel replicas, which are dropped with it"
        )
        said.append("a GPU that is down takes its data-parallel replica along; the experts of its rank move to the others of the group")
    elif not found and question.fallback == ():
        said.append(f"nothing to fall back to: the plan's fallback_tp is 0 or its tp, {plan.tp}; a failed GPU drops its replica")
    elif not found:
        why = f"{job.model.name} has experts and ep is 1" if job.model.moe else "tp is 1"
        said.append(f"nothing to fall back to: {why}; a failed GPU drops its replica")
    left = fleet.units % fleet.per_replica or job.gpus - fleet.gpus
    if left:
        said.append(f"{left} GPUs make no whole replica and are left out")
    running = [each for each in found if not each.why_not]
    if running:
        floor = units.size - min(each.gpus for each in running)
        past = [str(blast) for blast in fleet.blasts if blast > floor]
        if past:
            said.append(
                f"an event of {' or '.join(past)} GPUs passes the floor, {units.size - floor} of {units.size}: it drops a replica anyway"
            )
    if question.data.power_cap.value <= 1.0:
        said.append("no boost: the power cap is 1 (--power-cap 1.3 where the rack can give more)")
    return said
