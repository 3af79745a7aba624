"""Seconds a step that data parallelism adds: gradients, sharded weights, and the optimizer.

Symbols: W parameters of a rank before sharding, D = dp x cp ranks (edp for experts), S the ranks that shard (D, or the HSDP group),
g and w bytes a parameter of a gradient and a weight on the wire, m micro batches.
Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 7; PyTorch FSDP (arXiv 2304.11277), section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div
from tuner.cost_model.collectives import Group, collective_seconds
from tuner.cost_model.roofline import stream_seconds
from tuner.cost_model.shard import groups, shard
from tuner.cost_model.weights import Weights, shards
from tuner.cost_model.work import host_rate
from tuner.job import gradient_bytes
from tuner.plan import OFFLOADS

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.pipeline import StageTime
    from tuner.job import Job
    from tuner.plan import Plan


class Traffic(NamedTuple):
    """Seconds of a step's data-parallel collectives, before overlap: gradients, and weights gathered for compute."""

    gradients: Floats
    weights: Floats


def wire_bytes(job: Job) -> tuple[float, float]:
    """Return bytes a parameter of a reduced gradient and of a gathered weight, as the framework sends them."""
    framework = job.framework
    reduce = float(framework.reduce_bytes.value) if framework.reduce_bytes else gradient_bytes(job)
    gather = framework.gather_bytes or framework.param_bytes
    return reduce, float(gather.value)


def traffic(job: Job, plan: Plan, held: Weights, microbatches: Ints, calibration: Calibration) -> Traffic:
    """Return the collectives of a step.

    ZeRO 0: one all-reduce of W g. ZeRO 1: reduce-scatter of W g and all-gather of W w. ZeRO 2 scatters the gradients of every micro
    batch. ZeRO 3 also gathers the weights for every forward, and again for every backward when they are resharded in between
    (with a pipeline they are kept for the step). HSDP: the shard groups' copies are all-reduced over D / S ranks.
    """
    dense_shards, expert_shards = shards(job, plan)
    mesh = groups(job, plan)
    dense = _collectives(job, plan, held.dense, mesh["dp"], dense_shards, microbatches, calibration)
    if calibration["sharded_tensor_s"] > 0.0:
        slicing = _slicing_seconds(job, plan, mesh["dp"].size, calibration["sharded_tensor_s"])
        dense = Traffic(dense.gradients, dense.weights + slicing)
    if not job.model.moe:
        return dense
    expert = _collectives(job, plan, held.expert, mesh["edp"], expert_shards, microbatches, calibration)
    return Traffic(dense.gradients + expert.gradients, dense.weights + expert.weights)


def _slicing_seconds(job: Job, plan: Plan, ranks: Ints, slice_s: float) -> Floats:
    """Return the host seconds of a ZeRO 1 step that cuts each parameter tensor into D slices: 6 tensors a layer (query-key-value, output,
    up, down, two norms), of layers / p layers.
    """
    tensors = 6 * ceil_div(job.model.layers, plan.pp)
    return np.where((plan.zero == 1) & (ranks > 1), slice_s * tensors * ranks, 0.0)


def _collectives(job: Job, plan: Plan, count: Floats, group: Group, ranks: Ints, microbatches: Ints, calibration: Calibration) -> Traffic:
    g, w = wire_bytes(job)

    def seconds(op: str, bytes_: Floats, over: Group) -> Floats:
        return collective_seconds(op, bytes_, over, cluster=job.cluster, calibration=calibration)

    inner, outer = Group(ranks, group.stride), Group(group.size // ranks, group.stride * ranks)
    reduced = seconds("all_reduce", g * count, group)
    scattered = seconds("reduce_scatter", g * count, inner)
    between = seconds("all_reduce", g * count / ranks, outer)
    gathered = seconds("all_gather", w * count, inner)
    per_micro_batch = np.where(plan.zero >= 2, microbatches, 1)
    gradients = np.where(plan.zero == 0, reduced, scattered * per_micro_batch + between)
    resharded = job.framework.resharded_after_forward.value
    gathers = np.where(
        plan.zero >= 3, np.where(plan.pp > 1, 1.0, microbatches * (2.0 if resharded else 1.0)), np.where(plan.zero > 0, 1.0, 0.0)
    )
    return Traffic(gradients, gathered * gathers)


def exposed(plan: Plan, comm: Traffic, slowest: StageTime, microbatches: Ints, calibration: Calibration) -> Floats:
    """Return what the collectives add to a step.

    With dp_overlap a fraction is hidden inside its window: gradients behind the last micro batch's backward, weights behind the
    first forward; ZeRO 2 and 3 work at every micro batch and may use them all. What is hidden still slows what hides it by
    overlap_contention. Without dp_overlap all of it is exposed.
    """
    fraction = calibration["dp_overlap_fraction"] * plan.dp_overlap
    every = np.where(plan.zero >= 2, microbatches, 1)
    gathers_again = np.where(plan.zero >= 3, microbatches, 0)
    backward = (slowest.backward + slowest.recompute) * every
    forward = slowest.forward * np.maximum(gathers_again, 1) + slowest.backward * gathers_again
    hidden = np.minimum(comm.gradients * fraction, backward) + np.minimum(comm.weights * fraction, forward)
    return comm.gradients + comm.weights - (1.0 - calibration["overlap_contention"]) * hidden


def optimizer_seconds(job: Job, plan: Plan, held: Weights, calibration: Calibration) -> Floats:
    """Return the seconds of the update: state read and written once for each parameter that the rank updates, the gradient norm, and
    with an offloaded optimizer the gradients and weights over the host link instead.

    Adam in mixed precision reads gradient, master weight and two moments and writes three and the weight: 4 x 4 + 3 x 4 + 2 = 30 B.
    """
    dense_shards, expert_shards = shards(job, plan)
    dense = held.dense / np.where(plan.zero >= 1, dense_shards, 1)
    expert = held.expert / np.where(plan.zero >= 1, expert_shards, 1)
    updated = dense + expert
    norm = 4.0 * updated
    passes = 1.0 if job.framework.fused_optimizer.value else calibration["unfused_optimizer_factor"]
    on_gpu = stream_seconds(
        calibration["optimizer_bytes_per_parameter"] * passes * updated + norm, gpu=job.cluster.gpu, calibration=calibration, kernels=4
    )
    on_host = 6.0 * updated / host_rate(job.cluster.gpu, calibration) + updated * calibration["host_adam_s_per_parameter"]
    return np.where(plan.offload & OFFLOADS["optimizer"] > 0, on_host, on_gpu)


def embedding_reduce_seconds(job: Job, plan: Plan, calibration: Calibration) -> Floats:
    """Return the seconds of reducing a tied embedding's gradient between the first and the last stage (Narayanan 2021, section 2.2)."""
    if not job.model.tied_embeddings:
        return 0.0
    ends = Group(np.minimum(plan.pp, 2), groups(job, plan)["pp"].stride * np.maximum(plan.pp - 1, 1))
    bytes_ = wire_bytes(job)[0] * shard(job, plan).vocab * job.model.hidden
    return collective_seconds("all_reduce", bytes_, ends, cluster=job.cluster, calibration=calibration)
