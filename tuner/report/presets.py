"""Lists of presets, and one preset with its figures, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.table import GAP, Column, Page, Table, noted, wrapped
from tuner.report.words import lasting
from tuner.units import show_bytes, show_count, show_flops, show_rate, show_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LONGEST = 400  # characters of one value: a grid of a calibration has thousands
WIDEST = 44  # characters of a cell in a list
SHOWN: dict[str, Callable[[float], str]] = {
    "memory": show_bytes,
    "memory_bytes": show_bytes,
    "l2": show_bytes,
    "hbm": show_rate,
    "bandwidth": show_rate,
    "host_link": show_rate,
    "latency": show_seconds,
    "parameters": show_count,
    "active_parameters": show_count,
    "power": lambda watts: f"{watts:g} W",
    "power_cap": lambda cap: f"{cap:g} W" if cap > 3 else f"{cap:g}x",  # of a GPU; of failure data: of its normal power
    "mtbf": lambda value: f"{value / 3600:,.0f} h",
    **dict.fromkeys(("repair", "software_repair", "detection", "restart", "in_place_restart", "checkpoint_write"), lasting),
    "hardware_share": lambda share: f"{100 * share:g} %",
    "clock": lambda hertz: f"{hertz / 1e9:.3g} GHz",
}


def kinds_text(record: Sequence[dict[str, Any]], page: Page) -> str:
    """Return the kinds of presets."""
    lines = Table(
        [
            Column("kind", [each["kind"] for each in record], left=True),
            Column("presets", [str(each["presets"]) for each in record]),
            Column("what", [each["about"] for each in record], rank=1, left=True),
        ]
    ).lines(page)
    return "\n".join([*lines, "", *wrapped("tuner presets KIND lists them; tuner presets KIND NAME shows one with its sources", page)])


def list_text(record: Sequence[dict[str, Any]], page: Page) -> str:
    """Return the presets of a kind, one a line: the columns are the keys, those that do not fit are left out."""
    if not record:
        return "none"
    keys = [key for key in dict.fromkeys(key for each in record for key in each) if key not in ("fits", "coefficients")]
    columns = [
        Column(
            key.replace("_", " "),
            [clipped(cell(key, each.get(key))) for each in record],
            rank=i,
            left=all(isinstance(each.get(key, ""), (str, list, dict, type(None))) for each in record),
        )
        for i, key in enumerate(keys)
    ]
    return "\n".join(Table(columns).lines(page))


def clipped(text: str) -> str:
    """Return a cell's text, cut where it would crowd out the other columns."""
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def cell(key: str, value: Any) -> str:
    """Return a value of a list in a few letters."""
    if value is None:
        return ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(domain_words(domain) for domain in value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {word(item)}" for name, item in value.items())
    return quantity(key, value)


def domain_words(domain: dict[str, Any]) -> str:
    """Return a network domain: 8 at 450 GB/s; its name stands with the preset itself."""
    return f"{'all' if domain.get('size') is None else domain['size']} at {show_rate(domain['bandwidth'])}"


def word(value: Any) -> str:
    """Return a value as a person reads it: yes and no for truth."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def quantity(key: str, value: Any) -> str:
    """Return a number with the unit that its key implies."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key.endswith("_flops"):
            return show_flops(value)
        return SHOWN[key](value) if key in SHOWN else f"{value:g}" if isinstance(value, float) else str(value)
    return word(value)


def one_text(record: dict[str, Any], page: Page) -> str:
    """Return one preset: every figure with its source."""
    rows = [row for key, value in record.items() for row in flat(key, value)]
    names = max(len(name) for name, _, _ in rows)
    values = max((len(value) for _, value, source in rows if source), default=0)
    lines = []
    for name, whole, source in rows:
        value = whole if len(whole) <= LONGEST else f"{whole[:60]} ... ({len(whole):,} characters: --json has them all)"
        head = f"{name:<{names}}{GAP}{value:<{values}}{GAP}" if source else f"{name:<{names}}{GAP}"
        lines += noted(head, source or value, page, page.dim if source else str)
    return "\n".join(lines)


def flat(path: str, value: Any) -> list[tuple[str, str, str]]:
    """Return (dotted path, value, source) of every figure in a value."""
    key = path.rpartition(".")[2]
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, dict) and "value" in value and "source" in value:
        kind = "x_flops" if ".peak." in f".{path}" else key
        return [(path, quantity(kind, value["value"]), value["source"])]
    if isinstance(value, dict):
        return [row for name, item in value.items() for row in flat(f"{path}.{name}", item)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [row for i, item in enumerate(value) for row in flat(f"{path}.{item.get('name', i)}", item)]
    if isinstance(value, list):
        joint = "; " if key in ("detected", "assumed") else ", "
        return [(path, joint.join(map(str, value)), "")]
    return [(path, quantity(key, value), "")]
