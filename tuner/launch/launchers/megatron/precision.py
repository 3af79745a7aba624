"""Number formats and attention kernels, as settings of Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.tables.settings import Aspect, Meaning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.errors import Problem
    from tuner.launch.launchers.tables.settings import Ask, Kind, Values

KINDS: Mapping[str, Kind] = {
    "attention_backend": "text",
    "use_flash_attn": "flag",
    "bf16": "flag",
    "fp16": "flag",
    "fp8": "text",
    "fp8_recipe": "text",
    "fp4": "text",
    "fp4_recipe": "text",
}

FP8 = {"fp8": ("hybrid", "tensorwise"), "fp8-blockwise": ("hybrid", "blockwise"), "mxfp8": ("e4m3", "mxfp8")}
RECIPES = {"tensorwise": "fp8", "delayed": "fp8", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}


def _put_precision(ask: Ask) -> dict[str, Any]:
    job = ask.job
    found: dict[str, Any] = {"attention_backend": "unfused" if job.attention == "unfused" else None}
    if job.precision == "fp32":
        return found
    if job.precision == "fp16":
        return {**found, "fp16": True}
    found["bf16"] = True
    if job.precision in FP8:
        found |= dict(zip(("fp8", "fp8_recipe"), FP8[job.precision], strict=True))
    if job.precision == "nvfp4":
        found |= {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    return found


def _take_precision(values: Values) -> Meaning:
    job: dict[str, Any] = {}
    problems: list[Problem] = []
    unknown: list[Unknown] = []
    if values.get("bf16") and values.get("fp16") and values.has("bf16", "fp16"):
        problems.append(values.problem("fp16" if values.has("fp16") else "bf16", "bf16 and fp16 cannot stand together"))
    if values.get("fp8") and values.get("fp4"):
        problems.append(values.problem("fp4", "fp8 and fp4 cannot stand together"))
    recipe = values.get("fp8_recipe") or "delayed"
    if values.get("fp4"):
        job["precision"] = "nvfp4"
    elif values.get("fp8") and recipe in RECIPES:
        job["precision"] = RECIPES[recipe]
    elif values.get("fp8"):
        unknown.append(values.unknown("fp8_recipe"))
    elif values.has("bf16", "fp16") or "bf16" in values.otherwise:
        job["precision"] = "fp16" if values.get("fp16") else "bf16" if values.get("bf16") else "fp32"
    delayed = values.get("fp8") and recipe == "delayed" and values.get("recompute_granularity") == "selective"
    modules = {"layernorm", "moe_act"} & set(values.get("recompute_modules") or [])
    if delayed and modules and values.has("recompute_modules"):
        problems.append(values.problem("recompute_modules", "delayed scaling of fp8 does not recompute layernorm or moe_act"))
    backend = values.get("attention_backend")
    if backend in ("unfused", "local"):
        job["attention"] = "unfused"
    elif backend in ("flash", "fused") or values.get("use_flash_attn"):
        job["attention"] = "flash"
    elif backend not in (None, "auto") and values.has("attention_backend"):
        unknown.append(values.unknown("attention_backend"))
    assumed = {}
    if job.get("precision") == "fp32" and not values.has("bf16", "fp16"):
        assumed["precision"] = "fp32: what it computes in where neither bf16 nor fp16 is told"
    return Meaning(job=job, problems=tuple(problems), unknown=tuple(unknown), assumed=assumed)


PRECISION = Aspect(
    group="precision",
    keys=("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe", "attention_backend", "use_flash_attn"),
    put=_put_precision,
    take=_take_precision,
)
