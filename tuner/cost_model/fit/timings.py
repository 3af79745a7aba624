"""Efficiency curves from a few dozen timings of one machine: what ships scaled by a level, or a curve of its own where the rows suffice.

The ways that are tried for each kind of operator: the curve that would hold otherwise, the same with one level and one latency fitted to
the rows (held near 1 by a penalty), a curve of the rows alone, and for collectives a latency and a rate. The one that tells held-out
quarters of the rows best is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.collectives import PASSES
from tuner.cost_model.curves import AttentionCurve, CollectiveCurve, Fit, GemmCurve, Grid
from tuner.cost_model.fit import attention, gemm, links
from tuner.cost_model.fit.lattice import Term, corrections, folds, grid, minimise, round4
from tuner.cost_model.fit.tables import Table, errors
from tuner.cost_model.roofline import multiprocessors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cluster import Gpu
    from tuner.timing import Timing

Curve = GemmCurve | AttentionCurve | CollectiveCurve
FEWEST = {"gemm": 24, "attention": 16, "collective": 6}  # rows for a curve of one's own; of collectives, for each number of members
FEW = 4  # rows under which nothing is held out, and a level moves little
FOLDS = 4
SEEN = ((FOLDS - 1) / FOLDS) ** 2  # share of the rows that are left where a way is tried inside a quarter's rest
LEVEL_DOUBT, LATENCY_DOUBT = 1.0, 2.0  # standard deviations of the logarithms of a level and of a latency before any row
NOISE = 0.2  # of one timing, in its logarithm
SMOOTH, STRAIGHT = 0.2, 3.0
MOST_OFF = 3.0
CLEARLY = 0.95
COARSE = ((64.0, 256.0, 1024.0, 4096.0, 16384.0),) * 3
SMALL_MENU = ((16, 64, 1), (64, 64, 1), (128, 128, 1))  # of a processor that computes one small tile at a time
ALL = (1.0, 1e12)


def _nothing(_: Table) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An operator's rows and how a curve tells them. own: fits a curve of its own, line: a latency and a rate; None where the rows are
    too few, or there is no such way.
    """

    name: str
    table: Table
    parts: Any
    base: Curve
    predict: Callable[[Any, Table], Any]
    own: Callable[[Table], Curve | None]
    line: Callable[[Table], Curve | None] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one kind of operator gave. way: shipped, level, own or line; before, after: median and 90th percentile of the errors on rows
    held out, of the curve that would hold otherwise and of the one taken.
    """

    name: str
    n: int
    way: str
    before: tuple[float, float]
    after: tuple[float, float]
    curve: Any


def table_of(rows: Sequence[Timing], gpu: Gpu, operator: str, precision: str) -> Table:
    """Return timings as columns."""
    names = ("m", "n", "k", "batch", "length", "heads", "kv_heads", "bytes", "members", "stride", "nodes", "seconds")
    columns: dict[str, Any] = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    columns |= {name: np.array([row.head_dim for row in rows]) for name in ("qk", "v")}
    columns |= {"median": columns["seconds"], "half": np.ones(len(rows), dtype=bool)}
    return Table(operator=operator, gpu=gpu, columns=columns, precision=precision)


def products(rows: Sequence[Timing], gpu: Gpu, precision: str, base: GemmCurve) -> Kind:
    """Return the matrix products."""
    table = table_of(rows, gpu, "gemm", precision)

    def own(part: Table) -> GemmCurve | None:
        if len(part) < FEWEST["gemm"] * SEEN:
            return None
        menus = (SMALL_MENU,) if multiprocessors(gpu) == 1 else gemm.MENUS
        made = [gemm.base_curve([part], "bfloat16", menu, None, pooled=False) for menu in menus]
        best = min(made, key=lambda curve: float(np.mean(np.abs(np.log(gemm.predict(curve, part, "bfloat16") / part["seconds"])))))
        left = np.log(part["seconds"] / gemm.predict(best, part, "bfloat16"))
        terms = [Term(COARSE, [part["m"], part["n"], part["k"]], 0.3)]
        return best.model_copy(update={"correction": corrections(terms, left)[0]})

    parts = folds(table["m"], table["n"], table["k"], parts=FOLDS)
    return Kind(name="gemm", table=table, parts=parts, base=base, predict=lambda c, t: gemm.predict(c, t, "bfloat16"), own=own)


def attended(rows: Sequence[Timing], gpu: Gpu, precision: str, base: AttentionCurve) -> Kind:
    """Return attention, forward."""
    table = table_of(rows, gpu, "attention_forward", precision)

    def own(part: Table) -> AttentionCurve | None:
        if len(part) < FEWEST["attention"] * SEEN:
            return None
        made = [attention.tuned_curve([part], block) for block in attention.BLOCKS[: 2 if multiprocessors(gpu) > 1 else 1]]
        return min(made, key=lambda curve: float(np.mean(np.abs(np.log(attention.predict(curve, part) / part["seconds"])))))

    columns = ("batch", "length", "heads", "kv_heads", "qk")
    parts = folds(*(table[name] for name in columns), parts=FOLDS)
    return Kind(name="attention", table=table, parts=parts, base=base, predict=attention.predict, own=own)


def linked(op: str, rows: Sequence[Timing], gpu: Gpu, link: float, base: CollectiveCurve) -> Kind:
    """Return one collective inside a domain whose members reach each other at `link` bytes/s."""
    table = table_of(rows, gpu, "nccl", "")

    def own(part: Table) -> CollectiveCurve | None:
        return _own_collective(part, op, link, base, SMOOTH)

    def line(part: Table) -> CollectiveCurve | None:
        return _own_collective(part, op, link, base, STRAIGHT)

    parts = folds(table["members"], table["bytes"], parts=FOLDS)
    return Kind(name=op, table=table, parts=parts, base=base, predict=lambda c, t: links.predict(c, op, t, link), own=own, line=line)


def _own_collective(part: Table, op: str, link: float, base: CollectiveCurve, smooth: float) -> CollectiveCurve | None:
    """Return a curve of the members that were measured; others keep what `base` has relative to the nearest that was.

    smooth: how stiff the efficiency is over the bytes; STRAIGHT leaves a latency and a rate that grows or falls evenly.
    """
    made = {}
    for i, members in enumerate(links.MEMBERS):
        rows = part.where(part["members"] == members)
        if len(rows) >= FEWEST["collective"] * SEEN:
            made[i] = links.one_size(rows, op, link, smooth)
    if not made:
        return None
    latency, efficiency = [], []
    for i, members in enumerate(links.MEMBERS):
        near = min(made, key=lambda j: abs(j - i))
        before, here = ((float(base.latency(n)), base.efficiency(n, np.array(links.BYTES))) for n in (links.MEMBERS[near], members))
        latency.append(made[near][0] * here[0] / before[0])
        efficiency.append(made[near][1] * here[1] / before[1])
    return links.curve_of(np.array(latency), np.array(efficiency))


def levelled(curve: Curve, factor: float, latency: float) -> Curve:
    """Return a curve whose times are `factor` times as long, but for its fixed part, which is `latency` times as long."""
    if isinstance(curve, CollectiveCurve):
        changes = {
            "latency": grid(curve.latency.axes, curve.latency.table * latency),
            "efficiency": grid(curve.efficiency.axes, curve.efficiency.table / factor),
        }
        return curve.model_copy(update=changes)
    before = curve.correction
    scaled = Grid(axes=(ALL,) * 3, values=" ".join(["1"] * 8)) if before is None else before
    launch = round4(min(curve.launch_s * latency / factor, 10.0))
    return curve.model_copy(update={"launch_s": launch, "correction": grid(scaled.axes, scaled.table * factor)})


def _without_latency(curve: Curve) -> Curve:
    if isinstance(curve, CollectiveCurve):
        return curve.model_copy(update={"latency": grid(curve.latency.axes, curve.latency.table * 1e-12)})
    return curve.model_copy(update={"launch_s": 0.0})


def _level(kind: Kind, table: Table) -> Curve:
    """Return the shipped curve at the level and latency of the rows, both held near 1: one row moves little, twenty decide."""
    logs, whole = np.log(table["seconds"]), kind.predict(kind.base, table)
    work = np.minimum(kind.predict(_without_latency(kind.base), table), whole)

    def residuals(x: Any) -> Any:
        factor, latency = np.exp(np.clip(x, -12.0, 12.0))
        off = (np.log(factor * work + latency * (whole - work)) - logs) / NOISE
        return np.concatenate([off, [x[0] / LEVEL_DOUBT, x[1] / LATENCY_DOUBT]])

    found = minimise(residuals, [0.0, 0.0], 1.0)
    return levelled(kind.base, *np.exp(np.clip(found, -12.0, 12.0)))


def _candidates(kind: Kind, table: Table) -> dict[str, Curve]:
    made = {"own": kind.own(table), "line": kind.line(table)}
    return {"shipped": kind.base, "level": _level(kind, table)} | {way: curve for way, curve in made.items() if curve is not None}


def _best(kind: Kind, table: Table, parts: Any) -> str:
    """Return the way that tells each part of the rows best without it."""
    off: dict[str, list[Any]] = {}
    for part in np.unique(parts):
        rest, left = table.where(parts != part), table.where(parts == part)
        for way, curve in _candidates(kind, rest).items():
            off.setdefault(way, []).append(np.abs(np.log(kind.predict(curve, left) / left["seconds"])))
    count = len(np.unique(parts))
    scores = {way: float(np.mean(np.minimum(np.concatenate(found), MOST_OFF))) for way, found in off.items() if len(found) == count}
    return min(scores, key=lambda way: scores[way])


def tell(kind: Kind, source: str) -> Told:
    """Return the curve of a kind of operator, and how it does on rows it has not seen: each quarter is told by a curve whose way was chosen
    and whose numbers were fitted without it.
    """
    table, parts = kind.table, kind.parts
    if len(table) < FEW:
        curve, before = _level(kind, table), errors(kind.predict(kind.base, table), table["seconds"])
        return Told(name=kind.name, n=len(table), way="level", before=before, after=before, curve=_with_fit(curve, kind, source, None))
    said = np.empty(len(table))
    for part in np.unique(parts):
        rest = table.where(parts != part)
        way = _best(kind, rest, parts[parts != part])
        said[parts == part] = kind.predict(_candidates(kind, rest)[way], table.where(parts == part))
    shipped = kind.predict(kind.base, table)
    after, before = errors(said, table["seconds"]), errors(shipped, table["seconds"])
    if not closer(said, shipped, table["seconds"]):
        return Told(name=kind.name, n=len(table), way="shipped", before=before, after=before, curve=kind.base)
    way = _best(kind, table, parts)
    curve = _candidates(kind, table)[way]
    return Told(name=kind.name, n=len(table), way=way, before=before, after=after, curve=_with_fit(curve, kind, source, after))


def closer(said: Any, before: Any, seconds: Any) -> bool:
    """Whether `said` is nearer to what was measured than `before`: by the mean of the log errors, each bounded, so that one slip of a busy
    machine does not decide.
    """
    off = [float(np.mean(np.minimum(np.abs(np.log(side / seconds)), MOST_OFF))) for side in (said, before)]
    return off[0] < CLEARLY * off[1]


def _with_fit(curve: Any, kind: Kind, source: str, after: tuple[float, float] | None) -> Any:
    inside = errors(kind.predict(curve, kind.table), kind.table["seconds"])
    fields: dict[str, Any] = {"source": source, "n": len(kind.table), "median": round4(inside[0]), "p90": round4(inside[1])}
    if after is not None:
        fields |= {"held_out": "shapes, a quarter at a time", "held_out_median": round4(after[0]), "held_out_p90": round4(after[1])}
    return curve.model_copy(update={"fit": Fit(**fields)})


def in_one_domain(rows: Sequence[Timing], op: str, size: int) -> list[Timing]:
    """Return the timings of a collective among ranks of one innermost domain of `size`."""
    assert op in PASSES  # noqa: S101
    return [row for row in rows if row.op == op and row.members > 1 and (row.members - 1) * row.stride < size and row.nodes == 1]
