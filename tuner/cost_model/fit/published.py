"""Levels that were published for accelerators without a table: the pooled curve scaled to the best product seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.curves import Fit, GemmCurve
from tuner.cost_model.fit.gemm import PRECISION_OF
from tuner.cost_model.fit.lattice import grid, round4
from tuner.cost_model.roofline import ELEMENT_BYTES, achievable_peak, corrected, multiprocessors, products_seconds, watts_per_teraflop

if TYPE_CHECKING:
    from tuner.cluster import Gpu

_MAMF = "stas00/ml-engineering, maximum achievable matmul FLOPS (mean of 100 after 50 warm-up)"
_MAF = "AMD ROCm blog, Measuring Max-Achievable FLOPs part 2 (hipBLASLt, normally distributed data)"

# GPU: dtype: (best TFLOP/s of any shape, source)
BEST: dict[str, dict[str, tuple[float, str]]] = {
    "mi300x": {"bfloat16": (708.0, _MAF), "fp8": (1273.0, _MAF)},
    "mi325x": {"bfloat16": (843.0, _MAF), "fp8": (1519.0, _MAF)},
    "mi355x": {"bfloat16": (1565.0, _MAMF)},
    "gaudi3": {"bfloat16": (1243.0, _MAMF), "fp8": (1289.5, _MAMF)},
    "l40s": {
        "bfloat16": (261.0, "silicon database of ai-dynamo/aiconfigurator, best of all shapes (trtllm 1.3.0rc20)"),
        "fp8": (432.0, "silicon database of ai-dynamo/aiconfigurator, best of all shapes (trtllm 1.3.0rc20)"),
    },
}
# dtype: TFLOP/s of B300 over those of B200 by one library (trtllm 1.3.0rc20) and dtype: the best of all shapes, which runs at
# the card's clocks, and the median of m, n, k >= 4096, which runs at the power limit.
B300_OVER_B200 = {"bfloat16": (1836 / 1693, 1485 / 1471), "fp8": (3376 / 3151, 2492 / 2374)}
# Products longer than this run at the power limit: from 2**40 to 2**41 FLOP GB300's lead over GB200 doubles.
_LIMITED_FLOP = 2.0**40.5
_SIZES = np.array([2048, 4096, 8192, 16384])


def sibling(curve: GemmCurve, ratios: tuple[float, float]) -> GemmCurve:
    """Return the curve of a GPU that is (best, limited) times as fast as the curve's on short products and on long ones."""
    best, limited = ratios
    tiles = tuple(t.model_copy(update={"efficiency": round4(min(t.efficiency * best, 1.0))}) for t in curve.tiles)
    source = f"{curve.fit.source}; {best:.3f} times as fast, long products {limited:.3f} (published distributions)"
    changes: dict[str, Any] = {"tiles": tiles, "fit": Fit(source=source)}
    if curve.correction:
        m, n, k = np.meshgrid(*curve.correction.axes, indexing="ij")
        changes["correction"] = grid(
            curve.correction.axes, curve.correction.table * np.where(2.0 * m * n * k > _LIMITED_FLOP, best / limited, 1.0)
        )
    return curve.model_copy(update=changes)


def at_power(curve: GemmCurve, gpu: Gpu) -> GemmCurve:
    """Return the curve with the factor for power one at the power of `gpu`."""
    watts = watts_per_teraflop(gpu)
    if curve.power is None or watts is None:
        return curve
    return curve.model_copy(update={"power": grid(curve.power.axes, curve.power.table / curve.power(watts))})


def scaled(curve: GemmCurve, gpu: Gpu, dtype: str, best: float, source: str) -> GemmCurve:
    """Return `curve` with tile efficiencies scaled so that its best product over large sizes runs at `best` TFLOP/s."""
    m, n, k = np.meshgrid(_SIZES, _SIZES, _SIZES)

    def rate(trial: GemmCurve) -> float:
        seconds = products_seconds(
            m,
            n,
            k,
            1,
            curve=trial,
            rate=achievable_peak(gpu, PRECISION_OF[dtype], trial),
            bandwidth=gpu.hbm.value,
            sms=multiprocessors(gpu),
            element=ELEMENT_BYTES[dtype],
        )
        seconds = corrected(seconds, m, n, k, curve=trial, sms=multiprocessors(gpu))
        return float((2.0 * m * n * k / seconds).max() / 1e12)

    for _ in range(4):
        factor = best / rate(curve)
        tiles = tuple(t.model_copy(update={"efficiency": round4(min(t.efficiency * factor, 1.0))}) for t in curve.tiles)
        curve = curve.model_copy(update={"tiles": tiles})
    return curve.model_copy(update={"fit": Fit(source=f"pooled curve at the published best of {best:g} TFLOP/s: {source}")})
