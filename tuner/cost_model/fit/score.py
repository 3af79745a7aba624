"""Curves against tables of measured operators: what each row's median of libraries should take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tuner.cost_model.calibration import COLLECTIVES, DTYPES
from tuner.cost_model.fit import attention, experts, gemm, links
from tuner.cost_model.fit.tables import find_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tuner.cost_model.curves import AttentionCurve, CollectiveCurve, GemmCurve, GroupedCurve
    from tuner.cost_model.fit.tables import Table


class Curves(Protocol):
    """What scoring reads of a calibration."""

    @property
    def gemm(self) -> Mapping[str, GemmCurve]: ...  # noqa: D102
    @property
    def grouped(self) -> Mapping[str, GroupedCurve]: ...  # noqa: D102
    @property
    def attention(self) -> Mapping[str, AttentionCurve]: ...  # noqa: D102
    @property
    def collectives(self) -> Mapping[str, CollectiveCurve]: ...  # noqa: D102


def parts(table: Table, curves: Curves) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dtype, predicted, median measured) seconds for each dtype of a table that the curves know.

    Products count from m = SCORED_M, collectives above SCORED_BYTES, all rows of attention and MoE.
    """
    if table.operator == "gemm":
        for dtype in DTYPES:
            rows = table.where((table["gemm_dtype"] == dtype) & (table["m"] >= gemm.SCORED_M))
            if len(rows) and dtype in curves.gemm:
                yield dtype, gemm.predict(curves.gemm[dtype], rows, dtype), rows["median"]
    elif table.operator == "moe_forward":
        for dtype in DTYPES:
            rows = experts.select(table, dtype)
            if len(rows) and dtype in curves.grouped and dtype in curves.gemm:
                yield dtype, experts.predict_median(curves.grouped[dtype], curves.gemm[dtype].plain, rows, dtype), rows["median"]
    elif table.operator == "nccl":
        yield from _collectives(table, curves)
    else:
        kind, columns = ("gqa", attention.gqa) if table.operator == "attention_forward" else ("mla", attention.mla)
        rows = columns(table)
        if len(rows) and kind in curves.attention:
            yield "bfloat16", attention.predict_median(curves.attention[kind], rows), rows["median"]


def _collectives(table: Table, curves: Curves) -> Iterator[tuple[str, Any, Any]]:
    """Yield all collectives of one dtype together."""
    for dtype in links.ELEMENT_BYTES:
        of_dtype = table.where(table["nccl_dtype"] == dtype)
        found = []
        for op in COLLECTIVES:
            rows = links.select(of_dtype, op)
            rows = rows.where(rows["bytes"] > links.SCORED_BYTES)
            if len(rows) and op in curves.collectives:
                found.append((links.predict(curves.collectives[op], op, rows, find_link(table.gpu)), rows["seconds"]))
        if found:
            yield dtype, np.concatenate([p for p, _ in found]), np.concatenate([m for _, m in found])


def dtypes(table: Table) -> set[str]:
    """Return the dtypes that a table has rows of."""
    for name in ("gemm_dtype", "moe_dtype", "nccl_dtype"):
        if name in table.columns:
            return set(table[name].tolist())
    return {"bfloat16"} if len(table) else set()
