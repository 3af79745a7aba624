"""The measured step time of a row, from whichever figure its source gives. docs/measured_step_time.md states each formula."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.accuracy.fields import Row
from tuner.cost_model.flops import attention_flops, full_recompute_flops, model_flops
from tuner.job import peak_flops
from tuner.plan import FULL, RECOMPUTE_MODULES

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.plan import Plan

CAUSAL = {"causal": True, "full": False}


def measured_step_s(row: Row, job: Job, plan: Plan) -> float | None:
    """Return seconds a step: step_time_s, else from tokens_per_s_per_gpu, else from tflops_per_gpu, else from mfu; None without any."""
    seconds = row.measured.positive("step_time_s")
    tokens, tflops, mfu = (row.measured.positive(key) for key in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"))
    if seconds is not None:
        return seconds
    if tokens is not None:
        return job.global_batch * job.seq_len / (tokens * job.gpus)
    if tflops is not None:
        return counted_flops(row, job, plan) / (tflops * 1e12 * job.gpus)
    if mfu is not None:
        peak = row.top.positive("mfu_peak_tflops")
        return counted_flops(row, job, plan) / (mfu * (peak * 1e12 if peak else peak_flops(job)) * job.gpus)
    return None


def counted_flops(row: Row, job: Job, plan: Plan) -> float:
    """Return the FLOPs of a step as the row's source counts them.

    flops_convention "model" (or not stated): forward and backward only; "hardware": recomputation as well. attention_flops "causal":
    half of the scores; "full" (or not stated, as in the papers): all of them.
    """
    causal = _choice(row, "attention_flops", CAUSAL, "full")
    hardware = _choice(row, "flops_convention", {"model": False, "hardware": True}, "model")
    return model_flops(job, causal=causal) + (recomputed_flops(job, plan, causal=causal) if hardware else 0.0)


def recomputed_flops(job: Job, plan: Plan, *, causal: bool) -> float:
    """Return the FLOPs that recomputation adds to a step: a forward of every layer (full), or of the attention core (core_attn).

    Sources: Narayanan et al. 2021 equation 3 (full); Korthikanti et al. 2022 appendix A (selective).
    """
    if plan.recompute & FULL:
        return full_recompute_flops(job, causal=causal)
    if plan.recompute & RECOMPUTE_MODULES["core_attn"]:
        cores = sum(n * attention_flops(job.model, kind, job.seq_len, causal=causal) for kind, n in job.model.layer_groups())
        return cores * job.global_batch
    return 0.0


def _choice(row: Row, key: str, known: dict[str, bool], default: str) -> bool:
    stated = row.top.word(key, known)
    if stated is None:
        row.assume(f"{key}={default}{row.top.unknown(key)}")
        return known[default]
    return stated
