"""How the answer of `tuner failures` changes with the share of GPUs that are down, and with the size of what falls together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.failures import at_least
from tuner.cost_model.policies import expected_phi
from tuner.failing import DOMAINS, MOST_HIT, degrees_of, units_of
from tuner.fallback import fallbacks, policies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.policies import Fleet
    from tuner.failing import Question
    from tuner.fallback import Fallback
    from tuner.job import Job
    from tuner.plan import Plan

FRACTIONS = (0.0005, 0.001, 0.002, 0.003, 0.004)
MOST_DEGREES = 8  # that a group of another size may fall back to


def kept(fleet: Fleet, found: Sequence[Fallback], question: Question) -> dict[str, Any]:
    """Return what each policy keeps of the samples, restarts left out, and the spares it needs."""
    if fleet.probabilities(1)[0] > MOST_HIT:
        return {"samples": {}, "spares_needed": {}, "why_not": f"more than {100 * MOST_HIT:.0f} % of such groups are hit"}
    samples, needed = {}, {}
    for policy, spares in policies_of(fleet, found, question):
        samples[policy.name], needed[policy.name] = expected_phi(fleet, policy), spares
    return {"samples": samples, "spares_needed": needed, "why_not": ""}


def by_fraction(fleet: Fleet, found: Sequence[Fallback], question: Question) -> list[dict[str, Any]]:
    """Return what each policy keeps where this share of the GPUs is down, with as many spares as it then needs."""
    rows = []
    for fraction in FRACTIONS:
        other = fleet.at_fraction(fraction)
        hit = other.probabilities(1)[0]
        rows.append({"failed_fraction": fraction, "hit": hit} | kept(other, found, dataclasses.replace(question, spares=None)))
    return rows


def by_domain(job: Job, plan: Plan, calibration: Calibration, fleet: Fleet, question: Question) -> list[dict[str, Any]]:
    """Return what each policy keeps where groups (and the NVLink domains they fill) have other sizes, at the same share of failed GPUs.

    A tensor-parallel group is cut anew with a pipeline that keeps the GPUs of a replica as near as whole groups allow; an expert-parallel
    one with other experts a rank. GPUs that make no whole replica are left out. Plans are priced whether or not their framework runs them.
    """
    rows = []
    at = units_of(job, plan)
    share = min(question.fallback) / at.degree if question.fallback else 0.875 if question.fallback is None else 1.0
    replica = at.per_replica * at.size
    for size in question.domains or DOMAINS:
        row: dict[str, Any] = {"domain": size, "hit": float(at_least(1, size, fleet.fractions()))}
        small = _recut(plan, at.axis, size, replica)
        gpus = 0 if small is None else job.gpus // _replica_gpus(small, at.axis) * _replica_gpus(small, at.axis)
        heads = job.model.heads if at.axis == "tp" else size
        uneven = [blast for blast in fleet.blasts if size % blast and blast % size]
        if small is None or not gpus or uneven or size > heads:
            why = f"events of {uneven[0]} GPUs do not line up" if uneven else "no whole replica of such groups"
            rows.append(row | {"why_not": f"more GPUs than the {heads} heads of a layer" if size > heads else why})
            continue
        replicas = gpus // _replica_gpus(small, at.axis)
        batch = replicas * max(round(job.global_batch / replicas), 1)
        inner = job.cluster.domains[0].model_copy(update={"size": size})
        domains = (inner, *(d for d in job.cluster.domains[1:] if d.size is None or d.size > size))
        other = job.model_copy(update={"global_batch": batch, "cluster": job.cluster.model_copy(update={"gpus": gpus, "domains": domains})})
        units = units_of(other, small)
        floor = max(int(np.ceil(share * units.degree)), 1)
        degrees = (
            range(units.degree - 1, min(floor, units.degree - 1) - 1, -1) if units.degree > 1 and question.fallback != () else range(0)
        )
        spread = degrees[:: -(-len(degrees) // MOST_DEGREES)] if degrees else degrees
        chosen = degrees_of(at, question) if size == at.size else tuple(sorted({*spread, *degrees[-1:]}, reverse=True))
        found = fallbacks(other, small, calibration, units, chosen, question)
        cut = dataclasses.replace(fleet, units=units.units, unit=units.size, per_replica=units.per_replica, samples=units.samples)
        shape = {"gpus": gpus, "per_replica": units.per_replica, "replicas": replicas, "of_samples": units.samples}
        rows.append(row | shape | kept(cut, found, dataclasses.replace(question, spares=None)))
    return rows


def _recut(plan: Plan, axis: str, size: int, replica: int) -> Plan | None:
    """Return the plan with groups of `size` GPUs, or None where it has none."""
    if axis == "ep":
        return dataclasses.replace(plan, ep=size // plan.etp) if size % plan.etp == 0 and size % (plan.tp * plan.cp) == 0 else None
    stages = max(round(replica / size / plan.cp), 1)
    vpp = max(round(plan.pp * plan.vpp / stages), 1) if plan.vpp > 1 and stages > 1 else 1
    return dataclasses.replace(plan, tp=size, pp=stages, vpp=vpp, fallback_tp=0)


def _replica_gpus(plan: Plan, axis: str) -> int:
    spanned = max(plan.ep * plan.etp // (plan.tp * plan.cp), 1) if axis == "ep" else 1
    return int(spanned * plan.tp * plan.cp * plan.pp)
