"""Seconds of one operator on one accelerator, from its data sheet and the calibration's efficiency curves.

Symbols: m, n, k sizes of a product (m x k) @ (k x n); P peak FLOP/s of the dtype; S multiprocessors; B bytes/s of HBM.
Everything below is a column (a number or an array that broadcasts) unless said otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div
from tuner.cost_model.calibration import DTYPE_OF
from tuner.job import PEAK_OF

if TYPE_CHECKING:
    from tuner.cluster import Gpu
    from tuner.cost_model.calibration import Calibration, GemmCurve

# Bytes of one element of an input; 128 x 128 and 1 x 16 blocks carry a scale each (fp32 and fp8).
ELEMENT_BYTES: dict[str, float] = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
_OUTPUT_BYTES = 2.0
_DEFAULT_SMS = 128


def peak(gpu: Gpu, precision: str) -> float:
    """Return the dense peak FLOP/s of `precision` on `gpu`."""
    return next(gpu.peak[name].value for name in PEAK_OF[precision] if name in gpu.peak)


def _multiprocessors(gpu: Gpu) -> int:
    return gpu.sms.value if gpu.sms else _DEFAULT_SMS


def _compute_seconds(m: Ints, n: Ints, k: Ints, groups: Ints, *, curve: GemmCurve, peak_flops: float, sms: int) -> Floats:
    """Return the seconds of tensor-core work of `groups` products: the best of the curve's tile shapes.

    A tile of tm x tn takes 2 tm tn (k + prologue_k) / (P/S e) on one multiprocessor; ceil(m/tm) ceil(n/tn) groups tiles run in
    waves of S. An incomplete last wave counts in full with weight partial_wave, else by its share (persistent and
    stream-k kernels balance it).
    """
    best: Floats = None
    for tile in curve.tiles:
        tiles = ceil_div(m, tile.m) * ceil_div(n, tile.n) * groups
        waves = curve.partial_wave * ceil_div(tiles, sms) + (1.0 - curve.partial_wave) * np.maximum(tiles / sms, 1.0)
        seconds = waves * (k + curve.prologue_k) * (2.0 * tile.m * tile.n * sms / (peak_flops * tile.efficiency))
        best = seconds if best is None else np.minimum(best, seconds)
    return best


def grouped_gemm_seconds(rows: Ints, groups: Ints, n: Ints, k: Ints, *, precision: str, gpu: Gpu, calibration: Calibration) -> Floats:
    """Return the seconds of `groups` products (rows x k) @ (k x n) in one kernel, as the experts of an MoE layer run them."""
    dtype = DTYPE_OF[precision]
    curve = calibration.grouped[dtype]
    seconds = _products(rows, groups, n, k, precision=precision, gpu=gpu, calibration=calibration) * curve.factor
    return seconds * curve.correction(rows, groups) if curve.correction else seconds


def gemm_seconds(m: Ints, n: Ints, k: Ints, *, precision: str, gpu: Gpu, calibration: Calibration) -> Floats:
    """Return the seconds of one product (m x k) @ (k x n): launch + max(compute, memory), corrected.

    compute: _compute_seconds; memory: each operand once, (m k + k n) e + 2 m n bytes at the achieved share of B. Forward, dX
    and dW of a linear layer are products of the same three sizes.
    """
    curve = calibration.gemm[DTYPE_OF[precision]]
    seconds = _products(m, 1, n, k, precision=precision, gpu=gpu, calibration=calibration)
    return seconds * curve.correction(m, n, k) if curve.correction else seconds


def _products(m: Ints, groups: Ints, n: Ints, k: Ints, *, precision: str, gpu: Gpu, calibration: Calibration) -> Floats:
    dtype = DTYPE_OF[precision]
    curve = calibration.gemm[dtype]
    compute = _compute_seconds(m, n, k, groups, curve=curve, peak_flops=peak(gpu, precision), sms=_multiprocessors(gpu))
    element = 4.0 if precision == "fp32" else ELEMENT_BYTES[dtype]
    moved = (element * m * k + element * n * k + _OUTPUT_BYTES * m * n) * groups
    return curve.launch_s + np.maximum(compute, moved / (gpu.hbm.value * curve.memory))


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
    """Return the forward seconds of a fused attention kernel (Dao 2022): work in blocks of queries, one per multiprocessor.

    FLOPs of one block: 2 block keys (qk_head_dim + v_head_dim), keys = kv_len, halved by a causal mask (plus half a block on
    the diagonal), at most `window` when window > 0. heads and kv_heads are those on this GPU. The softmax's precision is
    that of the bf16 unit whatever the job's.
    """
    curve = calibration.attention["mla" if qk_head_dim != v_head_dim else "gqa"]
    keys = kv_len * 0.5 + curve.block * 0.5 if causal else kv_len * 1.0
    keys = np.minimum(keys, window * 1.0) if window else keys
    keys = np.minimum(keys, kv_len)
    blocks = batch * heads * ceil_div(q_len, curve.block)
    sms = _multiprocessors(gpu)
    waves = curve.partial_wave * ceil_div(blocks, sms) + (1.0 - curve.partial_wave) * np.maximum(blocks / sms, 1.0)
    rate = peak(gpu, "bf16" if precision not in ("fp32", "fp16") else precision) / sms * curve.efficiency(qk_head_dim)
    compute = waves * (keys + curve.half_length) * (2.0 * curve.block * (qk_head_dim + v_head_dim) / rate)
    moved = 2.0 * batch * (q_len * heads * (qk_head_dim + v_head_dim) + kv_len * kv_heads * (qk_head_dim + v_head_dim))
    seconds = curve.launch_s + np.maximum(compute, moved / (gpu.hbm.value * curve.memory))
    return seconds * curve.correction(batch * heads, q_len) if curve.correction else seconds


def stream_seconds(bytes_: Floats, *, gpu: Gpu, calibration: Calibration, kernels: Ints = 1) -> Floats:
    """Return the seconds of memory-bound work: bytes over the achieved HBM bandwidth, and a launch for each kernel."""
    rate = gpu.hbm.value * calibration["memory_bandwidth_efficiency"]
    return bytes_ / rate + kernels * calibration["kernel_launch_s"]
