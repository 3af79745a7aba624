"""What was written for a launch, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.estimate import broken_lines
from tuner.report.words import knob_words, labelled, mesh, plan_words

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        lines += format_lines(one, page)
        if contents:
            for file, text in one["files"].items():
                lines += ["", page.dim(f"# {file}"), text.rstrip("\n")]
    for name, problems in record["refused"].items():
        lines += ["", page.bold(name), *refused_lines(problems, page)]
    return "\n".join(lines)


def format_lines(one: dict[str, Any], page: Page) -> list[str]:
    """Return the files of a format, how to start them, rules of its framework that the plan breaks, and what to know."""
    lines = labelled("files", ", ".join(one["files"]), page)
    lines += labelled("start", one["start"], page) if one["start"] else []
    lines += broken_lines(one["broken"], page)
    for note in one["notes"]:
        lines += labelled("note", note, page)
    return lines


def refused_lines(problems: Sequence[dict[str, Any]], page: Page) -> list[str]:
    """Return why a format is not written."""
    lines = []
    for item in problems:
        value = f" = {item['value']}" if item["value"] else ""
        way_out = f" ({item['hint']})" if item["hint"] else ""
        lines += labelled("refused", f"{item['path']}{value}: {item['rule']}{way_out}", page)
    return lines
