"""The default axes of a space: for each knob the values that this job allows, none of which is never legal."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from tuner.arrays import ceil_div
from tuner.cost_model.params import active_parameters, embedding_parameters, head_parameters
from tuner.cost_model.rules import enforced
from tuner.cost_model.rules.shards import SHARDS
from tuner.plan import Plan
from tuner.plan_text import layout_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.job import Job
    from tuner.model import Model

TOKENS_OF_A_CONTEXT_RANK = 1024  # a shorter share of a sequence leaves attention nothing to overlap with
TOKENS_OF_A_MICRO_BATCH = 65_536
LARGEST_TP = 64


def default_axes(job: Job) -> dict[str, tuple[str | int, ...]]:
    """Return {knob: values} for `job`, outer axes first: degrees as far as the model, the GPUs and the batch allow."""
    tp = tensor_degrees(job)
    layouts = pipeline_layouts(job)
    pp = pipeline_degrees(job, layouts)
    cp = context_degrees(job)
    return {
        "pp": pp,
        "tp": tp,
        "cp": cp,
        "ep": expert_degrees(job),
        "etp": tuple(n for n in tp if n <= 8) if job.model.moe else (1,),
        "vpp": chunk_counts(job, pp, layouts),
        "pipeline_layout": tuple(layout_text(*pair) for pair in layouts),
        "micro_batch": micro_batches(job),
        "cp_kind": ("p2p", "a2a") if len(cp) > 1 else ("p2p",),
        "schedule": ("1f1b", "zb-1p", "zb-2p") if "zero-bubble" in job.framework.rules else ("1f1b",),
        "sequence_parallel": (0, 1),
        "zero": (0, 1, 2, 3),
        "shard_group": shard_groups(job),
        "offload": offloads(job),
        "recompute": recompute_sets(job, pp, layouts),
    }


Axes = dict[str, "tuple[str | int, ...]"]


def coarser(job: Job, axes: Axes) -> Iterator[tuple[str, Axes]]:
    """Yield the axes made coarser step by step, each step on top of the last, with the knob that was thinned: what changes least
    about the best plan first. A search takes the first that has few enough plans. What the framework does by default stays.
    """
    default = job.framework.defaults.recompute.value
    steps: tuple[tuple[str, Callable[[str | int], bool]], ...] = (
        ("shard_group", lambda value: value == 0),
        ("recompute", lambda value: _modules_of(value) not in (2, 3) and (_layers_of(value) < 4 or _layers_of(value) % 4 == 0)),
        ("micro_batch", lambda value: int(value) & (int(value) - 1) == 0),
        ("etp", lambda value: value == 1),
        ("recompute", lambda value: _modules_of(value) < 2 and _layers_of(value) in (0, 1, 2, 4, 8, 16, 32)),
        ("offload", lambda value: value in ("none", "optimizer")),
        ("micro_batch", lambda value: int(value) <= 8),
        ("vpp", lambda value: int(value) & (int(value) - 1) == 0),
        ("offload", lambda value: value == "none"),
        ("cp_kind", lambda value: value == "p2p"),
    )
    for knob, keep in steps:
        kept = tuple(value for value in axes[knob] if keep(value) or value == default) or axes[knob][:1]
        if kept != axes[knob]:
            axes = axes | {knob: kept}
            yield knob, axes


def _modules_of(recompute: str | int) -> int:
    """Modules of a recompute text; a set of four or more is all a model has, near enough."""
    text = str(recompute)
    return 0 if text.startswith(("none", "full")) else text.count("+") + 1


def _layers_of(recompute: str | int) -> int:
    return int(str(recompute).partition(":")[2] or 0)


def divisors(number: int, largest: int) -> tuple[int, ...]:
    """Return the divisors of `number` up to `largest`, ascending."""
    return tuple(n for n in range(1, min(number, largest) + 1) if number % n == 0)


def tensor_degrees(job: Job) -> tuple[int, ...]:
    """Divisors of the GPUs that the model's widths allow under the framework's rules, up to 64; 1 where none is allowed."""
    values = np.array(divisors(job.gpus, min(job.model.heads, LARGEST_TP)))
    good = np.ones(len(values), dtype=bool)
    for rule in enforced(job, "error"):
        if rule in SHARDS:
            good = good & rule.holds(job, Plan(tp=values, sequence_parallel=1))
    return tuple(int(n) for n in values[good]) or (1,)


def fallback_degrees(job: Job) -> tuple[int, ...]:
    """0, and up to two GPUs fewer than each tensor-parallel degree; 0 alone for a mixture of experts, whose groups do not fall back so."""
    lower = {tp - lost for tp in tensor_degrees(job) for lost in (1, 2) if tp > lost and not job.model.moe}
    return (0, *sorted(lower))


def context_degrees(job: Job) -> tuple[int, ...]:
    """Divisors of the GPUs that leave each rank at least 1,024 tokens of a sequence, in two equal chunks."""
    largest = max(job.seq_len // TOKENS_OF_A_CONTEXT_RANK, 1)
    return tuple(n for n in divisors(job.gpus, largest) if n == 1 or job.seq_len % (2 * n) == 0)


def expert_degrees(job: Job) -> tuple[int, ...]:
    """Common divisors of the experts and the GPUs."""
    if job.model.moe is None:
        return (1,)
    return tuple(n for n in divisors(job.model.moe.experts, job.gpus) if job.gpus % n == 0)


def micro_batches(job: Job) -> tuple[int, ...]:
    """Divisors of the global batch, up to 65,536 tokens."""
    return divisors(job.global_batch, max(TOKENS_OF_A_MICRO_BATCH // job.seq_len, 1))


def loss_in_layers(model: Model) -> int:
    """What the logits cost in layers, rounded up: head parameters over one layer's active parameters."""
    ends = head_parameters(model) + embedding_parameters(model)
    layer = (active_parameters(model) - (0 if model.tied_embeddings else ends)) / model.layers
    return int(np.ceil(1.0 * model.vocab * model.hidden / max(layer, 1.0)))


def _deals_evenly(job: Job) -> bool:
    return "megatron" in job.framework.rules


def pipeline_layouts(job: Job) -> tuple[tuple[int, int], ...]:
    """What embedding and loss count as, in layers: none, one for the embedding, up to one more for the loss than its logits cost;
    and, where every stage holds the same count, what makes the layers divide by each pipeline degree.
    """
    layers = job.model.layers
    pairs = {(first, last) for first in (0, 1) for last in range(min(loss_in_layers(job.model), 4) + 2)}
    if not _deals_evenly(job):
        return tuple(sorted(pairs))
    degrees = [n for n in divisors(job.gpus, layers + 8) if n > 1]
    for pp in degrees:
        missing = -layers % pp
        if missing <= 8:
            pairs |= {(e, missing - e) for e in {missing // 2, missing // 2 - 1, 1, 0} if 0 <= e <= missing}
    legal = [pair for pair in pairs if any(_divides(layers, pair, pp) for pp in degrees)]
    return tuple(sorted({(0, 0), *legal}))


def _divides(layers: int, pair: tuple[int, int], chunks: int) -> bool:
    units = layers + sum(pair)
    return units % chunks == 0 and max(pair) <= units // chunks


def pipeline_degrees(job: Job, layouts: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Divisors of the GPUs that give each stage a layer, and equal ones where the framework wants that."""
    candidates = divisors(job.gpus, job.model.layers + max(map(sum, layouts)))
    if not _deals_evenly(job):
        return tuple(n for n in candidates if n <= job.model.layers)
    return tuple(n for n in candidates if n == 1 or any(_divides(job.model.layers, pair, n) for pair in layouts))


def chunk_counts(job: Job, pp: tuple[int, ...], layouts: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Model chunks a stage: those that deal layers evenly where the framework wants that, else up to 8."""
    layers = job.model.layers
    if not _deals_evenly(job):
        return tuple(n for n in (1, 2, 3, 4, 6, 8) if n == 1 or (len(pp) > 1 and pp[1] * n <= layers))
    found = {
        n for p in pp if p > 1 for pair in layouts for n in divisors((layers + sum(pair)) // p, layers) if _divides(layers, pair, p * n)
    }
    return tuple(sorted({1, *found}))


def shard_groups(job: Job) -> tuple[int, ...]:
    """Ranks that shard what ZeRO shards: 0 (all), and where the framework can shard in groups (FSDP's hybrid sharding, Megatron-LM's
    distributed-optimizer instances) a node's worth and powers of two of it.
    """
    if not {"fsdp", "megatron"} & set(job.framework.rules):
        return (0,)
    node = job.cluster.gpus_per_node
    return (0, *(node * 2**i for i in range(7) if node * 2**i < job.gpus and job.gpus % (node * 2**i) == 0))


def offloads(job: Job) -> tuple[str, ...]:
    """What the framework can keep in host memory."""
    rules = job.framework.rules
    if "megatron" in rules:
        return ("none", "optimizer", "activations", "optimizer+activations")
    return ("none", "optimizer") if "deepspeed" in rules or "torchtitan" in rules else ("none",)


def recompute_sets(job: Job, pp: tuple[int, ...], layouts: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """None, module sets that save something in this model, and full over a count of a stage's layers."""
    default = job.framework.defaults.recompute.value
    rules = job.framework.rules
    if "megatron" in rules or not {"deepspeed", "nanotron", "fsdp"} & set(rules):
        sets = _module_sets(job)
    else:
        sets = [default] if default not in ("none", "full") else []
    counts = [] if {"deepspeed", "nanotron"} & set(rules) else layer_counts(job, pp, layouts)
    return tuple(dict.fromkeys(("none", *sets, *(f"full:{n}" for n in counts), "full")))


def _module_sets(job: Job) -> list[str]:
    model, moe = job.model, job.model.moe
    parts = ["layernorm"]
    parts += ["core_attn"] if job.attention == "unfused" else []
    parts += ["mlp"] if moe is None or moe.first_dense_layers or moe.every > 1 else []
    parts += ["mla_up_proj"] if model.mla else []
    inside = (["moe_act"] + (["shared_experts"] if moe.shared_expert_ffn_hidden else [])) if moe else []
    of_experts = [[], ["moe"], *(list(c) for n in range(1, len(inside) + 1) for c in combinations(inside, n))] if moe else [[]]
    sets = ["+".join((*some, *of)) for n in range(len(parts) + 1) for some in combinations(parts, n) for of in of_experts]
    return [text for text in sets if text]


def layer_counts(job: Job, pp: tuple[int, ...], layouts: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Layers of a stage to recompute: every count below the largest stage of a pipeline, and quarters of the whole model."""
    units = job.model.layers + max(map(sum, layouts))
    piped = max((ceil_div(units, p) for p in pp if p > 1), default=1)
    return tuple(sorted({*range(1, piped), *(job.model.layers * i // 4 for i in (1, 2, 3))} - {0}))
