"""What is trained, on what, and with which software: everything a plan does not choose."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tuner.cluster import Cluster, Sourced
from tuner.model import Model
from tuner.plan_text import parse_layout, parse_recompute
from tuner.spec import Name, Spec
from tuner.units import Count, Tokens

PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4")
Precision = Literal["bf16", "fp16", "fp32", "fp8", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4"]
AttentionKernel = Literal["flash", "unfused"]
Task = Literal["pretrain", "sft", "lora"]
RuleFamily = Literal["always", "megatron", "torchtitan", "deepspeed", "nanotron", "fsdp", "zero-bubble", "accelerate"]
MOST_RAMP_STEPS = 10_000
BytesPerParameter = Annotated[int, Field(ge=0, le=64, strict=True)]


def _recompute(text: str) -> str:
    parse_recompute(text)
    return text


def _layout(text: str) -> str:
    parse_layout(text)
    return text


class Defaults(Spec):
    """What a framework does with a knob that nobody set, each with its source. Texts are those of plan_text.py.

    precision None: the best 16-bit type of the accelerator.
    """

    recompute: Sourced[Annotated[str, AfterValidator(_recompute)]]
    vpp: Sourced[Annotated[int, Field(ge=1, le=1000, strict=True)]]
    zero: Sourced[Annotated[int, Field(ge=0, le=3, strict=True)]]
    sequence_parallel: Sourced[bool]
    attention: Sourced[AttentionKernel]
    tp_overlap: Sourced[bool]
    dp_overlap: Sourced[bool]
    ep_overlap: Sourced[bool]
    cuda_graphs: Sourced[bool]
    pipeline_layout: Sourced[Annotated[str, AfterValidator(_layout)]]
    precision: Sourced[Precision] | None = None


class Framework(Spec):
    """A training framework: its defaults, the rules it enforces, and what it keeps in memory.

    relatives: frameworks on the same engine, nearest first, whose calibration stands in on a GPU where this one was not measured;
    rules: names of the rule families it enforces (see cost_model/rules.py); param_bytes, grad_bytes, optimizer_bytes: bytes
    a parameter for the weights, the gradients and the optimizer state (fp32 master weights included) in mixed precision;
    grad_shard_zero: the ZeRO stage from which it shards gradients; padded_vocab: the vocabulary is padded to a multiple of
    this times tp (1: not padded).

    bf16_grad_bytes: grad_bytes in bf16 training, where it differs from fp16's (fp32 accumulation);
    reduce_bytes: bytes a parameter that gradients take on the wire (None: grad_bytes); gather_bytes: bytes a parameter when
    sharded weights are gathered for compute (None: param_bytes); pipeline_balance: what it equalises when it deals layers to
    stages on its own: the number of layers (None as well), their compute cost with the logits, or parameters. fused_activation:
    whether a gated MLP's activation and product are one kernel that keeps its two inputs (None as well), or two that keep three.
    scattered_sends: whether tensor-parallel ranks send a tp-th of a replicated activation to the next stage and gather it there,
    rather than all of it each (None as well). deduplicated_dispatch: whether a token goes once to each rank (and node) of its
    experts (DeepEP, HybridEP), rather than once for each expert (None as well).
    forwards_first: whether a pipeline runs the forwards of all micro batches before the first backward, whatever its schedule is called
    (None: no).
    fused_softmax: whether unfused attention has scale, mask and softmax in one 16-bit kernel (None as well) or in fp32 steps.
    fused_attention_since: the year from which its attention is a fused kernel (None: as far back as it matters);
    gpt_dropout: whether it trains GPT-style models (learned positions, plain MLP) with dropout unless told otherwise (None: no);
    sharded_logits: whether the loss runs on a rank's share of the vocabulary (None: yes; no: logits are gathered over tp);
    fused_norm: whether a norm is one kernel that keeps its input alone (None: yes; no: element-wise kernels keep an fp32 copy of it and
    the 16-bit result before the weight as well);
    fused_loss: whether the cross-entropy is one kernel over 16-bit logits whose gradient overwrites them (None: no, fp32 copies);
    stacked_qkv: whether the stacked queries, keys and values stay beside the keys and values that attention took (None: no);
    gathered_inputs: whether blocks keep the inputs that sequence parallelism gathered, rather than gather them again in the backward
    (None: no);
    bucket_elements: elements of each of the two buffers through which ZeRO 1 and 2 reduce gradients and gather weights (None: none);
    quantised_inputs: whether products of a quantised precision keep their inputs in it rather than in 16 bits (None: no);
    weighed_activation: whether the router's weights multiply the experts' activation, so that their output is not kept (None: no);
    accumulation_bytes: HBM bytes a parameter of adding a micro batch's gradient to the step's sum, beyond writing it in 16 bits (None: 0);
    fused_accumulation: whether the product that makes a gradient also adds it, and hides that as long as it lasts (None: no);
    async_tensor_parallel: whether the backward's tensor-parallel collectives run beside its products (None: yes).
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    relatives: tuple[Name, ...] = ()
    rules: tuple[RuleFamily, ...]
    defaults: Defaults
    param_bytes: Sourced[BytesPerParameter]
    grad_bytes: Sourced[BytesPerParameter]
    optimizer_bytes: Sourced[BytesPerParameter]
    grad_shard_zero: Sourced[Annotated[int, Field(ge=0, le=4, strict=True)]]
    padded_vocab: Sourced[Annotated[int, Field(ge=1, le=2**20, strict=True)]]
    resharded_after_forward: Sourced[bool]
    fused_optimizer: Sourced[bool]
    bf16_grad_bytes: Sourced[int] | None = None
    reduce_bytes: Sourced[BytesPerParameter] | None = None
    gather_bytes: Sourced[BytesPerParameter] | None = None
    pipeline_balance: Sourced[Literal["layers", "cost", "parameters"]] | None = None
    fused_activation: Sourced[bool] | None = None
    scattered_sends: Sourced[bool] | None = None
    forwards_first: Sourced[bool] | None = None
    deduplicated_dispatch: Sourced[bool] | None = None
    fused_softmax: Sourced[bool] | None = None
    fused_attention_since: Sourced[int] | None = None
    gpt_dropout: Sourced[bool] | None = None
    sharded_logits: Sourced[bool] | None = None
    fused_norm: Sourced[bool] | None = None
    fused_loss: Sourced[bool] | None = None
    stacked_qkv: Sourced[bool] | None = None
    gathered_inputs: Sourced[bool] | None = None
    bucket_elements: Sourced[Annotated[int, Field(ge=0, le=10**12, strict=True)]] | None = None
    quantised_inputs: Sourced[bool] | None = None
    weighed_activation: Sourced[bool] | None = None
    accumulation_bytes: Sourced[BytesPerParameter] | None = None
    fused_accumulation: Sourced[bool] | None = None
    async_tensor_parallel: Sourced[bool] | None = None


def gradient_bytes(job: Job) -> float:
    """Return bytes a parameter of the gradients that a job keeps."""
    framework = job.framework
    if job.precision == "fp32":
        return 4.0
    if framework.bf16_grad_bytes and job.precision != "fp16":
        return float(framework.bf16_grad_bytes.value)
    return float(framework.grad_bytes.value)


def says(trait: Sourced[bool] | None, otherwise: bool) -> bool:
    """Return what a framework says of a trait, or `otherwise` where it says nothing."""
    return otherwise if trait is None else trait.value


class RampUp(Spec):
    """Batch ramp-up as Megatron-LM spells it: from `start` sequences by `increment` over `samples` sequences."""

    start: Count
    increment: Count
    samples: Count


class Job(Spec):
    """A training job. seq_len in tokens, global_batch in sequences (both pinned: a tuner that changes them answers
    another question), tokens: the budget of the whole run, lora_rank for task lora.
    """

    model: Model
    cluster: Cluster
    framework: Framework
    release: str = ""
    seq_len: Annotated[Count, Field(le=100_000_000)]
    global_batch: Annotated[Count, Field(le=100_000_000)]
    precision: Precision = "bf16"
    attention: AttentionKernel = "flash"
    task: Task = "pretrain"
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 16
    tokens: Tokens | None = None
    ramp_up: RampUp | None = None

    @model_validator(mode="after")
    def _precision_exists(self) -> Self:
        gpu = self.cluster.gpu
        if not any(name in gpu.peak for name in PEAK_OF[self.precision]):
            raise ValueError(f"{gpu.name} has no {self.precision}: it has {', '.join(gpu.peak)}")
        if self.ramp_up:
            ramp = f"start {self.ramp_up.start} by {self.ramp_up.increment}"
            steps, rest = divmod(self.global_batch - self.ramp_up.start, self.ramp_up.increment)
            if steps < 0 or rest:
                raise ValueError(f"ramp_up from {ramp} must reach global_batch = {self.global_batch} in whole steps")
            if steps > MOST_RAMP_STEPS:
                raise ValueError(f"ramp_up from {ramp} has more than {MOST_RAMP_STEPS} steps")
        if self.model.positions == "learned" and self.model.max_positions and self.seq_len > self.model.max_positions:
            raise ValueError(f"seq_len = {self.seq_len} exceeds the model's {self.model.max_positions} learned positions")
        return self

    @property
    def gpus(self) -> int:
        """Accelerators in the job."""
        return self.cluster.gpus


# The peak a precision's matrix products run against, best first: a card without that unit has no such precision.
PEAK_OF: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "fp16": ("fp16", "bf16"),
    "fp32": ("tf32", "fp32"),
    "fp8": ("fp8",),
    "fp8-blockwise": ("fp8",),
    "fp8-rowwise": ("fp8",),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("fp4",),
}


def peak_flops(job: Job) -> float:
    """Return the dense peak FLOP/s of the job's precision on its accelerator."""
    peaks = job.cluster.gpu.peak
    return next(peaks[name].value for name in PEAK_OF[job.precision] if name in peaks)
