"""Forks that launch in another framework's words: what their own flags mean, where that launcher left them as not understood."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.launch.launchers.launcher import Found

MEGATRON_DEEPSPEED = "megatron-deepspeed"
_MARKS = {"--deepspeed", "--deepspeed_config", "--zero-stage", "--deepspeed-activation-checkpointing"}
_RECOMPUTE = {"--checkpoint-activations", "--deepspeed-activation-checkpointing"}
_IDLE = {"--deepspeed", "--deepspeed_config", "--abort-on-unmet-fused-kernel-constraints", "--kill-switch-path", "--embed-layernorm"}


def forked(found: Found) -> Found:
    """Return what files in Megatron-LM's words say, where they are for Megatron-DeepSpeed (bigscience-workshop/Megatron-DeepSpeed
    megatron/arguments.py): ZeRO by --zero-stage, activations recomputed by --checkpoint-activations, alibi and a norm behind the
    embedding. Its bf16 optimizer shards its state whatever the stage (deepspeed/runtime/bf16_optimizer.py).
    """
    names = {item.name for item in found.unknown}
    if found.framework != "megatron-lm" or not names & _MARKS:
        return found
    values = {item.name: item.value for item in found.unknown}
    plan: dict[str, Any] = dict(found.plan)
    model: dict[str, Any] = dict(found.model)
    assumed = dict(found.assumed)
    understood = _IDLE & names
    if re.fullmatch(r"[0-3]", values.get("--zero-stage", "")):
        plan["zero"] = int(values["--zero-stage"])
        understood.add("--zero-stage")
    if found.job.get("precision") == "bf16" and plan.get("zero") == 0:
        plan["zero"] = 1
        assumed["zero"] = "1: the bf16 optimizer shards its state at --zero-stage 0 too"
    if names & _RECOMPUTE:
        plan["recompute"] = "full"
        understood |= _RECOMPUTE & names
    if values.get("--pp-partition-method", "").strip("'\"") == "type:transformer|embedding":
        plan["pipeline_layout"] = "embedding=1+loss=1"
        understood.add("--pp-partition-method")
    if "--embed-layernorm" in names:
        model["embedding_norm"] = True
    if "--no-pipeline-parallel" in names:
        plan["pp"] = 1
        understood.add("--no-pipeline-parallel")
    vocab = values.get("--pad-vocab-size-to", "")
    if vocab.isdigit() and len(vocab) < 10:
        model["vocab"] = int(vocab)
        understood.add("--pad-vocab-size-to")
    dealt = "embedding" in str(plan.get("pipeline_layout"))  # by DeepSpeed: Megatron's own rule of dealing layers does not hold
    mended = [problem for problem in found.problems if dealt and problem.rule.endswith(" layers")]
    alibi = [problem for problem in found.problems if problem.value == "alibi"]
    if alibi:
        model["positions"] = "alibi"
    return dataclasses.replace(
        found,
        framework=MEGATRON_DEEPSPEED,
        plan=plan,
        model=model,
        assumed=assumed,
        unknown=tuple(item for item in found.unknown if item.name not in understood),
        problems=tuple(problem for problem in found.problems if problem not in (*alibi, *mended)),
    )
