"""A dense model, a batch and a plan as the arguments of pretrain_gpt.py, and what of them these arguments do not spell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.launch.launchers.launcher import used
from tuner.plan import ALL_LAYERS, CP_KINDS, FULL, RECOMPUTE_MODULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.job import Job
    from tuner.plan import Plan

# Knobs with an argument, or with a rule of their own that refuses them.
_SPELLED = {"tp", "cp", "cp_kind", "micro_batch", "sequence_parallel", "recompute", "recompute_layers", "dp_overlap", "fallback_tp"}
_REFUSED = {"pp", "zero"}
_OF_EXPERTS = {"ep", "etp", "ep_overlap"}
_WHY = {
    "tp_overlap": "its buffers need initialize_transformer_engine_userbuffers_for_nonuniform_tp before the model is built",
    "cuda_graphs": "its hooks do nothing while a graph is captured, so that nothing would be resharded",
}
_PRECISIONS = {"bf16": ("--bf16",), "fp16": ("--fp16",), "fp32": ()}


def of_a_whole_run(job: Job) -> list[tuple[str, ...]]:
    """Return the arguments that a short check in fp32 leaves out: precision, batch ramp-up, samples."""
    found: list[tuple[str, ...]] = [_PRECISIONS[job.precision]] if _PRECISIONS[job.precision] else []
    if job.ramp_up is not None:
        found.append(("--rampup-batch-size", str(job.ramp_up.start), str(job.ramp_up.increment), str(job.ramp_up.samples)))
    if job.tokens is not None:
        found.append(("--train-samples", str(int(job.tokens) // job.seq_len)))
    return found


def unspelled(job: Job, plan: Plan) -> Iterable[tuple[str, str, str]]:
    """Yield (rule, what, way out) of what is asked for and has no argument here: nothing is left out silently."""
    known = _SPELLED | _REFUSED | (_OF_EXPERTS if job.model.moe else set())
    for name, value in used(plan).items():
        if name not in known:
            why = _WHY.get(name, "nothing is known of it with two degrees")
            yield "ntp-knob", f"{name} = {value} is not exported: {why}", f"without {name}"
    if job.precision not in _PRECISIONS:
        yield "ntp-precision", f"precision = {job.precision}: upstream runs bf16 alone; fp16 and fp32 have the same buffers", "bf16"
    model = job.model
    traits = {
        "alibi positions": model.positions == "alibi",
        "a norm behind the embedding": model.embedding_norm,
        f"{model.norms_per_layer} norms a layer": model.norms_per_layer != 2,
        "a norm over all heads together": model.qk_norm_whole,
        "attention sinks": model.attention_sinks,
        "sliding windows": model.sliding_window is not None,
        "biases of some linear layers": not model.biases and (model.output_bias or model.mlp_bias),
    }
    for trait in (name for name, has in traits.items() if has):
        yield "ntp-model", f"{model.name} has {trait}, which is not exported", "another model"


def arguments(job: Job, plan: Plan, vocab_multiple: int) -> list[tuple[str, ...]]:
    """Return the arguments of any run, a flag and its values each; tp is that of healthy replicas."""
    batch = [("--micro-batch-size", str(int(plan.micro_batch))), ("--global-batch-size", str(job.global_batch))]
    return [*_model(job), *batch, ("--make-vocab-size-divisible-by", str(vocab_multiple)), *_plan(plan)]


def _model(job: Job) -> list[tuple[str, ...]]:
    model = job.model
    found: list[tuple[str, ...]] = [
        ("--num-layers", str(model.layers)),
        ("--hidden-size", str(model.hidden)),
        ("--ffn-hidden-size", str(model.ffn_hidden)),
        ("--num-attention-heads", str(model.heads)),
        ("--kv-channels", str(model.head_dim)),
        ("--seq-length", str(job.seq_len)),
        ("--max-position-embeddings", str(max(job.seq_len, model.max_positions))),
        ("--position-embedding-type", {"rotary": "rope", "learned": "learned_absolute"}.get(model.positions, "none")),
        ("--normalization", "RMSNorm" if model.norm == "rms" else "LayerNorm"),
    ]
    if model.kv_heads != model.heads:
        found += [("--group-query-attention",), ("--num-query-groups", str(model.kv_heads))]
    switches = {
        "--swiglu": model.gated_mlp,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--disable-bias-linear": not model.biases,
        "--add-qkv-bias": model.qkv_bias and not model.biases,
        "--qk-layernorm": model.qk_norm,
    }
    found += [(name,) for name, on in switches.items() if on]
    dropout = "0.1" if model.dropout else "0.0"
    return [*found, ("--attention-dropout", dropout), ("--hidden-dropout", dropout)]


def _plan(plan: Plan) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [
        ("--tensor-model-parallel-size", str(int(plan.tp))),
        ("--pipeline-model-parallel-size", "1"),
        ("--context-parallel-size", str(int(plan.cp))),
    ]
    if plan.cp > 1:
        found.append(("--cp-comm-type", next(name for name, code in CP_KINDS.items() if code == plan.cp_kind)))
    if plan.sequence_parallel:
        found.append(("--sequence-parallel",))
    if plan.dp_overlap:
        found.append(("--overlap-grad-reduce",))
    # few large buckets: each may start a reshard of its own
    return [*found, ("--ddp-bucket-size", "100000000"), ("--disable-gloo-process-groups",), *_recompute(plan)]


def _recompute(plan: Plan) -> list[tuple[str, ...]]:
    modules, layers = int(plan.recompute), int(plan.recompute_layers)
    if modules & FULL:
        some = layers < ALL_LAYERS
        method = ("block", str(layers)) if some else ("uniform", "1")
        return [("--recompute-granularity", "full"), ("--recompute-method", method[0]), ("--recompute-num-layers", method[1])]
    names = [name for name, bit in RECOMPUTE_MODULES.items() if modules & bit]
    return [("--recompute-granularity", "selective"), ("--recompute-modules", *names)] if names else []
