"""The measured step time from each kind of figure, against numbers computed by hand (docs/measured_step_time.md)."""

import pytest

from tests.accuracy.row import GPT, changed, read

# 96 x B s L h^2 (1 + s / 6h + V / 16 L h), Narayanan et al. 2021 equation 3, for GPT's row: 4.5110e18 FLOP.
HARDWARE = 96.0 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
# 72 x B s L h^2 (1 + s / 6h + V / 12 L h), Korthikanti et al. 2022 appendix A.
MODEL = 72.0 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))


def test_step_time_comes_first():
    figures = {"step_time_s": 33.0, "tokens_per_s_per_gpu": 1.0, "tflops_per_gpu": 1.0, "mfu": 0.01}
    assert read(changed(measured=figures)).step_s == 33.0


def test_then_tokens():
    """1,536 x 2,048 = 3,145,728 tokens over 1,024 GPUs at 96 tokens/s: 32 s."""
    figures = {"tokens_per_s_per_gpu": 96.0, "tflops_per_gpu": 1.0, "mfu": 0.01}
    assert read(changed(measured=figures)).step_s == pytest.approx(32.0, rel=1e-12)


def test_then_tflops_with_recomputation_counted():
    assert pytest.approx(4.5110e18, rel=1e-4) == HARDWARE
    assert read(GPT).step_s == pytest.approx(HARDWARE / (1024 * 140e12), rel=1e-9)
    assert read(GPT).step_s == pytest.approx(31.466, abs=0.001)  # the source: around 32 seconds


def test_tflops_of_the_model_alone():
    row = read(changed(flops_convention="model"))
    assert row.step_s == pytest.approx(MODEL / (1024 * 140e12), rel=1e-9)
    assert "attention_flops=full" in row.assumed
    assert read({k: v for k, v in GPT.items() if k != "flops_convention"}).step_s == pytest.approx(row.step_s)


def test_hardware_without_recomputation_is_the_model():
    assert read(changed(config={"recompute": "none"})).step_s == pytest.approx(MODEL / (1024 * 140e12), rel=1e-9)


def test_selective_recomputation_adds_the_attention_core():
    """A forward of every core: 4 B s^2 h L = 4 x 1536 x 2048^2 x 12288 x 96 = 3.040e16 FLOP."""
    core = 4.0 * 1536 * 2048**2 * 12288 * 96
    assert read(changed(config={"recompute": "selective"})).step_s == pytest.approx((MODEL + core) / (1024 * 140e12), rel=1e-9)


def test_causal_attention_counts_half_of_the_scores():
    """3 x 4 B s^2 h L less (s - 1) / (2 s) of it."""
    core = 12.0 * 1536 * 2048**2 * 12288 * 96
    row = read(changed(flops_convention="model", attention_flops="causal"))
    assert row.step_s == pytest.approx((MODEL - core * 2047 / 4096) / (1024 * 140e12), rel=1e-9)


def test_then_mfu_of_the_stated_peak_or_of_the_card():
    figures = {"tflops_per_gpu": ..., "mfu": 0.5}
    row = read(changed(measured=figures, flops_convention="model"))
    assert row.step_s == pytest.approx(MODEL / (1024 * 0.5 * 312e12), rel=1e-9)  # A100: 312 TFLOP/s
    row = read(changed(measured=figures, flops_convention="model", mfu_peak_tflops=300))
    assert row.step_s == pytest.approx(MODEL / (1024 * 0.5 * 300e12), rel=1e-9)


def test_a_figure_of_zero_was_rounded_away():
    assert read(changed(measured={"tokens_per_s_per_gpu": 0.0})).step_s == pytest.approx(31.466, abs=0.001)


def test_grouped_query_gated_moe():
    """h 1024, 2 layers, 8 heads of 128 with 2 of keys, 4 experts of 512 of which 2 run, vocabulary 1000, s 100, B 8 on 8 GPUs.

    A layer: q and o 2 x 1024 x 1024, k and v 2 x 1024 x 256, experts 2 x 3 x 1024 x 512 = 5,767,168 weights a token; core
    2 x 100 x 100 x 8 x 256; logits 1024 x 1000. Forward of a sequence: 2 x (100 x 2 x 5,767,168 + 40,960,000) + 100 x 2 x 1,024,000.
    """
    model = {"layers": 2, "hidden": 1024, "ffn_hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128, "vocab": 1000, "seq_len": 100}
    model |= {"gated_mlp": True, "tied_embeddings": False, "moe": {"experts": 4, "top_k": 2, "expert_ffn_hidden": 512}}
    forward = 2 * (100 * 2 * 5_767_168 + 2 * 100 * 100 * 8 * 256) + 100 * 2 * 1_024_000
    row = changed(
        model=model,
        cluster={"gpus": 8},
        config={"tp": 1, "pp": 1, "micro_batch": 1, "global_batch": 8, "recompute": "none"},
        measured={"tflops_per_gpu": 100.0},
    )
    assert read(row).step_s == pytest.approx(3 * 8 * forward / (8 * 100e12), rel=1e-9)
    assert read(row | {"task": "lora"}).step_s == pytest.approx(2 * 8 * forward / (8 * 100e12), rel=1e-9)


def test_no_time_is_none():
    assert read(changed(measured={"tflops_per_gpu": ..., "memory_gb": 30.0})).step_s is None
