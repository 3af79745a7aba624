"""Bytes that a rank of a pipeline stage needs, and how likely that is too much.

Everything is per rank. What ZeRO shards: optimizer state from stage 1, gradients from the framework's grad_shard_zero, weights from
stage 3 (Rajbhandari 2020, arXiv 1910.02054, section 5). The peak is the larger of two phases: forward and backward, with activations, and
the optimizer's step, when they are gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, Ints, leaves, term
from tuner.cost_model.activations import layer_activations
from tuner.cost_model.pipeline import StageLayers, in_flight, stage_layers
from tuner.cost_model.residual import correction
from tuner.cost_model.shard import fully_recomputed, groups, shard
from tuner.cost_model.weights import Weights, adapter_weights, layer_weights, shards, stage_weights
from tuner.cost_model.work import E
from tuner.job import gradient_bytes, says
from tuner.plan import OFFLOADS

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan

ZERO = "Rajbhandari 2020, section 5"
KORTHIKANTI = "Korthikanti 2022, section 4"
SEEN = "public runs: see docs/memory.md"
NORMAL_90 = 1.645  # standard deviations that hold 90 % of a normal variable
ACCUMULATED = 4.0  # bytes a parameter of fp32 gradient accumulators


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at its peak. The first lines live all step long; `phase` is the larger of the two phases."""

    weights: Floats = term("B", "weights in the compute type", ZERO)
    gradients: Floats = term("B", "gradients", ZERO)
    optimizer: Floats = term("B", "optimizer state and master weights", ZERO)
    activations: Floats = term("B", "activations of the micro batches in flight", KORTHIKANTI)
    recompute_peak: Floats = term("B", "one layer's activations while it is recomputed or run backward, beyond the loss's", KORTHIKANTI)
    logits: Floats = term("B", "logits and loss", "one 16-bit block and fp32 copies of s b V / t")
    gathered: Floats = term("B", "layers gathered by ZeRO 3 / FSDP, buckets of ZeRO 1 and 2", "FSDP, arXiv 2304.11277, section 3.3")
    optimizer_step: Floats = term("B", "temporaries of the optimizer's step beyond what the backward had", SEEN)
    workspace: Floats = term("B", "workspaces of the matrix products' libraries", "PyTorch, CUBLAS_WORKSPACE_CONFIG")
    fragmentation: Floats = term("B", "reserved by the allocator but not allocated", SEEN)
    communicators: Floats = term("B", "buffers of the communicators", SEEN)
    context: Floats = term("B", "device context and libraries", SEEN)
    measured_runs: Floats = term("B", "what measured runs near this one add or take", "residual.py; Rasmussen 2006, equation 2.25")
    host: Floats = 0.0  # bytes of the host's memory that the rank's offloaded state takes; not on the device

    @property
    def allocated(self) -> Floats:
        """Bytes of tensors at the peak: what an allocator's peak counter shows."""
        return (self.weights + self.gradients + self.optimizer) + self.workspace + self.working + self.measured_runs

    @property
    def working(self) -> Floats:
        """Bytes of the tensors that come and go within a step: what fragments the allocator's memory."""
        return self.activations + (self.recompute_peak + self.logits) + (self.gathered + self.optimizer_step)

    @property
    def reserved(self) -> Floats:
        """Bytes the allocator holds."""
        return self.allocated + self.fragmentation

    @property
    def device(self) -> Floats:
        """Bytes taken on the device: what has to fit."""
        return self.reserved + self.communicators + self.context


def stage_memory(job: Job, plan: Plan, calibration: Calibration, microbatches: Ints, stage: Ints) -> Memory:
    """Return the memory of a rank of `stage`."""
    held = stage_weights(job, plan, stage)
    state, moved = _state(job, plan, calibration, held, stage)
    room = np.maximum(calibration["host_bytes_per_gpu"] - moved, 0.0)
    activations, peak, away = _activations(job, plan, calibration, microbatches, stage, room)
    logits = _logits(job, plan, calibration, stage)
    peak = np.maximum(peak - logits, 0.0)  # the loss runs backward, and is freed, before the layers do
    gathered = _gathered(job, plan, stage) + _buckets(job, plan, held)
    step: Floats = 0.0
    if not job.framework.fused_optimizer.value:
        freed = activations + (peak + logits) + gathered
        step = np.maximum(_optimizer_temporaries(job, plan, calibration, held) - freed, 0.0)
    tensors = Memory(**state, activations=activations, recompute_peak=peak, logits=logits, gathered=gathered, optimizer_step=step)
    memory = replace(
        tensors,
        workspace=calibration["workspace_bytes"],
        fragmentation=tensors.working * (calibration["fragmentation"] - 1.0),
        communicators=_communicators(job, plan) * calibration["nccl_group_bytes"],
        context=calibration["context_bytes"],
        host=moved + away,
    )
    if calibration.memory_residual is None:
        return memory
    return replace(memory, measured_runs=memory.allocated * (correction(job, plan, calibration.memory_residual) - 1.0))


def _state(job: Job, plan: Plan, calibration: Calibration, held: Weights, stage: Ints) -> tuple[dict[str, Floats], Floats]:
    """Weights, gradients and optimizer state, and what of it lies on the host. LoRA holds the last two for its adapters alone.

    Where 16-bit gradients are added to fp32 accumulators, they come as activations go, and less than all of them stands at the peak.
    """
    f = job.framework
    dense_shards, expert_shards = shards(job, plan)
    weight_cut = [np.where(plan.zero >= 3, n, 1) for n in (dense_shards, expert_shards)]
    grad_cut = [np.where(plan.zero >= f.grad_shard_zero.value, n, 1) for n in (dense_shards, expert_shards)]
    state_cut = [np.where(plan.zero >= 1, n, 1) for n in (dense_shards, expert_shards)]
    trained = Weights(adapter_weights(job, plan, stage), 0.0) if job.task == "lora" else held
    kept_on_gpu = 1 - (plan.offload & OFFLOADS["optimizer"] > 0) * 1
    wide = 2.0 if job.precision == "fp32" else 1.0  # fp32 weights and gradients are twice the bytes, and are their own masters
    moments = 8.0 if job.precision == "fp32" else float(f.optimizer_bytes.value)
    gradient = gradient_bytes(job)
    if gradient > ACCUMULATED:
        gradient = ACCUMULATED + (gradient - ACCUMULATED) * calibration["added_gradients_share"]
    optimizer = moments * (trained.dense / state_cut[0] + trained.expert / state_cut[1])
    return {
        "weights": f.param_bytes.value * wide * (held.dense / weight_cut[0] + held.expert / weight_cut[1]),
        "gradients": gradient * (trained.dense / grad_cut[0] + trained.expert / grad_cut[1]),
        "optimizer": kept_on_gpu * optimizer,
    }, (1 - kept_on_gpu) * optimizer


def _mean_layer(job: Job, plan: Plan, calibration: Calibration, held: StageLayers) -> tuple[Floats, Floats, Floats]:
    """Return bytes of all the stage's layers kept whole, of their inputs alone, and the largest single layer, for one micro batch."""
    whole: Floats = 0.0
    largest: Floats = 0.0
    inputs: Floats = 0.0
    kept: Floats = np.where(plan.pp > 1, 0.0, calibration["gathered_inputs_kept"])
    if says(job.framework.gathered_inputs, False):
        kept = 1.0
    for count, kinds in ((held.leading, job.model.leading_groups()), (held.body, job.model.body_groups())):
        of_all = sum(n for _, n in kinds)
        for kind, n in kinds:
            one = layer_activations(job, plan, kind, kept)
            whole = whole + count * (one.bytes * (n / of_all))
            largest = np.maximum(largest, one.bytes)
            inputs = one.layer_input
    return whole, inputs, largest


def _activations(
    job: Job, plan: Plan, calibration: Calibration, microbatches: Ints, stage: Ints, room: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return bytes kept for the micro batches in flight, the peak of one layer on top of them, and the bytes kept on the host instead.

    Full recompute keeps the input of recompute_layers layers and the others whole; while a recomputed layer runs backward, all of it
    exists once. Between layers there are two whole T x h blocks more, also where sequence parallelism shards what is kept: the input
    that is gathered and the output before it is scattered. Activation offload keeps one layer of them (two in turn) on the device, and as
    many more as the host has no `room` for. The output of a stage is freed once sent, and the embedding's dropout mask (1 byte) stays:
    Korthikanti 2022, appendix B.
    """
    held = stage_layers(job, plan, stage)
    if job.model.mtp_layers:
        held = StageLayers(held.leading, held.body + (stage == plan.pp - 1) * job.model.mtp_layers)
    whole, inputs, largest = _mean_layer(job, plan, calibration, held)
    redone = np.minimum(plan.recompute_layers, held.total)
    share = redone / np.maximum(held.total, 1)
    full = fully_recomputed(plan)
    of_stage = np.where(full, whole * (1.0 - share) + redone * inputs, whole)
    offloaded = plan.offload & OFFLOADS["activations"] > 0
    flights = in_flight(job, plan, microbatches, stage)
    least = np.maximum(np.minimum(of_stage, 2.0 * largest), of_stage - room / np.maximum(flights, 1.0))
    near = np.where(offloaded, least, of_stage)
    mask = (stage == 0) * (inputs / E) if job.model.dropout else 0.0
    blocks = 2.0 * E * shard(job, plan).tokens * job.model.hidden
    peak = np.where(full & (redone > 0), largest, 0.0) + blocks + _scores(job, plan)
    return near * flights + mask * flights, peak, (of_stage - near) * flights


def _scores(job: Job, plan: Plan) -> Floats:
    """Return the bytes that unfused attention needs for a moment on top of what it keeps, while one layer runs backward: gradients of
    the softmax's output and input in 16 bits, and where the softmax is not fused three fp32 copies (docs/memory.md).
    """
    if job.attention == "flash":
        return 0.0
    s = shard(job, plan)
    each = 4.0 if says(job.framework.fused_softmax, True) else 12.0
    return each * plan.micro_batch * s.heads * s.query * job.seq_len


def _logits(job: Job, plan: Plan, calibration: Calibration, stage: Ints) -> Floats:
    """Return the bytes of one micro batch's logits and loss on the last stage; a fused loss keeps the 16-bit logits alone."""
    s = shard(job, plan)
    width = s.vocab if says(job.framework.sharded_logits, True) else s.vocab * plan.tp
    each = E if says(job.framework.fused_loss, False) else calibration["logits_bytes_per_element"]
    return (stage == plan.pp - 1) * (each * s.tokens * width)


def _gathered(job: Job, plan: Plan, stage: Ints) -> Floats:
    """Return the bytes of whole weights and gradients that ZeRO 3 holds for a moment: two layers (the next is prefetched) of weights
    and one of gradients; with a pipeline the stage's weights stay gathered and its gradients whole until the last micro batch.
    """
    f = job.framework
    dense_shards, expert_shards = shards(job, plan)
    layer: Floats = 0.0
    for kind, _ in job.model.layer_groups():
        one = layer_weights(job, plan, kind)
        whole = one.dense * (1.0 - 1.0 / dense_shards) + one.expert * (1.0 - 1.0 / expert_shards)
        layer = np.maximum(layer, whole)
    gather = float((f.gather_bytes or f.param_bytes).value)
    reduce = float((f.reduce_bytes or f.grad_bytes).value)
    held = stage_layers(job, plan, stage).total
    piped = plan.pp > 1
    whole = layer * (gather * np.where(piped, held, 2) + reduce * np.where(piped, held, 1))
    return np.where(plan.zero >= 3, whole, 0.0)


def _buckets(job: Job, plan: Plan, held: Weights) -> Floats:
    """Return the bytes of the buffers through which ZeRO 1 and 2 reduce gradients and gather weights, no larger than what passes.

    Where gradients have fp32 accumulators they are reduced and gathered in place (DeepSpeed, bf16_optimizer.py).
    """
    f = job.framework
    if f.bucket_elements is None or gradient_bytes(job) > ACCUMULATED:
        return 0.0
    each = np.minimum(f.bucket_elements.value, held.dense + held.expert)
    used = (plan.zero >= 1) & (plan.zero <= 2) & (plan.dp(job.gpus) > 1)
    return used * each * float(f.param_bytes.value + (f.reduce_bytes or f.grad_bytes).value)


def _optimizer_temporaries(job: Job, plan: Plan, calibration: Calibration, held: Weights) -> Floats:
    """Return the bytes an unfused Adam allocates in its step: a temporary of 4 bytes for each parameter it updates."""
    if job.task == "lora":
        return 0.0
    dense_shards, expert_shards = shards(job, plan)
    cut = plan.zero >= 1
    updated = held.dense / np.where(cut, dense_shards, 1) + held.expert / np.where(cut, expert_shards, 1)
    return calibration["unfused_optimizer_temporaries"] * updated


def _communicators(job: Job, plan: Plan) -> Ints:
    """Return how many communicators a rank opens: the world's, and one for each group of more than one rank."""
    count: Ints = 1
    for name, group in groups(job, plan).items():
        if name not in ("etp", "edp", "ep") or job.model.moe:
            count = count + (group.size > 1)
    return count


# Probability of running out by log(need / capacity), as standard deviations from the middle: the normal distribution, tabulated so that
# scalar and vector evaluation agree to the last bit. Abramowitz and Stegun, table 26.1.
_DEVIATIONS = (-4.0, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_BELOW = (0.0, 0.00135, 0.00621, 0.02275, 0.06681, 0.15866, 0.30854, 0.5, 0.69146, 0.84134, 0.93319, 0.97725, 0.99379, 0.99865, 1.0)


def out_of_memory_probability(job: Job, device_bytes: Floats, calibration: Calibration) -> Floats:
    """Return the probability that a rank needing `device_bytes` by the model runs out: the logarithm of the need is uncertain by
    oom_margin_spread (the standard deviation of measured over predicted memory), the capacity is what the driver reports.
    """
    spread = calibration["oom_margin_spread"]
    shares = [math.exp(spread * deviations) for deviations in _DEVIATIONS]
    return np.interp(device_bytes / job.cluster.gpu.memory.value, shares, _BELOW)


def largest_term(memory: Memory) -> str:
    """Return the name of the largest leaf of a single plan's memory."""
    return max(leaves(memory).items(), key=lambda item: float(item[1]))[0]
