"""Errors, coverage, rank correlation, regret and confusion: how wrong predictions are, and whether they choose well."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

LEAST_LAYOUTS = 5
PREDICTED_OOM = 0.5  # p_oom from which a plan counts as predicted to run out


def errors(pairs: Sequence[tuple[float, float]], covered: Sequence[bool | None] = ()) -> dict[str, float | int | None]:
    """Return {n, median_abs_err, p90_abs_err, bias, coverage90} of (measured, predicted) pairs.

    An error is predicted / measured - 1; bias is the mean error; coverage90 the share of measured values inside the 90 % interval
    (None where no interval is given). The 90th percentile is interpolated between ranks (numpy's default).
    """
    relative = [predicted / measured - 1.0 for measured, predicted in pairs]
    known = [inside for inside in covered if inside is not None]
    sizes = sorted(abs(error) for error in relative)
    return {
        "n": len(relative),
        "median_abs_err": percentile(sizes, 50),
        "p90_abs_err": percentile(sizes, 90),
        "bias": fmean(relative) if relative else None,
        "coverage90": sum(known) / len(known) if known else None,
    }


def percentile(ascending: Sequence[float], percent: float) -> float | None:
    """Return the percentile of sorted values, interpolated linearly between ranks; None of none."""
    if not ascending:
        return None
    place = (len(ascending) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b (ties corrected): (C - D) / sqrt((P - T1) (P - T2)) over the P pairs; None when one side is all ties.

    Source: Kendall 1945, "The treatment of ties in ranking problems". Quadratic in the length: series have tens of layouts.
    """
    balance, ties_first, ties_second = 0, 0, 0
    n = len(first)
    for i in range(n):
        for j in range(i + 1, n):
            a = (first[i] > first[j]) - (first[i] < first[j])
            b = (second[i] > second[j]) - (second[i] < second[j])
            balance += a * b
            ties_first += a == 0
            ties_second += b == 0
    pairs = n * (n - 1) // 2
    scale = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return balance / scale if scale else None


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Return measured[fastest predicted] / min(measured) - 1; equally fast predictions count by the mean of their measured times."""
    if not measured:
        return None
    fastest = min(predicted)
    chosen = [m for m, p in zip(measured, predicted, strict=True) if p == fastest]
    return fmean(chosen) / min(measured) - 1.0


def confusion(cases: Iterable[tuple[bool, float]]) -> dict[str, int]:
    """Return counts of (ran out of memory, p_oom): true_fit ran and was predicted to, false_fit was predicted to and ran out, .."""
    counts = dict.fromkeys(("true_fit", "false_fit", "true_oom", "false_oom"), 0)
    for ran_out, p_oom in cases:
        predicted_oom = p_oom >= PREDICTED_OOM
        counts[f"{'true' if predicted_oom == ran_out else 'false'}_{'oom' if predicted_oom else 'fit'}"] += 1
    return counts


def series(cases: Iterable[tuple[dict[str, Any], Hashable, float, float]]) -> list[dict[str, Any]]:
    """Return {key, n, kendall_tau, regret} of every series of at least 5 layouts from (key, layout, measured, predicted) rows.

    Equal layouts of a series are merged by the median of their measured times (and of their predictions, which agree).
    """
    grouped: dict[tuple[Any, ...], dict[Hashable, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    keys: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, layout, measured, predicted in cases:
        values = tuple(key.values())
        keys[values] = key
        grouped[values][layout].append((measured, predicted))
    found = []
    for values, layouts in grouped.items():
        if len(layouts) < LEAST_LAYOUTS:
            continue
        measured_s = [median(m for m, _ in rows) for rows in layouts.values()]
        predicted_s = [median(p for _, p in rows) for rows in layouts.values()]
        tau = kendall_tau(predicted_s, measured_s)
        found.append({"key": keys[values], "n": len(layouts), "kendall_tau": tau, "regret": regret(measured_s, predicted_s)})
    return found


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there, None of none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def middle(values: Iterable[float]) -> float | None:
    """Return the median of the values, None of none."""
    known = list(values)
    return median(known) if known else None
