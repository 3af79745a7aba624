"""The ranked plans of a search, as text: the columns that tell the plans apart, as many as fit the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.fallback_cost import sharded_note
from tuner.report.export import best_lines
from tuner.report.profile import trial_lines
from tuner.report.table import Column, Page, Table, wrapped
from tuner.report.words import gigabytes, header, labelled, mesh, mfu_words, microbatches, percent, probability, seconds, word
from tuner.units import show_count, show_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# (knob, title, usual value, rank): a knob's column stands when some plan has another value, and always where usual is None.
KNOBS: tuple[tuple[str, str, Any, int], ...] = (
    ("tp", "tp", None, 0),
    ("pp", "pp", None, 0),
    ("vpp", "vpp", 1, 0),
    ("cp", "cp", 1, 0),
    ("ep", "ep", 1, 0),
    ("etp", "etp", 1, 1),
    ("fallback_tp", "fallback", None, 2),
    ("dp", "dp", None, 3),
    ("micro_batch", "mb", None, 0),
    ("sequence_parallel", "sp", False, 2),
    ("recompute", "recompute", None, 1),
    ("zero", "zero", None, 1),
    ("shard_group", "shards", 0, 2),
    ("offload", "offload", "none", 2),
    ("pipeline_layout", "layout", "even", 2),
    ("schedule", "schedule", "1f1b", 2),
    ("cp_kind", "cp by", "p2p", 2),
    ("tp_overlap", "TP overlap", None, 12),
    ("dp_overlap", "DP overlap", None, 12),
    ("ep_overlap", "EP overlap", False, 12),
    ("cuda_graphs", "CUDA graphs", False, 12),
)
MOST_PARETO = 12


def search_text(record: dict[str, Any], page: Page, *, detail: int = 0) -> str:
    """Return the report of a search's record; detail 1 adds the Pareto front and the axes."""
    job = record["job"]
    lines = header(job, record["calibration"], page)
    lines += space_lines(record, page)
    if record["counts"]:
        lines += ["", *count_table(record, page)]
    if "measured" in record:
        runs = [run["plan"] for run in record["measured"]["trials"]]
        lines += trial_lines(record["measured"], [name for name, *_ in KNOBS if len({str(plan[name]) for plan in runs}) > 1], page)
    rows = record["ranking"] + ([record["current"]] if record["current"] else [])
    if rows:
        lines += ["", *ranking_table(record, rows, page), ""]
    lines += verdict(record, page)
    if "export" in record:
        lines += best_lines(record, page)
    if detail and record["pareto"]:
        lines += ["", *pareto_table(record, page)]
    if detail:
        lines += ["", *axes_lines(record, page)]
    return "\n".join(lines)


def space_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return how many plans there were, were legal, and fit, and how long it took."""
    space = record["space"]
    room = "" if space["max_memory_bytes"] is None else f" and at most {gigabytes(space['max_memory_bytes'])} GB"
    text = (
        f"{space['combinations']:,} combinations -> {space['legal']:,} legal -> {space['fit']:,} fit "
        f"(P(OOM) < {100 * space['max_p_oom']:g} %{room}); "
        f"priced {space['plans']:,} plans in {seconds(space['seconds'])}, {space['plans_per_s']:,.0f} a second"
    )
    if record["strategy"] in ("tpe", "gp") and "measured" not in record:
        text = (
            f"{record['strategy']} tried {space['plans']:,} legal plans of {space['combinations']:,} combinations, "
            f"{space['fit']:,} of them fit (P(OOM) < {100 * space['max_p_oom']:g} %{room}), in {seconds(space['seconds'])}"
        )
    lines = labelled("space", text, page)
    if space["thinned"]:
        knobs = ", ".join(name.replace("_", " ") for name in space["thinned"])
        lines += labelled("thinned", f"not every value of {knobs} was tried; -v lists those that were, --space takes others", page)
    held = [f"{knob} = {word(value)}" for knob, value in space["fix"].items()] + space["limits"]
    return lines + (labelled("limits", "; ".join(held), page) if held else [])


def ranking_table(record: dict[str, Any], rows: Sequence[dict[str, Any]], page: Page) -> list[str]:
    """Return the ranked plans, the person's own last, and the columns that the page has no room for."""
    own, measured = record["current"] is not None, "measured" in record
    names = [str(row["rank"]) for row in record["ranking"]] + (["yours"] if own else [])
    pp = [row["plan"]["pp"] for row in rows]
    like = [f"+{row['like']}" if row["like"] else "" for row in rows]
    columns = [
        Column("#", names),
        Column("+", like, rank=1, left=True),
        *knob_columns([row["plan"] for row in rows], kept=("fallback_tp",) if record["failures"] else ()),
    ]
    columns += [
        Column("GB", [gigabytes(row["memory_bytes"]) for row in rows]),
        Column("stage", [place(row["worst_stage"], n) for row, n in zip(rows, pp, strict=True)], rank=7, left=True),
        Column("P(OOM)", [probability(row["p_oom"]) for row in rows], rank=5 if measured else 8),
        Column("step", [seconds(row["step_s"]) for row in rows], rank=0 if measured else 4),
        Column("tok/s/GPU", [f"{row['tokens_per_s_per_gpu']:,.0f}" for row in rows], rank=1 if measured or record["failures"] else 0),
        Column("90 % range", [speeds(row) for row in rows], rank=5),
        Column("MFU %", [percent(row["mfu"]) for row in rows], rank=2),
        Column("days", [f"{row['run']['days']:,.1f}" if row["run"] else "" for row in rows], rank=3),
        Column("cost", [money(row["run"]) for row in rows], rank=6),
        Column("1 GPU lost", [lost_short(row["one_gpu_lost"]) for row in rows], rank=4, left=True),
        Column("basis", [row["basis"] for row in rows], rank=0 if measured else 6, left=True),
    ]
    if record["failures"]:
        columns.insert(-2, Column("goodput %", [percent(row["goodput"], 2) for row in rows]))
        columns.insert(-2, Column("good tok/s", [f"{row['good_tokens_per_s_per_gpu']:,.0f}" for row in rows]))
    styles: dict[int, Callable[[str], str]] = {0: page.good} if record["ranking"] else {}
    if own:
        styles[len(rows) - 1] = page.warn
    table = Table(columns, styles=styles)
    hidden = table.hidden(page)
    first = next((text for text in like if text), "")
    alike = f"{first}: that many more plans differ from this one in smaller knobs and by less than 0.5 %; --all ranks each plan"
    note = labelled("", alike, page) if first and "+" not in hidden else []
    note += labelled("", f"not shown at this width: {', '.join(hidden)}", page) if hidden else []
    return [*table.lines(page), *map(page.dim, note)]


def knob_columns(plans: Sequence[dict[str, Any]], kept: Sequence[str] = ()) -> list[Column]:
    """Return the columns of the knobs that matter to these plans; those of `kept` stand on the narrowest page too."""
    columns = []
    for knob, title, usual, rank in KNOBS:
        values = [plan[knob] for plan in plans]
        if usual is not None and all(value == usual for value in values):
            continue
        if knob == "fallback_tp" and all(plan[knob] == plan["tp"] for plan in plans):
            continue
        if rank == 12 and len(set(values)) == 1:
            continue
        differs = len(set(values)) > 1 and knob != "dp"  # dp follows from the others
        left = isinstance(values[0], str)
        place = 0 if knob in kept else min(rank, 1) if differs else rank
        columns.append(Column(title, [word(value) for value in values], rank=place, left=left))
    return columns


def place(stage: int, pp: int) -> str:
    """Return which stage is the fullest, shortly."""
    return "" if pp <= 1 else "first" if stage == 0 else "last" if stage == pp - 1 else str(stage)


def speeds(row: dict[str, Any]) -> str:
    """Return the 90 % range of tokens/s/GPU: a slow step is the low end."""
    return f"{row['low_tokens_per_s_per_gpu']:,.0f}-{row['high_tokens_per_s_per_gpu']:,.0f}"


def goodput_words(record: dict[str, Any]) -> str:
    """Return which failures the ranking counts, and what the best plan keeps."""
    of, best = record["failures"], record["ranking"][0]
    rates = f"{of['name']}: a GPU fails every {of['mtbf_s'] / 3600:,.0f} h and is away for {of['repair_s'] / 3600:,.0f} h"
    left = f"{percent(best['goodput'] / of['lasting'], 2)} % of the samples are left on average" if of["lasting"] > 0 else "nothing is left"
    kept = f"{left} times {percent(of['lasting'], 2)} % of the time whose work survives restarts (of any plan): goodput"
    kept += "; plans are ranked by good tok/s, tok/s/GPU times goodput"
    return f"{rates}, so {100 * of['failed_fraction']:.2g} % are down; {kept}"


def lost_short(lost: dict[str, Any]) -> str:
    """Return what one lost GPU does: "tp 8->7 -2.4 %", "drop -12.5 %"."""
    where = "drop" if lost["way"] == "drop" else f"{lost['way']} {lost['degree']}->{lost['to']}"
    return f"{where} {percent(lost['change'])} %"


def lost_words(lost: dict[str, Any]) -> str:
    """Return what one lost GPU costs the best plan, and what would avoid it."""
    if lost["way"] == "drop":
        less = f"one GPU costs {percent(-lost['change'])} %: its replica is dropped, dp {lost['degree']} -> {lost['to']}"
        less = less if lost["to"] else "one GPU stops the job: no other replica is left"
        return less + (f" ({lost['why']})" if lost["why"] else "")
    names = {"tp": "tensor-parallel", "ep": "expert-parallel"}
    text = f"one GPU costs {percent(-lost['change'])} % where its {names[lost['way']]} group goes on at {lost['to']} of {lost['degree']}"
    boosted = lost["way"] == "tp" and lost["power"] is not None and lost["power"] > 1.0
    text += f" ({percent(lost['overhead'])} % if it could have {lost['power']:.2f}x its power)" if boosted else ""
    return text + "; `tuner failures` compares policies"


def money(run: dict[str, Any] | None) -> str:
    """Return the cost of a run, "" where no price is known."""
    return f"{run['cost']:,.0f}" if run and run["cost"] is not None else ""


def verdict(record: dict[str, Any], page: Page) -> list[str]:
    """Return what the table means: the best plan's arithmetic, how it stands to the person's, what cannot be told apart."""
    if record["why_nothing"]:
        lines = labelled("nothing", record["why_nothing"], page)
        return lines + (own_words(record, page) if record["current"] else [])
    if not record["ranking"]:
        return []
    best, job = record["ranking"][0], record["job"]
    cut = f"{mesh(best['plan'], job)}; {microbatches(best['microbatches'], best['plan']['micro_batch'])}"
    lines = labelled("best", f"{cut}; {kept_words(best['plan'])}", page)
    if best["run"]:
        run = best["run"]
        cost = f", cost {run['cost']:,.0f}" if run["cost"] is not None else ""
        text = (
            f"{show_count(run['tokens'])} tokens in {run['days']:,.1f} days, {run['gpu_hours']:,.0f} GPU-hours{cost} (no restarts counted)"
        )
        lines += labelled("run", text, page)
    if record["failures"]:
        lines += labelled("failing", goodput_words(record), page)
    lines += labelled("losing", lost_words(best["one_gpu_lost"]), page)
    if best["one_gpu_lost"]["way"] == "tp" and best["plan"]["zero"]:
        lines += labelled("", sharded_note(best["plan"]["zero"]), page)
    lines += own_words(record, page) if record["current"] else []
    held = held_words(record)
    lines += labelled("held", f"{held}: as {job['framework']} does, not varied; --space varies them", page) if held else []
    lines += labelled("sure", sure_words(record), page)
    lines += labelled("plainer", plainer_words(record["plainer"]), page) if record["plainer"] else []
    return lines + labelled("", f"MFU: {mfu_words(job)}", page)


def kept_words(plan: dict[str, Any]) -> str:
    """Return the rest of what a launch needs: "recompute none, zero 1", and what is not as usual of vpp, layout, schedule, cp, offload."""
    words = [f"recompute {plan['recompute']}", f"zero {plan['zero']}"]
    words += [f"vpp {plan['vpp']}"] if plan["vpp"] > 1 else []
    words += ["sequence parallelism"] if plan["tp"] > 1 and plan["sequence_parallel"] else []
    words += [f"layout {plan['pipeline_layout']}"] if plan["pp"] > 1 and plan["pipeline_layout"] != "even" else []
    words += [f"schedule {plan['schedule']}"] if plan["pp"] > 1 and plan["schedule"] != "1f1b" else []
    words += [f"cp by {plan['cp_kind']}"] if plan["cp"] > 1 else []
    words += [f"fallback to tp {plan['fallback_tp']}"] if plan["fallback_tp"] != plan["tp"] else []
    words += [f"offload {plan['offload']}"] if plan["offload"] != "none" else []
    return ", ".join(words)


def held_words(record: dict[str, Any]) -> str:
    """Return the knobs that the search did not vary and nobody held, as the best plan has them; "" where it varied all."""
    space, plan = record["space"], record["ranking"][0]["plan"]
    varied = {*space["fix"], *space["axes"]}
    dense = record["job"]["parameters"] == record["job"]["active_parameters"]
    idle = {"dp", "fallback_tp", *(("ep", "etp", "ep_overlap") if dense else ())}
    return ", ".join(f"{title} {word(plan[knob])}" for knob, title, *_ in KNOBS if knob in plan and knob not in varied | idle)


def sure_words(record: dict[str, Any]) -> str:
    """Return how far the numbers can be trusted to tell the plans apart."""
    shown = len(record["ranking"])
    tied = min(record["tied"], shown)
    basis = record["ranking"][0]["basis"]
    measured = sum(row["basis"] == "measured" for row in record["ranking"])
    proxies = sum(row["basis"] == "proxy" for row in record["ranking"])
    made = f"{measured} of {shown} times are measured" if measured or proxies else f"times are {basis}, not measured"
    made += f", {proxies} extrapolated from proxies" if proxies else ""
    if tied <= 1:
        return made
    which = f"all {shown} shown" if tied == shown else f"the first {tied}"
    return f"{made}; {which} cannot be told apart from the best"


def plainer_words(plainer: dict[str, Any]) -> str:
    """Return which of the plans that cannot be told apart needs fewer knobs, and which it does without."""
    knobs = ", ".join(name.replace("_", " ") for name in plainer["without"])
    return f"#{plainer['rank']} is as fast within the noise of a run ({percent(plainer['slower'])} % slower), without {knobs}: try it first"


def own_words(record: dict[str, Any], page: Page) -> list[str]:
    """Return how the person's plan stands to the best, what was assumed of it, and what is wrong with it."""
    own = record["current"]
    broken = [problem.removeprefix("error: ") for problem in own["problems"] if problem.startswith("error: ")]
    lines = [line for text in broken for line in labelled("yours", f"is illegal: {text}", page)]
    if own["why_not_fit"]:
        lines += labelled("yours", f"does not fit: {own['why_not_fit']}", page)
    if own["gain"] is not None:
        runs = own["legal"] and own["fits"]
        lines += labelled("yours" if runs else "", gain_words(own["gain"], runs=runs), page)
    if own["assumed"]:
        knobs = ", ".join(f"{name.replace('_', ' ')} {word(own['plan'][name])}" for name in own["assumed"])
        lines += labelled("", f"taken for yours, as {record['job']['framework']} does: {knobs}", page)
    for problem in own["problems"]:
        lines += [] if problem.startswith("error: ") else labelled("", problem, page)
    return lines


def gain_words(gain: float, *, runs: bool) -> str:
    """Return how many times faster the best plan is than the person's, which may not run at all."""
    words = f"{gain:.2f}x as fast as yours"
    return f"best is {words}" if runs else f"if yours ran, best would be {words}"


def count_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the best of each count of GPUs, the chosen one marked."""
    counts = record["counts"]
    chosen = record["job"]["gpus"] if not record["why_nothing"] else None
    columns = [
        Column("GPUs", [f"{each['gpus']:,}" for each in counts]),
        Column("best plan", [plan_short(each["plan"]) for each in counts], rank=2, left=True),
        Column("step", [seconds(each["step_s"]) if each["step_s"] else "-" for each in counts], rank=1),
        Column("days", [f"{each['days']:,.1f}" if each["days"] else "-" for each in counts]),
        Column("GPU-hours", [f"{each['gpu_hours']:,.0f}" if each["gpu_hours"] else "-" for each in counts]),
        Column("cost", [f"{each['cost']:,.0f}" if each["cost"] else "" for each in counts]),
    ]
    if record["deadline_s"] is not None:
        in_time = [{True: "yes", False: "no", None: ""}[each["meets_deadline"]] for each in counts]
        columns.append(Column(f"in {show_seconds(record['deadline_s'])}", in_time, left=True))
    columns.append(Column("", ["<- cheapest" if each["gpus"] == chosen else "" for each in counts], left=True))
    at = next((i for i, each in enumerate(counts) if each["gpus"] == chosen), None)
    return Table(columns, styles={} if at is None else {at: page.good}).lines(page)


def plan_short(plan: dict[str, Any] | None) -> str:
    """Return a plan's degrees in a few letters, "-" where nothing fits."""
    if plan is None:
        return "nothing fits"
    names = ("tp", "pp", "vpp", "cp", "ep", "dp")
    degrees = " ".join(f"{name} {plan[name]}" for name in names if plan[name] != 1 or name in ("tp", "pp", "dp"))
    return f"{degrees} mb {plan['micro_batch']} {plan['recompute']}"


def pareto_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the plans that no other beats in both time and memory, the leanest first."""
    front = record["pareto"]
    step = max(1, -(-len(front) // MOST_PARETO))
    shown = [*front[::-1][::step]][::-1]
    columns = [
        Column("GB", [gigabytes(row["memory_bytes"]) for row in shown]),
        Column("step", [seconds(row["step_s"]) for row in shown]),
        *knob_columns([row["plan"] for row in shown]),
    ]
    left = f" ({len(shown)} of {len(front)} shown)" if len(shown) < len(front) else ""
    title = wrapped(f"time against memory: the plans that no other beats in both{left}", page)
    return [*title, *Table(columns).lines(page)]


def axes_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return the values that were searched."""
    lines = []
    for knob, values in record["space"]["axes"].items():
        shown = ", ".join(values[:24]) + (f", ... ({len(values)} in all)" if len(values) > 24 else "")
        lines += labelled(knob.replace("_", " "), shown, page, width=19)
    return lines
