"""Why a plan costs what it costs, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.estimate import broken_lines, fallback_lines, headline, memory_lines, stage_table
from tuner.report.table import Column, Page, Table, referenced
from tuner.report.words import gigabytes, header, labelled, percent, probability, seconds, word

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_KNOBS = 24


def explain_text(record: dict[str, Any], page: Page) -> str:
    """Return the report of an explanation's record."""
    lines = [*header(record["job"], record["calibration"], page), ""]
    lines += headline(record, page)
    lines += memory_lines(record, page)
    lines += fallback_lines(record, page)
    lines += broken_lines(record["broken"], page)
    lines += way_out(record, page)
    lines += rival_lines(record, page)
    lines += ["", *time_table(record, page), "", *memory_table(record, page), "", *stage_table(record, page)]
    lines += ["", *stage_times(record, page)] if len(record["stages"]) > 1 else []
    lines += ["", *rival_table(record, page)] if record["best"] and record["best"]["changes"] else []
    return "\n".join([*lines, "", *knob_table(record, page)])


def way_out(record: dict[str, Any], page: Page) -> list[str]:
    """Return why the plan does not fit, and the nearest plan that is legal and fits."""
    lines = labelled("because", record["why_not_fit"], page) if record["why_not_fit"] else []
    near = record["nearest_that_fits"]
    if near is not None:
        changes = ", ".join(f"{c['knob'].replace('_', ' ')} {word(c['from'])} -> {word(c['to'])}" for c in near["changes"])
        cost = f"{seconds(near['step_s'])} a step, {gigabytes(near['memory_bytes'])} GB"
        lines += labelled("nearest", f"{changes}: {cost}, P(OOM) {probability(near['p_oom'])}", page)
    elif record["why_not_fit"] or not record["legal"]:
        lines += labelled("nearest", "no plan within three changed knobs is legal and fits; ask search", page)
    return lines


def rival_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return the best plan of a search, and why this one was not chosen."""
    best = record["best"]
    if best is None:
        return []
    if not best["changes"]:
        return labelled("best", "this is the best plan that a search finds", page)
    changes = ", ".join(f"{c['knob'].replace('_', ' ')} {word(c['from'])} -> {word(c['to'])}" for c in best["changes"])
    cost = f"{seconds(best['step_s'])} a step ({best['gain']:.2f}x as fast), {gigabytes(best['memory_bytes'])} GB"
    lines = [*labelled("best", f"{changes}: {cost}", page), *labelled("", f"this plan is not chosen: {best['why_not']}", page)]
    by_time = "that is by the time of a step while nothing fails: `tuner search --objective goodput --current PLAN` counts failures"
    return lines + (labelled("", by_time, page) if record["fallback"] else [])


def rival_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the terms in which this plan and the best one differ: those of 0.5 % of the step, or of the memory, and more."""
    best = record["best"]

    def side(terms: list[dict[str, Any]], own: float, other: float) -> list[tuple[str, float, float]]:
        shown = [(term["name"].replace("_", " "), term["value"], term["best"]) for term in terms if abs(term["difference"]) >= own / 200]
        rest = [own - sum(row[1] for row in shown), other - sum(row[2] for row in shown)]
        return [*shown, ("all others", rest[0], rest[1]), ("total", own, other)]

    def table(title: str, rows: list[tuple[str, float, float]], show: Callable[[float], str]) -> list[str]:
        columns = [
            Column(title, [name for name, _, _ in rows], left=True),
            Column("this plan", [show(own) for _, own, _ in rows]),
            Column("best", [show(other) for _, _, other in rows]),
            Column("difference", [("+" if own >= other else "-") + show(abs(own - other)) for _, own, other in rows]),
        ]
        return Table(columns, styles={len(rows) - 1: page.bold}).lines(page)

    time = side(best["time"], record["step_s"], best["step_s"])
    memory = side(best["memory"], record["memory_bytes"], best["memory_bytes"])
    return [*table("time against the best", time, seconds), "", *table("GB against the best", memory, gigabytes)]


def time_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the seconds of a step by term, those that are nothing left out, and where each formula comes from."""
    terms = [term for term in record["step"] if term["value"]]
    marks, notes = referenced([term["ref"] for term in terms], page)
    table = Table(
        [
            Column("time of a step", [*(term["name"].replace("_", " ") for term in terms), "step"], left=True),
            Column("", [*(seconds(term["value"]) for term in terms), seconds(record["step_s"])]),
            Column("%", [*(percent(term["share"]) for term in terms), "100.0"], rank=1),
            Column("from", [*marks, ""], left=True),
            Column("what", [*(term["what"] for term in terms), ""], rank=2, left=True),
        ],
        styles={len(terms): page.bold},
    )
    return [*table.lines(page), *notes]


def memory_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the bytes of a rank of the fullest stage by term, and where each formula comes from."""
    stage = record["stages"][record["worst_stage"]]
    terms = [term for term in stage["memory"] if term["value"]]
    marks, notes = referenced([term["ref"] for term in terms], page)
    title = f"memory of stage {stage['index']}" if len(record["stages"]) > 1 else "memory"
    table = Table(
        [
            Column(title, [*(term["name"].replace("_", " ") for term in terms), "total"], left=True),
            Column("GB", [*(gigabytes(term["value"]) for term in terms), gigabytes(stage["memory_bytes"])]),
            Column("from", [*marks, ""], left=True),
            Column("what", [*(term["what"] for term in terms), ""], rank=2, left=True),
        ],
        styles={len(terms): page.bold},
    )
    return [*table.lines(page), *notes]


def stage_times(record: dict[str, Any], page: Page) -> list[str]:
    """Return the seconds of one micro batch on the stages that matter: first, last, fullest and slowest."""
    stages = record["stages"]
    chosen = sorted({0, record["worst_stage"], record["slowest_stage"], len(stages) - 1})
    shown = [stages[i] for i in chosen]
    marks = {record["slowest_stage"]: " (slowest)"}
    columns = [Column("a micro batch on", [f"stage {s['index']}{marks.get(s['index'], '')}" for s in shown], left=True)]
    for name in ("forward", "backward", "recompute", "sends"):
        columns.append(Column(name, [seconds(stage[f"{name}_s"]) for stage in shown]))
    columns.append(Column("layers", [str(stage["layers"]) for stage in shown], rank=1))
    return Table(columns).lines(page)


def knob_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return what one step in each knob does, the fastest first."""
    knobs = record["knobs"][:MOST_KNOBS]
    if not knobs:
        return ["no single knob can be turned: every neighbour breaks a rule"]
    lines = Table(
        [
            Column("one step", [item["knob"].replace("_", " ") for item in knobs], left=True),
            Column("from", [word(item["before"]) for item in knobs], left=True),
            Column("to", [word(item["after"]) for item in knobs], left=True),
            Column("step", [seconds(item["step_s"]) for item in knobs], rank=1),
            Column("time", [signed(item["time_change"]) for item in knobs]),
            Column("GB", [gigabytes(item["memory_bytes"]) for item in knobs], rank=2),
            Column("memory", [signed(item["memory_change"]) for item in knobs], rank=1),
            Column("P(OOM)", [probability(item["p_oom"]) for item in knobs], rank=1),
        ],
    ).lines(page)
    left = len(record["knobs"]) - len(knobs)
    return [*lines, *([f"... and {left} slower ones (--json has all)"] if left > 0 else [])]


def signed(change: float) -> str:
    """Return a relative change in percent with its sign: +3.1 %."""
    return f"{100 * change:+.1f} %"
