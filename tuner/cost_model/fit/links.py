"""Curves of collectives inside a domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.collectives import PASSES
from tuner.cost_model.curves import CollectiveCurve, Fit
from tuner.cost_model.fit.lattice import OUTLIER, folds, grid, minimise, positive, round4
from tuner.cost_model.fit.tables import SOURCE, Table, errors

if TYPE_CHECKING:
    from collections.abc import Sequence

OP_OF = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all"}
ELEMENT_BYTES = {"half": 2, "int8": 1}
MEMBERS = (2.0, 4.0, 8.0)
LARGEST_DOMAIN = 72.0
BYTES = tuple(float(2**i) for i in (16, 18, 20, 21, 22, 23, 24, 25, 26, 28, 30))
SCORED_BYTES = 1e6
_FEWEST = 6  # rows that say something of a size: the efficiencies between them are smooth
_MONOTONE = 0.998  # room for the four digits that are written


def select(table: Table, op: str) -> Table:
    """Return the rows of one collective with their bytes; message_size counts elements."""
    t = table.where(np.array([OP_OF.get(name) == op for name in table["op_name"]]))
    size = t["message_size"] * np.array([ELEMENT_BYTES.get(name, 2) for name in t["nccl_dtype"]])
    half = t["nccl_dtype"] == "half"
    return Table(operator="nccl", gpu=t.gpu, columns={"members": t["num_gpus"], "bytes": size, "half": half, "seconds": t["seconds"]})


def predict(curve: CollectiveCurve, op: str, table: Table, link: float) -> Any:
    """Return the curve's seconds, as collectives.inner_seconds has them."""
    n, size = table["members"], table["bytes"]
    return curve.latency(n) + PASSES[op] * size * ((n - 1) / n) / (link * curve.efficiency(n, size))


def one_size(table: Table, op: str, link: float, smooth: float = 0.05) -> tuple[float, Any]:
    """Return latency and efficiencies at BYTES of one group size: smooth in the message, half counting more than int8 (which
    the switch cannot reduce). smooth: weight of the efficiencies' second differences beside the rows'.
    """
    members = table["members"][0]
    logs, weight = np.log(table["seconds"]), np.where(table["half"], 1.0, 0.3)
    wire = PASSES[op] * table["bytes"] * ((members - 1) / members) / link
    position = np.interp(table["bytes"], BYTES, np.arange(len(BYTES)))
    low = np.minimum(position.astype(int), len(BYTES) - 2)
    span = np.asarray(BYTES)
    share = (np.clip(table["bytes"], BYTES[0], BYTES[-1]) - span[low]) / (span[low + 1] - span[low])

    def residuals(x: Any) -> Any:
        efficiency = positive(x[1:])
        at = efficiency[low] * (1.0 - share) + efficiency[low + 1] * share
        fit = weight * (np.log(positive(x[0]) + wire / at) - logs)
        return np.concatenate([fit, smooth * np.diff(x[1:], 2)])

    start = [np.log(table["seconds"].min()), *np.log(np.linspace(0.1, 0.75, len(BYTES)))]
    x = minimise(residuals, start, OUTLIER)
    return float(positive(x[0])), positive(x[1:])


def _fitted(tables: Sequence[tuple[Table, float]], op: str) -> CollectiveCurve:
    """Return the curve of one or more (table, link) pairs; sizes that no table has follow from their neighbours."""
    latency, efficiency = [], []
    for members in MEMBERS:
        rows = [(t.where(t["members"] == members), link) for t, link in tables]
        made = [one_size(t, op, link) for t, link in rows if len(t) >= _FEWEST]
        latency.append(np.median([a for a, _ in made]) if made else np.nan)
        efficiency.append(np.median([b for _, b in made], axis=0) if made else np.full(len(BYTES), np.nan))
    return curve_of(np.array(latency), np.array(efficiency))


def curve_of(latency: Any, efficiency: Any) -> CollectiveCurve:
    """Return the curve of latencies and efficiencies at MEMBERS, NaN where unknown: a missing size takes the efficiency of the
    one below and the latency that grows as between the two before. Beyond eight the latency grows by as much for each
    doubling as from four to eight.
    """
    first = int(np.argmax(~np.isnan(latency)))
    latency[:first], efficiency[:first] = latency[first], efficiency[first]
    for i in range(1, len(MEMBERS)):
        if np.isnan(latency[i]):
            latency[i] = latency[i - 1] * (latency[i - 1] / latency[i - 2] if i > 1 else 1.5)
            efficiency[i] = efficiency[i - 1]
    for i in range(1, len(BYTES)):  # more bytes never take less time
        efficiency[:, i] = np.minimum(efficiency[:, i], efficiency[:, i - 1] * (_MONOTONE * BYTES[i] / BYTES[i - 1]))
    last = latency[-1] + max(latency[-1] - latency[-2], 0.0) * np.log2(LARGEST_DOMAIN / MEMBERS[-1])
    return CollectiveCurve(
        latency=grid([(*MEMBERS, LARGEST_DOMAIN)], [*latency, last]),
        efficiency=grid([MEMBERS, BYTES], efficiency),
        fit=Fit(source=SOURCE),
    )


def with_eight(curve: CollectiveCurve, other: CollectiveCurve, note: str) -> CollectiveCurve:
    """Return `curve` with its column of eight members made from another GPU's step from four to eight."""
    latency, efficiency = curve.latency.table[:3].copy(), curve.efficiency.table.copy()
    latency[2] = latency[1] * other.latency.table[2] / other.latency.table[1]
    efficiency[2] = np.minimum(efficiency[1] * other.efficiency.table[2] / other.efficiency.table[1], 1.0)
    fit = curve.fit.model_copy(update={"source": f"{curve.fit.source}; {note}"})
    return curve_of(latency, efficiency).model_copy(update={"fit": fit})


def fit_gpu(table: Table, op: str, link: float) -> CollectiveCurve:
    """Return the curve of one GPU, scored on messages above 1 MB."""
    part = folds(table["members"], table["bytes"], table["half"])
    sides = [(_fitted([(table.where(part != i), link)], op), table.where(part == i)) for i in range(4)]
    large = [(c, t.where(t["bytes"] > SCORED_BYTES)) for c, t in sides]
    outside = errors(np.concatenate([predict(c, op, t, link) for c, t in large]), np.concatenate([t["seconds"] for _, t in large]))
    curve = _fitted([(table, link)], op)
    return _with_fit(curve, [(table, link)], op, outside, "rows by (GPUs, bytes, dtype), a quarter at a time")


def fit_pooled(tables: Sequence[tuple[Table, float]], op: str) -> CollectiveCurve:
    """Return the curve of all GPUs together; its held-out error is that of each GPU by the others."""
    outside = None
    if len(tables) > 1:
        curves = [_fitted([other for other in tables if other is not pair], op) for pair in tables]
        rows = [(t.where(t["bytes"] > SCORED_BYTES), link) for t, link in tables]
        outside = errors(
            np.concatenate([predict(c, op, t, link) for c, (t, link) in zip(curves, rows, strict=True)]),
            np.concatenate([t["seconds"] for t, _ in rows]),
        )
    return _with_fit(_fitted(tables, op), tables, op, outside, "each GPU in turn")


def _with_fit(
    curve: CollectiveCurve, tables: Sequence[tuple[Table, float]], op: str, outside: tuple[float, float] | None, which: str
) -> CollectiveCurve:
    rows = [(t.where(t["bytes"] > SCORED_BYTES), link) for t, link in tables]
    predicted = np.concatenate([predict(curve, op, t, link) for t, link in rows])
    inside = errors(predicted, np.concatenate([t["seconds"] for t, _ in rows]))
    fit = {"source": SOURCE, "n": len(predicted), "median": round4(inside[0]), "p90": round4(inside[1])}
    if outside is not None:
        fit |= {"held_out": which, "held_out_median": round4(outside[0]), "held_out_p90": round4(outside[1])}
    return curve.model_copy(update={"fit": Fit(**fit)})
