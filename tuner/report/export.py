"""What was written for a launch, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.estimate import broken_lines
from tuner.report.words import gigabytes, knob_words, labelled, mesh, plan_words, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.report.table import Page


def export_text(record: dict[str, Any], page: Page, *, contents: bool) -> str:
    """Return the plan, and of each format its files (with their contents where asked), how to start them and what to know."""
    job, plan, formats = record["job"], record["plan"], record["formats"]
    lines = plan_lines(plan, record["assumed"], job, job["framework"], page)
    for name, one in formats.items():
        lines += ["", page.bold(name)]
        if one["plan"] != plan or one["framework"] != job["framework"]:
            lines += plan_lines(one["plan"], one["assumed"], job, one["framework"], page)
        lines += format_lines(one, job, page)
        if contents:
            for file, text in one["files"].items():
                lines += ["", page.dim(f"# {file}"), text.rstrip("\n")]
    return "\n".join([*lines, *refusals_lines(record["refused"], page)])


def best_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return what a search wrote of its best plan in each format."""
    job, export = record["job"], record["export"]
    best = record["ranking"][0]
    lines: list[str] = []
    for name, one in export["formats"].items():
        lines += ["", page.bold(name), *place_lines(one, best, record, page), *format_lines(one, job, page, against=best)]
    return [*lines, *refusals_lines(export["refused"], page)]


def plan_lines(plan: dict[str, Any], assumed: Sequence[str], job: dict[str, Any], framework: str, page: Page) -> list[str]:
    """Return a plan, and what its framework does where nobody said."""
    lines = labelled("plan", f"{plan_words(plan)}; {mesh(plan, job)}", page)
    if assumed:
        words = ", ".join(knob_words(name, plan[name]) for name in assumed)
        lines += labelled("assumed", f"{words}: what {framework} does when not told", page)
    return lines


def place_lines(one: dict[str, Any], best: dict[str, Any], record: dict[str, Any], page: Page) -> list[str]:
    """Return which plan of the ranking a format has, and why not the first."""
    place, job = one["place"], record["job"]
    if not place["why"]:
        changed = [name for name, value in one["plan"].items() if best["plan"].get(name) != value]
        held = ", ".join(knob_words(name, one["plan"][name]) for name in changed)
        return labelled("plan", "rank 1" + (f" ({held}, as {one['framework']} has it)" if held else ""), page)
    lines = cause_lines("not 1", place["why"], page)
    where = f"rank {place['rank']}" if place["rank"] is not None else "not listed"
    if place["ahead"] is not None:
        where += f": {place['ahead']:,} of the {record['space']['fit']:,} plans that fit are ahead as {job['framework']} prices them"
    return lines + labelled("plan", f"{plan_words(one['plan'])} ({where})", page)


def format_lines(one: dict[str, Any], job: dict[str, Any], page: Page, against: dict[str, Any] | None = None) -> list[str]:
    """Return what a format costs as foretold (beside the best plan of a search), its files, how to start them, what is wrong, and what to
    know.
    """
    room = f"{gigabytes(one['memory_bytes'])} of {gigabytes(job['gpu_memory_bytes'])} GB"
    cost = f"{seconds(one['step_s'])} a step ({seconds(one['low_s'])} to {seconds(one['high_s'])}), {room}, as {one['framework']}"
    if against is not None and one["framework"] != job["framework"]:
        cost += f" (rank 1 takes {seconds(against['step_s'])} as {job['framework']})"
    elif against is not None and one["step_s"] != against["step_s"]:
        cost += f" (rank 1 takes {seconds(against['step_s'])})"
    lines = labelled("cost", cost, page)
    lines += broken_lines(one["broken"], page)
    lines += labelled("no fit", one["too_large"], page) if one["too_large"] else []
    lines += labelled("files", ", ".join(one["files"]), page)
    lines += labelled("start", one["start"], page) if one["start"] else []
    for note in one["notes"]:
        lines += labelled("note", note, page)
    return lines


def refusals_lines(refused: dict[str, Sequence[dict[str, Any]]], page: Page) -> list[str]:
    """Return why formats are not written."""
    lines: list[str] = []
    for name, problems in refused.items():
        lines += ["", page.bold(name), *cause_lines("refused", problems, page)]
    return lines


def cause_lines(label: str, problems: Sequence[dict[str, Any]], page: Page) -> list[str]:
    """Return problems, those of one cause together."""
    causes: dict[str, list[dict[str, Any]]] = {}
    for item in problems:
        causes.setdefault(item["rule"].removeprefix("cannot be written: "), []).append(item)
    lines = []
    for rule, items in causes.items():
        knobs = ", ".join(f"{item['path']} = {item['value']}" if item["value"] else item["path"] for item in items if item["path"])
        ends = [item["hint"].partition(", or another format")[0] for item in items if item["hint"]]
        hint = f" ({', '.join(dict.fromkeys(ends))})" if ends else ""
        lines += labelled(label, f"{knobs + ': ' if knobs else ''}{rule}{hint}", page)
    return lines
