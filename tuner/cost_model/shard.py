"""What one rank holds of a layer: the sizes that every formula of time and memory shares.

Shards are rounded up, never divided exactly, so that an uneven degree (8 -> 7) runs through the same formulas; whether a plan is
legal is for the rules to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.arrays import Ints, ceil_div
from tuner.cost_model.collectives import Group
from tuner.job import Job
from tuner.plan import FULL, RECOMPUTE_MODULES, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Sizes on one rank, for one micro batch.

    query: query tokens a sequence (seq_len / cp, a multiple of spread); tokens: micro_batch x query; spread: tokens / spread are held where
    sequence parallelism shards (spread = tp with it, 1 without); heads, kv_heads, ffn, expert_ffn, shared_ffn, vocab: local
    widths; experts: local experts of the fullest rank; rows: (token, expert) pairs that it computes, balanced routing.
    """

    query: Ints
    tokens: Ints
    spread: Ints
    heads: Ints
    kv_heads: Ints
    ffn: Ints
    shared_ffn: Ints
    vocab: Ints
    experts: Ints
    expert_ffn: Ints
    rows: Ints


def shard(job: Job, plan: Plan) -> Shard:
    """Return what a rank of this plan holds. Experts: tokens / spread x top_k pairs leave a rank, etp x as many arrive."""
    model, moe = job.model, job.model.moe
    sharded = plan.sequence_parallel > 0
    spread = np.where(sharded, plan.tp, 1)
    query = ceil_div(ceil_div(job.seq_len, plan.cp), spread) * spread  # padded where sequence parallelism deals it unevenly
    tokens = plan.micro_batch * query
    pad = job.framework.padded_vocab.value
    experts = ceil_div(moe.experts if moe else 0, plan.ep)
    # ranks of an expert-tensor group hold different tokens, unless they repeat those of one tensor-parallel group
    pairs = ceil_div(tokens * (moe.top_k if moe else 0), spread) * np.where(sharded, plan.etp, ceil_div(plan.etp, plan.tp))
    return Shard(
        query=query,
        tokens=tokens,
        spread=spread,
        heads=ceil_div(model.heads, plan.tp),
        kv_heads=ceil_div(model.kv_heads, plan.tp),
        ffn=ceil_div(model.ffn_hidden, plan.tp),
        shared_ffn=ceil_div(moe.shared_expert_ffn_hidden if moe else 0, plan.tp),
        vocab=ceil_div(model.vocab, pad * plan.tp) * pad,
        experts=experts,
        expert_ffn=ceil_div(moe.expert_ffn_hidden if moe else 0, plan.etp),
        rows=ceil_div(pairs * (experts * plan.ep), moe.experts) if moe else 0,
    )


def groups(job: Job, plan: Plan) -> dict[str, Group]:
    """Return the communication groups by name, as (size, rank stride) in the rank order tp-cp-dp-pp and etp-ep-edp-pp.

    Source: Megatron-LM parallel_state.py (order "tp-cp-ep-dp-pp"); dp here is the data-parallel group with context
    parallelism, over which gradients are reduced and optimizer states are sharded.
    """
    replicas = np.maximum(plan.dp(job.gpus), 1)
    return {
        "tp": Group(plan.tp, 1),
        "cp": Group(plan.cp, plan.block),
        "dp": Group(replicas * plan.cp, plan.block),
        "pp": Group(plan.pp, plan.block * plan.cp * replicas),
        "ep": Group(plan.ep, plan.etp),
        "etp": Group(plan.etp, 1),
        "edp": Group(np.maximum(plan.edp(job.gpus), 1), plan.etp * plan.ep),
    }


def recomputed(plan: Plan, *modules: str) -> Ints:
    """Return 1 where the plan recomputes any of these modules on their own (full recompute is counted apart), else 0."""
    bits = sum(RECOMPUTE_MODULES[name] for name in modules)
    return ((plan.recompute & bits) > 0) & (plan.recompute < FULL)


def fully_recomputed(plan: Plan) -> Ints:
    """Return 1 where whole layers are recomputed, else 0."""
    return plan.recompute >= FULL
