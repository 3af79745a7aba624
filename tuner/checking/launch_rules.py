"""Rules about flags that a plan has no knob for: those of a launch, beside those of its plan."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from tuner.answers import Broken
from tuner.checking.alike import kind_of
from tuner.plan import RECOMPUTE_MODULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.job import Job
    from tuner.launch.launchers.launcher import Found, Unknown
    from tuner.plan import Plan

_ASKED = re.compile(
    r"^#SBATCH[^\n]{0,80}?(?:gpu:|gpus(?:-per-node)?[= ])([a-zA-Z][\w-]{1,30}):\d|^#SBATCH\s+(?:-C|--constraint)[= ]\"?([\w-]{2,30})",
    re.MULTILINE,
)
_OFF = ("false", "0", "off", "no")


def with_flags(broken: tuple[Broken, ...], found: Found, job: Job, plan: Plan) -> tuple[Broken, ...]:
    """Return the rules that a launch breaks, those of its further flags included."""
    if "megatron" not in job.framework.rules:
        return broken
    flags = {item.name.lstrip("-").replace("-", "_").rpartition(".")[2]: item for item in found.unknown if item.value.lower() not in _OFF}
    more = [
        _p2p(flags.get("no_overlap_p2p_communication"), plan),
        _saved(flags.get("distribute_saved_activations"), plan),
        _hybrid(flags.get("hybrid_context_parallel"), plan),
        _shared(flags.get("moe_shared_expert_overlap"), plan),
    ]
    group = flags.get("microbatch_group_size_per_virtual_pipeline_stage") or flags.get("microbatch_group_size_per_vp_stage")
    if group is not None and group.value.isdigit() and len(group.value) < 9 and int(plan.vpp) > 1:
        broken = tuple(item for item in broken if item.rule != "vpp-microbatches")  # which is about the default group
        more.append(_group(group, job, plan))
    return (*broken, *(item for item in more if item is not None))


def flags_told(found: Found) -> Found:
    """Return what files say with the pipeline of a DeepSpeed configuration, which that launcher does not write."""
    stages = next((item for item in found.unknown if item.name == "pipeline.stages" and item.value.isdigit() and len(item.value) < 6), None)
    if found.framework != "deepspeed" or stages is None or not int(stages.value):
        return found
    left = tuple(item for item in found.unknown if item is not stages)
    return dataclasses.replace(found, plan={**found.plan, "pp": int(stages.value)}, unknown=left)


def with_gpu(found: Found, texts: Iterable[str]) -> Found:
    """Return what files say with the kind of GPU that their #SBATCH lines ask for, where it is one that is known."""
    names = [match[1] or match[2] for text in texts for match in _ASKED.finditer(text)]
    kind = next((name for name in names if kind_of(name) is not None), "")
    if found.gpu or not kind:
        return found
    return dataclasses.replace(found, gpu=kind, assumed={**found.assumed, "GPU": f"{kind}: what #SBATCH asks for"})


def _broken(rule: str, flag: Unknown, text: str, source: str) -> Broken:
    return Broken(rule=rule, severity="error", text=f"{text} ({flag.name} at {flag.where})", source=f"Megatron-LM {source}")


def _p2p(flag: Unknown | None, plan: Plan) -> Broken | None:
    if flag is None or int(plan.vpp) == 1 or int(plan.pp) > 2:
        return None
    text = f"vpp = {plan.vpp} without overlapped p2p communication needs pp > 2, and pp = {plan.pp}"
    return _broken("vpp-p2p", flag, text, "arguments.py:1000-1012; schedules.py:2182")


def _saved(flag: Unknown | None, plan: Plan) -> Broken | None:
    if flag is None or not plan.sequence_parallel:
        return None
    return _broken(
        "saved-activations-sp", flag, "saved activations are not distributed with sequence parallelism", "transformer_config.py:1934"
    )


def _hybrid(flag: Unknown | None, plan: Plan) -> Broken | None:
    if flag is None or (int(plan.pp) == 1 and not plan.cuda_graphs and int(plan.zero) < 2):
        return None
    text = f"hybrid context parallelism needs pp = 1, no CUDA graphs and no FSDP (pp = {plan.pp}, zero = {plan.zero})"
    return _broken("hybrid-cp", flag, text, "arguments.py:1444-1449")


def _shared(flag: Unknown | None, plan: Plan) -> Broken | None:
    recomputed = int(plan.recompute) & RECOMPUTE_MODULES["shared_experts"]
    if flag is None or not (plan.ep_overlap or recomputed):
        return None
    what = "recomputed" if recomputed else "overlapped with expert-parallel communication"
    text = f"shared experts that overlap cannot be {what}"
    return _broken("shared-expert-overlap", flag, text, "transformer_config.py:1955-2018, 3002-3050")


def _group(flag: Unknown, job: Job, plan: Plan) -> Broken | None:
    size, pp, count = int(flag.value), int(plan.pp), int(plan.microbatches(job.gpus, job.global_batch))
    rest = count % size if size else 0
    if size >= pp and count >= size and (rest == 0 or rest >= pp):
        return None
    text = f"groups of {size} micro batches must be of at least pp = {pp}, and leave 0 or at least pp of {count}"
    return _broken("vpp-group", flag, text, "schedules.py:1159-1180")
