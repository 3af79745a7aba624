"""What the built-in workload does not run: plans that a search leaves out before it runs anything. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.plan import ALL_LAYERS, CP_KINDS, FULL, RECOMPUTE_MODULES, SCHEDULES
from tuner.plan_text import recompute_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuner.job import Job
    from tuner.plan import Plan

PRECISIONS = ("bf16", "fp32")
ZERO_BUBBLE = SCHEDULES["zb-1p"]
_NAMES = {code: name for name, code in SCHEDULES.items()}


def refusals(job: Job, plan: Plan, microbatches: int = 0) -> list[str]:
    """Return why the built-in workload does not run a plan, one line each; none where it does.

    microbatches: those of a trial's step (0: those of the job's global batch).
    """
    found = [*_about_the_job(job), *_about_ranks(job, plan)]
    if found:
        return found
    steps = microbatches or int(plan.microbatches(job.gpus, job.global_batch))
    return [*_about_shards(job, plan), *_about_sequences(job, plan), *_about_experts(job, plan), *_about_stages(job, plan, steps),
            *_about_recompute(job, plan), *_about_knobs(job, plan)]  # fmt: skip


def refusals_of_job(job: Job) -> list[str]:
    """Return why the built-in workload does not run a job in any plan."""
    return list(_about_the_job(job))


def _about_the_job(job: Job) -> Iterator[str]:
    model = job.model
    if job.task != "pretrain":
        yield f"task = {job.task}: the workload runs pretrain alone"
    if job.precision not in PRECISIONS:
        yield f"precision = {job.precision}: the workload computes in {' or '.join(PRECISIONS)}"
    unknown = {
        "mla": model.mla is not None,
        "mtp_layers": model.mtp_layers > 0,
        "attention_sinks": model.attention_sinks,
        "qk_norm_whole": model.qk_norm_whole,
        "positions = alibi": model.positions == "alibi",
        f"norms_per_layer = {model.norms_per_layer} (2 or 4 are)": model.norms_per_layer not in (2, 4),
        "moe.shared_expert_gate": model.moe is not None and model.moe.shared_expert_gate,
        "moe.expert_bias": model.moe is not None and model.moe.expert_bias,
    }
    for name, there in unknown.items():
        if there:
            yield f"{model.name} has {name}, which the workload does not build"
    if model.positions == "rotary" and model.head_dim % 2:
        yield f"head_dim = {model.head_dim} must be even for rotary positions"


def _about_ranks(job: Job, plan: Plan) -> Iterator[str]:
    ranks = plan.tp * plan.pp * plan.cp
    if job.gpus % ranks:
        yield f"tp*pp*cp = {plan.tp}*{plan.pp}*{plan.cp} must divide gpus = {job.gpus}"
    elif job.global_batch % (plan.micro_batch * plan.dp(job.gpus)):
        yield f"micro_batch*dp = {plan.micro_batch}*{plan.dp(job.gpus)} must divide global_batch = {job.global_batch}"


def _about_shards(job: Job, plan: Plan) -> Iterator[str]:
    model, moe = job.model, job.model.moe
    if model.heads % plan.tp:
        yield f"tp = {plan.tp} must divide heads = {model.heads}"
    if model.kv_heads % plan.tp and plan.tp % model.kv_heads:
        yield f"tp = {plan.tp} must divide kv_heads = {model.kv_heads} or be a multiple of them"
    widths = {} if moe and not moe.first_dense_layers and moe.every == 1 else {"ffn_hidden": model.ffn_hidden}
    widths |= {"shared_expert_ffn_hidden": moe.shared_expert_ffn_hidden} if moe else {}
    for name, width in widths.items():
        if width % plan.tp:
            yield f"tp = {plan.tp} must divide {name} = {width}"
    replicas = plan.dp(job.gpus) * plan.cp
    if plan.shard_group and (not plan.zero or replicas % plan.shard_group):
        yield f"shard_group = {plan.shard_group} needs zero > 0 and must divide dp*cp = {replicas}"
    if plan.shard_group and moe:
        yield f"shard_group = {plan.shard_group}: the workload shards a mixture of experts over all its replicas"


def _about_sequences(job: Job, plan: Plan) -> Iterator[str]:
    model, cp = job.model, plan.cp
    if plan.sequence_parallel and (job.seq_len // cp) % plan.tp:
        yield f"tp = {plan.tp} must divide seq_len/cp = {job.seq_len}/{cp} with sequence parallelism"
    if cp == 1:
        return
    if job.seq_len % (2 * cp):
        yield f"2*cp = {2 * cp} must divide seq_len = {job.seq_len}"
    whole = plan.tp * cp
    if plan.cp_kind == CP_KINDS["a2a"] and (model.heads % whole or model.kv_heads % whole):
        yield f"tp*cp = {plan.tp}*{cp} must divide heads = {model.heads} and kv_heads = {model.kv_heads} where cp_kind is a2a"
    for name, there in {
        "attention = unfused": job.attention == "unfused",
        "a sliding window": model.sliding_window is not None,
        "dropout": model.dropout,
    }.items():
        if there:
            yield f"cp = {cp}: the workload's context parallelism has no {name.removeprefix('a ')}"


def _about_experts(job: Job, plan: Plan) -> Iterator[str]:
    moe = job.model.moe
    if moe is None:
        if plan.ep > 1 or plan.etp > 1:
            yield f"ep = {plan.ep}, etp = {plan.etp}: {job.model.name} has no experts, so both must be 1"
        return
    within = job.gpus // plan.pp
    if moe.experts % plan.ep or within % plan.ep:
        yield f"ep = {plan.ep} must divide experts = {moe.experts} and the {within} ranks of a stage"
    if plan.etp > 1:
        yield f"etp = {plan.etp}: the workload does not cut single experts"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield f"tp = {plan.tp}: a mixture of experts needs sequence_parallel where tp > 1"


def _about_stages(job: Job, plan: Plan, microbatches: int) -> Iterator[str]:
    if plan.pp == 1:
        if plan.vpp > 1:
            yield f"vpp = {plan.vpp} needs pp > 1"
        return
    name, chunks = _NAMES[int(plan.schedule)], plan.pp * plan.vpp
    units = job.model.layers + plan.embedding_layers + plan.loss_layers
    smallest, largest = units // chunks, -(-units // chunks)
    if smallest < 1 or plan.embedding_layers > largest or plan.loss_layers > smallest:
        yield f"pp*vpp = {plan.pp}*{plan.vpp} chunks need a layer each ({units} with what embedding and loss count as)"
    if name == "zb-2p":
        yield "schedule = zb-2p: the workload has 1f1b, gpipe and zb-1p"
    if plan.vpp > 1 and name != "1f1b":
        yield f"schedule = {name} holds one chunk a stage, so vpp = {plan.vpp} must be 1"
    if name == "1f1b" and plan.vpp == 1 and microbatches < plan.pp:
        yield f"microbatches = {microbatches} must be at least pp = {plan.pp} (torch's Schedule1F1B)"
    rounds = max(1, microbatches // plan.pp)
    if (plan.vpp > 1 or name == "zb-1p") and microbatches % rounds:
        yield f"microbatches = {microbatches} must divide into {rounds} rounds of about pp = {plan.pp} (torch's interleaved schedules)"


def _about_recompute(job: Job, plan: Plan) -> Iterator[str]:
    text = recompute_text(int(plan.recompute), int(plan.recompute_layers))
    moe = job.model.moe
    absent = {"mla_up_proj"}
    if moe is None:
        absent |= {"moe", "moe_act", "shared_experts"}
    elif not moe.shared_expert_ffn_hidden:
        absent |= {"shared_experts"}
    if not plan.recompute & FULL and any(plan.recompute & RECOMPUTE_MODULES[name] for name in absent):
        yield f"recompute = {text} names a part that {job.model.name} does not have"
    if plan.recompute & FULL and plan.recompute_layers < ALL_LAYERS and plan.recompute_layers % plan.vpp:
        yield f"recompute = {text}: each of vpp = {plan.vpp} chunks recomputes the same number of layers"
    if plan.recompute and plan.pp > 1 and plan.schedule == ZERO_BUBBLE:
        yield f"recompute = {text} with schedule = zb-1p: torch's split backward recomputes once for every weight"


def _about_knobs(job: Job, plan: Plan) -> Iterator[str]:
    absent = {"offload": plan.offload, "tp_overlap": plan.tp_overlap, "ep_overlap": plan.ep_overlap, "cuda_graphs": plan.cuda_graphs}
    for name, value in absent.items():
        if value:
            yield f"{name}: the workload has none"
    if plan.dp(job.gpus) * plan.cp == 1:
        return
    if plan.zero >= 2 and not plan.dp_overlap:
        yield f"dp_overlap = 0: FSDP2, which zero = {plan.zero} is, overlaps its collectives"
    if plan.zero < 2 and plan.dp_overlap and plan.pp > 1 and plan.schedule == ZERO_BUBBLE:
        yield "dp_overlap with schedule = zb-1p: torch's split backward does not say when a gradient is whole"
