"""Public reports of people's runs with a known answer: what fitted, what ran out, and which of two layouts was faster.

Figures are those of the reports; benchmarks/reports.py reads a whole file of such reports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.jobs import calibration_of
from tuner import presets
from tuner.cost_model.estimate import Estimate, estimate, peak_memory
from tuner.job import Job
from tuner.model import Model
from tuner.plan import FULL, RECOMPUTE_MODULES, Plan

GPT_181B = Model(
    name="gpt-181b",
    layers=72,
    hidden=14336,
    ffn_hidden=57344,
    heads=64,
    kv_heads=64,
    head_dim=224,
    vocab=250880,
    gated_mlp=False,
    tied_embeddings=True,
    norm="layer",
    biases=True,
    dropout=True,
    positions="learned",
)


def job(model: str | Model, cluster: str, framework: str, **fields: Any) -> Job:
    found = presets.model(model) if isinstance(model, str) else model
    return Job(model=found, cluster=presets.cluster(cluster), framework=presets.framework(framework), **fields)


def said(of: Job, plan: Plan) -> Estimate:
    return estimate(of, plan, calibration_of(of))


def allocated(of: Job, plan: Plan, stage: int = 0) -> float:
    return float(peak_memory(of, plan, calibration_of(of), stage).allocated)


def test_llama3_70b_fits_64_h100() -> None:
    """FlagOpen/FlagPerf training/nvidia/llama3_70B-megatron: 55 GiB at tp 8, pp 4, dp 2 (its script sets sequence parallelism and the
    distributed optimizer); without either the same layout would run out.
    """
    of = job("llama3-70b", "dgx-h100x64", "megatron-lm", seq_len=8192, global_batch=512)
    plan = Plan(tp=8, pp=4, micro_batch=1, sequence_parallel=1, zero=1, recompute=RECOMPUTE_MODULES["core_attn"])
    assert float(said(of, plan).p_oom) < 0.5
    assert 0.75 < allocated(of, plan) / (55 * 2**30) < 1.25
    assert float(said(of, replace(plan, sequence_parallel=0, zero=0)).p_oom) > 0.5


def test_llama2_70b_prefers_a_longer_pipeline_on_h800() -> None:
    """FlagOpen/FlagPerf training/nvidia/llama2_70B-megatron, 32 H800: tp 4, pp 8 ran 791 tokens/s/GPU, tp 8, pp 4 642, at 12 GiB more."""
    of = job("llama2-70b", "hgx-h800x32", "megatron-lm", seq_len=4096, global_batch=44)
    wide, long = (Plan(tp=tp, pp=32 // tp, sequence_parallel=1, zero=1) for tp in (8, 4))
    assert 1.1 < float(said(of, wide).step_s / said(of, long).step_s) < 1.35
    assert allocated(of, long) > allocated(of, wide)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_181b_prefers_a_shorter_pipeline_that_needs_more_memory(micro_batch: int) -> None:
    """bigscience-workshop tr11-176B-ml/chronicles-prequel.md, 384 A100, 2021-02-21: at each micro batch pp 6 was 2-2.5 % faster than pp 12
    and took 7-9 GB more.
    """
    of = job(GPT_181B, "a100x384", "megatron-deepspeed", seq_len=2048, global_batch=2048, precision="fp16", attention="unfused")
    short, long = (Plan(tp=8, pp=pp, zero=1, micro_batch=micro_batch, recompute=FULL) for pp in (6, 12))
    assert float(said(of, short).step_s) < float(said(of, long).step_s)
    assert 5e9 < float(said(of, short).memory_bytes - said(of, long).memory_bytes) < 11e9


def test_llama3_405b_on_128_h100_needs_tensor_parallelism() -> None:
    """pytorch/torchtitan pull 554: FSDP over 128 H100 alone ran out at 8k tokens, FSDP 16 x TP 8 ran."""
    of = job("llama3.1-405b", "hgx-h100-96gb-500wx128", "torchtitan", seq_len=8192, global_batch=128)
    assert float(said(of, Plan(zero=3, recompute=FULL)).p_oom) > 0.5
    assert float(said(of, Plan(tp=8, zero=3, sequence_parallel=1, recompute=FULL)).p_oom) < 0.5


def test_the_first_of_four_stages_holds_20_gib_more_than_the_last() -> None:
    """7B on 4 stages: 46.8, 38.9, 31.7, 26.9 GiB (public report): 1F1B keeps 4, 3, 2 and 1 micro batches."""
    of = job("llama2-7b", "h100x4", "megatron-lm", seq_len=4096, global_batch=64)
    stages = [allocated(of, Plan(pp=4, micro_batch=2), stage) / 2**30 for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert 15 < stages[0] - stages[3] < 25


def test_recomputing_fused_attention_saves_nothing() -> None:
    """NVIDIA/Megatron-LM issue 1225: 25.5 -> 24.9 GB where the formula of unfused attention says 70 % less."""
    of = job("llama3-8b", "h100x8", "megatron-lm", seq_len=8192, global_batch=32)
    plan = Plan(tp=4, sequence_parallel=1, zero=1)
    redone = replace(plan, recompute=RECOMPUTE_MODULES["core_attn"])
    assert allocated(of, redone) > 0.95 * allocated(of, plan)
    assert float(said(of, redone).step_s) >= float(said(of, plan).step_s)
