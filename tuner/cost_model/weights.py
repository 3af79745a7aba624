"""Parameters that one rank of a stage holds, before ZeRO shards them over data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div
from tuner.cost_model.params import layer_parameters, mtp_parameters, position_parameters
from tuner.cost_model.pipeline import StageLayers, stage_layers
from tuner.cost_model.shard import shard

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.model import LayerKind
    from tuner.plan import Plan


class Weights(NamedTuple):
    """Parameters (a count) of a rank: `dense` are replicated over dp x cp ranks, `expert` over edp ranks."""

    dense: Floats
    expert: Floats


def layer_weights(job: Job, plan: Plan, kind: LayerKind) -> Weights:
    """Return a rank's share of one layer: attention by whole heads, MLP by columns over tp, experts over ep x etp."""
    model, s = job.model, shard(job, plan)
    p = layer_parameters(model, kind)
    dense = p.attention * s.heads / model.heads + p.replicated + p.mlp * s.ffn / model.ffn_hidden
    if not (kind.moe and model.moe):
        return Weights(dense, 0.0)
    if model.moe.shared_expert_ffn_hidden:
        dense = dense + p.shared_experts * s.shared_ffn / model.moe.shared_expert_ffn_hidden
    expert = p.experts * (s.experts / model.moe.experts) * (s.expert_ffn / model.moe.expert_ffn_hidden)
    return Weights(dense, expert)


def stage_weights(job: Job, plan: Plan, stage: Ints) -> Weights:
    """Return the parameters of a rank of `stage`: its layers, the embedding on the first, the head and MTP on the last.

    Tied embeddings have one matrix, of which a pipeline keeps a copy at either end (Narayanan 2021, section 2.2).
    """
    model, s = job.model, shard(job, plan)
    first, last = stage == 0, stage == plan.pp - 1
    held = stage_layers(job, plan, stage)
    matrix = 1.0 * s.vocab * model.hidden
    second_copy = np.where(plan.pp > 1, 1, 0) if model.tied_embeddings else 1
    dense = first * (matrix + position_parameters(model)) + last * (second_copy * matrix + model.hidden)
    expert: Floats = 0.0
    layers = _layers(job, plan, held)
    dense, expert = dense + layers.dense, expert + layers.expert
    if model.mtp_layers:
        extra = layer_weights(job, plan, model.kind(model.layers - 1))
        dense = dense + last * model.mtp_layers * (extra.dense + mtp_parameters(model))
        expert = expert + last * model.mtp_layers * extra.expert
    return Weights(dense, expert)


def _layers(job: Job, plan: Plan, held: StageLayers) -> Weights:
    dense: Floats = 0.0
    expert: Floats = 0.0
    for count, kinds in ((held.leading, job.model.leading_groups()), (held.body, job.model.body_groups())):
        of_all = sum(n for _, n in kinds)
        for kind, n in kinds:
            one = layer_weights(job, plan, kind)
            dense = dense + count * (one.dense * (n / of_all))
            expert = expert + count * (one.expert * (n / of_all))
    return Weights(dense, expert)


def adapter_weights(job: Job, plan: Plan, stage: Ints) -> Floats:
    """Return the trained parameters of LoRA on a rank: rank x (inputs + outputs) of the four attention and MLP products of a layer.

    Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1; adapters on all linear layers, as Megatron-Bridge and NeMo default.
    """
    model = job.model
    qkv = model.heads * model.qk_head_dim + model.kv_heads * (model.qk_head_dim + model.v_head_dim)
    gates = 2 if model.gated_mlp else 1
    widths = 4 * model.hidden + qkv + model.heads * model.v_head_dim + (gates + 1) * model.ffn_hidden
    return ceil_div(job.lora_rank * widths, plan.tp) * 1.0 * stage_layers(job, plan, stage).total


def shards(job: Job, plan: Plan) -> tuple[Ints, Ints]:
    """Return over how many ranks ZeRO shards dense and expert state: dp x cp and edp, or the HSDP shard group if smaller."""
    dense = np.maximum(plan.dp(job.gpus), 1) * plan.cp
    expert = np.maximum(plan.edp(job.gpus), 1)
    group = np.where(plan.shard_group > 0, plan.shard_group, dense)
    return np.minimum(dense, group), np.minimum(expert, group)
