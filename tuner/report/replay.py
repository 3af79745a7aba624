"""How replayed searches ended, as text."""

from __future__ import annotations

from typing import Any

from tuner.report.table import Column, Page, Table, hidden_note, wrapped
from tuner.report.words import percent, seconds


def replay_text(record: dict[str, Any], page: Page) -> str:
    """Return the series with the regret of each, and the means of those that do not stand apart."""
    rows = sorted(record["series"], key=lambda one: one["apart"])
    keys = [one["key"] for one in rows]
    table = Table(
        [
            Column("source", [str(key["source"]) for key in keys], rank=4, left=True),
            Column("model", [str(key["model"]) for key in keys], left=True),
            Column("GPUs", [f"{key['gpus']:,}" for key in keys]),
            Column("seq", [f"{key['seq_len']:,}" for key in keys], rank=5),
            Column("layouts", [f"{one['candidates']:,}" for one in rows], rank=3),
            Column("runs", [f"{one['runs']:,}" for one in rows], rank=6),
            Column("failed", [f"{one['failed_runs']:,}" for one in rows], rank=1),
            Column("best", [seconds(one["best_s"]) for one in rows], rank=2),
            Column("found", ["none ran" if one["chosen_s"] is None else seconds(one["chosen_s"]) for one in rows], rank=2),
            Column("regret", [f"{percent(one['regret'])} %" for one in rows]),
            Column("second best", [f"+{percent(one['second_best'] - 1.0)} %" for one in rows], rank=3),
            Column("stands", ["apart" if one["apart"] else "" for one in rows], rank=7, left=True),
        ]
    )
    count = len(rows) - record["apart"]["series"]
    lines = [*table.lines(page), *hidden_note(table, page), ""]
    searches = f"{record['runs']} runs a series, strategy {record['strategy']}, calibration {record['calibration']}"
    if count:
        means = f"mean regret {percent(record['mean_regret'])} %, worst {percent(record['max_regret'])} %"
        searches += f": {count} series: {means}, {record['mean_failed_runs']:.1f} failed runs each"
    lines += wrapped(searches, page)
    if record["apart"]["series"]:
        words = f"apart, where the second-best layout is far behind: {record['apart']['series']} series"
        lines += wrapped(f"{words}, mean regret {percent(record['apart']['mean_regret'])} %", page)
    return "\n".join(lines)
