"""Curves of grouped products, from measured MoE operators: permutation, both products and activation of the local experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.curves import Fit, GemmCurve, GroupedCurve
from tuner.cost_model.fit.gemm import PRECISION_OF
from tuner.cost_model.fit.lattice import correction, folds, grid, minimise, positive, round4
from tuner.cost_model.fit.tables import SOURCE, Table, errors, find_gpu
from tuner.cost_model.roofline import ELEMENT_BYTES, achievable_peak, multiprocessors, products_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS_AXIS = (4.0, 16.0, 64.0, 256.0, 1024.0, 8192.0)
GROUPS_AXIS = (1.0, 4.0, 16.0, 64.0, 256.0)
_BANDWIDTH = 0.8  # share of HBM bandwidth of the permutations
_OUTLIER = 0.1


def select(table: Table, dtype: str) -> Table:
    """Return the local sizes of one dtype: rows of each expert, experts, hidden size, inner size of this GPU, tokens.

    The Nemotron shapes (hidden 2688, or 22 experts a token) are left out: their experts have no gate.
    """
    t = table.where((table["moe_dtype"] == dtype) & (table["hidden_size"] != 2688) & (table["topk"] != 22))
    columns = {
        "rows": np.maximum(t["num_tokens"] * t["topk"] / t["num_experts"], 1.0),
        "groups": np.maximum(t["num_experts"] // t["moe_ep_size"], 1),
        "hidden": t["hidden_size"],
        "inner": np.maximum(t["inter_size"] // t["moe_tp_size"], 1),
        "tokens": t["num_tokens"],
        "model": t["hidden_size"] * 1e9 + t["inter_size"] * 1e4 + t["num_experts"],
        "seconds": t["seconds"],
    }
    return Table(operator=table.operator, gpu=table.gpu, columns=columns)


def predict(curve: GroupedCurve, gemm: GemmCurve, table: Table, dtype: str) -> Any:
    """Return the seconds of the measured operator: gated first product (2 inner wide), second product, permutation, activation.

    Bytes beside the products, in 16 bits: routing_passes over the tokens' hidden states, each routed row's hidden state
    written and read twice, and 3 inner for its activation.
    """
    gpu = find_gpu(table.gpu)
    shared: dict[str, Any] = {
        "curve": gemm,
        "rate": achievable_peak(gpu, PRECISION_OF[dtype], gemm),
        "bandwidth": gpu.hbm.value,
        "sms": multiprocessors(gpu),
        "element": ELEMENT_BYTES[dtype],
    }
    rows, groups, hidden, inner = table["rows"], table["groups"], table["hidden"], table["inner"]
    products = products_seconds(rows, 2 * inner, hidden, groups, **shared) + products_seconds(rows, hidden, inner, groups, **shared)
    moved = 2.0 * (curve.routing_passes * table["tokens"] * hidden + rows * groups * (4.0 * hidden + 3.0 * inner))
    return curve.routing_s + products * curve.factor(rows, groups) + moved / (_BANDWIDTH * gpu.hbm.value)


def _fitted(tables: Sequence[Table], gemms: Sequence[GemmCurve], dtype: str) -> GroupedCurve:
    logs = [np.log(t["seconds"]) for t in tables]
    axes = (ROWS_AXIS, GROUPS_AXIS)
    flat = np.ones(len(ROWS_AXIS) * len(GROUPS_AXIS))

    def curve(x: Any, factor: Any) -> GroupedCurve:
        seconds, passes = round4(min(positive(x[0]), 1.0)), round4(min(positive(x[1]), 100.0))
        return GroupedCurve(factor=factor, routing_s=seconds, routing_passes=passes, fit=Fit(source=SOURCE))

    def trial(x: Any) -> GroupedCurve:
        level = grid(axes, flat * positive(x[2]), digits=17)
        return GroupedCurve(
            factor=level,
            routing_s=float(min(positive(x[0]), 1.0)),
            routing_passes=float(min(positive(x[1]), 100.0)),
            fit=Fit(source=SOURCE),
        )

    def residuals(x: Any) -> Any:
        parts = zip(tables, gemms, logs, strict=True)
        return np.concatenate([np.log(predict(trial(x), gemm, t, dtype)) - log for t, gemm, log in parts])

    x = minimise(residuals, [np.log(1e-5), 0.0, 0.2], _OUTLIER)
    # The factor acts on the products alone: what the rest leaves of each measured time, over the products.
    level = curve(x, grid(axes, flat))
    bare = level.model_copy(update={"factor": grid(axes, flat * 1e-6)})
    beside = np.concatenate([predict(bare, g, t, dtype) for t, g in zip(tables, gemms, strict=True)])
    products = np.concatenate([predict(level, g, t, dtype) for t, g in zip(tables, gemms, strict=True)]) - beside
    measured = np.concatenate([t["seconds"] for t in tables])
    centre = np.log(positive(x[2]))
    share = products * positive(x[2]) / (products * positive(x[2]) + beside)
    logs_left = np.clip(np.log(np.maximum(measured - beside, 0.05 * measured) / products) - centre, -1.0, 1.0)
    columns = [np.concatenate([t[name] for t in tables]) for name in ("rows", "groups")]
    shape = correction(axes, columns, logs_left, smooth=1.0, weight=share**2)
    return curve(x, grid(axes, shape.table * positive(x[2])))


def fit_gpu(table: Table, gemm: GemmCurve, dtype: str) -> GroupedCurve:
    """Return the curve of one GPU, on top of its curve for single products."""
    part = folds(table["model"])
    sides = [(_fitted([table.where(part != i)], [gemm], dtype), table.where(part == i)) for i in range(4) if (part == i).any()]
    outside = errors(np.concatenate([predict(c, gemm, t, dtype) for c, t in sides]), np.concatenate([t["seconds"] for _, t in sides]))
    curve = _fitted([table], [gemm], dtype)
    return _scored(curve, [table], [gemm], dtype, outside, "the models (hidden, inner, experts), a quarter at a time")


def fit_pooled(tables: Sequence[Table], gemms: Sequence[GemmCurve], dtype: str) -> GroupedCurve:
    """Return the curve of all GPUs together; its held-out error is that of each GPU by the others."""
    outside = None
    if len(tables) > 1:
        kept = [[i for i in range(len(tables)) if i != left] for left in range(len(tables))]
        curves = [_fitted([tables[i] for i in keep], [gemms[i] for i in keep], dtype) for keep in kept]
        outside = errors(
            np.concatenate([predict(c, g, t, dtype) for c, g, t in zip(curves, gemms, tables, strict=True)]),
            np.concatenate([t["seconds"] for t in tables]),
        )
    return _scored(_fitted(tables, gemms, dtype), tables, gemms, dtype, outside, "each GPU in turn")


def _scored(
    curve: GroupedCurve,
    tables: Sequence[Table],
    gemms: Sequence[GemmCurve],
    dtype: str,
    outside: tuple[float, float] | None,
    which: str,
) -> GroupedCurve:
    predicted = np.concatenate([predict(curve, g, t, dtype) for t, g in zip(tables, gemms, strict=True)])
    inside = errors(predicted, np.concatenate([t["seconds"] for t in tables]))
    fit = {"source": SOURCE, "n": sum(len(t) for t in tables), "median": round4(inside[0]), "p90": round4(inside[1])}
    if outside is not None:
        fit |= {"held_out": which, "held_out_median": round4(outside[0]), "held_out_p90": round4(outside[1])}
    return curve.model_copy(update={"fit": Fit(**fit)})
