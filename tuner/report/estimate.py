"""What one plan costs, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.answers import FITS_BELOW, SEARCHED_BELOW
from tuner.report.table import Column, Page, Table, hidden_note
from tuner.report.words import (
    gigabytes,
    header,
    knob_words,
    labelled,
    mesh,
    mfu_words,
    microbatches,
    percent,
    plan_words,
    probability,
    seconds,
    stage_name,
)
from tuner.units import show_count

if TYPE_CHECKING:
    from collections.abc import Sequence


def estimate_text(record: dict[str, Any], page: Page) -> str:
    """Return the report of an estimate's record."""
    lines = [*header(record["job"], record["calibration"], page), ""]
    lines += headline(record, page)
    lines += memory_lines(record, page)
    lines += fallback_lines(record, page)
    lines += run_lines(record, page)
    lines += broken_lines(record["broken"], page)
    lines += ["", *stage_table(record, page)]
    return "\n".join(lines)


def headline(record: dict[str, Any], page: Page) -> list[str]:
    """Return the plan, its mesh, what was assumed, and its time and speed."""
    job, plan = record["job"], record["plan"]
    lines = labelled("plan", plan_words(plan), page)
    lines += labelled("", f"{mesh(plan, job)}; {microbatches(record['microbatches'], plan['micro_batch'])}", page)
    if record["assumed"]:
        words = ", ".join(knob_words(name, plan[name]) for name in record["assumed"])
        lines += labelled("assumed", f"{words}: what {job['framework']} does when not told", page)
    lines += labelled("time", f"{seconds(record['step_s'])} a step, 90 % range {interval(record)}, {record['basis']}", page)
    speed = f"{record['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, MFU {percent(record['mfu'])} % ({mfu_words(job)})"
    return [*lines, *labelled("speed", speed, page)]


def interval(record: dict[str, Any]) -> str:
    """Return the 90 % interval of a step: 17.1-26.7 s."""
    return f"{seconds(record['low_s']).removesuffix(' s')}-{seconds(record['high_s'])}"


def memory_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return what the fullest stage needs, of what, and whether it fits."""
    place = stage_name(record["worst_stage"], record["plan"]["pp"])
    need = f"{gigabytes(record['memory_bytes'])} of {gigabytes(record['job']['gpu_memory_bytes'])} GB" + (f" on {place}" if place else "")
    lines = labelled("memory", f"{need}, P(OOM) {probability(record['p_oom'])}: {fit_words(record['p_oom'])}", page)
    return lines if record["fits"] else [page.bad(line) for line in lines] if page.color else lines


def fit_words(p_oom: float) -> str:
    """Return what a probability to run out of memory means, for a plan and for a replica of it alike."""
    return "fits" if p_oom < SEARCHED_BELOW else "may not fit, a search passes over it" if p_oom < FITS_BELOW else "does not fit"


def fallback_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return what it costs that a replica goes on at the plan's lower degree, item by item."""
    of = record["fallback"]
    if of is None:
        return []
    uneven = max(of["imbalance"], key=lambda name: of["imbalance"][name])
    fullest = f"its fullest rank has {of['imbalance'][uneven]:.2f}x the {uneven.replace('_', ' ')} of a healthy one"
    even = f"{of['balanced']:.2f}x would be even" if of["imbalance"][uneven] > 1.01 * of["balanced"] else "as even as can be"
    reduced = (
        f"a replica that loses GPUs goes on at tp {of['to']} of {of['tp']}, {percent(1.0 / of['pace'] - 1.0)} % slower: {fullest} ({even})"
    )
    lines = labelled("fallback", reduced, page)
    kept = f"it keeps step with {of['microbatches']} of {of['of']} micro batches, or with all at {of['power']:.2f}x its power"
    lines += labelled("", kept, page)
    need = f"{gigabytes(of['memory_bytes'])} of {gigabytes(record['job']['gpu_memory_bytes'])} GB, P(OOM) {probability(of['p_oom'])}"
    fit = labelled("", f"its GPUs need {need}: {fit_words(of['p_oom'])}" + (f" ({why})" if (why := of["why_not_fit"]) else ""), page)
    lines += [page.bad(line) for line in fit] if of["why_not_fit"] and page.color else fit
    moves = [
        f"moving shards before gradients are reduced {seconds(of['resharding_before_s'])} ({seconds(of['before_s'])} not hidden)",
        f"and back {seconds(of['resharding_after_s'])} ({seconds(of['after_s'])} not hidden)",
        f"a reduction {of['balanced']:.2f}x as large {seconds(of['reduce_s'])} more",
    ]
    lines += labelled("", f"each healthy replica loses {percent(of['overhead'], 2)} % meanwhile: {', '.join(moves)}", page)
    total = f"one lost GPU costs the job {percent(-of['change'], 2)} % of its samples a second in all"
    better = ", which is better" if of["dropped"] > of["change"] else ""
    lines += labelled("", f"{total}; dropping its replica would cost {percent(-of['dropped'], 2)} %{better}", page)
    return lines + [line for note in of["notes"] for line in labelled("note", note, page)]


def run_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return days, GPU-hours and cost of the whole run, where a token budget is given."""
    run = record["run"]
    if run is None:
        return []
    cost = f", cost {run['cost']:,.0f} at {record['job']['price_per_gpu_hour']:g} a GPU-hour" if run["cost"] is not None else ""
    text = f"{show_count(run['tokens'])} tokens in {run['days']:,.1f} days, {run['gpu_hours']:,.0f} GPU-hours{cost} (no restarts counted)"
    return labelled("run", text, page)


def broken_lines(broken: Sequence[dict[str, Any]], page: Page) -> list[str]:
    """Return the rules that the plan breaks."""
    lines = []
    for item in broken:
        label = "illegal" if item["severity"] == "error" else "warning"
        lines += labelled(label, f"{item['text']} [{item['rule']}]", page)
    return lines


def stage_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the memory of the stages that matter: first, last and fullest."""
    stages = record["stages"]
    pp = len(stages)
    shown = [stages[i] for i in sorted({0, record["worst_stage"], pp - 1})]
    terms = [{term["name"]: term["value"] for term in stage["memory"]} for stage in shown]
    names = [name for name in terms[0] if any(each[name] for each in terms)]
    largest = sorted(names, key=lambda name: -max(each[name] for each in terms))
    columns = [
        Column("GB", [stage_name(stage["index"], pp) or "each rank" for stage in shown], left=True),
        Column("total", [gigabytes(stage["memory_bytes"]) for stage in shown]),
        Column("layers", [str(stage["layers"]) for stage in shown], rank=30),
        Column("in flight", [f"{stage['in_flight']:g}" for stage in shown], rank=20),
    ]
    columns += [Column(name.replace("_", " "), [gigabytes(each[name]) for each in terms], rank=1 + largest.index(name)) for name in names]
    table = Table(columns)
    return [*table.lines(page), *hidden_note(table, page)]
