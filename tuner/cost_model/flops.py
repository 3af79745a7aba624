"""FLOPs that a model needs for one step: what MFU counts.

Symbols: B sequences, s tokens, L layers, h hidden, V vocabulary. A product of (m, k) and (k, n) is 2 m n k FLOP; training does each
forward product three times over (output, input gradient, weight gradient). For a GPT with multi-head attention and an MLP of 4h the
sum is 72 B L s h^2 (1 + s/(6h) + V/(12hL)): Korthikanti et al. 2022 (arXiv 2205.05198), appendix A. Recompute is not counted, nor is
padding of the vocabulary, the router or the embedding lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.model import LayerKind, Model

TRAINING = 3.0  # one forward and two backward products


def attention_flops(model: Model, kind: LayerKind, seq_len: int, *, causal: bool) -> float:
    """Return the forward FLOPs of the attention core of one layer and sequence: 2 s s_seen a (d_qk + d_v).

    s_seen: keys a query sees on average: s counted in full, (s + 1) / 2 when causal, about the window when it slides.
    """
    seen = (seq_len + 1) / 2 if causal else float(seq_len)
    if kind.window and kind.window < seq_len:
        w = kind.window
        seen = w - w * (w - 1) / (2 * seq_len) if causal else float(w)
    return 2.0 * seq_len * seen * model.heads * (model.qk_head_dim + model.v_head_dim)


def linear_flops(model: Model, kind: LayerKind) -> float:
    """Return the forward FLOPs of one layer's matrix products for one token."""
    h, a, g = float(model.hidden), model.heads, model.kv_heads
    gates = 2 if model.gated_mlp else 1
    if model.mla:
        m = model.mla
        queries = h * m.q_lora_rank + (m.q_lora_rank or h) * a * model.qk_head_dim
        keys = h * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank * a * (m.qk_nope_head_dim + m.v_head_dim)
        attention = queries + keys + a * m.v_head_dim * h
    else:
        attention = h * (a * model.qk_head_dim + g * (model.qk_head_dim + model.v_head_dim)) + a * model.v_head_dim * h
    width = float(model.ffn_hidden)
    if kind.moe and model.moe:
        width = model.moe.top_k * model.moe.expert_ffn_hidden + model.moe.shared_expert_ffn_hidden
    return 2.0 * (attention + (gates + 1) * h * width)


def model_flops(job: Job, *, causal: bool | None = None) -> float:
    """Return the FLOPs of one step of the whole job, forward and backward.

    causal: whether attention is counted as the causal half (the default for fused kernels, which skip the rest) or in full (the
    default for unfused ones, as in the papers of 2021-22). LoRA needs no weight gradients: two products for three.
    """
    model = job.model
    half = job.attention == "flash" if causal is None else causal
    of_sequence = 0.0
    kinds = [*model.layer_groups(), (model.kind(model.layers - 1), model.mtp_layers)]
    for kind, count in kinds:
        core = attention_flops(model, kind, job.seq_len, causal=half)
        of_sequence += count * (linear_flops(model, kind) * job.seq_len + core)
    of_sequence += model.mtp_layers * 4.0 * model.hidden * model.hidden * job.seq_len
    of_sequence += (1 + model.mtp_layers) * 2.0 * model.hidden * model.vocab * job.seq_len
    passes = 2.0 if job.task == "lora" else TRAINING
    return passes * of_sequence * job.global_batch


def full_recompute_flops(job: Job, *, causal: bool = False) -> float:
    """Return the extra FLOPs of recomputing every layer once: a forward of the layers, not of the logits.

    With model_flops it gives 96 B s L h^2 (1 + s/(6h) + V/(16Lh)): Narayanan et al. 2021 (arXiv 2104.04473), equation 3.
    """
    model = job.model
    each = sum(
        count * (linear_flops(model, kind) * job.seq_len + attention_flops(model, kind, job.seq_len, causal=causal))
        for kind, count in model.layer_groups()
    )
    return each * job.global_batch
