"""MaxText on GPUs: train.yml over base.yml, its mesh split into axes inside the NVLink domain (ici_) and between domains (dcn_).

Read at: maxtext 0.2.5 configs/base.yml, configs/types.py (batch and pipeline arithmetic, context_parallel_strategy, quantization),
configs/pyconfig.py (base_config, key=value overrides), layers/nnx_decoders.py get_remat_policy, configs/models/*.yml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from tuner.cluster import nodes_of
from tuner.launch.launchers.launcher import DERIVED, Found, Launcher, Written, refuse_unspelled
from tuner.launch.launchers.max import reading as max_reading
from tuner.launch.launchers.max.keys import AXES, KEYS, LATENCY_HIDING, NAME, OFFLOADED, POLICIES, PROJECTIONS, QUANTISED, TENSORS, modules
from tuner.launch.launchers.tables.vocabulary import refusal, spelled
from tuner.launch.launchers.texts.scripts import exported, header
from tuner.plan import CP_KINDS, FULL, OFFLOADS
from tuner.plan_text import recompute_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.model import Model
    from tuner.plan import Plan

CONFIG, SCRIPT = "train.yml", "train.sh"
STEPS = 30
SAYS: Mapping[str, str] = {
    "tp": "ici_/dcn_tensor_parallelism; with sequence parallelism ici_/dcn_tensor_sequence_parallelism",
    "pp": "ici_/dcn_pipeline_parallelism",
    "vpp": "num_pipeline_repeats, with num_layers_per_pipeline_stage",
    "cp": "ici_/dcn_context_parallelism",
    "ep": "ici_/dcn_expert_parallelism",
    "etp": "experts are split by the tensor axes: etp is tp",
    "micro_batch": "per_device_batch_size, with gradient_accumulation_steps or num_pipeline_microbatches",
    "sequence_parallel": "the tensor_sequence axis in place of the tensor axis",
    "recompute": "remat_policy, custom with a place for each tensor where no named policy keeps the same",
    "zero": "ici_/dcn_fsdp_parallelism (0: the data axis alone; 1: with shard_optimizer_over_data; 2: pipeline_fsdp_ag_once)",
    "shard_group": "ici_/dcn_fsdp_parallelism beside ici_/dcn_data_parallelism",
    "offload": "optimizer_memory_host_offload",
    "dp_overlap": f"XLA_FLAGS {LATENCY_HIDING}",
    "cp_kind": "context_parallel_strategy all_gather or ring (ulysses needs TPUs)",
}
CANNOT: Mapping[str, str] = {
    "recompute_layers": "a remat policy is of every layer; take recompute=full",
    "embedding_layers": "stages hold equal counts of layers",
    "loss_layers": "stages hold equal counts of layers",
    "schedule": "its one schedule is circular, all forwards before the backwards, and cannot be chosen",
    "tp_overlap": "collective matrix products are XLA's choice or need a process for each GPU with Transformer Engine",
    "ep_overlap": "XLA schedules the all-to-all; no option splits a batch for it",
    "cuda_graphs": "a step is one XLA program, whose command buffers XLA chooses",
    "fallback_tp": "a replica that loses a GPU is not rebuilt with fewer tensor-parallel ranks",
    **dict.fromkeys(DERIVED, "a plan that is launched has no idle ranks"),
}


@dataclass(frozen=True, slots=True)
class MaxText:
    """train.yml and train.sh, a process for each node."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """How each knob is spelled."""
        return SAYS

    @property
    def cannot(self) -> Mapping[str, str]:
        """Why a knob has no spelling."""
        return CANNOT

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return train.yml and train.sh."""
        del version
        refuse_unspelled(self, plan)
        settings = _settings(job, plan)
        document = {
            "base_config": "base.yml",
            "run_name": "tuner",
            "hardware": "gpu",
            "steps": STEPS,
            "dataset_type": "synthetic",
            "packing": False,
            "enable_checkpointing": False,
            "reuse_example_batch": 1,
            **spelled(KEYS, settings),
        }
        files = {CONFIG: yaml.safe_dump(document, sort_keys=False, allow_unicode=True), SCRIPT: _script(job, plan)}
        return Written(files=files, programs=(SCRIPT,), start=f"./{SCRIPT}", notes=_notes(job))

    def reads(self, name: str, text: str) -> bool:
        """Whether the file is a MaxText configuration or a script that starts MaxText."""
        start = text[:200_000]
        if name.endswith((".yml", ".yaml")):
            return any(
                word in start for word in ("per_device_batch_size", "base_emb_dim", "ici_fsdp_parallelism", "ici_tensor_parallelism")
            )
        script = name.endswith((".sh", ".slurm", ".sbatch", ".bash")) or text.startswith("#!")
        return script and "maxtext" in start.lower()

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what these files say: YAML first, then key=value words of scripts, which override it."""
        return max_reading.read(files)


def split_axes(degrees: Mapping[str, int], domain: int) -> dict[str, tuple[int, int]]:
    """Return {axis: (ici, dcn)} with the product of the first being `domain`, filled in the order of AXES. The product of the degrees
    must be a multiple of the domain.
    """
    left, found = domain, {}
    for axis in AXES:
        inside = math.gcd(degrees.get(axis, 1), left)
        left //= inside
        found[axis] = (inside, degrees.get(axis, 1) // inside)
    return found


def per_device(batch: int, gpus: int) -> float:
    """Return per_device_batch_size so that MaxText's int(gpus * per_device_batch_size) is `batch` sequences (types.py)."""
    value = batch / gpus
    while int(gpus * value) < batch:
        value = math.nextafter(value, math.inf)
    return value


def _settings(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan. Raises SpecError listing what cannot be spelled."""
    gpus, model = job.gpus, job.model
    dp, count = max(int(plan.dp(gpus)), 1), int(plan.microbatches(gpus, job.global_batch))
    tp, pp, cp, vpp, ep, mb = (int(n) for n in (plan.tp, plan.pp, plan.cp, plan.vpp, plan.ep, plan.micro_batch))
    refused: dict[str, tuple[Any, str]] = {}
    data, fsdp = _data_axes(plan, dp, refused)
    decoder = _decoder(model, refused)
    _check_stages(job, plan, count, refused)
    _check_rest(job, plan, refused)
    remat = _remat(job, plan, refused)
    domain = min(job.cluster.sizes[0], gpus)
    if gpus % domain:
        refused["tp"] = (tp, f"{gpus} GPUs are no whole number of domains of {domain}: MaxText's mesh has equal slices")
    if refused:
        raise refusal(NAME, refused)
    axis = "tensor_sequence" if plan.sequence_parallel else "tensor"
    degrees = {axis: tp, "context": cp, "expert": ep, "fsdp": fsdp, "data": data, "pipeline": pp}
    settings: dict[str, Any] = _architecture(model, decoder) | remat
    for name, (inside, outside) in split_axes(degrees, domain).items():
        settings |= {f"ici_{name}": inside, f"dcn_{name}": outside}
    settings |= {
        "slices": gpus // domain,
        "per_device": per_device(mb * dp * (count if pp > 1 else 1), gpus),
        "accumulation": 1 if pp > 1 else count,
        "seq_len": job.seq_len,
        "strategy": ("ring" if plan.cp_kind == CP_KINDS["p2p"] else "all_gather") if cp > 1 else None,
        "offload": bool(plan.offload),
        "optimizer_over_data": True if plan.zero == 1 else None,
        "dtype": "float32" if job.precision == "fp32" else "bfloat16",
        "weight_dtype": "float32",
        "quantization": QUANTISED.get(job.precision),
        "attention": "cudnn_flash_te" if job.attention == "flash" else "dot_product",
    }
    if pp > 1:
        settings |= {
            "microbatches": count,
            "stage_layers": model.layers // (pp * vpp),
            "repeats": vpp,
            "gathered_once": plan.zero == 2,
        }
    return settings


def _data_axes(plan: Plan, dp: int, refused: dict[str, tuple[Any, str]]) -> tuple[int, int]:
    """Return (data, fsdp): dp = data x fsdp x expert, and weights are sharded over fsdp x expert x context."""
    ep, cp, group = int(plan.ep), int(plan.cp), int(plan.shard_group)
    if dp % ep:
        refused["ep"] = (ep, f"must divide dp = {dp}: the expert axis is part of the batch's")
        return dp, 1
    if plan.zero < 2:
        if ep * cp > 1:
            refused["zero"] = (plan.zero, "weights are always sharded over the context and expert axes; take zero=3")
        if plan.zero == 1 and (dp == 1 or group not in (0, dp)):
            refused["shard_group"] = (group, f"the optimizer is sharded over the whole data axis, dp = {dp} ranks of at least 2")
        return dp // ep, 1
    if plan.zero == 2 and plan.pp == 1:
        refused["zero"] = (2, "gathered weights are kept only by pipelines (pipeline_fsdp_ag_once); take zero=3")
    if dp * cp == 1:
        refused["zero"] = (plan.zero, "there are no data- or context-parallel ranks to shard over")
    group = group or dp * cp
    if group % (ep * cp) or (dp * cp) % group:
        refused["shard_group"] = (group, f"must be ep*cp = {ep}*{cp} times the fsdp axis, and divide dp*cp = {dp}*{cp}")
        return dp // ep, 1
    return dp * cp // group, group // (ep * cp)


def _check_stages(job: Job, plan: Plan, count: int, refused: dict[str, tuple[Any, str]]) -> None:
    if plan.pp == 1:
        return
    model, chunks = job.model, int(plan.pp * plan.vpp)
    if model.layers % chunks:
        refused["vpp" if plan.vpp > 1 else "pp"] = (
            plan.vpp if plan.vpp > 1 else plan.pp,
            f"pp*vpp = {plan.pp}*{plan.vpp} must divide {model.layers} layers: stages are equal (types.py)",
        )
    if model.leading_dense_layers:
        refused["pp"] = (plan.pp, "only the layers with experts are put into a pipeline (types.py pipeline_parallel_layers)")
    if count % plan.pp:
        refused["micro_batch"] = (plan.micro_batch, f"pp = {plan.pp} must divide {count} micro batches (types.py)")


def _check_rest(job: Job, plan: Plan, refused: dict[str, tuple[Any, str]]) -> None:
    if plan.offload & OFFLOADS["activations"]:
        refused["offload"] = ("activations", "a policy offloads single tensors, not all; take offload=optimizer")
    if job.model.moe and plan.etp != plan.tp:
        refused["etp"] = (plan.etp, f"the tensor axes split experts too: must be tp = {plan.tp}")
    if plan.cp > 1 and plan.cp_kind == CP_KINDS["a2a"]:
        refused["cp_kind"] = ("a2a", "ulysses needs TPUs; take p2p (ring) or all_gather")
    if job.precision not in ("bf16", "fp32", *QUANTISED):
        refused["precision"] = (job.precision, f"MaxText trains in bf16, fp32, {', '.join(QUANTISED)}")
    if job.task != "pretrain":
        refused["task"] = (job.task, "only pre-training is written")


def _remat(job: Job, plan: Plan, refused: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the settings of a recompute set: a named policy, or a place for each tensor."""
    told = recompute_text(int(plan.recompute))
    if plan.recompute == 0 or plan.recompute & FULL:
        return {"policy": "full" if plan.recompute & FULL else "none"}
    wanted = frozenset(told.split("+"))
    for name, kept in POLICIES.items():
        if frozenset(PROJECTIONS) <= set(kept) and name not in OFFLOADED and modules(frozenset(kept), job.model) == wanted:
            return {"policy": name}
    keep = [*PROJECTIONS]
    keep += [] if "core_attn" in wanted else ["context"]
    keep += [] if "mlp" in wanted else ["mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"]
    keep += [] if "moe" in wanted else ["moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"]
    if modules(frozenset(keep), job.model) != wanted:
        refused["recompute"] = (told, "a policy keeps named tensors and recomputes norms always: layernorm with core_attn, mlp, moe")
    return {"policy": "custom"} | {f"keep_{name}": "device" if name in keep else "remat" for name in TENSORS}


def _decoder(model: Model, refused: dict[str, tuple[Any, str]]) -> str:
    """Return the decoder block that is this architecture."""
    moe = model.moe
    common = model.norms_per_layer == 2 and not (
        model.embedding_norm or model.attention_sinks or model.output_bias or model.mlp_bias or model.qk_norm_whole or model.sliding_window
    )
    llama = common and model.norm == "rms" and model.gated_mlp and model.positions == "rotary" and not (model.biases or model.dropout)
    plain = moe is None or not (
        moe.shared_expert_ffn_hidden or moe.first_dense_layers or moe.every > 1 or moe.expert_bias or moe.router_bias
    )
    if llama and model.mla and moe and moe.every == 1 and not (moe.expert_bias or model.qk_norm or model.qkv_bias):
        return "deepseek"
    if llama and not model.mla and plain and not model.mtp_layers:
        if moe and not model.qkv_bias:
            return "qwen3_moe" if model.qk_norm else "mixtral"
        if not moe and not (model.qk_norm and model.qkv_bias):
            return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama2"
    gpt = common and model.norm == "layer" and not model.gated_mlp and model.biases and model.positions == "learned"
    if gpt and moe is None and model.heads == model.kv_heads:
        return "gpt3"
    refused["model"] = (model.name, "no decoder block of MaxText that the tuner knows is this architecture")
    return ""


def _architecture(model: Model, decoder: str) -> dict[str, Any]:
    moe, mla = model.moe, model.mla
    settings: dict[str, Any] = {name: getattr(model, name) for name in ("hidden", "heads", "kv_heads", "layers", "head_dim", "vocab")}
    settings |= {
        "decoder": decoder,
        "ffn_hidden": model.ffn_hidden if moe is None or moe.first_dense_layers else moe.expert_ffn_hidden,
        "activations": ["silu", "linear"] if model.gated_mlp else ["gelu"],
        "tied_embeddings": model.tied_embeddings,
        "qk_norm": True if model.qk_norm else None,
        "qkv_bias": True if model.qkv_bias else None,
        "max_positions": model.max_positions or None,
        "dropout": 0.1 if model.dropout else None,
        "mtp_layers": model.mtp_layers or None,
    }
    if moe:
        settings |= {"experts": moe.experts, "top_k": moe.top_k, "expert_ffn_hidden": moe.expert_ffn_hidden}
        if decoder == "deepseek":
            shared = moe.shared_expert_ffn_hidden // moe.expert_ffn_hidden
            settings |= {"shared_experts": shared, "first_dense_layers": moe.first_dense_layers, "router_bias": moe.router_bias}
    if mla:
        settings |= {"attention_type": "mla"} | mla.model_dump()
    return settings


def _script(job: Job, plan: Plan) -> str:
    nodes = nodes_of(job.cluster, NAME).count
    shared = int(plan.dp(job.gpus)) * int(plan.cp) > 1
    hidden = "true" if plan.dp_overlap or not shared else "false"
    variables = [
        ("XLA_FLAGS", f"{LATENCY_HIDING}={hidden}", "whether collectives of the fsdp and data axes run beside compute"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95", "JAX takes three quarters of a GPU's memory unless told"),
    ]
    lines = [
        *header(job, "MaxText, written by tuner"),
        'here="$(cd "$(dirname "$0")" && pwd)"',
        *exported(variables),
        "# One process for each node: JAX finds the others through these.",
        f'export NNODES="${{NNODES:-{nodes}}}"',
        'export NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}"',
        'export JAX_COORDINATOR_IP="${MASTER_ADDR:-127.0.0.1}"',
        'export JAX_COORDINATOR_PORT="${MASTER_PORT:-1234}"',
        f'exec python3 -m maxtext.trainers.pre_train.train "$here/{CONFIG}"',
    ]
    return "\n".join(lines) + "\n"


def _notes(job: Job) -> tuple[str, ...]:
    domain = job.cluster.domains[0]
    notes = [
        "checkpoints are Orbax: MaxText restores one that was written on another mesh and reshards it",
        f"ici_ axes fill the {domain.name} domain of {min(job.cluster.sizes[0], job.gpus)} GPUs; dcn_ axes are between domains",
    ]
    if job.ramp_up:
        notes.append("the batch ramp-up is not written: MaxText's own keys count sequences a device (enable_rampup_batch_size)")
    return tuple(notes)


def open_launcher() -> Launcher:
    """Return the launcher."""
    return MaxText()
