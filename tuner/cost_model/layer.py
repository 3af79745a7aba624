"""Seconds of one layer for one micro batch on one rank, forward, backward and recomputed.

Symbols: T tokens of the micro batch on the rank, h hidden, a and g local query and key/value heads, d head size, f local MLP
width, e = 2 bytes an activation. A matrix product (m, n, k) is y[m, n] = x[m, k] w[k, n]; its backward is dx = (m, k, n) and
dw = (k, n, m). Parts of a layer are what can be recomputed on its own (Megatron-LM's recompute modules).
Source of the layer's content: Korthikanti et al. 2022 (arXiv 2205.05198) section 4; Shoeybi et al. 2019; DeepSeek-V2 (2405.04434).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, ceil_div
from tuner.cost_model.activations import layer_activations
from tuner.cost_model.collectives import dispatch_seconds
from tuner.cost_model.roofline import attention_seconds
from tuner.cost_model.shard import fully_recomputed, recomputed
from tuner.cost_model.work import E, Operators, Part, Work, host_rate
from tuner.job import says
from tuner.plan import OFFLOADS

if TYPE_CHECKING:
    from tuner.arrays import Ints
    from tuner.model import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One layer and micro batch: forward and backward without recompute, what module recompute adds to the backward, and what
    recomputing the whole layer would add (charged where the plan does so, by the stage, which knows how many layers).
    """

    forward: Work
    backward: Work
    recompute: Work
    full_recompute: Work
    wgrad: Floats


def norm_part(c: Operators) -> Part:
    """Norms and residual additions. Forward reads and writes T x h for each; backward reads two and writes one."""
    elements = 1.0 * c.shard.tokens * c.job.model.hidden / c.shard.spread
    count = c.job.model.norms_per_layer
    masks = 1.0 if c.job.model.dropout else 0.0
    passes = 1.0 if says(c.job.framework.fused_norm, True) else c.calibration["unfused_norm_factor"]
    norms = c.elementwise(count * 2 * E * passes * elements, count * 3 * E * passes * elements, kernels=count)
    residuals = c.elementwise(2 * (3 * E + masks) * elements, 2 * (2 * E + masks) * elements, kernels=2)
    return norms + residuals


def projection_part(c: Operators) -> Part:
    """Query, key, value and output products with rope, and the tensor-parallel collectives around them.

    MLA (DeepSeek-V2): the down-projections are replicated over tp and run on the sequence shard.
    """
    model, s = c.job.model, c.shard
    mla = model.mla
    out = c.linear(s.tokens, model.hidden, s.heads * model.v_head_dim)
    rope = 1.0 * s.tokens * (s.heads + s.kv_heads) * model.qk_head_dim
    rotate = c.elementwise(2 * E * rope, 2 * E * rope, kernels=2) if model.positions == "rotary" else Part(forward=Work(), backward=Work())
    if mla is None:
        qkv = c.linear(s.tokens, s.heads * model.qk_head_dim + s.kv_heads * (model.qk_head_dim + model.v_head_dim), model.hidden)
    else:
        local = s.tokens / s.spread
        down = mla.kv_lora_rank + mla.qk_rope_head_dim + mla.q_lora_rank
        qkv = c.linear(local, down, model.hidden) + c.elementwise(2 * E * local * down, 3 * E * local * down)
    block = qkv + out
    return block + rotate + c.tensor_parallel(block)


def mla_up_part(c: Operators) -> Part:
    """The up-projections of MLA: queries from their latent (or from the hidden state), keys and values from theirs."""
    model, s = c.job.model, c.shard
    mla = model.mla
    if mla is None:
        return Part(forward=Work(), backward=Work())
    queries = c.linear(s.tokens, s.heads * model.qk_head_dim, mla.q_lora_rank or model.hidden)
    return queries + c.linear(s.tokens, s.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)


def core_attention_part(c: Operators, kind: LayerKind) -> Part:
    """The attention core and what context parallelism adds.

    flash: one fused kernel, causal; backward = attention_backward_ratio x forward (five products for two, Dao 2023).
    unfused: products QK^T and PV over all s x s scores (no causal saving) and softmax and dropout in memory: forward reads and
    writes the scores twice with a mask (9 bytes a score), backward 11. Context parallelism: p2p passes keys and values around
    the ring behind the kernel; all_gather gathers them first; a2a swaps sequence for heads (Ulysses).
    """
    model, s, job = c.job.model, c.shard, c.job
    if job.attention == "flash":
        seconds = _flash(c, kind)
        forward, backward = Work(attention=seconds), Work(attention=seconds * c.calibration["attention_backward_ratio"])
    else:
        rows = 1.0 * c.plan.micro_batch * s.heads * s.query
        scores = rows * job.seq_len
        products = c.gemm(rows, job.seq_len, model.qk_head_dim) + c.gemm(rows, model.v_head_dim, job.seq_len)
        dropped = 5.0 if model.dropout else 0.0
        forward = Work(attention=products + c.stream((2 * E + dropped) * scores, kernels=2))
        backward = Work(attention=2 * products + c.stream((3 * E + dropped) * scores, kernels=2))
    comm_forward, comm_backward = _context_comm(c, forward.attention)
    return Part(forward=forward + Work(cp_comm=comm_forward), backward=backward + Work(cp_comm=comm_backward))


def _flash(c: Operators, kind: LayerKind) -> Floats:
    """Return the seconds of the fused kernels of one micro batch.

    A ring runs c kernels of s/c queries on s/c keys, each half masked once causal work is balanced over ranks (Brandon 2023, arXiv
    2311.09431); all_gather runs one of s/c queries on all keys; a2a one over the whole sequence and a c-th of the heads.
    """
    plan, s, job, model = c.plan, c.shard, c.job, c.job.model
    window = kind.window if kind.window < job.seq_len else 0

    def kernel(queries: Ints, keys: Ints, heads: Ints, kv_heads: Ints) -> Floats:
        sizes = (plan.micro_batch, queries, keys, heads, kv_heads, model.qk_head_dim, model.v_head_dim)
        seconds = attention_seconds(*sizes, causal=True, window=window, precision=job.precision, gpu=c.gpu, calibration=c.calibration)
        return seconds / c.sustained

    ring = plan.cp * kernel(s.query, s.query, s.heads, s.kv_heads)
    gathered = kernel(s.query, job.seq_len, s.heads, s.kv_heads)
    swapped = kernel(job.seq_len, job.seq_len, ceil_div(s.heads, plan.cp), ceil_div(s.kv_heads, plan.cp))
    return np.where(plan.cp_kind == 0, ring, np.where(plan.cp_kind == 1, gathered, swapped))


def _context_comm(c: Operators, kernel: Floats) -> tuple[Floats, Floats]:
    """Seconds that context parallelism adds forward and backward. The backward ring also carries dK and dV; each further step of a
    ring merges its fp32 output (or gradient) into the sum so far: read and written once.
    """
    model, s = c.job.model, c.shard
    keys = E * s.tokens * s.kv_heads * (model.qk_head_dim + model.v_head_dim)
    heads = E * s.tokens * s.heads * (model.qk_head_dim + model.v_head_dim)
    gathered = c.comm("all_gather", keys * c.plan.cp, "cp")
    scattered = c.comm("reduce_scatter", keys * c.plan.cp, "cp")
    exchanged = c.comm("all_to_all", heads + keys, "cp")
    hidden = c.calibration["cp_overlap_fraction"] * kernel
    merged = c.stream(8.0 * (c.plan.cp - 1) * s.tokens * s.heads * model.v_head_dim, kernels=0)
    ring_forward = c.behind_products(gathered, hidden) + merged
    ring_backward = c.behind_products(2 * gathered, c.calibration["attention_backward_ratio"] * hidden) + merged
    forward = np.where(c.plan.cp_kind == 0, ring_forward, np.where(c.plan.cp_kind == 1, gathered, exchanged))
    backward = np.where(c.plan.cp_kind == 0, ring_backward, np.where(c.plan.cp_kind == 1, gathered + scattered, exchanged))
    return forward, backward


def activation_part(c: Operators, rows: Floats, width: Ints) -> Part:
    """The MLP's activation over rows x width: a gated one reads two operands forward and writes two gradients backward."""
    operands = 2 if c.job.model.gated_mlp else 1
    elements = 1.0 * rows * width
    return c.elementwise((operands + 1) * E * elements, (2 * operands + 1) * E * elements)


def mlp_part(c: Operators, width: Ints) -> Part:
    """A dense MLP of local `width` (gated: two input products fused into one), with its tensor-parallel collectives."""
    model, tokens = c.job.model, c.shard.tokens
    gates = 2 if model.gated_mlp else 1
    block = c.linear(tokens, gates * width, model.hidden) + c.linear(tokens, model.hidden, width)
    return block + activation_part(c, tokens, width) + c.tensor_parallel(block)


def experts_part(c: Operators) -> Part:
    """Router, permutation, grouped products and the expert-parallel collectives of a mixture of experts (without activation).

    Each rank sends tokens / spread x top_k rows of h, dispatch and combine, forward and backward (fewer where copies for one rank
    are sent once); expert-tensor parallelism
    gathers the rows over etp and scatters the results. `ep_overlap` hides a fraction behind another micro batch's work.
    """
    model, s, moe = c.job.model, c.shard, c.job.model.moe
    assert moe is not None  # noqa: S101 (callers ask only for layers with experts)
    gates = 2 if model.gated_mlp else 1
    local = 1.0 * s.tokens / s.spread
    router = c.linear(local, moe.experts, model.hidden) + c.elementwise(12.0 * local * moe.experts, 12.0 * local * moe.experts, kernels=4)
    moved = E * local * moe.top_k * model.hidden
    passes = c.calibration["permute_passes"]
    permute = c.elementwise(passes * moved, passes * moved, kernels=4)
    products = c.grouped_linear(s.rows, gates * s.expert_ffn, model.hidden) + c.grouped_linear(s.rows, model.hidden, s.expert_ffn)
    left = 1.0 - c.calibration["ep_overlap_fraction"] * c.plan.ep_overlap
    exchange = 2 * _dispatch(c, local, moved) * left
    gathered = E * s.rows * model.hidden
    over_etp = (c.comm("all_gather", gathered, "etp") + c.comm("reduce_scatter", gathered, "etp")) * left
    comm = Work(ep_comm=exchange + over_etp)
    return router + permute + products + Part(forward=comm, backward=comm)


def _dispatch(c: Operators, tokens: Floats, moved: Floats) -> Floats:
    """Return the seconds of sending the rank's tokens to their experts, or back: every (token, expert) pair in an all-to-all, or
    each token once to a rank where the framework's dispatcher does so.
    """
    moe = c.job.model.moe
    factor = c.calibration["ep_volume_factor"]
    if moe is None or not says(c.job.framework.deduplicated_dispatch, False):
        return c.comm("all_to_all", moved * factor, "ep")
    token = E * factor * c.job.model.hidden
    return dispatch_seconds(tokens, token, moe.top_k, c.groups["ep"], cluster=c.job.cluster, calibration=c.calibration)


def layer_time(c: Operators, kind: LayerKind) -> LayerTime:
    """Return the seconds of one layer of this kind; columns span only the axes they depend on."""
    model, s, plan = c.job.model, c.shard, c.plan
    norms, projections, up, core = norm_part(c), projection_part(c), mla_up_part(c), core_attention_part(c, kind)
    always = norms + projections + up + core
    redone = norms.forward.times(recomputed(plan, "layernorm")) + core.forward.times(recomputed(plan, "core_attn"))
    if model.mla:
        redone = redone + up.forward.times(recomputed(plan, "mla_up_proj"))
    if kind.moe and model.moe:
        activation, experts = activation_part(c, s.rows, s.expert_ffn), experts_part(c)
        layer = always + experts + activation
        redone = redone + activation.forward.times(recomputed(plan, "moe_act", "moe")) + experts.forward.times(recomputed(plan, "moe"))
        if model.moe.shared_expert_ffn_hidden:
            shared = mlp_part(c, s.shared_ffn)
            layer = layer + shared
            redone = redone + shared.forward.times(recomputed(plan, "shared_experts"))
    else:
        mlp = mlp_part(c, s.ffn)
        layer = always + mlp
        redone = redone + mlp.forward.times(recomputed(plan, "mlp"))
    kernels = c.calibration["host_moe_factor"] if kind.moe else 1.0
    moved = _offloaded_seconds(c, kind)
    forward, backward = (_waiting(c, work, kernels, moved) for work in (layer.forward, layer.backward))
    return LayerTime(
        forward=forward,
        backward=backward,
        recompute=redone,
        full_recompute=forward.times(fully_recomputed(plan)),
        wgrad=layer.wgrad,
    )


def _offloaded_seconds(c: Operators, kind: LayerKind) -> Floats:
    """Return the seconds of moving one layer's activations over the host link, once each way; 0 where they stay on the device."""
    moved = layer_activations(c.job, c.plan, kind).bytes / host_rate(c.gpu, c.calibration)
    return np.where(c.plan.offload & OFFLOADS["activations"] > 0, moved, 0.0)


def _waiting(c: Operators, work: Work, kernels: float, moved: Floats) -> Work:
    """Add what the GPU waits for: a host that cannot issue a layer's kernels as fast as they run (`kernels` times as many as a
    dense layer has), what nothing hides (layer_fixed_s: blocking launches, synchronous checkpoints), and a host link that moves its
    activations more slowly than it computes.
    """
    busy = work.seconds
    issued = 1 - c.plan.cuda_graphs
    floor = c.calibration["host_per_layer_s"] * kernels * issued + _ring_steps(c)
    return work + Work(host=np.maximum(floor - busy, 0.0) + c.calibration["layer_fixed_s"] * issued, offload=np.maximum(moved - busy, 0.0))


def _ring_steps(c: Operators) -> Floats:
    """Return the least seconds of a layer's tensor-parallel rings, (t - 1) pipelined_ring_step_s, where a pipeline spans nodes."""
    step_s = c.calibration["pipelined_ring_step_s"]
    if step_s == 0.0 or c.job.gpus <= c.job.cluster.sizes[0]:
        return 0.0
    return np.where(c.plan.pp > 1, (c.plan.tp - 1) * step_s, 0.0)


def embedding_time(c: Operators) -> Part:
    """The token embedding: gathers and writes T x h; with tensor parallelism each rank looks up its vocabulary and they reduce."""
    moved = E * c.shard.tokens * c.job.model.hidden
    gather, scatter, reduce = c.tp_collectives
    reduced = np.where(c.plan.sequence_parallel > 0, scatter, reduce)
    gathered = np.where(c.plan.sequence_parallel > 0, gather, 0.0)
    dense = c.accumulate(1.0 * c.shard.vocab * c.job.model.hidden)  # the gradient of a lookup is as large as the table
    comm = Part(forward=Work(tp_comm=reduced), backward=Work(tp_comm=gathered, memory_bound=dense))
    return c.elementwise(2 * moved, 3 * moved, kernels=2) + comm


def head_time(c: Operators) -> Part:
    """Final norm, logits over the local vocabulary and the cross-entropy, which passes over fp32 logits several times.

    A framework that does not shard the loss gathers the logits over tp first; a fused loss reads and writes 16-bit logits once each way.

    An MTP layer (DeepSeek-V3) shares the head: it runs once more for each.
    """
    model, s = c.job.model, c.shard
    block = c.linear(s.tokens, s.vocab, model.hidden)
    if says(c.job.framework.sharded_logits, True):
        logits = 1.0 * s.tokens * s.vocab
        sums = Work(tp_comm=3 * c.comm("all_reduce", 4.0 * s.tokens, "tp"))
    else:
        logits = 1.0 * s.tokens * s.vocab * c.plan.tp
        sums = Work(tp_comm=c.comm("all_gather", E * logits, "tp"))
    passes = (c.calibration["loss_forward_bytes"], c.calibration["loss_backward_bytes"])
    if says(c.job.framework.fused_loss, False):
        passes = (2 * E, 2 * E)
    loss = c.elementwise(passes[0] * logits, passes[1] * logits, kernels=6)
    elements = 1.0 * s.tokens * model.hidden / s.spread
    norm = c.elementwise(2 * E * elements, 3 * E * elements)
    return block + c.tensor_parallel_input(block) + loss + norm + Part(forward=sums, backward=Work())


def mtp_time(c: Operators) -> Part:
    """What an MTP module adds to its transformer layer and head: two norms and the product of the joined 2h -> h (2412.19437, eq. 21)."""
    model, s = c.job.model, c.shard
    local = 1.0 * s.tokens / s.spread
    return c.linear(local, model.hidden, 2 * model.hidden) + c.elementwise(
        4 * E * local * model.hidden, 6 * E * local * model.hidden, kernels=2
    )
