import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost_model.flat import GPU, calibration, gemm_curve
from tuner import presets
from tuner.cost_model.calibration import calibration_for
from tuner.cost_model.curves import Grid, Tile
from tuner.cost_model.roofline import attention_seconds, gemm_seconds, grouped_gemm_seconds, stream_seconds, watts_per_teraflop
from tuner.job import PEAK_OF, PRECISIONS

SAMPLE = json.loads((Path(__file__).parents[1] / "fixtures" / "operators_sample.json").read_text())
MEASURED = sorted(SAMPLE["gemm"])


def test_product_by_hand():
    # 4 tiles in one wave of 100: 2 * 128 * 128 * 1000 FLOP at 100e12 / 100 * 0.5 FLOP/s = 65.536 us; launch 1 us.
    # memory: (256 * 1000 * 2) * 2 + 2 * 256 * 256 = 1,155,072 B at 0.5e12 B/s = 2.31 us, hidden.
    seconds = gemm_seconds(256, 256, 1000, precision="bf16", gpu=GPU, calibration=calibration())
    assert seconds == pytest.approx(1e-6 + 65.536e-6, rel=1e-12)


def test_waves_by_hand():
    # 11 x 10 tiles on 100 multiprocessors: two whole waves, or with partial_wave 0.5 half of that and half of 1.1 waves.
    whole = gemm_seconds(1408, 1280, 1000, precision="bf16", gpu=GPU, calibration=calibration())
    assert whole == pytest.approx(1e-6 + 2 * 65.536e-6, rel=1e-12)
    part = gemm_seconds(1408, 1280, 1000, precision="bf16", gpu=GPU, calibration=calibration(gemm=gemm_curve(partial_wave=0.5)))
    assert part == pytest.approx(1e-6 + 1.55 * 65.536e-6, rel=1e-12)


def test_split_k_by_hand():
    # k in 4 parts: a quarter of the time, and 4 parts x 8 B x 256 x 256 at 1e12 B/s x reduction 2 = 4.194 us.
    tiles = (Tile(m=128, n=128, splits=4, efficiency=0.5),)
    curve = gemm_curve(tiles=tiles, reduction=2.0)
    seconds = gemm_seconds(256, 256, 1000, precision="bf16", gpu=GPU, calibration=calibration(gemm=curve))
    assert seconds == pytest.approx(1e-6 + 65.536e-6 / 4 + 4 * 8 * 256 * 256 * 2 / 1e12, rel=1e-12)


def test_factors_over_sizes_by_hand():
    # 2 x 2 tiles of 128 on 100 multiprocessors: w = 0.04, halfway between 0.03 (factor 1) and 0.05 (factor 1.2); 250 is no
    # multiple of 16 and rounds up to the same tiles.
    factors = {
        "waves": Grid(axes=((0.03, 0.05), (1.0, 2.0)), values="1 1\n1.2 1.2"),
        "unaligned": Grid(axes=((1.0, 2.0),) * 3, values="3 " * 8),
    }
    used = calibration(gemm=gemm_curve().model_copy(update=factors))
    seconds = gemm_seconds(np.array([256, 250]), 256, 1000, precision="bf16", gpu=GPU, calibration=used)
    assert seconds == pytest.approx([1.1 * 66.536e-6, 3.0 * 1.1 * 66.536e-6], rel=1e-12)
    assert used.gemm["bfloat16"].plain == gemm_curve()


def test_memory_bound_product_by_hand():
    # k = 1: moved 2 * (8192 + 8192) + 2 * 8192 * 8192 B at 0.5e12 B/s = 268.5 us against 41 waves of 0.065536 us.
    seconds = gemm_seconds(8192, 8192, 1, precision="bf16", gpu=GPU, calibration=calibration())
    assert seconds == pytest.approx(1e-6 + (2 * 2 * 8192 + 2 * 8192**2) / 0.5e12, rel=1e-12)


def test_power_scales_the_rate():
    # 100 W for 100 TFLOP/s is 1 W per TFLOP/s.
    assert watts_per_teraflop(GPU) == 1.0
    curve = gemm_curve(power=Grid(axes=((0.5, 1.5),), values="0.4 0.6"))
    slow = gemm_seconds(256, 256, 1000, precision="bf16", gpu=GPU, calibration=calibration(gemm=curve))
    assert slow == pytest.approx(1e-6 + 65.536e-6 / 0.5, rel=1e-12)


def test_precisions_use_their_peak():
    one = {p: gemm_seconds(256, 256, 1000, precision=p, gpu=GPU, calibration=calibration()) for p in ("bf16", "fp8", "fp8-rowwise", "fp32")}
    assert one["fp8"] == one["fp8-rowwise"] == pytest.approx(1e-6 + 65.536e-6 / 2, rel=1e-12)
    assert one["fp32"] == pytest.approx(1e-6 + 65.536e-6 * 2, rel=1e-12)


def test_grouped_products_by_hand():
    # 8 groups of 100 rows: one tile each, one wave, times the factor 2 of the flat curve.
    seconds = grouped_gemm_seconds(100, 8, 128, 1000, precision="bf16", gpu=GPU, calibration=calibration())
    assert seconds == pytest.approx(2 * (1e-6 + 65.536e-6), rel=1e-9)


def test_flash_attention_by_hand():
    # 2 x 4 heads, 1,024 queries: 64 blocks, one wave. Keys of a block: (1024 + 128) / 2 = 576 of 1,024;
    # 2 * 128 * 576 * (128 + 128) FLOP at 0.5e12 FLOP/s = 75.5 us.
    def seconds(**changes):
        sizes = {"causal": True, "window": 0} | changes
        return attention_seconds(2, 1024, 1024, 4, 1, 128, 128, precision="bf16", gpu=GPU, calibration=calibration(), **sizes)

    assert seconds() == pytest.approx(1e-6 + 2 * 128 * 576 * 256 / 0.5e12, rel=1e-6)
    assert seconds(causal=False) == pytest.approx(1e-6 + 2 * 128 * 1024 * 256 / 0.5e12, rel=1e-6)
    assert seconds(window=256) == pytest.approx(1e-6 + 2 * 128 * 256 * 256 / 0.5e12, rel=1e-6)


def test_heads_that_share_keys_are_corrected_by_how_many_do():
    used = calibration()
    sharing = Grid(axes=((1.0, 9.0), (1.0, 2.0), (1.0, 2.0)), values="1 1\n1 1\n0.8 0.8\n0.8 0.8")
    shared = used.model_copy(update={"attention": {"gqa": used.attention["gqa"].model_copy(update={"sharing": sharing})}})

    def seconds(curves, kv_heads):
        return attention_seconds(
            1, 4096, 4096, 10, kv_heads, 128, 128, causal=True, window=0, precision="bf16", gpu=GPU, calibration=curves
        )

    assert seconds(shared, 10) == seconds(used, 10)
    assert seconds(shared, 2) == pytest.approx(0.9 * seconds(used, 2), rel=1e-12)


def test_fp8_jobs_attend_in_bf16():
    shape = (2, 1024, 1024, 4, 1, 128, 128)
    both = [attention_seconds(*shape, causal=True, window=0, precision=p, gpu=GPU, calibration=calibration()) for p in ("bf16", "fp8")]
    assert both[0] == both[1]


def test_streams_by_hand():
    used = calibration(memory_bandwidth_efficiency=0.8, kernel_launch_s=3e-6)
    assert stream_seconds(8e9, gpu=GPU, calibration=used, kernels=2) == pytest.approx(10e-3 + 6e-6, rel=1e-12)


@pytest.mark.parametrize("gpu", MEASURED)
def test_shipped_products_describe_measured_ones(gpu):
    card, (m, n, k, ms) = presets.gpu(gpu), np.array(SAMPLE["gemm"][gpu]).T
    predicted = gemm_seconds(m, n, k, precision="bf16", gpu=card, calibration=calibration_for("auto", card)) * 1e3
    error = np.abs(predicted / ms - 1)
    assert np.median(error) <= 0.06
    assert np.quantile(error, 0.9) <= 0.20


@pytest.mark.parametrize("gpu", MEASURED)
def test_data_sheet_and_pooled_curve_describe_measured_products(gpu):
    card, (m, n, k, ms) = presets.gpu(gpu), np.array(SAMPLE["gemm"][gpu]).T
    predicted = gemm_seconds(m, n, k, precision="bf16", gpu=card, calibration=calibration_for("none", card)) * 1e3
    assert np.median(np.abs(predicted / ms - 1)) <= 0.10


@pytest.mark.parametrize("gpu", MEASURED)
def test_shipped_attention_describes_measured_one(gpu):
    card = presets.gpu(gpu)
    keys = {"causal": True, "window": 0, "precision": "bf16", "gpu": card, "calibration": calibration_for("auto", card)}
    errors = [attention_seconds(b, s, s, h, g, d, d, **keys) * 1e3 / ms - 1 for b, s, h, g, d, ms in SAMPLE["attention"][gpu]]
    assert np.median(np.abs(errors)) <= 0.12


sizes = st.integers(min_value=1, max_value=200_000)


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "b300-sxm-288gb"])
@settings(max_examples=25, deadline=None)
@given(m=st.lists(sizes, min_size=1, max_size=9), n=sizes, k=st.lists(sizes, min_size=1, max_size=5), groups=st.integers(1, 300))
def test_numbers_and_arrays_agree_to_the_last_bit(name, m, n, k, groups):
    gpu = presets.gpu(name)
    used = calibration_for("auto", gpu)
    precisions = [p for p in PRECISIONS if any(peak in gpu.peak for peak in PEAK_OF[p])]
    rows, depths = np.array(m)[:, None], np.array(k)
    for precision in precisions:
        keys = {"precision": precision, "gpu": gpu, "calibration": used}
        grid = gemm_seconds(rows, n, depths, **keys)
        experts = grouped_gemm_seconds(rows, groups, n, depths, **keys)
        for i, one in enumerate(m):
            for j, depth in enumerate(k):
                assert gemm_seconds(one, n, depth, **keys) == grid[i, j]
                assert grouped_gemm_seconds(one, groups, n, depth, **keys) == experts[i, j]
        assert gemm_seconds(np.array([m[0]]), np.array([n]), np.array([k[0]]), **keys)[0] == grid[0, 0]


@settings(max_examples=50, deadline=None)
@given(b=st.integers(1, 64), s=st.lists(st.integers(1, 200_000), min_size=1, max_size=9), h=st.integers(1, 128), causal=st.booleans())
def test_attention_of_numbers_and_arrays_agree_to_the_last_bit(b, s, h, causal):
    gpu = presets.gpu("h100-sxm-80gb")
    keys = {"causal": causal, "window": 0, "precision": "bf16", "gpu": gpu, "calibration": calibration_for("auto", gpu)}
    for qk, v in ((128, 128), (192, 128), (80, 80)):
        lengths = np.array(s)
        grid = attention_seconds(b, lengths, lengths, h, 1, qk, v, **keys)
        for i, one in enumerate(s):
            assert attention_seconds(b, one, one, h, 1, qk, v, **keys) == grid[i]


@given(m=sizes, n=sizes, k=sizes)
def test_products_take_positive_finite_time(m, n, k):
    gpu = presets.gpu("a100-sxm-80gb")
    seconds = gemm_seconds(m, n, k, precision="bf16", gpu=gpu, calibration=calibration_for("auto", gpu))
    assert 0 < seconds < 1e7
    # Never faster than the data sheet by more than the smoothing of small products can explain.
    assert seconds >= 0.9 * 2.0 * m * n * k / gpu.peak["bf16"].value


# Libraries change tiles with m, so that a few measured products get faster by rows that fill them: up to 5 % off is seen and kept.
@given(m=st.integers(16, 3125).map(lambda i: 16 * i), n=st.integers(128, 50_000), k=st.integers(128, 50_000))
def test_twice_the_rows_take_longer(m, n, k):
    gpu = presets.gpu("h100-sxm-80gb")
    used = calibration_for("auto", gpu)
    once, twice = gemm_seconds(np.array([m, 2 * m]), n, k, precision="bf16", gpu=gpu, calibration=used)
    assert twice > 0.95 * once
