"""Curves of grouped products, from measured MoE operators: permutation, both products and activation of the local experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.curves import Fit, GemmCurve, GroupedCurve
from tuner.cost_model.fit.gemm import PRECISION_OF
from tuner.cost_model.fit.lattice import Term, correction, corrections, folds, grid, minimise, positive, round4
from tuner.cost_model.fit.tables import SOURCE, Table, errors, find_gpu
from tuner.cost_model.roofline import ELEMENT_BYTES, achievable_peak, multiprocessors, products_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS_AXIS = (4.0, 16.0, 64.0, 256.0, 1024.0, 8192.0)
GROUPS_AXIS = (1.0, 4.0, 16.0, 64.0, 256.0)
_BANDWIDTH = 0.8  # share of HBM bandwidth of the permutations
_OUTLIER = 0.1
_FEW_MODELS = 5.0  # a table has so few models that their differences should move the factors little
_MOST_P90 = 0.6  # held-out error beyond which a GPU's own curve says less than the pooled one


def select(table: Table, dtype: str) -> Table:
    """Return the local sizes of one dtype: rows of each expert, experts, hidden size, inner size of this GPU, tokens.

    The tables do not say it, but the experts with hidden size 2688 or with 22 of them for a token have no gate (Nemotron 3).
    """
    t = table.where(table["moe_dtype"] == dtype)
    columns = {
        "rows": np.maximum(t["num_tokens"] * t["topk"] / t["num_experts"], 1.0),
        "groups": np.maximum(t["num_experts"] // t["moe_ep_size"], 1),
        "hidden": t["hidden_size"],
        "inner": np.maximum(t["inter_size"] // t["moe_tp_size"], 1),
        "tokens": t["num_tokens"],
        "model": t["hidden_size"] * 1e9 + t["inter_size"] * 1e4 + t["num_experts"],
        "gated": (t["hidden_size"] != 2688) & (t["topk"] != 22),
        "seconds": t["seconds"],
        "median": t["median"],
    }
    return Table(operator=table.operator, gpu=table.gpu, columns=columns)


def predict(curve: GroupedCurve, gemm: GemmCurve, table: Table, dtype: str) -> Any:
    """Return the seconds of the measured operator: first product (2 inner wide with a gate), second product, permutation, activation.

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
    first = products_seconds(rows, np.where(table["gated"], 2, 1) * inner, hidden, groups, **shared)
    products = first + products_seconds(rows, hidden, inner, groups, **shared)
    moved = 2.0 * (curve.routing_passes * table["tokens"] * hidden + rows * groups * (4.0 * hidden + 3.0 * inner))
    return curve.routing_s + products * curve.factor(rows, groups) + moved / (_BANDWIDTH * gpu.hbm.value)


def predict_median(curve: GroupedCurve, gemm: GemmCurve, table: Table, dtype: str) -> Any:
    """Return what the median of the tables' kernels takes by the curve."""
    seconds = predict(curve, gemm, table, dtype)
    if curve.typical:
        seconds = seconds * curve.typical(table["rows"], table["groups"])
    return seconds * np.where(table["gated"], 1.0, curve.ungated(table["rows"])) if curve.ungated else seconds


def _gated(tables: Sequence[Table]) -> list[Table]:
    return [t.where(t["gated"]) if t["gated"].any() else t for t in tables]


def _typical(curve: GroupedCurve, tables: Sequence[Table], gemms: Sequence[GemmCurve], dtype: str) -> GroupedCurve:
    """Return the curve with the factors that lead to the median of all rows."""
    logs = np.concatenate([np.log(t["median"] / predict(curve, g, t, dtype)) for t, g in zip(tables, gemms, strict=True)])
    rows, groups, gated = (np.concatenate([t[name] for t in tables]) for name in ("rows", "groups", "gated"))
    level = float(np.median(logs[gated] if gated.any() else logs))
    terms = [Term((ROWS_AXIS, GROUPS_AXIS), [rows, groups], 1.0), Term((ROWS_AXIS,), [rows], 1.0, ~gated)]
    typical, ungated = corrections(terms, logs - level, ridge=_FEW_MODELS)
    return curve.model_copy(update={"typical": grid(typical.axes, typical.table * np.exp(level)), "ungated": ungated})


def _fitted(tables: Sequence[Table], gemms: Sequence[GemmCurve], dtype: str) -> GroupedCurve:
    """Return the curve of the fastest kernels of experts with a gate."""
    tables = _gated(tables)
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


def fit_gpu(table: Table, gemm: GemmCurve, dtype: str, pooled: GroupedCurve | None = None) -> GroupedCurve:
    """Return the curve of one GPU, on top of its curve for single products. Where its own rows of some models say too little of
    the others, the fastest kernels are as in `pooled`.
    """
    part = folds(table["model"])
    sides = [(table.where(part != i), table.where(part == i)) for i in range(4) if (part == i).any()]
    own = [_fitted([rest], [gemm], dtype) for rest, _ in sides]
    if pooled is not None:
        outside = [_gated([t])[0] for _, t in sides]
        apart = [predict(c, gemm, t, dtype) for c, t in zip(own, outside, strict=True)]
        if errors(np.concatenate(apart), np.concatenate([t["seconds"] for t in outside]))[1] > _MOST_P90:
            own = [pooled] * len(sides)
    whole = [_typical(c, [rest], [gemm], dtype) for c, (rest, _) in zip(own, sides, strict=True)]
    predicted = np.concatenate([predict_median(c, gemm, t, dtype) for c, (_, t) in zip(whole, sides, strict=True)])
    error = errors(predicted, np.concatenate([t["median"] for _, t in sides]))
    curve = _typical(pooled if pooled is not None and own[0] is pooled else _fitted([table], [gemm], dtype), [table], [gemm], dtype)
    return _scored(curve, [table], [gemm], dtype, error, "the models (hidden, inner, experts), a quarter at a time")


def fit_pooled(tables: Sequence[Table], gemms: Sequence[GemmCurve], dtype: str) -> GroupedCurve:
    """Return the curve of all GPUs together; its held-out error is that of each GPU by the others."""
    outside = None
    if len(tables) > 1:
        kept = [[i for i in range(len(tables)) if i != left] for left in range(len(tables))]
        curves = [_both([tables[i] for i in keep], [gemms[i] for i in keep], dtype) for keep in kept]
        outside = errors(
            np.concatenate([predict_median(c, g, t, dtype) for c, g, t in zip(curves, gemms, tables, strict=True)]),
            np.concatenate([t["median"] for t in tables]),
        )
    return _scored(_both(tables, gemms, dtype), tables, gemms, dtype, outside, "each GPU in turn")


def _both(tables: Sequence[Table], gemms: Sequence[GemmCurve], dtype: str) -> GroupedCurve:
    return _typical(_fitted(tables, gemms, dtype), tables, gemms, dtype)


def _scored(
    curve: GroupedCurve,
    tables: Sequence[Table],
    gemms: Sequence[GemmCurve],
    dtype: str,
    outside: tuple[float, float] | None,
    which: str,
) -> GroupedCurve:
    predicted = np.concatenate([predict_median(curve, g, t, dtype) for t, g in zip(tables, gemms, strict=True)])
    inside = errors(predicted, np.concatenate([t["median"] for t in tables]))
    fit = {"source": SOURCE, "n": sum(len(t) for t in tables), "median": round4(inside[0]), "p90": round4(inside[1])}
    if outside is not None:
        fit |= {"held_out": which, "held_out_median": round4(outside[0]), "held_out_p90": round4(outside[1])}
    return curve.model_copy(update={"fit": Fit(**fit)})
