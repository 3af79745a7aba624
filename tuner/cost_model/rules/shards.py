"""Rules of what a rank's shard of a model and of a sequence must divide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cost_model.rules.rule import ACCELERATE, ALWAYS, DEEPSPEED, MEGATRON, NANOTRON, TORCHTITAN, Rule, divides, implies
from tuner.plan import CP_KINDS

if TYPE_CHECKING:
    from tuner.arrays import Bools
    from tuner.job import Job
    from tuner.plan import Plan

_A2A = CP_KINDS["a2a"]


def _kv_heads_or_copies(job: Job, plan: Plan) -> Bools:
    return divides(plan.tp, job.model.kv_heads) | divides(job.model.kv_heads, plan.tp)


def _ulysses(job: Job, plan: Plan) -> Bools:
    ranks, model = plan.tp * plan.cp, job.model
    whole = divides(ranks, model.heads) & (divides(ranks, model.kv_heads) | divides(model.kv_heads, ranks))
    return implies((plan.cp_kind == _A2A) & (plan.cp > 1), whole)


def _ffn(job: Job, plan: Plan) -> Bools:
    """The MLP of dense layers and shared experts is split by tp, that of routed experts by etp."""
    model, moe = job.model, job.model.moe
    if moe is None:
        return divides(plan.tp, model.ffn_hidden)
    dense = model.ffn_hidden if moe.first_dense_layers or moe.every > 1 else 0
    return divides(plan.tp, dense) & divides(plan.tp, moe.shared_expert_ffn_hidden) & divides(plan.etp, moe.expert_ffn_hidden)


def _ffn_says(job: Job, row: Plan) -> str:
    moe = job.model.moe
    if moe is None:
        return f"tp = {row.tp} must divide ffn_hidden = {job.model.ffn_hidden}"
    dense = f"ffn_hidden = {job.model.ffn_hidden} (dense layers), " if moe.first_dense_layers or moe.every > 1 else ""
    return (
        f"tp = {row.tp} must divide {dense}shared_expert_ffn_hidden = {moe.shared_expert_ffn_hidden} and etp = {row.etp} "
        f"expert_ffn_hidden = {moe.expert_ffn_hidden}"
    )


def _vocab(job: Job, plan: Plan) -> Bools:
    return True if job.framework.padded_vocab.value > 1 else divides(plan.tp, job.model.vocab)


def _seq_cp(job: Job, plan: Plan) -> Bools:
    return implies(plan.cp > 1, divides(2 * plan.cp, job.seq_len))


def _seq_sp(job: Job, plan: Plan) -> Bools:
    return implies(plan.sequence_parallel > 0, divides(plan.tp, job.seq_len // plan.cp))


SHARDS = (
    Rule(
        id="heads-tp",
        families=(ALWAYS,),
        source="Megatron-LM transformer_config.py:1446; torchtitan decoder.py; DeepSpeed module_inject (num_heads % mp_size)",
        knobs=("tp",),
        holds=lambda job, plan: divides(plan.tp, job.model.heads),
        says=lambda job, row: f"tp = {row.tp} must divide heads = {job.model.heads}",
    ),
    Rule(
        id="kv-heads-tp",
        families=(MEGATRON,),
        source="Megatron-LM transformer_config.py:1462 (KV heads are copied where tp exceeds them)",
        knobs=("tp",),
        holds=_kv_heads_or_copies,
        says=lambda job, row: f"tp = {row.tp} must divide kv_heads = {job.model.kv_heads} or be a multiple of them",
    ),
    Rule(
        id="kv-heads-tp-whole",
        families=(TORCHTITAN, DEEPSPEED, NANOTRON, ACCELERATE),
        source="torchtitan decoder.py and issue 2574; Hugging Face TP (DeepSpeed AutoTP, Accelerate); nanotron nn/attention.py",
        knobs=("tp",),
        holds=lambda job, plan: divides(plan.tp, job.model.kv_heads),
        says=lambda job, row: f"tp = {row.tp} must divide kv_heads = {job.model.kv_heads}",
    ),
    Rule(
        id="heads-cp",
        families=(ALWAYS,),
        source="DeepSpeed Ulysses (arXiv 2309.14509): each of the tp*cp ranks attends with whole heads",
        knobs=("cp", "tp"),
        holds=_ulysses,
        says=lambda job, row: (
            f"tp*cp = {row.tp}*{row.cp} must divide heads = {job.model.heads}, and divide kv_heads = {job.model.kv_heads} or be a "
            "multiple of them, where context parallelism is all-to-all (cp_kind=a2a)"
        ),
    ),
    Rule(
        id="ffn-tp",
        families=(MEGATRON, NANOTRON),
        source="Megatron-LM tensor_parallel/layers.py (divide); nanotron parallel/tensor_parallel/nn.py",
        knobs=("tp", "etp"),
        holds=_ffn,
        says=_ffn_says,
    ),
    Rule(
        id="vocab-tp",
        families=(MEGATRON, DEEPSPEED, NANOTRON),
        source="Megatron-LM utils.py:591, training/tokenizer (padded to 128*tp by default)",
        knobs=("tp",),
        holds=_vocab,
        says=lambda job, row: f"tp = {row.tp} must divide vocab = {job.model.vocab}, which {job.framework.name} does not pad",
    ),
    Rule(
        id="seq-cp",
        families=(MEGATRON,),
        source="Megatron-LM arguments.py:1336 (two chunks of a sequence a rank balance causal attention)",
        knobs=("cp",),
        holds=_seq_cp,
        says=lambda job, row: f"2*cp = {2 * row.cp} must divide seq_len = {job.seq_len}",
    ),
    Rule(
        id="seq-sp",
        families=(MEGATRON,),
        source="Megatron-LM tensor_parallel/mappings.py:74",
        knobs=("sequence_parallel", "tp", "cp"),
        holds=_seq_sp,
        says=lambda job, row: (
            f"tp = {row.tp} must divide seq_len/cp = {job.seq_len}/{row.cp} = {job.seq_len // row.cp} with sequence parallelism"
        ),
    ),
    Rule(
        id="seq-tp-cp",
        families=(TORCHTITAN,),
        source="torchtitan trainer.py:300, parallel_dims.py (seq_len_divisor = tp * 2 * cp)",
        knobs=("tp", "cp"),
        holds=lambda job, plan: divides(plan.tp * 2 * plan.cp, job.seq_len),
        says=lambda job, row: f"tp*2*cp = {row.tp}*2*{row.cp} must divide seq_len = {job.seq_len}",
    ),
    Rule(
        id="tp-across-domain",
        families=(ALWAYS,),
        severity="warning",
        source="Narayanan 2021 (arXiv 2104.04473) section 3.2: tensor parallelism inside a node, pipelines across",
        knobs=("tp",),
        holds=lambda job, plan: plan.tp <= job.cluster.sizes[0],
        says=lambda job, row: f"tp = {row.tp} leaves the {job.cluster.domains[0].name} domain of {job.cluster.sizes[0]} GPUs",
    ),
)
