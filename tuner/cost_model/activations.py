"""Bytes that one layer keeps of one micro batch for its backward, on one rank.

Symbols as in layer.py; t = tp; "spread" = t where sequence parallelism shards what tensor parallelism replicates, else 1. Each line is a
tensor kept in 16 bits unless said. With multi-head attention, an MLP of 4h, dropout and unfused attention the sum is exactly
sbh(10 + 24/t + 5as/(ht)) and its variants: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.arrays import Floats, term, total
from tuner.cost_model.shard import recomputed, shard
from tuner.cost_model.work import QUANTISED, E
from tuner.job import says

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.model import LayerKind
    from tuner.plan import Plan

REF = "Korthikanti 2022, section 4"
UNFUSED_NORM = 3  # 16-bit tensors beyond its input that a norm of element-wise kernels keeps: it in fp32, and the result before the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one layer and micro batch, by part, nothing of it recomputed as a whole."""

    layer_input: Floats = term("B", "input of the layer (all that full recompute keeps)", REF)
    norms: Floats = term("B", "norm inputs and dropout masks beyond the layer's input", REF)
    linear_inputs: Floats = term("B", "inputs of the attention and MLP blocks", REF)
    qkv: Floats = term("B", "queries, keys, values and what MLA compresses them from", REF)
    core_attention: Floats = term("B", "attention scores, or the log-sum-exp of a fused kernel", f"{REF}; Dao 2023")
    projection_input: Floats = term("B", "input of the output projection", REF)
    mlp: Floats = term("B", "dense MLP: activation's input and output", REF)
    shared_experts: Floats = term("B", "shared experts: activation's input and output", REF)
    experts: Floats = term("B", "permuted tokens, experts' activation, router", "Megatron-LM moe_layer.py")

    @property
    def bytes(self) -> Floats:
        """Sum of the leaves."""
        return total(self)


def input_bytes(job: Job) -> float:
    """Return bytes an element in which a matrix product keeps its input: 2, or what Transformer Engine quantised it to (8 bits, or 4
    and one 8-bit scale for 16 elements: NVFP4).
    """
    if job.precision in QUANTISED and says(job.framework.quantised_inputs, False):
        return 0.5625 if job.precision == "nvfp4" else 1.0
    return E


def layer_activations(job: Job, plan: Plan, kind: LayerKind, gathered: Floats = 0.0) -> Activations:
    """Return what one layer keeps when it is not recomputed as a whole; single recomputed modules drop their part.

    gathered: share of the blocks' inputs that sequence parallelism gathered and that stay whole for the backward (0 where they are
    gathered again: Korthikanti 2022, section 4.2.2).
    """
    model, s = job.model, shard(job, plan)
    t = 1.0 * s.tokens
    hidden = t * model.hidden / s.spread
    mask = hidden if model.dropout else 0.0
    keep_norm = 1 - recomputed(plan, "layernorm") * 1
    extra_norms = model.norms_per_layer - 1
    if not says(job.framework.fused_norm, True):
        extra_norms += UNFUSED_NORM * model.norms_per_layer
    mla = model.mla
    q = t * s.heads * model.qk_head_dim
    kv = t * s.kv_heads * (model.qk_head_dim + model.v_head_dim)
    qkv = E * (q + kv * (2 if says(job.framework.stacked_qkv, False) else 1))
    if mla:
        latents = E * t * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim) / s.spread
        qkv = latents + E * (q + t * s.heads * (model.qk_head_dim + model.v_head_dim)) * (1 - recomputed(plan, "mla_up_proj") * 1)
    moe = model.moe if kind.moe else None
    each = input_bytes(job)
    block_inputs = each * keep_norm * (hidden + gathered * (t * model.hidden - hidden))
    attention_output = E if each == E else E + each  # quantised, the product keeps a copy of its own beside the kernel's
    return Activations(
        layer_input=E * hidden,
        norms=extra_norms * E * hidden + 2 * mask,
        linear_inputs=2 * block_inputs,
        qkv=qkv,
        core_attention=_core_attention(job, plan, kind),
        projection_input=attention_output * t * s.heads * model.v_head_dim,
        mlp=0.0 if moe else _mlp_bytes(job, t, s.ffn) * (1 - recomputed(plan, "mlp") * 1),
        shared_experts=_mlp_bytes(job, t, s.shared_ffn) * (1 - recomputed(plan, "shared_experts") * 1) if moe else 0.0,
        experts=_experts(job, plan) if moe else 0.0,
    )


def _core_attention(job: Job, plan: Plan, kind: LayerKind) -> Floats:
    """Scores of unfused attention (softmax output 2, with dropout its mask 1 and its output 2 bytes) over all s keys; a fused kernel
    keeps an fp32 log-sum-exp for each row, so that recomputing it saves nothing.
    """
    del kind  # an unfused kernel materialises all scores, whatever the window
    s = shard(job, plan)
    rows = 1.0 * plan.micro_batch * s.heads * s.query
    if job.attention == "flash":
        return 4.0 * rows
    each = 5.0 if job.model.dropout else 2.0
    return each * rows * job.seq_len * (1 - recomputed(plan, "core_attn") * 1)


def _mlp_bytes(job: Job, tokens: Floats, width: Floats) -> Floats:
    """Activation's input (two of them when gated) and output over tokens x width; a gate that is not fused keeps act(x) as well."""
    gated = 2 if says(job.framework.fused_activation, True) else 3
    return tokens * width * (E * (gated if job.model.gated_mlp else 1) + input_bytes(job))


def _experts(job: Job, plan: Plan) -> Floats:
    """Dispatched input and the experts' output (kept to weigh it by the router, unless their activation is weighed) of h, activation's
    input and output of the expert width, for each (token, expert) pair of the rank; router scores in fp32.
    """
    model, s = job.model, shard(job, plan)
    assert model.moe is not None  # noqa: S101 (callers ask only for layers with experts)
    rows = 1.0 * s.rows
    gates = 2 if model.gated_mlp else 1
    activation_output = 1 - recomputed(plan, "moe_act", "moe") * 1
    kept = 1 - recomputed(plan, "moe") * 1
    each = input_bytes(job)
    widths = rows * s.expert_ffn * (E * gates * kept + each * activation_output)
    ends = rows * model.hidden * (each if says(job.framework.weighed_activation, False) else each + E)
    router = 8.0 * s.tokens / s.spread * model.moe.experts * kept
    return ends * kept + widths + router
