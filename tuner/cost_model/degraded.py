"""What a group costs that goes on at a lower degree after GPUs of it failed, and what that costs the healthy ones.

Nonuniform tensor parallelism: n1 healthy degree, n2 reduced degree, R replicas of m micro batches each, W parameters that a healthy rank
holds of its stage, g bytes of a gradient on the wire. The reduced replica is a plan of degree n2 through the same estimate: uneven shards
are rounded up, so its fullest rank counts. A healthy replica hands the shards of its n1 - n2 extra ranks to the n2 others before
gradients are reduced and takes them back afterwards; the n2 then reduce n1/n2 of what they did.
Source: arXiv 2504.06095, sections 3 and 4.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div
from tuner.cost_model.collectives import collective_seconds
from tuner.cost_model.data_parallel import exposed, wire_bytes
from tuner.cost_model.estimate import estimate
from tuner.cost_model.shard import groups

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.data_parallel import Traffic
    from tuner.cost_model.estimate import Estimate, Slowest
    from tuner.job import Job
    from tuner.plan import Plan

Axis = Literal["tp", "ep"]
ROUNDING = 1e-9  # so that a healthy group keeps all its micro batches
ALPHA = 0.63  # performance ~ power^alpha: 1.122x at 1.2x power (arXiv 2504.06095, section 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """A job in which one group of ranks lost GPUs and goes on at a lower degree (columns that broadcast to the plan's shape, but for
    the plan).

    plan: of the ranks that fell back; healthy_s: a step while nothing failed; resharding_before_s, resharding_after_s: moving shards
    between a healthy group's ranks before and after gradients are reduced, all of it; before_s, after_s: what of it nothing hides;
    reduce_s: what reducing larger shards adds to a step; reduced_s: a step of the reduced group with the same batch; microbatches, of:
    micro batches it can run without slowing the others, of how many; replicas: data-parallel ones; spanned: how many of them the group
    serves; lost: how many of those end with the failed GPU; memory_bytes, p_oom: of the group's fullest rank; moved_bytes: that each
    extra rank of a healthy group sends, and later takes back.
    """

    plan: Plan
    healthy_s: Floats
    resharding_before_s: Floats
    resharding_after_s: Floats
    before_s: Floats
    after_s: Floats
    reduce_s: Floats
    reduced_s: Floats
    microbatches: Ints
    of: Ints
    replicas: Ints
    spanned: Ints
    lost: Ints
    memory_bytes: Floats
    p_oom: Floats
    moved_bytes: Floats

    @property
    def added_s(self) -> Floats:
        """What a step of every healthy replica takes longer while one is reduced, in seconds."""
        return self.before_s + self.after_s + self.reduce_s

    @property
    def overhead(self) -> Floats:
        """The same as a share of a healthy step."""
        return self.added_s / self.healthy_s

    @property
    def kept(self) -> Floats:
        """Share of the samples of the replicas it serves that the reduced group runs without slowing the others."""
        return (self.spanned - self.lost) / self.spanned * (self.microbatches / self.of)

    @property
    def pace(self) -> Floats:
        """Speed of the reduced group with its whole batch, over that of the others (at most 1)."""
        return np.minimum((self.healthy_s + self.added_s) / self.reduced_s, 1.0)

    @property
    def throughput(self) -> Floats:
        """Samples a second with one group reduced, over those with none: its batch is cut, or all wait for it, whichever is better.

        R replicas of which the group serves s and loses l: cut (R - s + s kept) / R at the healthy pace, waiting (R - l) / R at its own.
        """
        cut = (self.replicas - self.spanned * (1.0 - self.kept)) / self.replicas
        wait = (self.replicas - self.lost) / self.replicas * self.pace
        return np.maximum(cut, wait) / (1.0 + self.overhead)

    def power(self, alpha: float = ALPHA) -> Floats:
        """Power that the reduced group's GPUs need, over nominal, to keep step with its whole batch: pace^(-1/alpha)."""
        return self.pace ** (-1.0 / alpha)

    def boosted_pace(self, cap: float, alpha: float = ALPHA) -> Floats:
        """Return the pace under a power of at most `cap` times nominal."""
        return np.minimum(self.pace * cap**alpha, 1.0)


def reduced_plan(plan: Plan, degree: Ints) -> Plan:
    """Return the plan of a replica that goes on at this tensor-parallel degree: the ranks that it lacks stay idle."""
    return dataclasses.replace(plan, tp=degree, idle_tp=plan.block - degree, fallback_tp=0)


def degraded(job: Job, plan: Plan, calibration: Calibration, healthy: Estimate) -> Degraded:
    """Return what the plan's fallback_tp costs, beside the `healthy` estimate of the same plan.

    Where it has none (0 or tp) the costs are those of a healthy replica.
    """
    small = reduced_plan(plan, plan.fallback)
    return _beside(job, plan, small, calibration, healthy, "tp", 1, 0)


def degraded_experts(job: Job, plan: Plan, calibration: Calibration, degree: Ints, healthy: Estimate) -> Degraded:
    """Return what it costs that an expert-parallel group goes on at this degree (nonuniform expert parallelism): its other ranks take
    ceil(experts / degree) experts each, and the data-parallel replica of the failed GPU is lost.

    Source: Megatron-LM dev branch, nonuniform_ep.py: experts have an owner layout of the least degree, to which gradients are moved.
    """
    spanned = np.maximum(plan.ep * plan.etp // (plan.tp * plan.cp), 1)
    small = dataclasses.replace(plan, ep=degree, fallback_tp=0)
    lost = np.where(degree < plan.ep, 1, 0)
    return _beside(job, plan, small, calibration, healthy, "ep", spanned, lost)


def _beside(
    job: Job, plan: Plan, small: Plan, calibration: Calibration, whole: Estimate, axis: Axis, spanned: Ints, lost: Ints
) -> Degraded:
    """Return what a group costs that goes on as `small` says.

    The step of m micro batches is taken as a m + c, with a the steady seconds of one: m2 = floor((T(n1, m) + added - c2) / a2).
    """
    reduced = estimate(job, small, calibration)
    moves = _resharding(job, plan, small, calibration, whole.slowest, reduced.slowest.traffic, axis, spanned)
    microbatches = plan.microbatches(job.gpus, job.global_batch)
    step = reduced.step
    each = step.steady / microbatches * (reduced.step_s / (reduced.step_s - step.jitter - step.measured_runs))
    room = whole.step_s + (moves.before_s + moves.after_s + moves.reduce_s) - (reduced.step_s - each * microbatches)
    return Degraded(
        plan=small,
        healthy_s=whole.step_s,
        **moves._asdict(),
        reduced_s=reduced.step_s,
        microbatches=np.clip(np.floor(room / each * (1.0 + ROUNDING)), 0, microbatches),
        of=microbatches,
        replicas=np.maximum(plan.dp(job.gpus), 1),
        spanned=spanned,
        lost=lost,
        memory_bytes=reduced.memory_bytes,
        p_oom=reduced.p_oom,
    )


class _Moves(NamedTuple):
    resharding_before_s: Floats
    resharding_after_s: Floats
    before_s: Floats
    after_s: Floats
    reduce_s: Floats
    moved_bytes: Floats


def _resharding(
    job: Job, plan: Plan, small: Plan, calibration: Calibration, stage: Slowest, larger: Traffic, axis: Axis, spanned: Ints
) -> _Moves:
    """Return the costs of resharding in a healthy group: none where no replica is left beside those that the reduced group serves.

    An extra rank sends its W g bytes to the n2 others of its group, a message each for every layer's bucket, and takes as many back (with
    ZeRO 1: weights). Before the reduction that runs behind the last micro batch's backward as far as dp_overlap goes, but for the last
    bucket; afterwards behind the reduction of the last bucket.
    """
    mesh = groups(job, plan)[axis]
    held = stage.held.dense if axis == "tp" else stage.held.expert
    falls = ((small.tp < plan.tp) | (small.ep < plan.ep)) & (plan.dp(job.gpus) > spanned)
    buckets = np.maximum(ceil_div(job.model.layers, plan.pp), 1)
    (g, w), comm = wire_bytes(job), stage.traffic

    def move(bytes_: Floats) -> Floats:
        sent = bytes_ * mesh.size / np.maximum(mesh.size - 1, 1)  # an all-to-all keeps 1/n of its buffer; here all of it leaves the rank
        each = collective_seconds("all_to_all", sent / buckets, mesh, cluster=job.cluster, calibration=calibration)
        return np.where(falls, buckets * each, 0.0)

    before, after = move(g * held), move(np.where(plan.zero > 0, w, g) * held)
    microbatches = plan.microbatches(job.gpus, job.global_batch)
    reduced, usual = (exposed(plan, of, stage.time, microbatches, calibration) for of in (larger, comm))
    overlap = calibration["dp_overlap_fraction"] * plan.dp_overlap
    behind_backward = np.minimum(before * (1.0 - 1.0 / buckets) * overlap, stage.time.backward + stage.time.recompute)
    behind_reduction = np.minimum(after, (comm.gradients + comm.weights) / buckets) * plan.dp_overlap
    return _Moves(
        resharding_before_s=before,
        resharding_after_s=after,
        before_s=before - behind_backward,
        after_s=after - behind_reduction,
        reduce_s=np.where(falls, np.maximum(reduced - usual, 0.0), 0.0),
        moved_bytes=g * held * falls,
    )
