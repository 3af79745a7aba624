"""What was written for a launch, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.estimate import broken_lines
from tuner.report.words import knob_words, labelled, mesh, plan_words

if TYPE_CHECKING:
    from tuner.report.table import Page


def export_text(record: dict[str, Any], page: Page, *, contents: bool) -> str:
    """Return the plan, and of each format its files (with their contents where asked), how to start them and what to know."""
    job, plan = record["job"], record["plan"]
    lines = labelled("plan", f"{plan_words(plan)}; {mesh(plan, job)}", page)
    if record["assumed"]:
        words = ", ".join(knob_words(name, plan[name]) for name in record["assumed"])
        lines += labelled("assumed", f"{words}: what {job['framework']} does when not told", page)
    lines += broken_lines(record["broken"], page)
    for name, one in record["formats"].items():
        lines += ["", page.bold(name)]
        lines += labelled("files", ", ".join(one["files"]), page)
        lines += labelled("start", one["start"], page) if one["start"] else []
        for note in one["notes"]:
            lines += labelled("note", note, page)
        if contents:
            for file, text in one["files"].items():
                lines += ["", page.dim(f"# {file}"), text.rstrip("\n")]
    return "\n".join(lines)
