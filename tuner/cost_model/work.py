"""Seconds of work by what limits them, and the operators that make them for one job, plan and calibration.

Symbols: T tokens of the micro batch on the rank, h hidden, t = tp, e = 2 bytes an activation. A matrix product (m, n, k) is
y[m, n] = x[m, k] w[k, n]; its backward is dx = (m, k, n) and dw = (k, n, m).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div, leaf_names, term, total
from tuner.cost_model.collectives import collective_seconds
from tuner.cost_model.roofline import gemm_seconds, grouped_gemm_seconds, stream_seconds
from tuner.cost_model.shard import Shard, groups, shard
from tuner.job import says

if TYPE_CHECKING:
    from tuner.cluster import Gpu
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan

E = 2.0  # bytes of a 16-bit activation
QUANTISED = ("fp8", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4")


def host_rate(gpu: Gpu, calibration: Calibration) -> float:
    """Return the bytes a second that a copy between host and device reaches: the achieved share of the data sheet's link."""
    if gpu.host_link is None:
        return calibration["host_link_bytes_per_s"]
    return gpu.host_link.value * calibration["host_link_efficiency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds by what limits them."""

    gemm: Floats = term("s", "matrix products", "roofline.gemm_seconds, fitted to measured kernels")
    attention: Floats = term("s", "attention core", "roofline.attention_seconds; Dao 2023, arXiv 2307.08691")
    memory_bound: Floats = term("s", "norms, activations, rope, router, casts, loss", "bytes / achieved HBM bandwidth")
    tp_comm: Floats = term("s", "exposed tensor-parallel communication", "Korthikanti 2022, section 4.2.2; collectives.py")
    cp_comm: Floats = term("s", "exposed context-parallel communication", "Liu 2023, arXiv 2310.01889; Ulysses, arXiv 2309.14509")
    ep_comm: Floats = term("s", "exposed expert dispatch and combine", "GShard, arXiv 2006.16668; collectives.py")
    host: Floats = term("s", "waiting for kernel launches", "host floor of a layer without CUDA graphs")
    offload: Floats = term("s", "waiting for offloaded activations", "bytes / host link, behind a layer's compute")

    def __add__(self, other: Work) -> Work:
        """Return the sum, leaf by leaf."""
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in leaf_names(Work)})

    def times(self, factor: Floats) -> Work:
        """Return every leaf times `factor`."""
        return Work(**{name: getattr(self, name) * factor for name in leaf_names(Work)})

    @property
    def seconds(self) -> Floats:
        """Sum of the leaves."""
        return total(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Forward and backward of a part of a layer; wgrad: the weight gradients' share of the backward (zero-bubble moves it)."""

    forward: Work
    backward: Work
    wgrad: Floats = 0.0

    def __add__(self, other: Part) -> Part:
        """Return the sum."""
        return Part(forward=self.forward + other.forward, backward=self.backward + other.backward, wgrad=self.wgrad + other.wgrad)


class Operators:
    """The operators of one job, plan and calibration, so that a formula reads as its shapes."""

    def __init__(self, job: Job, plan: Plan, calibration: Calibration) -> None:
        self.job, self.plan, self.calibration = job, plan, calibration
        self.gpu = job.cluster.gpu
        self.shard: Shard = shard(job, plan)
        self.groups = groups(job, plan)
        self.trains_weights = job.task != "lora"
        self.sustained = calibration["gemm_sustained"]
        self.cast_bytes = calibration["quantise_bytes_per_element"] if job.precision in QUANTISED else 0.0
        added = job.framework.accumulation_bytes
        self.accumulation_bytes = 0.0 if added is None else float(added.value)

    def stream(self, bytes_: Floats, kernels: int = 1) -> Floats:
        """Seconds of memory-bound work."""
        return stream_seconds(bytes_, gpu=self.gpu, calibration=self.calibration, kernels=kernels)

    def gemm(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Seconds of one product under the load of a step."""
        return gemm_seconds(m, n, k, precision=self.job.precision, gpu=self.gpu, calibration=self.calibration) / self.sustained

    def linear(self, m: Floats, n: Floats, k: Floats) -> Part:
        """A linear layer of m tokens, k inputs, n outputs, with the casts of a quantised precision. LoRA trains no weights here."""
        forward, dgrad, wgrad = self.gemm(*_three_products(m, n, k))
        return self._trained(m, n, k, forward, dgrad, wgrad)

    def grouped_linear(self, rows: Floats, n: Floats, k: Floats) -> Part:
        """The same for `rows` (token, expert) pairs spread evenly over the local experts."""
        experts = np.maximum(self.shard.experts, 1)
        sizes = _three_products(np.maximum(rows / experts, 1.0), n, k)
        seconds = grouped_gemm_seconds(
            sizes[0], experts, sizes[1], sizes[2], precision=self.job.precision, gpu=self.gpu, calibration=self.calibration
        )
        forward, dgrad, wgrad = seconds / self.calibration["grouped_sustained"]
        return self._trained(rows, n, k, forward, dgrad, wgrad, experts)

    def _trained(self, m: Floats, n: Floats, k: Floats, forward: Floats, dgrad: Floats, wgrad: Floats, matrices: Ints = 1) -> Part:
        if not self.trains_weights:
            wgrad = 0.0
        cast_in = self.stream(self.cast_bytes * m * k) if self.cast_bytes else 0.0
        cast_out = self.stream(self.cast_bytes * m * n) if self.cast_bytes else 0.0
        added = self.accumulate(1.0 * matrices * n * k)
        if says(self.job.framework.fused_accumulation, False):
            added = np.maximum(added - wgrad, 0.0)
        return Part(
            forward=Work(gemm=forward, memory_bound=cast_in),
            backward=Work(gemm=dgrad + wgrad, memory_bound=cast_out + added),
            wgrad=wgrad,
        )

    def accumulate(self, weights: Floats) -> Floats:
        """Seconds of adding one micro batch's gradient of `weights` parameters to the step's sum. ZeRO 2 and 3 copy it into buckets to be
        scattered instead, at about the same traffic (and a term by ZeRO stage would span a grid's ZeRO axis). A step's first micro batch,
        which some frameworks only write, is not told apart. One long stream, so at its own share of the bandwidth:
        memory_bandwidth_efficiency also stands for how many kernels a framework fuses.
        """
        if not self.trains_weights:
            return 0.0
        if not self.accumulation_bytes:
            return 0.0
        return self.accumulation_bytes * weights / (self.gpu.hbm.value * self.calibration["long_stream_efficiency"])

    def comm(self, op: str, bytes_: Floats, group: str) -> Floats:
        """Seconds of a collective over a group of the mesh by name."""
        return collective_seconds(op, bytes_, self.groups[group], cluster=self.job.cluster, calibration=self.calibration)

    def elementwise(self, forward_bytes: Floats, backward_bytes: Floats, kernels: int = 1) -> Part:
        """A memory-bound operation of these bytes each way."""
        return Part(
            forward=Work(memory_bound=self.stream(forward_bytes, kernels)),
            backward=Work(memory_bound=self.stream(backward_bytes, kernels)),
        )

    @cached_property
    def tp_collectives(self) -> tuple[Floats, Floats, Floats]:
        """All-gather, reduce-scatter and all-reduce of T x h activations over tp, with what a framework loses on each further node."""
        bytes_ = E * self.shard.tokens * self.job.model.hidden
        gather, scatter, reduce = (self.comm(op, bytes_, "tp") for op in ("all_gather", "reduce_scatter", "all_reduce"))
        lost_s = self.calibration["spanning_ring_s"]
        if lost_s == 0.0:
            return gather, scatter, reduce
        late = lost_s * (ceil_div(self.plan.tp, self.job.cluster.sizes[0]) - 1)
        return gather + late, scatter + late, reduce + late

    def tensor_parallel(self, block: Part) -> Part:
        """The tensor-parallel collectives around a column-parallel and a row-parallel product of T x h activations.

        With sequence parallelism the forward gathers the input and scatters the output; the backward gathers the output
        gradient, scatters the input gradient and gathers the input again, the last two hidden behind the block's own products.
        Without it: one all-reduce each way, the backward one hidden behind dw. `tp_overlap` (user buffers, async TP) hides a
        further fraction of what is left.
        """
        gather, scatter, reduce = self.tp_collectives
        sharded = self.plan.sequence_parallel > 0
        hidden = self.beside_products(block)
        behind: Floats = np.where(sharded, scatter + gather, reduce)
        left = 1.0 - self.calibration["tp_overlap_fraction"] * self.plan.tp_overlap
        forward = np.where(sharded, gather + scatter, reduce) * left
        backward = (np.where(sharded, gather, 0.0) + self.behind_products(behind, hidden)) * left
        return Part(forward=Work(tp_comm=forward), backward=Work(tp_comm=backward))

    def beside_products(self, block: Part) -> Floats:
        """Seconds of a block's backward that its tensor-parallel collectives can run beside."""
        if not says(self.job.framework.async_tensor_parallel, True):
            return 0.0
        beside: Floats = np.where(self.plan.sequence_parallel > 0, block.backward.gemm, block.wgrad)
        return self.calibration["tp_async_fraction"] * beside

    def behind_products(self, comm: Floats, window: Floats) -> Floats:
        """What communication costs that runs beside products: all that outlasts them, and of the rest the share by which it slows
        them (it takes multiprocessors and bandwidth).
        """
        outlasts = np.maximum(comm - window, 0.0)
        return outlasts + self.calibration["overlap_contention"] * (comm - outlasts)

    def tensor_parallel_input(self, block: Part) -> Part:
        """The collectives of a column-parallel product alone (the output head): its input forward, its input gradient backward."""
        gather, scatter, reduce = self.tp_collectives
        sharded = self.plan.sequence_parallel > 0
        hidden = self.beside_products(block)
        backward = self.behind_products(np.where(sharded, scatter + gather, reduce), hidden)
        return Part(forward=Work(tp_comm=np.where(sharded, gather, 0.0)), backward=Work(tp_comm=backward))


def _three_products(m: Floats, n: Floats, k: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the sizes of y = x w, dx and dw, (m, n, k), (m, k, n) and (k, n, m), along a new leading axis: one evaluation of the
    curves for the three.
    """
    m, n, k = np.broadcast_arrays(1.0 * m, 1.0 * n, 1.0 * k)
    return np.stack((m, m, k)), np.stack((n, k, n)), np.stack((k, n, m))
