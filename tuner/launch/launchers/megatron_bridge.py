"""Megatron-Bridge: pretrain.sh, a torchrun line of scripts/training/run_recipe.py with overrides of its configuration; and such lines, or
those of scripts/performance (setup_experiment.py, run_script.py), read back.

The recipe that is written upon, vanilla_gpt_pretrain_config, is Megatron-LM's pretrain_gpt.py without any argument: everything else is an
override. Keys were checked against release 0.6.2 (megatron/bridge/training/config.py, models/gpt_provider.py), flags of scripts/performance
against its argument_parser.py.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from tuner.errors import one_problem
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, refuse_unspelled
from tuner.launch.launchers.megatron import core as megatron_core
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.launch.launchers.megatron.layout import parse_pattern
from tuner.launch.launchers.megatron.model import BARE
from tuner.launch.launchers.megatron_lm import environment_lines
from tuner.launch.launchers.primus import preset_of
from tuner.launch.launchers.tables.settings import Dialect, Setting, refusal, shown
from tuner.launch.launchers.texts.launch_line import flags_of, launches
from tuner.launch.launchers.texts.shell import read_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tuner.job import Job
    from tuner.launch.launchers.texts.launch_line import Launch
    from tuner.launch.launchers.texts.shell import Script, Word
    from tuner.plan import Plan

NAME = "megatron-bridge"
FILE = "pretrain.sh"
RECIPE = "vanilla_gpt_pretrain_config"
_DIALECT = Dialect(launcher=NAME, traits=frozenset({"vpp", "no-mla"}))
_RECIPES = re.compile(r"run_recipe\.py")
_PERFORMANCE = re.compile(r"(?:setup_experiment|run_script)\.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the configuration and the setting it spells. kind: "not" says the opposite; "pattern": a list of layers; "first": the one
    element of a list.
    """

    key: str
    name: str
    kind: Literal["same", "not", "pattern", "first"] = "same"

    def put(self, value: Any) -> str:
        """Return the value as an override has it."""
        if self.kind == "not":
            return _hydra(not value)
        if self.kind == "pattern":
            return _hydra(parse_pattern(value))
        return _hydra(value[0] if self.kind == "first" else value)

    def take(self, value: Any) -> Any:
        """Return the setting's value of one that was read."""
        if self.kind == "not" and str(value).lower() in ("true", "false"):
            return str(value).lower() == "false"
        if self.kind == "pattern" and isinstance(value, list):
            return "[" + ",".join(value) + "]"
        return value


def _keys(section: str, *names: str) -> tuple[Key, ...]:
    return tuple(Key(key=f"{section}.{name}", name=name) for name in names)


# One entry a key; all keys of a setting are written, each is read.
KEYS: tuple[Key, ...] = (
    *_keys("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size"),
    *_keys("model", "seq_length"),
    Key(key="dataset.seq_length", name="seq_length"),
    Key(key="tokenizer.vocab_size", name="vocab_size"),
    *_keys("model", "position_embedding_type", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    Key(key="model.gated_linear_unit", name="swiglu"),
    Key(key="model.share_embeddings_and_output_weights", name="untie_embeddings_and_output_weights", kind="not"),
    *_keys("model", "hidden_dropout", "attention_dropout", "mtp_num_layers", "window_attn_skip_freq", "softmax_type"),
    Key(key="model.window_size", name="window_size"),
    Key(key="model.num_moe_experts", name="num_experts"),
    *_keys("model", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *_keys("model", "moe_router_enable_expert_bias", "moe_router_score_function", "moe_grouped_gemm", "moe_token_dispatcher_type"),
    *_keys("model", "moe_router_force_load_balancing"),
    Key(key="model.moe_layer_freq", name="moe_layer_freq", kind="pattern"),
    *_keys("model", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *_keys("model", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *_keys("model", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
    Key(key="model.cp_comm_type", name="cp_comm_type", kind="first"),
    *_keys("model", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    Key(key="model.num_layers_in_first_pipeline_stage", name="decoder_first_pipeline_num_layers"),
    Key(key="model.num_layers_in_last_pipeline_stage", name="decoder_last_pipeline_num_layers"),
    *_keys("model", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *_keys("model", "cpu_offloading", "cpu_offloading_num_layers", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"),
    *_keys("model", "tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
    *_keys("comm_overlap", "tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_grad_reduce", "overlap_param_gather"),
    *_keys("ddp", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp"),
    *_keys("ddp", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"),
    *_keys("dist", "use_megatron_fsdp", "use_torch_fsdp2"),
    *_keys("optimizer", "use_distributed_optimizer", "overlap_param_gather", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *_keys("optimizer", "use_precision_aware_optimizer"),
    *_keys("checkpoint", "ckpt_format"),
    Key(key="rerun_state_machine.check_for_nan_in_loss", name="check_for_nan_in_loss_and_grad"),
    Key(key="ddp.check_for_nan_in_grad", name="check_for_nan_in_loss_and_grad"),
    *_keys("train", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
)
BY_KEY: Mapping[str, Key] = {key.key: key for key in KEYS}
# The recipe has no section of overlaps, and sets ddp and model itself.
_ONLY_READ = ("comm_overlap.", "dist.")
# Settings that need no key: the provider takes them from others.
UNSAID = frozenset({"group_query_attention", "max_position_embeddings", "bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe"})
# megatron/bridge/training/mixed_precision.py; the first of a precision is written.
PRECISIONS: Mapping[str, str] = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8",
    "fp16_with_fp8_current_scaling_mixed": "fp8",
    "fp16_with_fp8_delayed_scaling_mixed": "fp8",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "fp16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "fp16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
# scripts/performance/argument_parser.py: flags of its line by the setting they spell.
PERFORMANCE: Mapping[str, str] = {
    "--num_layers": "num_layers", "--hidden_size": "hidden_size",
    "-gb": "global_batch_size", "--global_batch_size": "global_batch_size",
    "-mb": "micro_batch_size", "--micro_batch_size": "micro_batch_size", "-sl": "seq_length", "--seq_length": "seq_length",
    "-tp": "tensor_model_parallel_size", "--tensor_model_parallel_size": "tensor_model_parallel_size",
    "-pp": "pipeline_model_parallel_size", "--pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "-cp": "context_parallel_size", "--context_parallel_size": "context_parallel_size",
    "-vp": "virtual_pipeline_model_parallel_size", "--virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "-ep": "expert_model_parallel_size", "--expert_model_parallel_size": "expert_model_parallel_size",
    "-et": "expert_tensor_parallel_size", "--expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "--pipeline_model_parallel_layout": "pipeline_model_parallel_layout", "--use_megatron_fsdp": "use_megatron_fsdp",
    "--cuda_graph_impl": "cuda_graph_impl", "--cuda_graph_scope": "cuda_graph_scope",
    "--moe_a2a_overlap": "overlap_moe_expert_parallel_comm", "-rl": "recompute_num_layers",
    "--recompute_num_layers": "recompute_num_layers", "--recompute_modules": "recompute_modules",
    "-ol": "cpu_offloading_num_layers", "--activation_offload_layers": "cpu_offloading_num_layers",
}  # fmt: skip
_DTYPES = {"bf16": "bf16", "fp8_cs": "fp8", "fp8_ds": "fp8", "fp8_sc": "fp8-blockwise", "fp8_mx": "mxfp8", "nvfp4": "nvfp4"}
_GPUS_OF_NODE = {"h100": 8, "b200": 8, "b300": 8, "gb200": 4, "gb300": 4, "vr200": 4}
_IDLE_FLAGS = frozenset(
    (
        *("-m", "--model_family_name", "-mr", "--model_recipe_name", "-g", "--gpu", "-ng", "--num_gpus", "-gn", "--gpus_per_node"),
        *("-c", "--compute_dtype", "-ms", "--max_steps", "-a", "--account", "-p", "--partition", "-t", "--time_limit", "-i"),
        *("--container_image", "-hf", "--hf_token", "-l", "--log_dir", "-nh", "--nemo_home", "--task", "--domain", "-d", "--dryrun"),
        *("--data", "-cm", "--custom_mounts", "-ce", "--custom_env_vars", "-E", "--env", "-wdk", "-wdp", "-wde", "-wdj", "--detach"),
        *("--recipe", "--dataset", "--step_func", "--mode", "--hf_path", "--tokenizer_type", "--offline", "--additional_slurm_params"),
    )
)
_IDLE_KEYS = re.compile(
    r"(?:scheduler|logger|tokenizer|validation|profiling|rng|dataset|checkpoint)\.\w+|optimizer\.(?:lr|min_lr|adam_\w+|weight_decay|clip_grad)|"
    r"train\.(?:train_iters|train_samples|eval_\w+|exit_\w+|manual_gc\w*|log_interval)|model\.(?:activation_func|should_pad_vocab|rotary_\w+|"
    r"max_position_embeddings|init_method_std|layernorm_epsilon|make_vocab_size_divisible_by|attention_softmax_in_fp32)|mixed_precision"
)


@dataclass(frozen=True, slots=True)
class MegatronBridge:
    """pretrain.sh."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """Keys of the configuration by plan field."""
        return MappingProxyType({knob: f"overrides: {text}" for knob, text in megatron_plan.SAYS.items()} | {"vpp": _VPP})

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields without a key."""
        return megatron_plan.CANNOT

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return pretrain.sh, which trains on made-up data."""
        del version
        refuse_unspelled(self, plan)
        groups = _settings(job, plan)
        lines = {group: [f"{key}={value}" for key, value in _overrides(settings)] for group, settings in groups.items()}
        precision = next((name for name, is_for in PRECISIONS.items() if is_for == job.precision), "")
        lines["precision"] = [f"mixed_precision={precision}"]
        lines["model"] += [f"model.activation_func={'silu' if job.model.gated_mlp else 'gelu'}", "model.should_pad_vocab=true"]
        lines["training"] += _TRAINING
        notes = [
            megatron_core.checkpoint_note(plan),
            f"{precision} reduces gradients in fp32: the preset {NAME} counts them in 16 bits, as the recipes for performance do",
        ]
        if job.model.moe:
            notes.append("model.moe_router_force_load_balancing spreads tokens evenly for a measurement: take it out to train")
        arrays = {f"{group.upper()}_OVERRIDES": overrides for group, overrides in lines.items() if overrides}
        text = _SCRIPT.format(
            environment="\n".join(environment_lines(job, plan)),
            per_node=min(job.cluster.gpus_per_node, job.gpus),
            nodes=-(-job.gpus // job.cluster.gpus_per_node),
            arrays="\n".join(_array(title, words) for title, words in arrays.items()),
            use=" \\\n    ".join(f'"${{{title}[@]}}"' for title in arrays),
        )
        start = f"MEGATRON_BRIDGE=/path/to/Megatron-Bridge bash {FILE}"
        return Written(files={FILE: text}, programs=(FILE,), start=start, notes=tuple(notes))

    def reads(self, name: str, text: str) -> bool:
        """Whether a script launches a recipe of Megatron-Bridge."""
        script = name.endswith((".sh", ".slurm", ".sbatch", ".bash")) or text.startswith("#!")
        recipe = _RECIPES.search(text) is not None and "--recipe" in text
        performance = _PERFORMANCE.search(text) is not None and ("model_recipe_name" in text or " -mr" in text)
        return script and (recipe or performance)

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what the launching line of a script says."""
        script, launch = _the_launch(files)
        performance = _PERFORMANCE.search(launch.program) is not None
        read = _Read(told={}, unknown=[], facts={})
        for word in launch.arguments:
            if re.match(r"[+~]{0,2}[a-z_]{1,80}(?:\.\w{1,120}){0,6}=", word.text):
                _take_override(script.where, word, read)
        for word, values in flags_of([w for w in launch.arguments if not re.match(r"[+~]{0,2}[a-z_.]+\.?\w*=", w.text)]):
            _take_flag(script.where, word, values, read)
        _recompute_of_performance(read)
        recipe = read.facts.get("model_recipe_name") or read.facts.get("recipe", "")
        bare = recipe in (RECIPE, "vanilla_gpt_pretrain_1gpu_h100_bf16_config")
        assumed = dict(read.assumed or {})
        model = "" if bare or not recipe else _preset(recipe)
        if not bare:
            assumed["recipe"] = f"{recipe or 'the recipe'} sets what is not told here, and was not read: {NAME}'s defaults are taken for it"
        if recipe and not bare and not model:
            read.unknown.append(Unknown(name="recipe", value=recipe, where=f"{script.where}:{launch.line}"))
        gpus, per_node = launch.processes, launch.per_node
        if performance:
            per_node = _number(read.facts.get("gpus_per_node")) or _GPUS_OF_NODE.get(read.facts.get("gpu", ""))
            gpus = _number(read.facts.get("num_gpus"))
        found = megatron_core.found(
            read.told,
            framework=NAME,
            otherwise=_VANILLA if bare else {},
            gpus=gpus,
            gpus_per_node=per_node,
            unknown=read.unknown,
            assumed=assumed,
            model=model,
        )
        return _with_precision(found, read, bare)


_VPP = "overrides: model.virtual_pipeline_model_parallel_size, and what pipeline_model_parallel_layout holds"
# recipes/gpt/h100/vanilla_gpt.py and the provider's own defaults.
_VANILLA: Mapping[str, Any] = {**BARE, "use_distributed_optimizer": False, "sequence_parallel": False}


@dataclass(slots=True, kw_only=True)
class _Read:
    """What is gathered of a line. facts: texts by flag name (recipe, gpu, num_gpus)."""

    told: dict[str, Setting]
    unknown: list[Unknown]
    facts: dict[str, str]
    precision: str = ""
    assumed: dict[str, str] | None = None


def _settings(job: Job, plan: Plan) -> dict[str, dict[str, Any]]:
    if job.attention == "unfused":
        raise refusal(_DIALECT, "attention", job.attention, "an override gives a text, and attention_backend is an enumeration")
    if job.precision == "fp32":
        raise refusal(_DIALECT, "precision", job.precision, f"recipes of precision are {', '.join(PRECISIONS)}")
    return megatron_core.settings(job, plan, _DIALECT)


def _overrides(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        spelled = [key for key in KEYS if key.name == name and not key.key.startswith(_ONLY_READ)]
        if not spelled and name not in UNSAID:
            raise KeyError(name)
        for key in spelled:
            yield key.key, key.put(value)


def _hydra(value: Any) -> str:
    """Return a value as Hydra's grammar has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    text = str(value)
    return text if re.fullmatch(r"[\w.+-]{1,200}|\d+,\d+", text) else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _plain(text: str) -> Any:
    """Return the text, or the texts of a list, of an override's value."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        items = inner[1:-1].split(",") if inner[1:-1].strip() else []
        return [str(_plain(item)) for item in items]
    if len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\"":
        return inner[1:-1].replace("\\'", "'").replace("\\\\", "\\")
    return inner


def _take_override(where: str, word: Word, read: _Read) -> None:
    name, _, raw = word.text.lstrip("+~").partition("=")
    place, key = f"{where}:{word.line}", BY_KEY.get(name)
    if word.missing:
        read.unknown.append(Unknown(name=name, value=f"{shown(raw)}: not said by this file", where=place))
        return
    value = _plain(raw)
    if name == "mixed_precision" and isinstance(value, str):
        known = PRECISIONS.get(value.replace("-", "_"))
        if known:
            read.precision = known
        else:
            read.unknown.append(Unknown(name=name, value=value, where=place))
    elif key is not None:
        told = Setting(value=key.take(value), where=place, spelled=name)
        if key.name == "moe_layer_freq" and isinstance(told.value, list):
            raise one_problem(place, name, shown(raw), "must be a number or a list")
        read.told[key.name] = told
    elif not _IDLE_KEYS.fullmatch(name):
        read.unknown.append(Unknown(name=name, value=shown(value), where=place))


def _take_flag(where: str, word: Word, values: Sequence[Word], read: _Read) -> None:
    place, name = f"{where}:{word.line}", PERFORMANCE.get(word.text)
    text = shown([value.text for value in values])
    missing = any(value.missing for value in values)
    if missing and word.text not in ("-hf", "--hf_token"):
        read.unknown.append(Unknown(name=word.text, value=f"{text}: not said by this file", where=place))
    elif name is not None:
        value: Any = text.split(",") if name in ("recompute_modules", "cuda_graph_scope") else text
        read.told[name] = Setting(value=None if text in ("None", "") else value, where=place, spelled=word.text)
    elif word.text in ("-c", "--compute_dtype"):
        if text not in _DTYPES:
            raise one_problem(place, word.text, text, f"must be one of {', '.join(_DTYPES)}")
        read.precision = _DTYPES[text]
    elif word.text in _IDLE_FLAGS:
        long = {"-mr": "model_recipe_name", "-g": "gpu", "-ng": "num_gpus", "-gn": "gpus_per_node", "--recipe": "recipe"}
        read.facts[long.get(word.text, word.text.lstrip("-"))] = text
    else:
        read.unknown.append(Unknown(name=word.text[:200], value=text, where=place))


def _recompute_of_performance(read: _Read) -> None:
    """-rl sets full recompute of a block of layers, --recompute_modules the selective one (scripts/performance/utils/overrides.py)."""
    layers, modules = read.told.get("recompute_num_layers"), read.told.get("recompute_modules")
    if "recompute_granularity" in read.told:
        return
    if layers is not None and layers.spelled.startswith("-") and layers.value not in (None, "0"):
        for name, value in (("recompute_granularity", "full"), ("recompute_method", "block")):
            read.told[name] = Setting(value=value, where=layers.where, spelled=layers.spelled)
    elif layers is not None and layers.spelled.startswith("-"):
        del read.told["recompute_num_layers"]
    elif modules is not None and modules.spelled.startswith("-"):
        read.told["recompute_granularity"] = Setting(value="selective", where=modules.where, spelled=modules.spelled)


def _with_precision(found: Found, read: _Read, bare: bool) -> Found:
    from dataclasses import replace

    tp = int(found.plan.get("tp", 1))
    plan = dict(found.plan)
    if not bare and "sequence_parallel" not in plan and "tp" in plan:
        plan["sequence_parallel"] = tp > 1  # scripts/performance sets it with -tp; recipes do so too
    job = {**found.job, **({"precision": read.precision} if read.precision else {"precision": "bf16"} if bare else {})}
    return replace(found, job=job, plan=plan)


def _preset(recipe: str) -> str:
    """Return the preset of a recipe such as llama3_70b_pretrain_config or llama31_405b, or ""."""
    name = re.sub(r"_(?:pretrain|sft|peft|finetune)_.*", "", recipe)
    split = re.sub(r"^(llama|qwen)(\d)(\d)_", r"\1\2.\3_", name)
    return preset_of(split) or preset_of(name) or preset_of(re.sub(r"^llama31_", "llama3_", name))


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9]\d{0,6}", text) else None


def _the_launch(files: Mapping[str, str]) -> tuple[Script, Launch]:
    found = []
    for name, text in files.items():
        script = read_script(text, name)
        found += [(script, line) for line in launches(script) if _RECIPES.search(line.program) or _PERFORMANCE.search(line.program)]
    if not found:
        raise one_problem(
            next(iter(files)), "", None, "has no line that launches a recipe", "run_recipe.py, run_script.py or setup_experiment.py"
        )
    return found[-1]


# -- writing

_TRAINING = [
    f"train.train_iters={megatron_core.STEPS}",
    "validation.eval_iters=0",
    "scheduler.lr_warmup_iters=0",
    "logger.log_interval=1",
    "checkpoint.save=null",
]
_SCRIPT = """\
#!/bin/bash
# Written by tuner for Megatron-Bridge: a few steps of a recipe without settings of its own, on made-up data.
# MEGATRON_BRIDGE is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further overrides are
# handed on.
set -euo pipefail

{environment}

MEGATRON_BRIDGE=${{MEGATRON_BRIDGE:?must be the folder of Megatron-Bridge}}
GPUS_PER_NODE=${{GPUS_PER_NODE:-{per_node}}}
NNODES=${{NNODES:-{nodes}}}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${{NODE_RANK:-0}}"
    --master-addr "${{MASTER_ADDR:-localhost}}"
    --master-port "${{MASTER_PORT:-29500}}"
)
{arrays}

exec torchrun "${{DISTRIBUTED_ARGS[@]}}" "$MEGATRON_BRIDGE"/scripts/training/run_recipe.py \\
    --recipe vanilla_gpt_pretrain_config \\
    {use} \\
    "$@"
"""


def _array(title: str, overrides: Sequence[str]) -> str:
    return f"{title}=(\n" + "\n".join(f"    {shlex.quote(word)}" for word in overrides) + "\n)"


def open_launcher() -> Launcher:
    """Return the launcher."""
    return MegatronBridge()
