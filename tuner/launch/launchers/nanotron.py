"""nanotron: one YAML file for run_train.py.

0.4 is the release; main adds recompute_layer, context_parallel_size, Qwen2 and experts. Read at: nanotron 0.4 and main
src/nanotron/config/{config,parallelism_config,models_config}.py, src/nanotron/parallel/context.py, run_train.py,
src/nanotron/serialize/optimizer.py, src/nanotron/parallel/tensor_parallel/functional.py (CUDA_DEVICE_MAX_CONNECTIONS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from tuner.launch.launchers.launcher import DERIVED, Found, Launcher, Written, chosen, refuse_unspelled
from tuner.launch.launchers.tables.vocabulary import Key, Said, Told, one_of, refusal, spelled, text, truth, understand, whole, whole_from
from tuner.launch.launchers.texts.documents import flat, from_yaml, nested
from tuner.launch.launchers.texts.overrides import from_script
from tuner.launch.launchers.texts.scripts import EXPANDABLE, gpus_of, torchrun_script
from tuner.plan import CP_KINDS, FULL, SCHEDULES
from tuner.plan_text import recompute_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.launch.launchers.texts.overrides import Script
    from tuner.model import Model, Moe
    from tuner.plan import Plan

NAME = "nanotron"
VERSIONS = ("0.4", "main")
CONFIG, SCRIPT = "train.yaml", "train.sh"
STEPS = 30
_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}  # schedule: pp_engine; nanotron's own default is afab
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MODEL = "model.model_config"


def _layers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError("must be a list of layers")
    return value


_PLAN = (
    Key(path="parallelism.dp", name="dp", take=whole),
    Key(path="parallelism.pp", name="pp", take=whole),
    Key(path="parallelism.tp", name="tp", take=whole),
    Key(path="parallelism.pp_engine", name="engine", take=one_of("1f1b", "afab")),
    Key(path="parallelism.tp_mode", name="tp_mode", take=one_of("ALL_REDUCE", "REDUCE_SCATTER")),
    Key(path="parallelism.tp_linear_async_communication", name="async_tp", take=truth),
    Key(path="parallelism.expert_parallel_size", name="ep", take=whole),
    Key(path="tokens.sequence_length", name="seq_len", take=whole),
    Key(path="tokens.micro_batch_size", name="micro_batch", take=whole),
    Key(path="tokens.batch_accumulation_per_replica", name="accumulation", take=whole),
    Key(path="optimizer.zero_stage", name="zero", take=whole_from(0, 3)),
    Key(path="model.dtype", name="dtype", take=text),
    Key(path="model.make_vocab_size_divisible_by", name="vocab_multiple", take=whole),
)
_PLAN_MAIN = (
    Key(path="parallelism.recompute_layer", name="recompute", take=truth),
    Key(path="parallelism.context_parallel_size", name="cp", take=whole),
)
_ARCHITECTURE = (
    Key(path=f"{_MODEL}.is_llama_config", name="llama", take=truth),
    Key(path=f"{_MODEL}.hidden_size", name="hidden", take=whole),
    Key(path=f"{_MODEL}.intermediate_size", name="ffn_hidden", take=whole),
    Key(path=f"{_MODEL}.num_attention_heads", name="heads", take=whole),
    Key(path=f"{_MODEL}.num_key_value_heads", name="kv_heads", take=whole),
    Key(path=f"{_MODEL}.num_hidden_layers", name="layers", take=whole),
    Key(path=f"{_MODEL}.vocab_size", name="vocab", take=whole),
    Key(path=f"{_MODEL}.tie_word_embeddings", name="tied_embeddings", take=truth),
    Key(path=f"{_MODEL}.max_position_embeddings", name="positions", take=whole),
)
_ARCHITECTURE_MAIN = (
    Key(path=f"{_MODEL}.is_qwen2_config", name="qwen2", take=truth),
    Key(path=f"{_MODEL}.attention_bias", name="qkv_bias", take=truth),
    Key(path=f"{_MODEL}._attn_implementation", name="attention", take=text),
    Key(path=f"{_MODEL}.sliding_window_size", name="window", take=whole),
    Key(path=f"{_MODEL}.moe_config.num_experts", name="experts", take=whole),
    Key(path=f"{_MODEL}.moe_config.top_k", name="top_k", take=whole),
    Key(path=f"{_MODEL}.moe_config.layers", name="moe_layers", take=_layers),
    Key(path=f"{_MODEL}.moe_config.enable_shared_expert", name="shared", take=truth),
    Key(path=f"{_MODEL}.moe_config.moe_intermediate_size", name="expert_ffn_hidden", take=whole),
    Key(path=f"{_MODEL}.moe_config.shared_expert_intermediate_size", name="shared_ffn_hidden", take=whole),
)
TABLES: Mapping[str, tuple[Key, ...]] = {
    "0.4": (*_ARCHITECTURE, *_PLAN),
    "main": (*_ARCHITECTURE, *_ARCHITECTURE_MAIN, *_PLAN, *_PLAN_MAIN),
}
# What nanotron wants beside the plan, and what a throughput run has there.
_REST: Mapping[str, Any] = {
    "general": {"project": "tuner", "run": "tuner", "seed": 42, "ignore_sanity_checks": True},
    "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1_000_000},
    "data_stages": [{"name": "random tokens", "start_training_step": 1, "data": {"dataset": None, "seed": 42, "num_loading_workers": 1}}],
    "model.ddp_bucket_cap_mb": 25,
    "model.init_method": {"std": 0.02},
    "optimizer": {
        "accumulate_grad_in_fp32": True,
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "optimizer_factory": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True},
        "learning_rate_scheduler": {
            "learning_rate": 0.0003,
            "lr_warmup_steps": 2,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": 0.00003,
        },
    },
    "tokens.train_steps": STEPS,
    "logging": {"iteration_step_info_interval": 1, "log_level": "info", "log_level_replica": "info"},
}
_MODEL_REST: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5}

SAYS: Mapping[str, str] = {
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
    "cp": "parallelism.context_parallel_size (main)",
    "micro_batch": "tokens.micro_batch_size, with tokens.batch_accumulation_per_replica",
    "sequence_parallel": "parallelism.tp_mode REDUCE_SCATTER (without: ALL_REDUCE)",
    "recompute": "parallelism.recompute_layer: every layer or none (main)",
    "zero": "optimizer.zero_stage 0 or 1",
    "schedule": "parallelism.pp_engine 1f1b, or afab for gpipe",
    "tp_overlap": "parallelism.tp_linear_async_communication",
}
CANNOT: Mapping[str, str] = {
    "vpp": "neither engine interleaves",
    "ep": "commits differ in what expert_parallel_size multiplies, so it is read and not written",
    "etp": "experts are not split by tensor parallelism",
    "recompute_layers": "every layer is recomputed or none",
    "shard_group": "the optimizer is sharded over all data-parallel ranks",
    "embedding_layers": "blocks are dealt to stages by their cost",
    "loss_layers": "blocks are dealt to stages by their cost",
    "offload": "nothing is offloaded",
    "dp_overlap": "gradients are reduced behind the last micro batch",
    "ep_overlap": "there is no such option",
    "cuda_graphs": "there is no such option",
    "cp_kind": "context parallelism is ring attention (p2p)",
    "fallback_tp": "a replica that loses a GPU is not rebuilt with fewer tensor-parallel ranks",
    **dict.fromkeys(DERIVED, "a plan that is launched has no idle ranks"),
}


@dataclass(frozen=True, slots=True)
class Nanotron:
    """train.yaml and train.sh."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = VERSIONS

    @property
    def says(self) -> Mapping[str, str]:
        """How each knob is spelled."""
        return SAYS

    @property
    def cannot(self) -> Mapping[str, str]:
        """Why a knob has no spelling."""
        return CANNOT

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return train.yaml and train.sh."""
        refuse_unspelled(self, plan)
        version = chosen(self, version)
        settings = _settings(job, plan, version)
        document = nested(_WRITTEN | spelled(TABLES[version], settings))
        files = {CONFIG: yaml.safe_dump(document, sort_keys=False, allow_unicode=True), SCRIPT: _script(job, plan, version)}
        return Written(files=files, programs=(SCRIPT,), start=f"./{SCRIPT}", notes=_notes(job, plan))

    def reads(self, name: str, text: str) -> bool:
        """Whether the file is a nanotron configuration or a script that starts run_train.py."""
        start = text[:200_000]
        if name.endswith((".yaml", ".yml")):
            return "parallelism:" in start and ("model_config:" in start or "batch_accumulation_per_replica" in start)
        return "run_train.py" in start and "--config-file" in start

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what these files say."""
        told: dict[str, Told] = {}
        scripts: list[Script] = []
        for name, content in files.items():
            if name.endswith((".yaml", ".yml")):
                told |= from_yaml(content, name)
            else:
                scripts.append(from_script(content, name))
        kept = {key: item for key, item in told.items() if not _quiet(key, item.value)}
        return _found(understand(TABLES["main"], kept), scripts)


def _quiet(key: str, value: Any) -> bool:
    """Whether a key is one that a written file has beside the plan, with the value that it has there."""
    return key in _WRITTEN and bool(_WRITTEN[key] == value)


_WRITTEN = dict(flat(dict(_REST))) | {f"{_MODEL}.{key}": value for key, value in _MODEL_REST.items()}


def _settings(job: Job, plan: Plan, version: str) -> dict[str, Any]:
    """Return the settings of a plan. Raises SpecError listing what this version cannot spell."""
    model, tp, pp, cp = job.model, int(plan.tp), int(plan.pp), int(plan.cp)
    dp = max(int(plan.dp(job.gpus)), 1)
    refused: dict[str, tuple[Any, str]] = {}
    _check(plan, version, refused)
    if why := _unbuildable(model, version):
        refused["model"] = (model.name, why)
    if job.precision not in _DTYPES:
        refused["precision"] = (job.precision, f"nanotron trains in {', '.join(_DTYPES)}")
    if job.task != "pretrain":
        refused["task"] = (job.task, "only pre-training is written")
    if job.attention != "flash":
        refused["attention"] = (job.attention, "nanotron has flash attention")
    if refused:
        raise refusal(NAME, refused)
    qwen2 = bool(model.moe or cp > 1)
    moe = model.moe
    return {
        "dp": dp,
        "pp": pp,
        "tp": tp,
        "engine": _ENGINES["gpipe" if plan.schedule == SCHEDULES["gpipe"] else "1f1b"],
        "tp_mode": "REDUCE_SCATTER" if plan.sequence_parallel else "ALL_REDUCE",
        "async_tp": bool(plan.tp_overlap),
        "recompute": bool(plan.recompute) if version != "0.4" else None,
        "cp": cp if version != "0.4" else None,
        "seq_len": job.seq_len,
        "micro_batch": int(plan.micro_batch),
        "accumulation": int(plan.microbatches(job.gpus, job.global_batch)),
        "zero": int(plan.zero),
        "dtype": _DTYPES[job.precision],
        "vocab_multiple": 1,
        "llama": None if qwen2 else True,
        "qwen2": True if qwen2 else None,
        "hidden": model.hidden,
        "ffn_hidden": moe.expert_ffn_hidden if moe else model.ffn_hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "layers": model.layers,
        "vocab": model.vocab,
        "tied_embeddings": model.tied_embeddings,
        "positions": job.seq_len,
        "attention": "ring" if cp > 1 else None,
        "experts": moe.experts if moe else None,
        "top_k": moe.top_k if moe else None,
    }


def _check(plan: Plan, version: str, refused: dict[str, tuple[Any, str]]) -> None:
    old = version == "0.4"
    if plan.recompute and (old or plan.recompute != FULL):
        reason = "0.4 recomputes nothing" if old else "every layer is recomputed or none; take full or none"
        refused["recompute"] = (recompute_text(int(plan.recompute)), reason)
    if plan.cp > 1 and old:
        refused["cp"] = (plan.cp, "0.4 has no context parallelism")
    if plan.cp > 1 and plan.cp_kind != CP_KINDS["p2p"]:
        refused["cp_kind"] = ("all_gather or a2a", CANNOT["cp_kind"])
    if plan.zero > 1:
        refused["zero"] = (plan.zero, "only the optimizer is sharded: 0 or 1")
    if plan.schedule not in (SCHEDULES["1f1b"], SCHEDULES["gpipe"]):
        refused["schedule"] = ("zero-bubble", "the engines are 1f1b and afab")


def _plain(moe: Moe) -> bool:
    return not (moe.shared_expert_ffn_hidden or moe.first_dense_layers or moe.every > 1 or moe.router_bias or moe.expert_bias)


def _unbuildable(model: Model, version: str) -> str:
    """Return why nanotron's Llama (or Qwen2, which has experts and ring attention) is not this architecture, or ""."""
    moe = model.moe
    if moe and version == "0.4":
        return "0.4 has no mixture of experts"
    plain = (
        (model.norm == "rms" and model.norms_per_layer == 2, "norms other than two RMS norms a layer"),
        (model.gated_mlp, "an MLP without a gate"),
        (model.positions == "rotary", f"{model.positions} positions"),
        (model.head_dim * model.heads == model.hidden, f"heads of {model.head_dim}: they are hidden/heads"),
        (not (model.biases or model.qkv_bias or model.output_bias or model.mlp_bias), "biases"),
        (not (model.qk_norm or model.embedding_norm or model.attention_sinks or model.dropout), "norms of heads, sinks or dropout"),
        (model.mla is None, "latent attention"),
        (model.sliding_window is None, "sliding windows"),
        (not model.mtp_layers, "multi-token prediction"),
        (moe is None or _plain(moe), "experts that are shared, biased or not in every layer"),
    )
    return next((f"nanotron's models do not have {what}" for good, what in plain if not good), "")


def _script(job: Job, plan: Plan, version: str) -> str:
    variables = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", EXPANDABLE)]
    if plan.tp > 1:
        reason = "its asynchronous tensor parallelism relies on one hardware queue: a collective must start before the product behind it"
        variables.append(("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason))
    before = ['cd "${NANOTRON:?set NANOTRON to the folder of a nanotron checkout}"']
    return torchrun_script(
        job, f"nanotron {version}, written by tuner", variables, before, ["run_train.py", f'--config-file "$here/{CONFIG}"'], version
    )


def _notes(job: Job, plan: Plan) -> tuple[str, ...]:
    notes = [
        "checkpoints: weights and Adam states of another tp, pp or dp are merged and sharded again when they are loaded; set "
        "checkpoints.resume_checkpoint_path",
        "tokens are random (data_stages dataset null), so no tokenizer is needed",
    ]
    if plan.pp > 1:
        notes.append("blocks are dealt to stages by nanotron itself, by their cost")
    if job.model.moe:
        notes.append("experts need main and grouped_gemm; its router and dispatch are under development")
    if job.ramp_up:
        notes.append("the batch ramp-up is not written: nanotron has none")
    return tuple(notes)


def _found(said: Said, scripts: list[Script]) -> Found:
    assumed: dict[str, str] = {}
    plan: dict[str, Any] = {name: said.settings[name] for name in ("tp", "pp", "cp", "ep", "zero", "micro_batch") if name in said.settings}
    tp, pp, cp, ep = (plan.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    release = next((script.version for script in scripts if script.version), "")
    dp, gpus = said.get("dp"), None
    if dp is not None:
        gpus = dp * tp * pp * cp
        plan["dp"] = dp
    if ep > 1:
        assumed["gpus"] = "dp*tp*pp*cp, as main counts; 0.4 multiplies by expert_parallel_size"
    started, each = next((counts for script in scripts if (counts := gpus_of(script))[0]), (None, None))
    if gpus and started and started != gpus:
        said.contradict("dp", f"dp*tp*pp*cp = {gpus} must be the {started} processes that are started (parallel/context.py)")
    if pp > 1:
        engine = said.get("engine", "afab")
        plan["schedule"] = {word: name for name, word in _ENGINES.items()}[engine]
        if "engine" not in said.settings:
            assumed["schedule"] = "gpipe: nanotron's pp_engine is afab unless told"
    if tp > 1 or "tp_mode" in said.settings:
        plan["sequence_parallel"] = tp > 1 and said.get("tp_mode", "ALL_REDUCE") == "REDUCE_SCATTER"
    if "async_tp" in said.settings:
        plan["tp_overlap"] = said.settings["async_tp"] and tp > 1
    if "recompute" in said.settings:
        plan["recompute"] = "full" if said.settings["recompute"] else "none"
    if cp > 1:
        plan["cp_kind"] = "p2p"
    job: dict[str, Any] = {"seq_len": said.settings["seq_len"]} if "seq_len" in said.settings else {}
    if dp is not None and "micro_batch" in said.settings:
        job["global_batch"] = dp * said.settings["micro_batch"] * said.get("accumulation", 1)
    job |= _precision(said)
    model = _model_fields(said)
    if model.get("kv_heads", tp) < tp:
        said.contradict("kv_heads", f"must be at least tp = {tp} (config.py)")
    return Found(
        framework=NAME,
        release=release,
        model=model,
        job=job,
        plan=plan,
        gpus=gpus or started,
        gpus_per_node=each,
        unknown=tuple(said.unknown),
        assumed=assumed,
        problems=tuple(said.problems),
    )


def _precision(said: Said) -> dict[str, str]:
    dtype = said.get("dtype")
    if dtype is None:
        return {}
    known = {word: name for name, word in _DTYPES.items()}
    if dtype not in known:
        said.contradict("dtype", "is no precision that the tuner prices", ", ".join(known))
        return {}
    return {"precision": known[dtype]}


def _model_fields(said: Said) -> dict[str, Any]:
    """Return the fields of Model that model_config tells: Llama's, or Qwen2's with its experts."""
    sizes = ("hidden", "ffn_hidden", "heads", "kv_heads", "layers", "vocab", "tied_embeddings", "qkv_bias")
    fields: dict[str, Any] = {key: said.settings[key] for key in sizes if key in said.settings}
    if "heads" in fields:
        fields.setdefault("kv_heads", fields["heads"])
        if "hidden" in fields:
            fields["head_dim"] = max(fields["hidden"] // fields["heads"], 1)
    multiple = said.get("vocab_multiple", 1)
    if multiple > 1 and "vocab" in fields:
        padded = multiple * said.get("tp", 1)
        fields["vocab"] = -(-fields["vocab"] // padded) * padded
    if "window" in said.settings:
        fields["sliding_window"] = {"size": said.settings["window"]}
    if "experts" in said.settings:
        width = said.get("expert_ffn_hidden") or fields.get("ffn_hidden", 11_008)
        moe: dict[str, Any] = {"experts": said.settings["experts"], "top_k": said.get("top_k", 2), "expert_ffn_hidden": width}
        if said.get("shared"):
            moe |= {"shared_expert_ffn_hidden": said.get("shared_ffn_hidden") or width, "shared_expert_gate": True}
        listed = said.get("moe_layers", [-1])
        if listed != [-1] and sorted(listed) != list(range(fields.get("layers", 0))):
            moe |= _placed(said, listed, fields.get("layers", 0))
        fields["moe"] = moe
    return fields


def _placed(said: Said, listed: list[int], layers: int) -> dict[str, int]:
    """Return first_dense_layers or every of a list of layers with experts."""
    first = min(listed, default=0)
    if sorted(listed) == list(range(first, layers)):
        return {"first_dense_layers": first}
    step = first + 1
    if step > 1 and sorted(listed) == list(range(first, layers, step)):
        return {"every": step}
    said.contradict("moe_layers", "the tuner knows experts in all layers behind the first ones, or in every n-th")
    return {}


def open_launcher() -> Launcher:
    """Return the launcher."""
    return Nanotron()
