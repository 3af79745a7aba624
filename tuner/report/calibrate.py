"""What a person's own runs teach the model, as text."""

from __future__ import annotations

from typing import Any

from tuner.report.table import Column, Page, Table, wrapped
from tuner.report.words import percent


def calibrate_text(record: dict[str, Any], page: Page) -> str:
    """Return the ways that were tried, how far each is off on runs it has not seen, and the verdict."""
    ways = record["tried"]
    table = Table(
        [
            Column("each run told by", [way["words"] for way in ways], left=True),
            Column("median |error|", [f"{percent(way['median_abs_err'])} %" for way in ways]),
            Column("90th pct", [f"{percent(way['p90_abs_err'])} %" for way in ways], rank=1),
        ]
    ).lines(page)
    runs = f"{record['rows']:,} timed runs of {record['plans']:,} layouts, {record['framework']}; {len(record['skipped']):,} rows skipped"
    chosen = next(way["words"] for way in ways if way["way"] == record["way"])
    verdict = (
        f"kept: {chosen}"
        if record["helps"]
        else "declined: no way of using these runs foretells them clearly better than the shipped calibration, so nothing is written"
    )
    lines = [*wrapped(runs, page), "", *table, "", *wrapped(verdict, page)]
    if record["helps"]:
        lines += wrapped("each run was left out with all repeats of its layout when it was foretold", page)
    return "\n".join(lines)
