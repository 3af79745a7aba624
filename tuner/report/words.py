"""Phrases that several reports share: the header of a job, a plan in words, the arithmetic of its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.table import Page, flow, wrapped
from tuner.units import show_count, show_flops

if TYPE_CHECKING:
    from collections.abc import Sequence

LABEL = 9


def gigabytes(value: float) -> str:
    """Return bytes in GB (1e9) with one decimal, without the unit."""
    return f"{value / 1e9:,.1f}"


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction in percent, without the sign."""
    return f"{100 * value:.{digits}f}"


def probability(value: float) -> str:
    """Return a probability in percent: 1.2 %, below 0.1 %, above 99.9 %."""
    if value < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if value > 0.999 else f"{percent(value)} %"


def seconds(value: float) -> str:
    """Return seconds with three digits: 21.3 s, 0.42 s, 13.2 ms."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 0.1 or value == 0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} us"


def lasting(value: float) -> str:
    """Return a time from a second to days: 30 s, 9.3 min, 1.55 h, 5 d."""
    for size, unit in ((48 * 3600.0, "d"), (3600.0, "h"), (120.0, "min")):
        if value >= size:
            return f"{value / {'d': 86400.0, 'h': 3600.0, 'min': 60.0}[unit]:.3g} {unit}"
    return f"{value:.3g} s"


def stage_name(stage: int, pp: int) -> str:
    """Return "stage 0 (first)", "stage 3", "stage 7 (last)", or "" without a pipeline."""
    if pp <= 1:
        return ""
    return f"stage {stage}" + (" (first)" if stage == 0 else " (last)" if stage == pp - 1 else "")


def labelled(label: str, text: str, page: Page, width: int = LABEL) -> list[str]:
    """Return "label    text", wrapped under the text."""
    first, *rest = wrapped(text, Page(width=page.width - width))
    return [page.bold(label.ljust(width)) + first, *(" " * width + line for line in rest)]


def header(job: dict[str, Any], calibration: dict[str, Any], page: Page) -> list[str]:
    """Return the lines that say what is trained, on what, and with which figures."""
    return flow([*header_parts(job), calibration_words(calibration)], page)


def header_parts(job: dict[str, Any]) -> list[str]:
    """Return what is trained, on what, how much of it, and with which software."""
    size = show_count(job["parameters"])
    kind = "dense" if job["active_parameters"] == job["parameters"] else f"with {show_count(job['active_parameters'])} active"
    rack = f", scale-up domains of {job['domain']}" if job["domain"] > job["gpus_per_node"] else ""
    nodes, node = job["gpus"] // job["gpus_per_node"], job["gpus_per_node"]
    task = job["task"] if job["task"] != "lora" else f"lora of rank {job['lora_rank']}"
    return [
        f"{job['model']} {size} {kind}",
        f"{job['gpus']:,} x {job['gpu']}" + (f" ({nodes:,} nodes of {node}{rack})" if nodes > 1 else ""),
        f"seq {job['seq_len']}, global batch {job['global_batch']}" + ("" if task == "pretrain" else f", {task}"),
        f"{job['framework']}{' ' + job['release'] if job['release'] else ''}, {job['precision']}, {job['attention']} attention",
    ]


def calibration_words(calibration: dict[str, Any]) -> str:
    """Return "calibration NAME HASH" and, when it was made for a relative, for whom."""
    name = "none" if calibration["name"] == "prior" else calibration["name"]
    lent = f" (a relative of {calibration['gpu']})" if calibration["based_on"] else ""
    return f"calibration {name}{lent} #{calibration['hash']}"


def mesh(plan: dict[str, Any], job: dict[str, Any]) -> str:
    """Return the arithmetic of a plan: "64 = tp 4 x pp 4 x dp 4", for experts too, and the cut of the batch."""
    degrees = [("tp", plan["tp"]), ("cp", plan["cp"]), ("pp", plan["pp"]), ("dp", plan["dp"])]
    text = f"{job['gpus']:,} GPUs = " + product(degrees, always=("tp", "pp", "dp"))
    if plan["ep"] > 1 or plan["etp"] > 1:
        experts = [("etp", plan["etp"]), ("ep", plan["ep"]), ("pp", plan["pp"]), ("edp", plan["edp"])]
        text += f"; experts: {job['gpus']:,} = " + product(experts, always=("ep", "pp", "edp"))
    return text


def microbatches(count: int, size: int) -> str:
    """Return "96 micro batches of 1"."""
    return f"{count:,} micro batch{'' if count == 1 else 'es'} of {size}"


def product(factors: Sequence[tuple[str, int]], always: Sequence[str] = ()) -> str:
    """Return "tp 4 x pp 4 x dp 4", leaving out factors of 1 but those in `always`."""
    return " x ".join(f"{name} {value}" for name, value in factors if value != 1 or name in always)


_SPOKEN = {
    "sequence_parallel": "sequence parallelism",
    "tp_overlap": "TP overlap",
    "dp_overlap": "DP overlap",
    "ep_overlap": "EP overlap",
    "cuda_graphs": "CUDA graphs",
}


def knob_words(name: str, value: Any) -> str:
    """Return one knob as text: "tp 8", "sequence parallel", "no DP overlap", "recompute full"."""
    if name in _SPOKEN:
        return _SPOKEN[name] if value else f"no {_SPOKEN[name]}"
    return f"{name.replace('_', ' ')} {value}"


def word(value: Any) -> str:
    """Return a knob's value as a person writes it: on and off for truth."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def plan_words(plan: dict[str, Any]) -> str:
    """Return a plan in words: its degrees, and what is switched on."""
    degrees = [(name, plan[name]) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")]
    parts = [f"{name} {value}" for name, value in degrees if value != 1 or name in ("tp", "pp", "dp")]
    parts.append(f"micro batch {plan['micro_batch']}")
    parts += [_SPOKEN[name] for name in _SPOKEN if plan[name]]
    parts.append(f"recompute {plan['recompute']}")
    parts.append(f"zero {plan['zero']}")
    usual = {"shard_group": 0, "schedule": "1f1b", "offload": "none", "cp_kind": "p2p", "pipeline_layout": "even"}
    parts += [knob_words(name, plan[name]) for name, value in usual.items() if plan[name] != value]
    parts += [knob_words("fallback_tp", plan["fallback_tp"])] if plan["fallback_tp"] != plan["tp"] else []
    return ", ".join(parts)


def mfu_words(job: dict[str, Any]) -> str:
    """Return how MFU is counted for this job."""
    half = "causal half of " if job["attention"] == "flash" else ""
    frozen = ", no weight gradients of frozen weights" if job["task"] == "lora" else ""
    return f"model FLOPs with the {half}attention over {show_flops(job['peak_flops'])}, recompute not counted{frozen}"
