"""Ten jobs of the kinds that people train, each with a plan as they state it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tuner

if TYPE_CHECKING:
    from tuner.exporting import ExportAnswer

FORMATS = (
    "accelerate",
    "deepspeed",
    "maxtext",
    "megatron-bridge",
    "megatron-lm",
    "nanotron",
    "nemo",
    "neutral",
    "primus",
    "torchtitan",
)
# name: model, cluster, seq_len, global_batch, plan, and further options
JOBS: dict[str, tuple[str, str, int, int, str, dict[str, Any]]] = {
    "gpt3-175b": ("gpt3-175b", "a100x1024", 2048, 1536, "tp=8,pp=8,recompute=full,zero=1", {}),
    "llama3-8b-fsdp": ("llama3-8b", "h100x16", 8192, 64, "zero=3,recompute=full", {}),
    "llama3-8b-long": ("llama3-8b", "h100x64", 131072, 16, "cp=8,zero=1,recompute=full", {}),
    "llama3-8b-fp8": ("llama3-8b", "h100x64", 8192, 256, "tp=2,zero=1,recompute=none", {"precision": "fp8"}),
    "llama3-70b-interleaved": (
        "llama3-70b",
        "h100x128",
        8192,
        512,
        "tp=4,pp=4,vpp=3,zero=1,sp=true,recompute=full,pipeline_layout=embedding=1+loss=3",
        {},
    ),
    "llama3-405b": (
        "llama3-405b",
        "h100x1024",
        8192,
        512,
        "tp=8,pp=16,sp=true,zero=1,recompute=full,pipeline_layout=embedding=1+loss=1",
        {},
    ),
    "mixtral-8x7b": ("mixtral-8x7b", "h100x64", 4096, 256, "pp=2,ep=8,etp=1,zero=1,recompute=full", {}),
    "deepseek-v3": ("deepseek-v3", "h100x2048", 4096, 15360, "pp=16,ep=64,zero=1,recompute=full,pipeline_layout=embedding=1+loss=2", {}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", "h200x32", 4096, 256, "ep=8,zero=2,recompute=full", {}),
    "gpt2-xl": ("gpt2-xl", "a100x8", 1024, 256, "zero=0,micro_batch=4", {"precision": "fp16"}),
}


def exported(name: str, formats: tuple[str, ...] = FORMATS, **more: Any) -> ExportAnswer:
    """Return the files of a job in these formats."""
    model, cluster, seq_len, batch, plan, options = JOBS[name]
    question = {"model": model, "cluster": cluster, "seq_len": seq_len, "global_batch": batch, "plan": plan, "calibration": "none"}
    return tuner.export(formats, **{**question, **options, **more})
