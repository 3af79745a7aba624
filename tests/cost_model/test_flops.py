from __future__ import annotations

import pytest

from tests.jobs import gpt, gpt_job, llama_job, moe_job
from tuner.cost_model.flops import attention_flops, full_recompute_flops, model_flops
from tuner.model import LayerKind


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128)])
def test_korthikanti_appendix_a(layers: int, hidden: int, heads: int) -> None:
    job = gpt_job(gpt(layers=layers, hidden=hidden, heads=heads), global_batch=64)
    s, h, v = 2048, hidden, 51200
    expected = 72 * 64 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert model_flops(job, causal=False) == pytest.approx(expected, rel=1e-12)


def test_narayanan_equation_3() -> None:
    job = gpt_job(global_batch=64)
    s, h, v, n = 2048, 12288, 51200, 96
    expected = 96 * 64 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert model_flops(job, causal=False) + full_recompute_flops(job) == pytest.approx(expected, rel=1e-12)


def test_llama3_70b_by_hand() -> None:
    """Per layer 2 (h(ad + 2kd) + ad h + 3hf) = 2 x 855,638,016 a token; head 2hV; attention (s + 1) / 2 keys a query."""
    job = llama_job(global_batch=1)
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    assert layer == 855_638_016
    core = 2 * 8192 * (8193 / 2) * 64 * 256
    expected = 3 * (80 * (2 * layer * 8192 + core) + 2 * 8192 * 128256 * 8192)
    assert model_flops(job) == pytest.approx(expected, rel=1e-12)


def test_unfused_attention_is_counted_in_full_by_default() -> None:
    assert model_flops(gpt_job()) == model_flops(gpt_job(), causal=False)
    assert model_flops(gpt_job(attention="flash")) == model_flops(gpt_job(), causal=True)


def test_sliding_window() -> None:
    """Window 2 over 4 tokens, causal: queries see 1, 2, 2, 2 keys: 7 in all."""
    model = gpt(layers=1, hidden=64, heads=1)
    assert attention_flops(model, LayerKind(2, False), 4, causal=True) == 2 * 7 * 128
    assert attention_flops(model, LayerKind(0, False), 4, causal=True) == 2 * 10 * 128


def test_only_active_experts_count() -> None:
    job = moe_job()
    six = model_flops(job)
    more = job.model.moe.model_copy(update={"experts": 128})
    assert model_flops(job.model_copy(update={"model": job.model.model_copy(update={"moe": more})})) == six
