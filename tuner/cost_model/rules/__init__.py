"""What is a legal plan: one list of rules, each a mask over columns and a text for a person.

legal(job, plan)      mask of the plans that the job's framework runs
distinct(job, plan)   mask of the plans in their one spelling (the search counts each plan once)
broken(job, row)      every rule that a single plan breaks, with its text
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tuner.cost_model.rules.accelerate import ACCELERATED
from tuner.cost_model.rules.fallback import FALLBACK
from tuner.cost_model.rules.knobs import OVERLAP, RECOMPUTE, SHARDING
from tuner.cost_model.rules.mesh import MESH, ONE_SPELLING, RANGES
from tuner.cost_model.rules.rule import ALWAYS, FAMILIES, Rule, Severity, sane
from tuner.cost_model.rules.shards import SHARDS
from tuner.cost_model.rules.stages import STAGES
from tuner.plan_text import layout_text

if TYPE_CHECKING:
    from tuner.arrays import Bools
    from tuner.job import Job
    from tuner.plan import Plan

__all__ = ["FAMILIES", "NOT_ABOUT_A_PLAN", "RULES", "Rule", "Severity", "broken", "distinct", "enforced", "legal", "masks"]

RULES: tuple[Rule, ...] = (*RANGES, *MESH, *SHARDS, *STAGES, *RECOMPUTE, *SHARDING, *OVERLAP, *ACCELERATED, *FALLBACK, *ONE_SPELLING)

# Rules of Megatron-LM and torchtitan that no plan can break, and why.
NOT_ABOUT_A_PLAN: tuple[tuple[str, str], ...] = (
    ("vpp without overlapped p2p needs pp > 2; p2p overlap needs vpp", "a plan has no p2p-overlap knob: interleaving overlaps by default"),
    ("micro batches in groups other than pp", "a plan has no group-size knob: groups are pp micro batches, the default"),
    ("first and last stage given by layer counts or a layout string", "a plan spells uneven stages by what embedding and loss count as"),
    (
        "distribute_saved_activations excludes sequence_parallel",
        "a plan has no such knob, only sequence parallelism",
    ),
    ("moe_act needs grouped GEMM", "a plan has no such knob: experts are grouped GEMMs"),
    ("moe_act and layernorm recompute refuse fp8 delayed scaling", "a job states the precision, not the scaling recipe of fp8"),
    ("shared_experts recompute refuses shared-expert overlap", "a plan has no shared-expert-overlap knob"),
    ("EP overlap needs an alltoall or flex dispatcher, torch >= 2.6, no shared-expert overlap", "a plan has no such knobs"),
    (
        "torch FSDP2 needs untied embeddings, no fp16, no gradient-accumulation fusion, ep == 1",
        "zero 2 and 3 may be Megatron-FSDP, which does not",
    ),
    ("hybrid context parallelism needs pp == 1 and per-token loss", "a plan has no hybrid context parallelism"),
    ("fp8 and fp4 are exclusive", "a job has one precision"),
    ("overlap_param_gather needs overlap_grad_reduce", "a plan has one data-parallel overlap knob for both"),
    ("virtual stages % pp == 0", "a plan has vpp chunks on each stage, so it holds"),
    ("the evaluation batch divides by micro_batch*dp", "a job has no evaluation batch"),
    ("activation offload of fewer layers than the model has", "a plan has no layer count for offload"),
)


def enforced(job: Job, *severities: Severity) -> tuple[Rule, ...]:
    """Return the rules of these severities (all when none is named) that the job's framework enforces."""
    families = {ALWAYS, *job.framework.rules}
    return tuple(r for r in RULES if families & set(r.families) and (not severities or r.severity in severities))


def masks(job: Job, plan: Plan, *severities: Severity) -> list[Bools]:
    """Return one mask a rule, each spanning only the axes that its rule depends on."""
    whole = sane(plan)
    return [rule.holds(job, plan if rule in RANGES else whole) for rule in enforced(job, *severities)]


def _all(each: list[Bools]) -> Bools:
    result: Bools = True
    for mask in each:
        result = result & mask
    return result


def legal(job: Job, plan: Plan) -> Bools:
    """Return the mask of the plans that break no error rule of the job's framework."""
    return _all(masks(job, plan, "error"))


def distinct(job: Job, plan: Plan) -> Bools:
    """Return the mask of the plans in their one spelling: those that break no duplicate rule."""
    return _all(masks(job, plan, "duplicate"))


def broken(job: Job, row: Plan) -> list[tuple[Rule, str]]:
    """Return every rule (warnings and duplicates too) that a single plan breaks, with what is wrong and the nearest way out."""
    outside = [(rule, rule.says(job, row)) for rule in RANGES if not rule.holds(job, row)]
    if outside:
        return outside
    rules = enforced(job)
    wrong = [rule for rule in rules if not rule.holds(job, row)]
    return [(rule, _with_hint(job, row, rule, wrong)) for rule in wrong]


def _with_hint(job: Job, row: Plan, rule: Rule, wrong: list[Rule]) -> str:
    knobs = [knob for knob in rule.knobs if rule.severity != "warning" or knob != "fallback_tp"]  # to warn of it is not to undo it
    ways = [way for way in (_nearest(job, row, rule, knob, wrong) for knob in knobs) if way]
    return rule.says(job, row) + (f"; nearest {', '.join(ways)}" if ways else "")


def _nearest(job: Job, row: Plan, rule: Rule, knob: str, wrong: list[Rule]) -> str:
    """Return "knob: value" for the value nearest to the present one that mends this rule and breaks no other, or ""."""
    import numpy as np

    if knob in ("recompute", "schedule", "offload", "cp_kind"):
        return ""
    values = np.arange(_LOWEST.get(knob, 1), _highest(job, knob) + 1)
    column = dataclasses.replace(row, **{knob: values})
    good = np.broadcast_to(rule.holds(job, column), values.shape)
    for other in enforced(job, "error"):
        good = good & (other.holds(job, column) | (other in wrong))
    if not good.any():
        return ""
    here = getattr(row, knob)
    distance = np.maximum(values / here, here / values) if knob in _DEGREES else np.abs(values - here)
    found = int(values[np.where(good, distance, np.inf).argmin()])
    if knob in _LAYOUT:
        layout = dataclasses.replace(row, **{knob: found})
        return f"pipeline_layout: {layout_text(layout.embedding_layers, layout.loss_layers)}"
    return f"{knob}: {found}"


_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")  # near means by ratio
_LAYOUT = ("embedding_layers", "loss_layers")  # people write pipeline_layout
_FLAGS = ("sequence_parallel", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")
_LOWEST = dict.fromkeys((*_FLAGS, "zero", "shard_group", "embedding_layers", "loss_layers", "fallback_tp"), 0)


def _highest(job: Job, knob: str) -> int:
    """Return the largest value worth trying in a hint."""
    if knob in _FLAGS:
        return 1
    if knob == "zero":
        return 3
    bounds = {"micro_batch": job.global_batch, "shard_group": job.gpus, "recompute_layers": job.model.layers, "vpp": job.model.layers}
    bounds |= {"embedding_layers": 8, "loss_layers": 8, "pp": min(job.gpus, 2 * job.model.layers)}
    return min(bounds.get(knob, job.gpus), 4096)
