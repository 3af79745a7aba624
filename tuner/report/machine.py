"""What timings of a machine's operators and links teach the model, as text."""

from __future__ import annotations

from typing import Any

from tuner.report.table import Column, Page, Table, wrapped
from tuner.report.words import percent

WORDS = {
    "memory_bandwidth_efficiency": "of the memory bandwidth",
    "long_stream_efficiency": "of it in long sums",
    "kernel_launch_s": "a kernel's launch",
    "attention_backward_ratio": "attention backward over forward",
    "host_per_layer_s": "host time of a layer",
    "pp_send_s": "a send beyond the link",
    "inter_node_efficiency": "of a network card's bandwidth",
    "inter_node_all_to_all_efficiency": "of it in all-to-all",
    "inter_node_hop_s": "a hop between nodes",
}


def machine_text(record: dict[str, Any], page: Page) -> str:
    """Return how far each kind of operator was off before and after on rows held out, and the coefficients."""
    kinds = record["operators"]
    table = Table(
        [
            Column("median |error|", [kind["operator"] for kind in kinds], left=True),
            Column("rows", [str(kind["rows"]) for kind in kinds]),
            Column("hardware alone", [_off(kind["hardware"]) for kind in kinds], rank=1),
            Column("shipped", [_off(kind["shipped"]) for kind in kinds]),
            Column("measured", [_off(kind["measured"]) for kind in kinds]),
            Column("90th pct", [_off(kind["measured"], "p90_abs_err") for kind in kinds], rank=2),
            Column("how", [kind["words"] for kind in kinds], rank=3, left=True),
        ]
    ).lines(page)
    found = record["coefficients"]
    numbers = Table(
        [
            Column("coefficient", list(found), left=True),
            Column("value", [f"{entry['value']:.3g}" for entry in found.values()]),
            Column("rows", [str(entry["n"]) for entry in found.values()], rank=1),
            Column("what", [WORDS.get(name, "") for name in found], rank=2, left=True),
        ]
    ).lines(page)
    head = f"{record['timings']:,} timings of {record['gpu']}, cluster {record['cluster']}"
    told = "measured: each quarter of the rows told by a calibration that was fitted, and chosen, without it"
    notes = [line for note in record["notes"] for line in wrapped(note, page)]
    return "\n".join(
        [*wrapped(head, page), "", *table, "", *wrapped(told, page), *(["", *numbers] if found else []), *([""] if notes else []), *notes]
    )


def _off(score: dict[str, float] | None, name: str = "median_abs_err") -> str:
    return "" if score is None else f"{percent(score[name], 0 if score[name] >= 1 else 1)} %"
