"""A ranking as a table for a spreadsheet."""

from __future__ import annotations

import csv
import io
from typing import Any

FIGURES = ("step_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes", "worst_stage", "p_oom", "basis")


def ranking_csv(record: dict[str, Any]) -> str:
    """Return the ranked plans of a search's record as CSV, the person's own plan last with rank "yours"."""
    rows = [(row["rank"], row) for row in record["ranking"]]
    if record["current"]:
        rows.append(("yours", record["current"]))
    knobs = list(rows[0][1]["plan"]) if rows else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["rank", *knobs, *FIGURES, "one_gpu_lost"])
    for rank, row in rows:
        writer.writerow([rank, *(row["plan"][knob] for knob in knobs), *(row[name] for name in FIGURES), row["one_gpu_lost"]["change"]])
    return out.getvalue()
