"""How wrong the model is on measured rows, as text."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tuner.report.table import Column, Page, Table, wrapped
from tuner.report.words import percent

MOST_REASONS = 8


def validate_text(record: dict[str, Any], page: Page) -> str:
    """Return the scores of a validation's record as tables."""
    operators = [*table_table(record["tables"], page), *left_out_lines(record["left_out"], page)] if "tables" in record else []
    if "rows" not in record:
        return "\n".join(operators)
    summary = record["summary"]
    lines = [f"{len(record['rows']):,} rows scored, {len(record['skipped']):,} skipped", ""]
    lines += error_table(summary, page)
    lines += ["", *wrapped(fit_words(summary["fit"]), page), ""]
    if "cross" in record:
        lines += [*cross_table(record, page), "", *wrapped("below: each row told without its series", page)]
        summary = record["cross"]["series"]
    if summary["by_source"]:
        lines += [*source_table(summary, page), ""]
    lines += wrapped(series_words(summary), page)
    lines += skipped_lines(record["skipped"], page)
    return "\n".join([*lines, *([""] if operators else []), *operators])


def table_table(tables: list[dict[str, Any]], page: Page) -> list[str]:
    """Return the errors on tables of measured operators."""
    if not tables:
        return ["no table was scored"]
    return Table(
        [
            Column("operator", [t["operator"] for t in tables], left=True),
            Column("GPU", [t["gpu"] for t in tables], left=True),
            Column("dtype", [t["dtype"] for t in tables], left=True),
            Column("rows", [f"{t['n']:,}" for t in tables]),
            Column("median |error|", [share(t["median_abs_err"]) for t in tables]),
            Column("90th pct", [share(t["p90_abs_err"]) for t in tables]),
            Column("median error", [share(t["bias"], sign=True) for t in tables], rank=2),
            Column("file", [t["file"] for t in tables], left=True, rank=1),
        ]
    ).lines(page)


def left_out_lines(left_out: list[dict[str, Any]], page: Page) -> list[str]:
    """Return what of the tables was not scored."""
    lines = [line for item in left_out for line in wrapped(f"  {item['file']}: {item['why']}", page, indent=4)]
    return ["", "not scored:", *lines] if left_out else []


def share(value: float | None, sign: bool = False) -> str:
    """Return a fraction in percent, "-" where there is none."""
    return "-" if value is None else f"{100 * value:+.1f} %" if sign else f"{percent(value)} %"


def number(value: float | None) -> str:
    """Return a rank correlation, "-" where there is none."""
    return "-" if value is None else f"{value:.2f}"


def error_table(summary: dict[str, Any], page: Page) -> list[str]:
    """Return the errors of time and memory; what stands apart from the time's where it has rows."""
    rows = [("time", summary["time"]), ("memory", summary["memory"])]
    rows += [(f"time, {name}", scores) for name, scores in summary.get("apart", {}).items() if scores["n"]]
    return Table(
        [
            Column("", [name for name, _ in rows], left=True),
            Column("rows", [f"{scores['n']:,}" for _, scores in rows]),
            Column("median |error|", [share(scores["median_abs_err"]) for _, scores in rows]),
            Column("90th pct", [share(scores["p90_abs_err"]) for _, scores in rows]),
            Column("mean error", [share(scores["bias"], sign=True) for _, scores in rows], rank=2),
            Column("in 90 % range", [share(scores["coverage90"]) for _, scores in rows], rank=1),
        ]
    ).lines(page)


def cross_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the scores of step time by what each row is told without."""
    rows = [("nothing left out", record["summary"])]
    rows += [(f"{'its model in its source' if left == 'model' else f'its {left}'} left out", of) for left, of in record["cross"].items()]
    return Table(
        [
            Column("time, each row told with", [name for name, _ in rows], left=True),
            Column("median |error|", [share(of["time"]["median_abs_err"]) for _, of in rows]),
            Column("90th pct", [share(of["time"]["p90_abs_err"]) for _, of in rows]),
            Column("in 90 % range", [share(of["time"]["coverage90"]) for _, of in rows], rank=1),
            Column("half range", [share(of["time"]["half_width90"]) for _, of in rows], rank=2),
            Column("tau", [number(of["mean_kendall_tau"]) for _, of in rows], rank=3),
            Column("regret", [share(of["mean_regret"]) for _, of in rows], rank=3),
        ]
    ).lines(page)


def fit_words(fit: dict[str, int]) -> str:
    """Return the confusion of fits and out of memory in a sentence."""
    ran, out = fit["true_fit"] + fit["false_oom"], fit["true_oom"] + fit["false_fit"]
    fitted, failed = f"{fit['true_fit']:,} were predicted to fit", f"{fit['true_oom']:,} were predicted to"
    return f"memory: of {ran:,} rows that ran {fitted}; of {out:,} that ran out {failed}"


def source_table(summary: dict[str, Any], page: Page) -> list[str]:
    """Return the scores of each source, and the means over sources."""
    sources = summary["by_source"]
    total = {"kendall_tau": summary["mean_kendall_tau"], "regret": summary["mean_regret"]}
    return Table(
        [
            Column("source", [*(s["source"] for s in sources), "mean over sources"], left=True),
            Column("rows", [*(f"{s['n']:,}" for s in sources), ""]),
            Column("time", [*(share(s["time"]["median_abs_err"]) for s in sources), ""], rank=1),
            Column("90th pct", [*(share(s["time"]["p90_abs_err"]) for s in sources), ""], rank=4),
            Column("memory", [*(share(s["memory"]["median_abs_err"]) for s in sources), ""], rank=3),
            Column("tau", [number(s["kendall_tau"]) for s in [*sources, total]]),
            Column("regret", [share(s["regret"]) for s in [*sources, total]]),
        ],
        styles={len(sources): page.bold},
    ).lines(page)


def series_words(summary: dict[str, Any]) -> str:
    """Return how many series the ranks were measured on."""
    return f"tau and regret: over {len(summary['series'])} series of at least 5 layouts (--json lists them)"


def skipped_lines(skipped: list[dict[str, Any]], page: Page) -> list[str]:
    """Return the commonest reasons for which rows were skipped."""
    reasons = Counter(item["why"] for item in skipped)
    lines = [line for why, n in reasons.most_common(MOST_REASONS) for line in wrapped(f"{n:>7,}  {why}", page, indent=9)]
    return ["", "skipped:", *lines, *(["  ..."] if len(reasons) > MOST_REASONS else [])] if skipped else []
