"""Curves of fused attention, forward: grouped-query (gqa) and multi-head latent (mla)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.curves import AttentionCurve, Fit
from tuner.cost_model.fit.lattice import Term, corrections, folds, fraction, grid, minimise, positive, round4
from tuner.cost_model.fit.tables import SOURCE, Table, errors, find_gpu
from tuner.cost_model.roofline import flash_seconds, multiprocessors, peak

if TYPE_CHECKING:
    from collections.abc import Sequence

MLA_QK, MLA_V = 192, 128
BLOCKS = (64, 128, 256)
TYPICAL_DIMENSIONS = (64.0, 128.0, 192.0, 256.0, 512.0)
HEADS_AXIS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
LENGTH_AXIS = (512.0, 1024.0, 1536.0, 2048.0, 3072.0, 4096.0, 8192.0, 16384.0)
SHARING_AXIS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 96.0)
SMALL_AXES = ((1.0, 4.0, 16.0, 64.0, 256.0, 2048.0), (512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0))
PROMPTS_AXES = ((512.0, 2048.0, 8192.0, 16384.0, 32768.0, 65536.0), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0))
DIMENSIONS = (64.0, 128.0, 256.0)
_BASE_ROWS = 2500
_OUTLIER = 0.1  # kernels of several libraries differ more here than in products


def gqa(table: Table) -> Table:
    """Return the columns of a grouped-query table."""
    columns = {
        "batch": table["batch_size"],
        "length": table["isl"],
        "heads": table["num_heads"],
        "kv_heads": table["num_key_value_heads"],
        "qk": table["head_dim"],
        "v": table["head_dim"],
        "seconds": table["seconds"],
        "median": table["median"],
    }
    return Table(operator=table.operator, gpu=table.gpu, columns=columns)


def mla(table: Table) -> Table:
    """Return the columns of a multi-head latent table: num_heads are those of one GPU, each with keys of its own."""
    ones = np.ones(len(table), dtype=int)
    columns = {
        "batch": table["batch_size"],
        "length": table["isl"],
        "heads": table["num_heads"],
        "kv_heads": table["num_heads"],
        "qk": ones * MLA_QK,
        "v": ones * MLA_V,
        "seconds": table["seconds"],
        "median": table["median"],
    }
    return Table(operator=table.operator, gpu=table.gpu, columns=columns)


def predict(curve: AttentionCurve, table: Table) -> Any:
    """Return the curve's seconds for the rows of gqa() or mla(), as roofline.attention_seconds has them."""
    gpu = find_gpu(table.gpu)
    return flash_seconds(
        table["batch"],
        table["length"],
        table["length"],
        table["heads"],
        table["kv_heads"],
        table["qk"],
        table["v"],
        causal=True,
        window=0,
        curve=curve,
        rate=peak(gpu, table.precision or "bf16"),
        bandwidth=gpu.hbm.value,
        sms=multiprocessors(gpu),
    )


def predict_median(curve: AttentionCurve, table: Table) -> Any:
    """Return what the median of the tables' kernels takes by the curve."""
    seconds = predict(curve, table)
    if curve.typical:
        seconds = seconds * curve.typical(table["batch"] * table["heads"], table["length"], table["qk"])
    return seconds * curve.prompts(table["batch"] * table["length"], table["heads"]) if curve.prompts else seconds


def _curve(x: Any, block: int, dimensions: Sequence[float]) -> AttentionCurve:
    size = len(dimensions)
    axis = tuple(dimensions) if size > 1 else (dimensions[0], dimensions[0] + 1.0)
    spread = 1 if size > 1 else 2
    return AttentionCurve(
        launch_s=float(min(positive(x[0]), 1.0)),
        partial_wave=float(fraction(x[1])),
        memory=float(np.clip(fraction(x[2]), 1e-3, 1.0)),
        efficiency=grid([axis], np.repeat(fraction(x[3 : 3 + size]), spread), digits=17),
        half_length=grid([axis], np.repeat(positive(x[3 + size : 3 + 2 * size]), spread), digits=17),
        block=block,
        fit=Fit(source=SOURCE),
    )


def _fitted(tables: Sequence[Table], block: int) -> AttentionCurve:
    """Return the curve of the head dimensions that kernels are tuned for, and what makes of it the median of all rows."""
    curve = tuned_curve([t.where(tuned) if (tuned := _is_tuned(t)).any() else t for t in tables], block)
    left = np.concatenate([np.log(t["median"] / predict(curve, t)) for t in tables])
    columns = _columns(tables)
    at = [columns["chains"], columns["length"], columns["qk"]]
    if not _is_mla(tables):
        # Head dimensions without a tuned kernel are off by a level each, which smoothness across dimensions would blur.
        level = {d: float(np.median(left[at[2] == d])) if (at[2] == d).any() else 0.0 for d in TYPICAL_DIMENSIONS}
        levels = np.array([level[d] for d in TYPICAL_DIMENSIONS])
        found = corrections([Term((*SMALL_AXES, TYPICAL_DIMENSIONS), at, 1.0)], left - np.interp(at[2], TYPICAL_DIMENSIONS, levels))[0]
        return curve.model_copy(update={"typical": grid(found.axes, found.table * np.exp(levels))})
    terms = [Term((*SMALL_AXES, curve.efficiency.axes[0]), at, 1.0), Term(PROMPTS_AXES, [columns["tokens"], columns["heads"]], 1.0)]
    typical, prompts = corrections(terms, left, most=3.0)
    return curve.model_copy(update={"typical": typical, "prompts": prompts})


def _is_mla(tables: Sequence[Table]) -> bool:
    return all(bool((t["qk"] != t["v"]).all()) for t in tables)


def _columns(tables: Sequence[Table]) -> dict[str, Any]:
    found = {name: np.concatenate([t[name] for t in tables]) for name in ("batch", "length", "heads", "kv_heads", "qk")}
    shared = found["heads"] / found["kv_heads"]
    return {**found, "chains": found["batch"] * found["heads"], "tokens": found["batch"] * found["length"], "shared": shared}


def _is_tuned(table: Table) -> Any:
    return np.isin(table["qk"], DIMENSIONS) | (table["qk"] != table["v"])


def tuned_curve(tables: Sequence[Table], block: int) -> AttentionCurve:
    """Return the curve of rows that their kernels are tuned for, blocks of `block` queries."""
    dimensions = tuple(sorted({float(d) for t in tables for d in np.unique(t["qk"])}))
    thin = [t.where(np.arange(len(t)) % max(1, len(t) * len(tables) // _BASE_ROWS) == 0) for t in tables]
    logs = [np.log(t["seconds"]) for t in thin]

    def residuals(x: Any) -> Any:
        curve = _curve(x, block, dimensions)
        return np.concatenate([np.log(predict(curve, t)) - log for t, log in zip(thin, logs, strict=True)])

    start = [np.log(1e-5), 0.0, 1.0, *[0.5] * len(dimensions), *[np.log(300.0)] * len(dimensions)]
    curve = _rounded(_curve(minimise(residuals, start, _OUTLIER), block, dimensions))
    left = np.concatenate([np.log(t["seconds"] / predict(curve, t)) for t in tables])
    columns = _columns(tables)
    last = curve.efficiency.axes[0]
    if _is_mla(tables):
        at = [columns["chains"], columns["length"], columns["qk"]]
        return curve.model_copy(update={"correction": corrections([Term((*SMALL_AXES, last), at, 1.0)], left)[0]})
    terms = [
        Term((HEADS_AXIS, LENGTH_AXIS, last), [columns["chains"], columns["length"], columns["qk"]], 0.3),
        Term((SHARING_AXIS, SMALL_AXES[1], last), [columns["shared"], columns["length"], columns["qk"]], 1.0),
    ]
    made = corrections(terms, left)
    return curve.model_copy(update={"correction": made[0], "sharing": made[1]})


def fit_gpu(table: Table) -> AttentionCurve:
    """Return the curve of one GPU. Of the block sizes the one with the least held-out error is taken."""
    part = folds(table["heads"], table["kv_heads"])
    best: tuple[float, AttentionCurve] | None = None
    for block in BLOCKS:
        sides = [(_fitted([table.where(part != i)], block), table.where(part == i)) for i in range(4)]
        outside = errors(np.concatenate([predict_median(c, t) for c, t in sides]), np.concatenate([t["median"] for _, t in sides]))
        if best is None or outside[0] + 0.2 * outside[1] < best[0]:
            curve = _fitted([table], block)
            inside = errors(predict_median(curve, table), table["median"])
            fit = _fit(len(table), inside, outside, "the (heads, KV heads) pairs, a quarter at a time")
            best = (outside[0] + 0.2 * outside[1], curve.model_copy(update={"fit": fit}))
    assert best is not None  # noqa: S101 - BLOCKS is not empty
    return best[1]


def fit_pooled(tables: Sequence[Table]) -> AttentionCurve:
    """Return the curve of all GPUs together; its held-out error is that of each GPU by the others."""
    curve = _fitted(tables, 128)
    inside = errors(np.concatenate([predict_median(curve, t) for t in tables]), np.concatenate([t["median"] for t in tables]))
    outside = None
    if len(tables) > 1:
        others = [(_fitted([other for other in tables if other is not t], 128), t) for t in tables]
        outside = errors(np.concatenate([predict_median(c, t) for c, t in others]), np.concatenate([t["median"] for t in tables]))
    return curve.model_copy(update={"fit": _fit(sum(len(t) for t in tables), inside, outside, "each GPU in turn")})


def _fit(n: int, inside: tuple[float, float], outside: tuple[float, float] | None, which: str) -> Fit:
    fit = Fit(source=SOURCE, n=n, median=round4(inside[0]), p90=round4(inside[1]))
    if outside is None:
        return fit
    return fit.model_copy(update={"held_out": which, "held_out_median": round4(outside[0]), "held_out_p90": round4(outside[1])})


def _rounded(curve: AttentionCurve) -> AttentionCurve:
    numbers = {name: round4(getattr(curve, name)) for name in ("launch_s", "partial_wave", "memory")}
    grids = {name: grid(getattr(curve, name).axes, getattr(curve, name).table) for name in ("efficiency", "half_length")}
    return curve.model_copy(update={**numbers, **grids})
