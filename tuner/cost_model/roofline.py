"""Seconds of one operator on one accelerator, from its data sheet and the calibration's efficiency curves.

Symbols: m, n, k sizes of a product (m x k) @ (k x n); P peak FLOP/s of the dtype; S multiprocessors; B bytes/s of HBM.
Sizes are columns (a number or an array that broadcasts); results are seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div
from tuner.cost_model.calibration import DTYPE_OF
from tuner.job import PEAK_OF

if TYPE_CHECKING:
    from tuner.cluster import Gpu
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.curves import AttentionCurve, GemmCurve

# Bytes of an element of an operand, with the scales of nvfp4 (one fp8 for 16 elements; those of fp8_block are 1/4096).
ELEMENT_BYTES: dict[str, float] = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
_OUTPUT_BYTES = 2.0
_PARTIAL_BYTES = 8.0  # a partial sum in fp32 is written and read
WAVE_TILE, ALIGNED = 128, 16
_MULTIPROCESSORS = 128  # of a card whose sheet does not say: only the rounding to whole waves depends on it


def peak(gpu: Gpu, precision: str) -> float:
    """Return the dense peak FLOP/s of `precision` on `gpu`."""
    return next(gpu.peak[name].value for name in PEAK_OF[precision] if name in gpu.peak)


def multiprocessors(gpu: Gpu) -> int:
    """Return how many blocks of work `gpu` runs at once."""
    return gpu.sms.value if gpu.sms else _MULTIPROCESSORS


def watts_per_teraflop(gpu: Gpu) -> float | None:
    """Return the card's power (its own cap where it has one) over its dense 16-bit peak in TFLOP/s, or None if unknown."""
    limit = gpu.power_cap or gpu.power
    dense = next((gpu.peak[name].value for name in ("bf16", "fp16") if name in gpu.peak), None)
    return limit.value / (dense / 1e12) if limit and dense else None


def achievable_peak(gpu: Gpu, precision: str, curve: GemmCurve) -> float:
    """Return P times the curve's factor for the card's power."""
    power = watts_per_teraflop(gpu)
    factor = float(curve.power(power)) if curve.power and power else 1.0
    return peak(gpu, precision) * factor


def products_seconds(
    m: Ints, n: Ints, k: Ints, groups: Ints, *, curve: GemmCurve, rate: float, bandwidth: float, sms: int, element: float
) -> Floats:
    """Return the seconds of `groups` products (m x k) @ (k x n) in one kernel: launch + max(compute, memory).

    compute: the best of the curve's tile shapes (what a library's heuristic is after). A tile takes
    2 tile_m tile_n (k / splits + prologue_k) / (rate/S e) on one multiprocessor; ceil(m/tile_m) ceil(n/tile_n) groups splits
    tiles run in waves of S, and an incomplete last wave counts in full with weight partial_wave, else by its share
    (persistent and stream-k kernels balance it). Splitting k adds `reduction` passes over fp32 partial sums.
    memory: each operand once, (m k + k n) element + 2 m n bytes for each group, at the curve's share of `bandwidth`.
    Neglected: reuse of operands in the L2 cache.
    """
    best: Floats = None
    for tile in curve.tiles:
        tiles = ceil_div(m, tile.m) * ceil_div(n, tile.n) * groups * tile.splits
        waves = curve.partial_wave * ceil_div(tiles, sms) + (1.0 - curve.partial_wave) * np.maximum(tiles / sms, 1.0)
        cost = 2.0 * tile.m * tile.n * sms / (rate * tile.efficiency)
        seconds = waves * (k * (1.0 / tile.splits) + curve.prologue_k) * cost
        if tile.splits > 1:
            seconds = seconds + _PARTIAL_BYTES * m * n * groups * (curve.reduction * tile.splits / bandwidth)
        best = seconds if best is None else np.minimum(best, seconds)
    moved = (element * m * k + element * n * k + _OUTPUT_BYTES * m * n) * groups
    return curve.launch_s + np.maximum(best, moved * (1.0 / (bandwidth * curve.memory)))


def _products(m: Ints, n: Ints, k: Ints, groups: Ints, precision: str, gpu: Gpu, calibration: Calibration) -> Floats:
    dtype = DTYPE_OF[precision]
    curve = calibration.gemm[dtype]
    return products_seconds(
        m,
        n,
        k,
        groups,
        curve=curve,
        rate=achievable_peak(gpu, precision, curve),
        bandwidth=gpu.hbm.value,
        sms=multiprocessors(gpu),
        element=4.0 if precision == "fp32" else ELEMENT_BYTES[dtype],
    )


def gemm_seconds(m: Ints, n: Ints, k: Ints, *, precision: str, gpu: Gpu, calibration: Calibration) -> Floats:
    """Return the seconds of one product (m x k) @ (k x n): products_seconds times the curve's factors at (m, n, k).

    Forward, dX and dW of a linear layer are products of the same three sizes in other orders.
    """
    seconds = _products(m, n, k, 1, precision, gpu, calibration)
    return corrected(seconds, m, n, k, curve=calibration.gemm[DTYPE_OF[precision]], sms=multiprocessors(gpu))


def corrected(seconds: Floats, m: Ints, n: Ints, k: Ints, *, curve: GemmCurve, sms: int) -> Floats:
    """Return `seconds` times the curve's factors: correction(m, n, k), waves(w, k) with w = ceil(m/128) ceil(n/128) / S, and
    where m is no multiple of 16 (rows that vector loads of 8-bit operands cannot split evenly) unaligned(m, n, k).
    """
    if curve.correction:
        seconds = seconds * curve.correction(m, n, k)
    if curve.waves:
        seconds = seconds * curve.waves(ceil_div(m, WAVE_TILE) * ceil_div(n, WAVE_TILE) / sms, k)
    return seconds * _unaligned(curve, m, n, k)


def _unaligned(curve: GemmCurve, m: Any, n: Any, k: Any) -> Any:
    """Return the factor of rows that ALIGNED does not divide, 1 elsewhere; m is a multiple nearly always, and then nothing is looked up."""
    rest = m % ALIGNED
    if not curve.unaligned or not np.any(rest):
        return 1.0
    return np.where(rest == 0, 1.0, curve.unaligned(m, n, k))


def grouped_gemm_seconds(rows: Ints, groups: Ints, n: Ints, k: Ints, *, precision: str, gpu: Gpu, calibration: Calibration) -> Floats:
    """Return the seconds of `groups` products (rows x k) @ (k x n) in one kernel, as the experts of an MoE layer run them."""
    factor = calibration.grouped[DTYPE_OF[precision]].factor
    return _products(rows, n, k, groups, precision, gpu, calibration) * factor(rows, groups)


def attention_seconds(
    batch: Ints,
    q_len: Ints,
    kv_len: Ints,
    heads: Ints,
    kv_heads: Ints,
    qk_head_dim: int,
    v_head_dim: int,
    *,
    causal: bool,
    window: int,
    precision: str,
    gpu: Gpu,
    calibration: Calibration,
) -> Floats:
    """Return the forward seconds of a fused attention kernel over q_len queries and kv_len keys (Dao 2023, arXiv 2307.08691).

    heads, kv_heads: those on this GPU. window: keys that a query sees at most (0: all). precision: only fp16 and fp32 differ,
    an fp8 job still runs its attention core in bf16.
    """
    curve = calibration.attention["gqa" if qk_head_dim == v_head_dim else "mla"]
    return flash_seconds(
        batch,
        q_len,
        kv_len,
        heads,
        kv_heads,
        qk_head_dim,
        v_head_dim,
        causal=causal,
        window=window,
        curve=curve,
        rate=peak(gpu, precision if precision in ("fp16", "fp32") else "bf16"),
        bandwidth=gpu.hbm.value,
        sms=multiprocessors(gpu),
    )


def flash_seconds(
    batch: Ints,
    q_len: Ints,
    kv_len: Ints,
    heads: Ints,
    kv_heads: Ints,
    qk_head_dim: Ints,
    v_head_dim: Ints,
    *,
    causal: bool,
    window: int,
    curve: AttentionCurve,
    rate: float,
    bandwidth: float,
    sms: int,
) -> Floats:
    """Return launch + max(compute, memory), corrected at (batch x heads, q_len, qk_head_dim) and at (heads/kv_heads, q_len,
    qk_head_dim): heads that share K and V find them in the L2 cache.

    compute: one multiprocessor takes a block of queries of one head, 2 block keys (qk_head_dim + v_head_dim) FLOP, where
    keys = kv_len, or for a causal mask its half and half a block on the diagonal, at most `window`, plus half_length for
    starting the block; waves as in products_seconds. memory: Q, K, V read and O written once in 16 bits.
    """
    keys = np.minimum(kv_len * 0.5 + curve.block * 0.5, kv_len) if causal else kv_len * 1.0
    keys = np.minimum(keys, window * 1.0) if window else keys
    blocks = batch * heads * ceil_div(q_len, curve.block)
    waves = curve.partial_wave * ceil_div(blocks, sms) + (1.0 - curve.partial_wave) * np.maximum(blocks / sms, 1.0)
    width = qk_head_dim + v_head_dim
    cost = 2.0 * curve.block * sms * width / (rate * curve.efficiency(qk_head_dim))
    compute = waves * (keys + curve.half_length(qk_head_dim)) * cost
    moved = 2.0 * batch * width * (q_len * heads + kv_len * kv_heads)
    seconds = curve.launch_s + np.maximum(compute, moved * (1.0 / (bandwidth * curve.memory)))
    if curve.correction:
        seconds = seconds * curve.correction(batch * heads, q_len, qk_head_dim)
    return seconds * curve.sharing(heads / kv_heads, q_len, qk_head_dim) if curve.sharing else seconds


def stream_seconds(bytes_: Floats, *, gpu: Gpu, calibration: Calibration, kernels: Ints = 1) -> Floats:
    """Return the seconds of memory-bound work: bytes over the achieved HBM bandwidth, and a launch for each kernel."""
    rate = gpu.hbm.value * calibration["memory_bandwidth_efficiency"]
    return bytes_ / rate + kernels * calibration["kernel_launch_s"]
