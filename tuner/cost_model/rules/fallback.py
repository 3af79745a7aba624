"""Rules of the degree at which a replica goes on when it loses GPUs (nonuniform tensor parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cost_model.rules.rule import ALWAYS, Rule, implies

if TYPE_CHECKING:
    from tuner.arrays import Bools
    from tuner.plan import Plan


def _falls_back(plan: Plan) -> Bools:
    return plan.fallback < plan.tp


FALLBACK = (
    Rule(
        id="fallback-tp",
        families=(ALWAYS,),
        source="arXiv 2504.06095, section 3: the reduced degree n2 is below the healthy n1",
        knobs=("fallback_tp", "tp"),
        holds=lambda job, plan: plan.fallback <= plan.tp,
        says=lambda job, row: f"fallback_tp = {row.fallback_tp} must not exceed tp = {row.tp} (tp itself: no fallback)",
    ),
    Rule(
        id="fallback-tp-zero",
        families=(ALWAYS,),
        source="arXiv 2504.06095, section 3: gradients are reduced between replicas of unequal degree, each with whole weights of its own",
        knobs=("zero", "fallback_tp"),
        holds=lambda job, plan: implies(_falls_back(plan), plan.zero <= 1),
        says=lambda job, row: (
            f"zero = {row.zero} shards weights or gradients over replicas, which fallback_tp = {row.fallback_tp} leaves at unequal degrees"
        ),
    ),
    Rule(
        id="fallback-tp-experts",
        families=(ALWAYS,),
        source="Megatron-LM dev branch, nonuniform_tp.py (experts are no units of it) and nonuniform_ep.py (EP groups have their own)",
        knobs=("fallback_tp",),
        holds=lambda job, plan: implies(_falls_back(plan), job.model.moe is None),
        says=lambda job, row: (
            f"fallback_tp = {row.fallback_tp}: {job.model.name} has experts, whose expert-parallel groups fall back instead "
            "(`tuner failures` plans these)"
        ),
    ),
    Rule(
        id="fallback-tp-experimental",
        families=(ALWAYS,),
        severity="warning",
        source="Megatron-LM PR 4585 (dev branch, d48bd6be0a); main has none",
        knobs=("fallback_tp",),
        holds=lambda job, plan: implies(_falls_back(plan), job.framework.name == "tuner-workload"),
        says=lambda job, row: (
            f"fallback_tp = {row.fallback_tp}: no released framework runs nonuniform tensor parallelism; Megatron-LM's dev branch does, "
            "for some degrees"
        ),
    ),
)
