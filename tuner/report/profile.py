"""What a measured search ran, as text."""

from __future__ import annotations

from typing import Any

from tuner.report.table import Column, Page, Table, hidden_note
from tuner.report.words import gigabytes, labelled, seconds

MOST = 40
SAID = {"ok": "", "oom": "out of memory", "failed": "failed", "stopped": "stopped", "infrastructure": "machine failed"}


def trial_lines(measured: dict[str, Any], names: list[str], page: Page) -> list[str]:
    """Return how the search went, and each run beside what was predicted. names: the knobs that tell the plans apart."""
    runs = measured["trials"]
    words = (
        f"{counted(measured['runs'])} of {measured['candidates']:,} candidates with {measured['runner']}, strategy {measured['strategy']}"
    )
    words += f"; {measured['known_before']} known from earlier searches" if measured["known_before"] else ""
    words += f"; {measured['failed_runs']} gave no time" if measured["failed_runs"] else ""
    lines = labelled("profile", f"{words}; ended: {measured['why']}", page)
    for fault in measured["faults"]:
        lines += labelled("", f"machine: {fault}", page)
    if measured["drift"] is not None:
        lines += labelled("drift", f"a plan that was run again took {measured['drift']:.2f} times as long as at first", page)
    for words in made_words(runs, measured["together"]):
        lines += labelled("times", words, page)
    shown = runs[-MOST:]
    if not shown:
        return lines
    table = Table(
        [
            Column("run", [_name(run) for run in shown]),
            *[Column(_title(name), [_word(run["plan"][name]) for run in shown], rank=1 if k < 4 else 4) for k, name in enumerate(names)],
            Column("predicted", [_seconds(run["predicted_s"]) for run in shown], rank=2),
            Column("expected", [_seconds(run["said_s"]) for run in shown], rank=3),
            Column("measured", [_seconds(run["result"]["step_s"]) for run in shown]),
            Column("+-", [_seconds(run["result"]["spread_s"]) for run in shown], rank=5),
            Column(
                "GB", ["" if run["result"]["memory_bytes"] is None else gigabytes(run["result"]["memory_bytes"]) for run in shown], rank=6
            ),
            Column("ended", [SAID[run["result"]["end"]] for run in shown], left=True),
        ]
    )
    why = [f"run {_name(run)} {SAID[run['result']['end']]}: {run['result']['reason']}" for run in shown if reason_of(run["result"])]
    return [*lines, "", *table.lines(page), *hidden_note(table, page), *(line for text in why for line in labelled("", text[:300], page))]


def counted(runs: int) -> str:
    """Return "1 run" or "8 runs"."""
    return f"{runs} run{'' if runs == 1 else 's'}"


def reason_of(result: dict[str, Any]) -> str:
    """Return why a run gave no time, or was stopped; "" of one that went well."""
    return str(result["reason"]) if SAID[result["end"]] else ""


def made_words(runs: list[dict[str, Any]], together: float) -> list[str]:
    """Return how the times were made that are no medians of the plans' own whole steps. together: see Measured."""
    results = [run["result"] for run in runs if run["result"]["step_s"] is not None and run["result"]["basis"]]
    proxies = [result for result in results if result["extrapolated"]]
    short = [result for result in results if not result["extrapolated"]]
    said = []
    if short:
        said.append(f"{len(short)} of {len(runs)} are what a line through short steps gives the whole batch (--full-steps runs whole ones)")
    if proxies:
        off = sorted(result["extrapolated"] for result in proxies)[len(proxies) // 2]
        said.append(
            f"{len(proxies)} of {len(runs)} are of proxies on one node, extrapolated in layers, PP, DP and micro batches by the model "
            f"(+-{100 * off:.0f} % each, +-{100 * together:.0f} % all alike); memory was not measured"
        )
    return said


def _name(run: dict[str, Any]) -> str:
    return "again" if run["reference"] else "known" if run["number"] < 0 else str(run["number"])


def _title(name: str) -> str:
    return {"micro_batch": "mb", "sequence_parallel": "sp"}.get(name, name.replace("_", " "))


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _gigabytes(value: float | None) -> str:
    return "" if value is None else gigabytes(value)
