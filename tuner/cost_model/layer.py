"""Seconds of one layer for one micro batch on one rank, forward, backward and recomputed.

Symbols: T tokens of the micro batch on the rank, h hidden, a and g local query and key/value heads, d head size, f local MLP
width, e = 2 bytes an activation. A matrix product (m, n, k) is y[m, n] = x[m, k] w[k, n]; its backward is dx = (m, k, n) and
dw = (k, n, m). Parts of a layer are what can be recomputed on its own (Megatron-LM's recompute modules).
Source of the layer's content: Korthikanti et al. 2022 (arXiv 2205.05198) section 4; Shoeybi et al. 2019; DeepSeek-V2 (2405.04434).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, term, total
from tuner.cost_model.collectives import collective_seconds
from tuner.cost_model.roofline import attention_seconds, gemm_seconds, grouped_gemm_seconds, stream_seconds
from tuner.cost_model.shard import Shard, fully_recomputed, groups, recomputed, shard
from tuner.job import says

if TYPE_CHECKING:
    from tuner.arrays import Ints
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.model import LayerKind
    from tuner.plan import Plan

E = 2.0  # bytes of a 16-bit activation
QUANTISED = ("fp8", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4")


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

    def __add__(self, other: Work) -> Work:
        """Return the sum, leaf by leaf."""
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def times(self, factor: Floats) -> Work:
        """Return every leaf times `factor`."""
        return Work(**{f.name: getattr(self, f.name) * factor for f in dataclasses.fields(self)})

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


class _Costs:
    """The operators of one job, plan and calibration, so that a formula reads as its shapes."""

    def __init__(self, job: Job, plan: Plan, calibration: Calibration) -> None:
        self.job, self.plan, self.calibration = job, plan, calibration
        self.gpu = job.cluster.gpu
        self.shard: Shard = shard(job, plan)
        self.groups = groups(job, plan)
        self.trains_weights = job.task != "lora"
        self.sustained = calibration["gemm_sustained"]
        self.cast_bytes = calibration["quantise_bytes_per_element"] if job.precision in QUANTISED else 0.0

    def stream(self, bytes_: Floats, kernels: int = 1) -> Floats:
        return stream_seconds(bytes_, gpu=self.gpu, calibration=self.calibration, kernels=kernels)

    def _gemm(self, m: Floats, n: Floats, k: Floats) -> Floats:
        return gemm_seconds(m, n, k, precision=self.job.precision, gpu=self.gpu, calibration=self.calibration) / self.sustained

    def linear(self, m: Floats, n: Floats, k: Floats) -> Part:
        """A linear layer of m tokens, k inputs, n outputs, with the casts of a quantised precision. LoRA trains no weights here."""
        dgrad = self._gemm(m, k, n)
        wgrad = self._gemm(k, n, m) if self.trains_weights else 0.0
        cast_in = self.stream(self.cast_bytes * m * k) if self.cast_bytes else 0.0
        cast_out = self.stream(self.cast_bytes * m * n) if self.cast_bytes else 0.0
        return Part(
            forward=Work(gemm=self._gemm(m, n, k), memory_bound=cast_in),
            backward=Work(gemm=dgrad + wgrad, memory_bound=cast_out),
            wgrad=wgrad,
        )

    def grouped_linear(self, rows: Floats, n: Floats, k: Floats) -> Part:
        """The same for `rows` (token, expert) pairs spread evenly over the local experts."""
        experts = np.maximum(self.shard.experts, 1)
        each = np.maximum(rows / experts, 1.0)

        def seconds(m: Floats, n: Floats, k: Floats) -> Floats:
            return (
                grouped_gemm_seconds(m, experts, n, k, precision=self.job.precision, gpu=self.gpu, calibration=self.calibration)
                / self.sustained
            )

        wgrad = seconds(1.0 * k, n, each) if self.trains_weights else 0.0
        cast_in = self.stream(self.cast_bytes * rows * k) if self.cast_bytes else 0.0
        cast_out = self.stream(self.cast_bytes * rows * n) if self.cast_bytes else 0.0
        return Part(
            forward=Work(gemm=seconds(each, n, k), memory_bound=cast_in),
            backward=Work(gemm=seconds(each, k, n) + wgrad, memory_bound=cast_out),
            wgrad=wgrad,
        )

    def comm(self, op: str, bytes_: Floats, group: str) -> Floats:
        return collective_seconds(op, bytes_, self.groups[group], cluster=self.job.cluster, calibration=self.calibration)

    def elementwise(self, forward_bytes: Floats, backward_bytes: Floats, kernels: int = 1) -> Part:
        return Part(
            forward=Work(memory_bound=self.stream(forward_bytes, kernels)),
            backward=Work(memory_bound=self.stream(backward_bytes, kernels)),
        )

    def tensor_parallel(self, block: Part) -> Part:
        """The tensor-parallel collectives around a column-parallel and a row-parallel product of T x h activations.

        With sequence parallelism the forward gathers the input and scatters the output; the backward gathers the output
        gradient, scatters the input gradient and gathers the input again, the last two hidden behind the block's own products.
        Without it: one all-reduce each way, the backward one hidden behind dw. `tp_overlap` (user buffers, async TP) hides a
        further fraction of what is left.
        """
        bytes_ = E * self.shard.tokens * self.job.model.hidden
        gather, scatter, reduce = (self.comm(op, bytes_, "tp") for op in ("all_gather", "reduce_scatter", "all_reduce"))
        sharded = self.plan.sequence_parallel > 0
        beside: Floats = np.where(sharded, block.backward.gemm, block.wgrad)
        hidden = self.calibration["tp_async_fraction"] * beside
        behind: Floats = np.where(sharded, scatter + gather, reduce)
        left = 1.0 - self.calibration["tp_overlap_fraction"] * self.plan.tp_overlap
        forward = np.where(sharded, gather + scatter, reduce) * left
        backward = (np.where(sharded, gather, 0.0) + self.behind_products(behind, hidden)) * left
        return Part(forward=Work(tp_comm=forward), backward=Work(tp_comm=backward))

    def behind_products(self, comm: Floats, window: Floats) -> Floats:
        """What communication costs that runs beside products: all that outlasts them, and of the rest the share by which it slows
        them (it takes multiprocessors and bandwidth).
        """
        outlasts = np.maximum(comm - window, 0.0)
        return outlasts + self.calibration["overlap_contention"] * (comm - outlasts)

    def tensor_parallel_input(self, block: Part) -> Part:
        """The collectives of a column-parallel product alone (the output head): its input forward, its input gradient backward."""
        bytes_ = E * self.shard.tokens * self.job.model.hidden
        gather, scatter, reduce = (self.comm(op, bytes_, "tp") for op in ("all_gather", "reduce_scatter", "all_reduce"))
        sharded = self.plan.sequence_parallel > 0
        beside: Floats = np.where(sharded, block.backward.gemm, block.wgrad)
        hidden = self.calibration["tp_async_fraction"] * beside
        backward = self.behind_products(np.where(sharded, scatter + gather, reduce), hidden)
        return Part(forward=Work(tp_comm=np.where(sharded, gather, 0.0)), backward=Work(tp_comm=backward))


def norm_part(c: _Costs) -> Part:
    """Norms and residual additions. Forward reads and writes T x h for each; backward reads two and writes one."""
    elements = 1.0 * c.shard.tokens * c.job.model.hidden / c.shard.spread
    count = c.job.model.norms_per_layer
    masks = 1.0 if c.job.model.dropout else 0.0
    passes = 1.0 if says(c.job.framework.fused_norm, True) else c.calibration["unfused_norm_factor"]
    norms = c.elementwise(count * 2 * E * passes * elements, count * 3 * E * passes * elements, kernels=count)
    residuals = c.elementwise(2 * (3 * E + masks) * elements, 2 * (2 * E + masks) * elements, kernels=2)
    return norms + residuals


def projection_part(c: _Costs) -> Part:
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


def mla_up_part(c: _Costs) -> Part:
    """The up-projections of MLA: queries from their latent (or from the hidden state), keys and values from theirs."""
    model, s = c.job.model, c.shard
    mla = model.mla
    if mla is None:
        return Part(forward=Work(), backward=Work())
    queries = c.linear(s.tokens, s.heads * model.qk_head_dim, mla.q_lora_rank or model.hidden)
    return queries + c.linear(s.tokens, s.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)


def core_attention_part(c: _Costs, kind: LayerKind) -> Part:
    """The attention core and what context parallelism adds.

    flash: one fused kernel, causal; backward = attention_backward_ratio x forward (five products for two, Dao 2023).
    unfused: products QK^T and PV over all s x s scores (no causal saving) and softmax and dropout in memory: forward reads and
    writes the scores twice with a mask (9 bytes a score), backward 11. Context parallelism: p2p passes keys and values around
    the ring behind the kernel; all_gather gathers them first; a2a swaps sequence for heads (Ulysses).
    """
    model, s, job = c.job.model, c.shard, c.job
    window = kind.window if kind.window < job.seq_len else 0
    if job.attention == "flash":
        seconds = attention_seconds(
            c.plan.micro_batch, s.query, job.seq_len, s.heads, s.kv_heads, model.qk_head_dim, model.v_head_dim,
            causal=True, window=window, precision=job.precision, gpu=c.gpu, calibration=c.calibration,
        ) / c.sustained  # fmt: skip
        forward, backward = Work(attention=seconds), Work(attention=seconds * c.calibration["attention_backward_ratio"])
    else:
        rows = 1.0 * c.plan.micro_batch * s.heads * s.query
        scores = rows * job.seq_len
        products = c._gemm(rows, job.seq_len, model.qk_head_dim) + c._gemm(rows, model.v_head_dim, job.seq_len)
        dropped = 5.0 if model.dropout else 0.0
        forward = Work(attention=products + c.stream((2 * E + dropped) * scores, kernels=2))
        backward = Work(attention=2 * products + c.stream((3 * E + dropped) * scores, kernels=2))
    comm_forward, comm_backward = _context_comm(c, forward.attention)
    return Part(forward=forward + Work(cp_comm=comm_forward), backward=backward + Work(cp_comm=comm_backward))


def _context_comm(c: _Costs, kernel: Floats) -> tuple[Floats, Floats]:
    """Exposed forward and backward seconds of context parallelism; the backward ring also carries dK and dV."""
    model, s = c.job.model, c.shard
    keys = E * s.tokens * s.kv_heads * (model.qk_head_dim + model.v_head_dim)
    heads = E * s.tokens * s.heads * (model.qk_head_dim + model.v_head_dim)
    gathered = c.comm("all_gather", keys * c.plan.cp, "cp")
    scattered = c.comm("reduce_scatter", keys * c.plan.cp, "cp")
    exchanged = c.comm("all_to_all", heads + keys, "cp")
    hidden = c.calibration["cp_overlap_fraction"] * kernel
    ring_forward = np.maximum(gathered - hidden, 0.0)
    ring_backward = np.maximum(2 * gathered - c.calibration["attention_backward_ratio"] * hidden, 0.0)
    forward = np.where(c.plan.cp_kind == 0, ring_forward, np.where(c.plan.cp_kind == 1, gathered, exchanged))
    backward = np.where(c.plan.cp_kind == 0, ring_backward, np.where(c.plan.cp_kind == 1, gathered + scattered, exchanged))
    return forward, backward


def activation_part(c: _Costs, rows: Floats, width: Ints) -> Part:
    """The MLP's activation over rows x width: a gated one reads two operands forward and writes two gradients backward."""
    operands = 2 if c.job.model.gated_mlp else 1
    elements = 1.0 * rows * width
    return c.elementwise((operands + 1) * E * elements, (2 * operands + 1) * E * elements)


def mlp_part(c: _Costs, width: Ints) -> Part:
    """A dense MLP of local `width` (gated: two input products fused into one), with its tensor-parallel collectives."""
    model, tokens = c.job.model, c.shard.tokens
    gates = 2 if model.gated_mlp else 1
    block = c.linear(tokens, gates * width, model.hidden) + c.linear(tokens, model.hidden, width)
    return block + activation_part(c, tokens, width) + c.tensor_parallel(block)


def experts_part(c: _Costs) -> Part:
    """Router, permutation, grouped products and the expert-parallel collectives of a mixture of experts (without activation).

    Each rank sends tokens / spread x top_k rows of h, dispatch and combine, forward and backward; expert-tensor parallelism
    gathers the rows over etp and scatters the results. `ep_overlap` hides a fraction behind another micro batch's work.
    """
    model, s, moe = c.job.model, c.shard, c.job.model.moe
    assert moe is not None  # noqa: S101 (callers ask only for layers with experts)
    gates = 2 if model.gated_mlp else 1
    local = 1.0 * s.tokens / s.spread
    router = c.linear(local, moe.experts, model.hidden) + c.elementwise(12.0 * local * moe.experts, 12.0 * local * moe.experts, kernels=4)
    moved = E * local * moe.top_k * model.hidden
    permute = c.elementwise(4 * moved, 4 * moved, kernels=4)
    products = c.grouped_linear(s.rows, gates * s.expert_ffn, model.hidden) + c.grouped_linear(s.rows, model.hidden, s.expert_ffn)
    left = 1.0 - c.calibration["ep_overlap_fraction"] * c.plan.ep_overlap
    exchange = 2 * c.comm("all_to_all", moved * c.calibration["ep_volume_factor"], "ep") * left
    gathered = E * s.rows * model.hidden
    over_etp = (c.comm("all_gather", gathered, "etp") + c.comm("reduce_scatter", gathered, "etp")) * left
    comm = Work(ep_comm=exchange + over_etp)
    return router + permute + products + Part(forward=comm, backward=comm)


def layer_time(job: Job, plan: Plan, kind: LayerKind, calibration: Calibration) -> LayerTime:
    """Return the seconds of one layer of this kind; columns span only the axes they depend on."""
    c = _Costs(job, plan, calibration)
    model, s = job.model, c.shard
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
    kernels = calibration["host_moe_factor"] if kind.moe else 1.0
    forward, backward = _host_bound(c, layer.forward, kernels), _host_bound(c, layer.backward, kernels)
    return LayerTime(
        forward=forward,
        backward=backward,
        recompute=redone,
        full_recompute=forward.times(fully_recomputed(plan)),
        wgrad=layer.wgrad,
    )


def _host_bound(c: _Costs, work: Work, kernels: float) -> Work:
    """Add what the GPU waits for when the host cannot issue a layer's kernels as fast as they run (`kernels` times as many as a
    dense layer has).
    """
    floor = c.calibration["host_per_layer_s"] * kernels * (1 - c.plan.cuda_graphs)
    return work + Work(host=np.maximum(floor - work.seconds, 0.0))


def embedding_time(job: Job, plan: Plan, calibration: Calibration) -> Part:
    """The token embedding: gathers and writes T x h; with tensor parallelism each rank looks up its vocabulary and they reduce."""
    c = _Costs(job, plan, calibration)
    moved = E * c.shard.tokens * job.model.hidden
    reduced = np.where(plan.sequence_parallel > 0, c.comm("reduce_scatter", moved, "tp"), c.comm("all_reduce", moved, "tp"))
    gathered = np.where(plan.sequence_parallel > 0, c.comm("all_gather", moved, "tp"), 0.0)
    comm = Part(forward=Work(tp_comm=reduced), backward=Work(tp_comm=gathered))
    return c.elementwise(2 * moved, 3 * moved, kernels=2) + comm


def head_time(job: Job, plan: Plan, calibration: Calibration) -> Part:
    """Final norm, logits over the local vocabulary and the cross-entropy, which passes over fp32 logits several times.

    A framework that does not shard the loss gathers the logits over tp first; a fused loss reads and writes 16-bit logits once each way.

    An MTP layer (DeepSeek-V3) shares the head: it runs once more for each.
    """
    c = _Costs(job, plan, calibration)
    model, s = job.model, c.shard
    block = c.linear(s.tokens, s.vocab, model.hidden)
    if says(job.framework.sharded_logits, True):
        logits = 1.0 * s.tokens * s.vocab
        sums = Work(tp_comm=3 * c.comm("all_reduce", 4.0 * s.tokens, "tp"))
    else:
        logits = 1.0 * s.tokens * s.vocab * plan.tp
        sums = Work(tp_comm=c.comm("all_gather", E * logits, "tp"))
    passes = (
        (2 * E, 2 * E) if says(job.framework.fused_loss, False) else (calibration["loss_forward_bytes"], calibration["loss_backward_bytes"])
    )
    loss = c.elementwise(passes[0] * logits, passes[1] * logits, kernels=6)
    elements = 1.0 * s.tokens * model.hidden / s.spread
    norm = c.elementwise(2 * E * elements, 3 * E * elements)
    return block + c.tensor_parallel_input(block) + loss + norm + Part(forward=sums, backward=Work())


def mtp_time(job: Job, plan: Plan, calibration: Calibration) -> Part:
    """What an MTP module adds to its transformer layer and head: two norms and the product of the joined 2h -> h (2412.19437, eq. 21)."""
    c = _Costs(job, plan, calibration)
    model, s = job.model, c.shard
    local = 1.0 * s.tokens / s.spread
    return c.linear(local, model.hidden, 2 * model.hidden) + c.elementwise(
        4 * E * local * model.hidden, 6 * E * local * model.hidden, kernels=2
    )
