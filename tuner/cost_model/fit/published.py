"""Levels that were published for accelerators without a table: the pooled curve scaled to the best product seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tuner.cost_model.curves import Fit, GemmCurve
from tuner.cost_model.fit.gemm import PRECISION_OF
from tuner.cost_model.fit.lattice import round4
from tuner.cost_model.roofline import ELEMENT_BYTES, achievable_peak, multiprocessors, products_seconds

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
_SIZES = np.array([2048, 4096, 8192, 16384])


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
        corrected = seconds * trial.correction(m, n, k) if trial.correction else seconds
        return float((2.0 * m * n * k / corrected).max() / 1e12)

    for _ in range(4):
        factor = best / rate(curve)
        tiles = tuple(t.model_copy(update={"efficiency": round4(min(t.efficiency * factor, 1.0))}) for t in curve.tiles)
        curve = curve.model_copy(update={"tiles": tiles})
    return curve.model_copy(update={"fit": Fit(source=f"pooled curve at the published best of {best:g} TFLOP/s: {source}")})
