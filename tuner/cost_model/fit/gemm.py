"""Curves of matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.arrays import ceil_div
from tuner.cost_model.curves import Fit, GemmCurve, Grid, Tile
from tuner.cost_model.fit.lattice import Term, corrections, folds, fraction, grid, minimise, positive, round4
from tuner.cost_model.fit.tables import SOURCE, Table, errors, find_gpu
from tuner.cost_model.roofline import (
    ALIGNED,
    ELEMENT_BYTES,
    WAVE_TILE,
    achievable_peak,
    corrected,
    multiprocessors,
    products_seconds,
    watts_per_teraflop,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PRECISION_OF = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-blockwise", "nvfp4": "nvfp4"}

# Tile shapes (m, n, splits of k) to choose from; shapes of one size share their efficiency.
MENUS = (
    ((128, 128, 1), (64, 64, 1), (128, 128, 4)),
    ((128, 256, 1), (128, 128, 1), (128, 128, 2), (128, 128, 6)),
)
AXES = (
    (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32768.0),
    (256.0, 512.0, 1024.0, 1536.0, 2048.0, 3072.0, 4096.0, 6144.0, 8192.0, 12288.0, 16384.0, 65536.0),
    (128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0),
)
UNALIGNED_AXES = (
    (64.0, 128.0, 256.0, 512.0, 1024.0, 1536.0, 2048.0, 3072.0, 4096.0),
    (256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0),
    (128.0, 512.0, 2048.0, 8192.0, 65536.0),
)
# Dense where one wave becomes two or three: there a library's choice of tile shows most.
WAVES_AXES = (
    (
        *(0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.05, 1.2, 1.4, 1.6, 1.8, 1.95, 2.05, 2.25, 2.5, 2.75, 2.95, 3.05, 3.3, 3.65),
        *(3.95, 4.05, 4.5, 4.95, 5.1, 5.9, 6.1, 7.0, 8.0, 10.0, 14.0, 20.0, 40.0, 100.0),
    ),
    (128.0, 1024.0, 4096.0, 16384.0, 65536.0),
)
_SMOOTH = 0.3
POWER_AXIS = (0.45, 0.56, 0.71, 1.28)  # watts per dense bf16 TFLOP/s: B200, GB300, H100, A100
SCORED_M = 256
_SMALLEST_M = 64
_BASE_ROWS = 2500


def select(table: Table, dtype: str) -> Table:
    """Return the rows of one dtype that the curve is fitted to."""
    return table.where((table["gemm_dtype"] == dtype) & (table["m"] >= _SMALLEST_M))


def predict(curve: GemmCurve, table: Table, dtype: str) -> Any:
    """Return the curve's seconds for the rows of `table`, as roofline.gemm_seconds has them."""
    gpu = find_gpu(table.gpu)
    m, n, k = table["m"], table["n"], table["k"]
    rate = achievable_peak(gpu, table.precision or PRECISION_OF[dtype], curve)
    element = 4.0 if table.precision == "fp32" else ELEMENT_BYTES[dtype]
    seconds = products_seconds(m, n, k, 1, curve=curve, rate=rate, bandwidth=gpu.hbm.value, sms=multiprocessors(gpu), element=element)
    return corrected(seconds, m, n, k, curve=curve, sms=multiprocessors(gpu))


def _curve(x: Any, menu: Sequence[tuple[int, int, int]], power: Grid | None) -> GemmCurve:
    """Return the curve of a vector of unbounded parameters."""
    sizes = sorted({(m, n) for m, n, _ in menu})
    efficiency = fraction(x[5 : 5 + len(sizes)])
    tiles = tuple(Tile(m=m, n=n, splits=s, efficiency=float(efficiency[sizes.index((m, n))])) for m, n, s in menu)
    if power is None:
        steps = np.concatenate([x[5 + len(sizes) :], [0.0]])
        if len(steps) > 1:
            # Non-decreasing in power, and 1 at the top of the axis.
            power = grid([POWER_AXIS], np.exp(-np.cumsum(np.abs(steps)[::-1])[::-1]), digits=17)
    return GemmCurve(
        launch_s=float(min(positive(x[0]), 1.0)),
        prologue_k=float(min(positive(x[1]), 1e4)),
        partial_wave=float(fraction(x[2])),
        memory=float(np.clip(fraction(x[3]), 1e-3, 1.0)),
        reduction=float(min(positive(x[4]), 50.0)),
        tiles=tiles,
        power=power,
        fit=Fit(source=SOURCE),
    )


def base_curve(tables: Sequence[Table], dtype: str, menu: Sequence[tuple[int, int, int]], power: Grid | None, *, pooled: bool) -> GemmCurve:
    """Return the curve without correction that is nearest to the tables (evenly thinned rows, equal weight for each table)."""
    thin = [t.where(np.arange(len(t)) % max(1, len(t) * len(tables) // _BASE_ROWS) == 0) for t in tables]
    logs = [np.log(t["seconds"]) for t in thin]
    weights = [np.where(t["m"] >= SCORED_M, 1.0, 0.3) for t in thin]

    def residuals(x: Any) -> Any:
        curve = _curve(x, menu, power)
        pairs = zip(thin, logs, weights, strict=True)
        return np.concatenate([w * (np.log(predict(curve, t, dtype)) - log) for t, log, w in pairs])

    start = [np.log(3e-6), np.log(100.0), 0.0, 1.0, 0.0, *[1.4] * len({(m, n) for m, n, _ in menu})]
    return _curve(minimise(residuals, start + [0.05] * (len(POWER_AXIS) - 1) * pooled), menu, power)


def _corrected(curve: GemmCurve, tables: Sequence[Table], dtype: str) -> GemmCurve:
    logs = np.concatenate([np.log(t["seconds"] / predict(curve, t, dtype)) for t in tables])
    columns = [np.concatenate([t[name] for t in tables]) for name in ("m", "n", "k")]
    tiles = [ceil_div(t["m"], WAVE_TILE) * ceil_div(t["n"], WAVE_TILE) / multiprocessors(find_gpu(t.gpu)) for t in tables]
    terms = [
        Term(AXES, columns, _SMOOTH),
        Term(WAVES_AXES, [np.concatenate(tiles), columns[2]], _SMOOTH),
        Term(UNALIGNED_AXES, columns, _SMOOTH, columns[0] % ALIGNED != 0),
    ]
    made = corrections(terms, logs, weight=np.where(columns[0] >= SCORED_M, 1.0, 0.5))
    return curve.model_copy(update=dict(zip(("correction", "waves", "unaligned"), made, strict=True)))


def _fitted(tables: Sequence[Table], dtype: str, menu: Sequence[tuple[int, int, int]], power: Grid | None, *, pooled: bool) -> GemmCurve:
    return _corrected(_rounded(base_curve(tables, dtype, menu, power, pooled=pooled)), tables, dtype)


def _scored(curve: GemmCurve, table: Table, dtype: str) -> tuple[Any, Any]:
    rows = table.where(table["m"] >= SCORED_M)
    return predict(curve, rows, dtype), rows["seconds"]


def fit_gpu(table: Table, dtype: str, power: Grid | None, *, scored: bool = True) -> GemmCurve:
    """Return the curve of one GPU, with its error on (n, k) pairs left out where it is to be `scored`."""
    gpu = find_gpu(table.gpu)
    watts = watts_per_teraflop(gpu)
    own = grid([POWER_AXIS], power.table / power(watts), digits=17) if power and watts else None
    if not scored:
        return _best([table], dtype, own)
    part = folds(table["n"], table["k"])
    pairs = [_scored(_best([table.where(part != i)], dtype, own), table.where(part == i), dtype) for i in range(4)]
    median, p90 = errors(np.concatenate([p for p, _ in pairs]), np.concatenate([m for _, m in pairs]))
    curve = _best([table], dtype, own)
    inside = errors(*_scored(curve, table, dtype))
    fit = Fit(
        source=SOURCE,
        n=int((table["m"] >= SCORED_M).sum()),
        median=round4(inside[0]),
        p90=round4(inside[1]),
        held_out="the (n, k) pairs, a quarter at a time",
        held_out_median=round4(median),
        held_out_p90=round4(p90),
    )
    return curve.model_copy(update={"fit": fit})


def _best(tables: Sequence[Table], dtype: str, power: Grid | None) -> GemmCurve:
    """Return the curve with the menu of tiles that is nearest before any factor over sizes."""
    bases = [base_curve(tables, dtype, menu, power, pooled=False) for menu in MENUS]

    def error(curve: GemmCurve) -> float:
        median, p90 = errors(*_scored(curve, tables[0], dtype))
        return median + 0.2 * p90

    return _corrected(_rounded(min(bases, key=error)), tables, dtype)


def fit_pooled(tables: Sequence[Table], dtype: str, *, scored: bool = True) -> GemmCurve:
    """Return the curve of all GPUs together; its held-out error is that of each GPU by the others."""
    pooled = len(tables) > 3
    curve = _fitted(tables, dtype, MENUS[0], None, pooled=pooled)
    inside = [_scored(curve, t, dtype) for t in tables]
    left = [(t, [other for other in tables if other is not t]) for t in tables] if scored and len(tables) > 1 else []
    outside = [_scored(_fitted(rest, dtype, MENUS[0], None, pooled=pooled), t, dtype) for t, rest in left]
    fit = _pooled_fit(inside, outside)
    return curve.model_copy(update={"fit": fit})


def _pooled_fit(inside: Sequence[tuple[Any, Any]], outside: Sequence[tuple[Any, Any]]) -> Fit:
    median, p90 = errors(*(np.concatenate(side) for side in zip(*inside, strict=True)))
    fit = {"source": SOURCE, "n": sum(len(m) for _, m in inside), "median": round4(median), "p90": round4(p90)}
    if outside:
        median, p90 = errors(*(np.concatenate(side) for side in zip(*outside, strict=True)))
        fit |= {"held_out": "each GPU in turn", "held_out_median": round4(median), "held_out_p90": round4(p90)}
    return Fit(**fit)


def _rounded(curve: GemmCurve) -> GemmCurve:
    """Return the curve with four digits in each number, so that the written file is what was scored."""
    tiles = tuple(tile.model_copy(update={"efficiency": round4(tile.efficiency)}) for tile in curve.tiles)
    numbers = {name: round4(getattr(curve, name)) for name in ("launch_s", "prologue_k", "partial_wave", "memory", "reduction")}
    power = grid(curve.power.axes, curve.power.table) if curve.power else None
    return curve.model_copy(update={"tiles": tiles, "power": power, **numbers})
