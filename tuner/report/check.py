"""The judgement on launch files, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.estimate import interval
from tuner.report.table import Column, Page, Table, hidden_note, wrapped
from tuner.report.words import gigabytes, header_parts, labelled, percent, plan_words, probability, product, seconds, stage_name, word

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW = 3  # unknown flags that are named without --verbose
FEW_ASSUMED = 8
LABEL = 10
WIDEST_NAME = 60
ROOMY = 100  # columns from which the overview names rules


def check_text(record: dict[str, Any], page: Page, every: bool = False) -> str:
    """Return the report of a check. every: name everything that was assumed and not understood."""
    launches = record["checked"]
    lines: list[str] = []
    if len(launches) > 1:
        lines += [*overview(launches, page), ""]
    for launch in launches:
        lines += [*launch_lines(launch, page, record["gap"], every), ""]
    return "\n".join([*lines, *closing(record, page)])


def overview(launches: Sequence[dict[str, Any]], page: Page) -> list[str]:
    """Return one row for each launch."""

    def figure(launch: dict[str, Any], name: str, show: Any) -> str:
        return show(launch["cost"][name]) if launch["cost"] else ""

    names = [_short(launch["files"][0], min(WIDEST_NAME, max(page.width // 3, 16))) for launch in launches]
    columns = [
        Column("launch", names, left=True),
        Column("format", [launch["format"] for launch in launches], rank=5, left=True),
        Column("GPUs", [f"{launch['job']['gpus']:,}" if launch["job"] else "" for launch in launches], rank=6),
        Column("plan", [_degrees(launch["plan"]) for launch in launches], rank=4, left=True),
        Column("GB", [figure(launch, "memory_bytes", gigabytes) for launch in launches], rank=3),
        Column("step", [figure(launch, "step_s", seconds) for launch in launches], rank=2),
        Column("MFU %", [figure(launch, "mfu", percent) for launch in launches], rank=7),
        Column("best", [_gain(launch) for launch in launches], rank=1),
        Column("is", [_verdict(launch, most=2 if page.width >= ROOMY else 0) for launch in launches], left=True),
    ]
    styles = {i: _style(launch, page) for i, launch in enumerate(launches) if launch["status"] != "ok"}
    table = Table(columns, styles=styles)
    return [*table.lines(page), *hidden_note(table, page)]


def _style(launch: dict[str, Any], page: Page) -> Any:
    return page.warn if launch["status"] in ("slower", "unclear") else page.bad


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else "..." + name[3 - most :]


def _degrees(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return ""
    names = ("tp", "cp", "pp", "dp", "ep")
    return product([(name, plan[name]) for name in names], always=("tp", "pp", "dp")).replace(" x ", " ")


def _gain(launch: dict[str, Any]) -> str:
    best = launch["best"]
    return "" if best is None or best["gain"] is None else f"{best['gain']:.2f}x"


def _verdict(launch: dict[str, Any], most: int = 100) -> str:
    """Return the status in words, with the first few (`most`) of the rules that are broken or parts that are missing."""
    lacking = [problem["path"] for problem in launch["problems"] if problem["rule"] == "is not said"]
    if launch["status"] == "unclear" and not lacking:
        return "unclear" if launch["framework"] else "unreadable"
    rules = [item["rule"] for item in launch["broken"] if item["severity"] == "error"]
    names = {"illegal": list(dict.fromkeys(rules)), "unclear": lacking}.get(launch["status"], [])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    if names and most:
        return f"{launch['status']}: {', '.join(names[:most])}{more}" + (" not said" if launch["status"] == "unclear" else "")
    return str(launch["status"])


def launch_lines(launch: dict[str, Any], page: Page, gap: float, every: bool) -> list[str]:
    """Return everything about one launch."""
    first, *others = launch["files"]
    kind = f" ({launch['format']})" if launch["format"] else ""
    verdict = _verdict(launch)
    title = f"{first}{kind}: {verdict}"
    style = page.bold if launch["status"] == "ok" else _style(launch, page)
    lines = [style(line) for line in wrapped(title, page, indent=LABEL)]

    def say(label: str, text: str) -> None:
        lines.extend(labelled(label, text, page, LABEL))

    if others:
        say("with", ", ".join(others))
    for problem in launch["problems"]:
        say("missing" if problem["rule"] == "is not said" else "wrong", _problem(problem))
    if launch["job"] is not None:
        say("job", ", ".join(header_parts(launch["job"])))
    if launch["plan"] is not None:
        say("plan", plan_words(launch["plan"]))
    for item in launch["broken"]:
        say("illegal" if item["severity"] == "error" else "warning", f"{item['text']} [{item['rule']}]")
    if launch["cost"] is not None:
        lines += _cost_lines(launch, page)
    lines += _best_lines(launch, page, gap)
    for text in launch["contradictions"]:
        say("differs", text)
    lines += _assumed_lines(launch, page, every)
    lines += _unknown_lines(launch, page, every)
    patch = launch["patch"]
    if patch is not None:
        say("fix", "a diff of the lines that differ" if patch["edited"] else patch["notes"][0])
        for text in patch["notes"][0 if patch["edited"] else 1 :]:
            say("", text)
    elif launch["no_patch"]:
        say("fix", f"none: {launch['no_patch']}")
    return lines


def _problem(problem: dict[str, Any]) -> str:
    if problem["rule"] == "is not said":
        return f"{problem['path']}: no file says it ({problem['hint']})"
    value = f" = {problem['value']}" if problem["value"] else ""
    hint = f" ({problem['hint']})" if problem["hint"] else ""
    return f"{problem['where']}: {problem['path']}{value}: {problem['rule']}{hint}".replace(": :", ":")


def _cost_lines(launch: dict[str, Any], page: Page) -> list[str]:
    cost, job, plan = launch["cost"], launch["job"], launch["plan"]
    place = stage_name(cost["worst_stage"], plan["pp"])
    need = f"{gigabytes(cost['memory_bytes'])} of {gigabytes(job['gpu_memory_bytes'])} GB" + (f" on {place}" if place else "")
    verdict = "fits" if launch["searched"] else "may not fit, a search passes over it" if launch["fits"] else "does not fit"
    lines = labelled("memory", f"{need}, P(OOM) {probability(cost['p_oom'])}: {verdict}; most: {launch['largest']}", page, LABEL)
    if launch["why_not_fit"]:
        lines += labelled("", launch["why_not_fit"], page, LABEL)
    if launch["legal"] is not False:
        time = f"{seconds(cost['step_s'])} a step, 90 % range {interval(cost)}, {cost['basis']}"
        speed = f"{cost['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, MFU {percent(cost['mfu'])} %"
        lines += labelled("time", f"{time}; {speed}", page, LABEL)
    return lines


def _best_lines(launch: dict[str, Any], page: Page, gap: float) -> list[str]:
    best = launch["best"]
    if best is None:
        return labelled("best", launch["no_best"], page, LABEL) if launch["no_best"] and launch["job"] else []
    changes = ", ".join(f"{c['knob'].replace('_', ' ')} {word(c['from'])} -> {word(c['to'])}" for c in best["changes"])
    gain = best["gain"]
    faster = "" if gain is None else f" ({gain:.2f}x as fast{f', past the gap of {percent(gap, 0)} %' if gain - 1 > gap else ''})"
    cost = f"{seconds(best['step_s'])} a step{faster}, {gigabytes(best['memory_bytes'])} GB, MFU {percent(best['mfu'])} %"
    return labelled("best", f"{changes}: {cost}", page, LABEL)


def _assumed_lines(launch: dict[str, Any], page: Page, every: bool) -> list[str]:
    usual = f": what {launch['framework']} does when not told"
    spoken = {name.replace("_", " "): why for name, why in launch["assumed"].items()}
    texts = [f"{name} {why}" for name, why in spoken.items() if not why.endswith(usual)]
    defaults = [f"{name} {why.removesuffix(usual)}" for name, why in spoken.items() if why.endswith(usual)]
    texts += [", ".join(defaults) + usual] if defaults else []
    shown = texts if every else texts[:FEW_ASSUMED]
    more = f"; and {len(texts) - len(shown)} more (-v names all)" if len(shown) < len(texts) else ""
    return labelled("assumed", "; ".join(shown) + more, page, LABEL) if texts else []


def _unknown_lines(launch: dict[str, Any], page: Page, every: bool) -> list[str]:
    unknown = launch["unknown"]
    if not unknown:
        return []
    shown = unknown if every else unknown[:FEW]
    texts = [
        f"{item['name']}{' ' + item['value'] if item['value'] else ''}{' at ' + item['where'] if item['where'] else ''}" for item in shown
    ]
    texts = [text if len(text) <= 160 else text[:157] + "..." for text in texts]
    more = "; ... (-v names all)" if len(shown) < len(unknown) else ""
    count = f"{len(unknown)} setting{'' if len(unknown) == 1 else 's'} not understood, and kept: "
    return labelled("unknown", count + "; ".join(texts) + more, page, LABEL)


def closing(record: dict[str, Any], page: Page) -> list[str]:
    """Return how many launches are what, and what was left out."""
    counts = ", ".join(f"{count} {status}" for status, count in record["counts"].items())
    total = len(record["checked"])
    skipped = ", ".join(f"{count} {why}" for why, count in record["skipped"].items())
    text = f"{total} launch{'' if total == 1 else 'es'}: {counts}" + (f"; files left out: {skipped}" if skipped else "")
    return labelled("checked", text, page, LABEL)
