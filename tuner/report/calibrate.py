"""What a person's own runs teach the model, as text."""

from __future__ import annotations

from typing import Any

from tuner.report.table import Column, Page, Table, hidden_note, wrapped
from tuner.report.words import gigabytes, percent, seconds

LONGEST_NAME = 28


def calibrate_text(record: dict[str, Any], page: Page) -> str:
    """Return what each log gave, the ways that were tried, how far each is off on runs it has not seen, and the verdict."""
    ways = record["tried"]
    table = Table(
        [
            Column("each run told by", [way["words"] for way in ways], left=True),
            Column("median |error|", [f"{percent(way['median_abs_err'])} %" for way in ways]),
            Column("90th pct", [f"{percent(way['p90_abs_err'])} %" for way in ways], rank=1),
        ]
    ).lines(page)
    runs = f"{_counted(record['rows'], 'timed run')} of {_counted(record['plans'], 'layout')}, {record['framework']}"
    runs += f"; {len(record['skipped']):,} skipped" if record["skipped"] else ""
    lines = [*_logs(record["logs"], page), *wrapped(runs, page), "", *table, "", *wrapped(_verdict(record), page)]
    if record["helps"]:
        lines += wrapped("each run was left out with all repeats of its layout when it was foretold", page)
    return "\n".join(lines)


def _verdict(record: dict[str, Any]) -> str:
    if record["helps"]:
        return f"kept: {next(way['words'] for way in record['tried'] if way['way'] == record['way'])}"
    if record["too_few"]:
        return (
            "declined: fewer than three different layouts cannot be cross-validated, so nothing is written; a runs file takes logs of "
            "several layouts (tuner calibrate --help)"
        )
    return "declined: no way of using these runs foretells them clearly better than the shipped calibration, so nothing is written"


def _logs(logs: list[dict[str, Any]], page: Page) -> list[str]:
    """Return a line for each log that counts, what is to know of it, and those that are left out."""
    if not logs:
        return []
    names = _names([log["log"] for log in logs])
    used = [log for log in logs if not log["why"]]
    spreads = ["" if log["spread_s"] is None else f"+-{seconds(log['spread_s'])}" for log in used]
    kinds = ["" if log["memory_bytes"] is None else f"{gigabytes(log['memory_bytes'])} {log['memory_kind']}" for log in used]
    table = Table(
        [
            Column("log", [names[log["log"]] for log in used], left=True),
            Column("launcher", [log["launcher"] for log in used], rank=3, left=True),
            Column("plan", [log["plan"] for log in used], rank=4, left=True),
            Column("step", [seconds(log["step_s"]) for log in used]),
            Column("spread", spreads, rank=2),
            Column("steps", [f"{log['steps']:,}" for log in used], rank=2),
            Column("predicted", ["" if log["predicted_s"] is None else seconds(log["predicted_s"]) for log in used], rank=1),
            Column("GB", kinds, rank=3, left=True),
        ]
    )
    lines = [*table.lines(page), *hidden_note(table, page)] if used else []
    for log in logs:
        if log["why"]:
            lines += wrapped(f"left out: {names[log['log']]}: {log['why']}", page, indent=6)
        elif log["note"]:
            lines += wrapped(f"note: {names[log['log']]}: {log['note']}", page, indent=6)
    return [*lines, ""]


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _names(paths: list[str]) -> dict[str, str]:
    """Return what each path is called: its last part, or as much of its end as fits where two paths end alike."""
    ends = [path.rpartition("/")[2] for path in paths]
    alike = len(set(ends)) < len(set(paths))
    return {path: _short(path if alike else end) for path, end in zip(paths, ends, strict=True)}


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"...{name[-LONGEST_NAME + 3 :]}"
