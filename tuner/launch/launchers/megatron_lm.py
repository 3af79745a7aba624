"""Megatron-LM: pretrain.sh, a torchrun line of pretrain_gpt.py with its arguments in arrays, and any script like it read back.

Flags were checked against the parser of release 0.19.2 (megatron/training/arguments.py), where most are named after fields of
TransformerConfig. Releases differ in how CUDA graphs are spelled.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from tuner.cluster import nodes_of
from tuner.errors import one_problem
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, chosen, refuse_unspelled
from tuner.launch.launchers.megatron import core as megatron_core
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.launch.launchers.megatron.model import BARE
from tuner.launch.launchers.tables.settings import Dialect, Setting, shown
from tuner.launch.launchers.texts.launch_line import flags_of, launches
from tuner.launch.launchers.texts.shell import read_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tuner.job import Job
    from tuner.launch.launchers.texts.launch_line import Launch
    from tuner.launch.launchers.texts.shell import Script
    from tuner.launch.launchers.texts.shell_names import Word
    from tuner.plan import Plan

NAME = "megatron-lm"
FILE = "pretrain.sh"
PROGRAM = "pretrain_gpt.py"
VERSIONS = ("0.16", "0.19")
_PROGRAMS = re.compile(r"pretrain_\w{1,60}\.py|train_gpt\w{0,40}\.py")
_TITLES = {
    "model": "MODEL_ARGS",
    "precision": "PRECISION_ARGS",
    "parallel": "PARALLEL_ARGS",
    "memory": "MEMORY_ARGS",
    "training": "TRAINING_ARGS",
    "data": "DATA_ARGS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag and the setting it spells. kind: "on" and "off" stand alone and say true and false; others take a value or several."""

    flag: str
    name: str
    kind: Literal["on", "off", "value", "values", "listed"] = "value"

    def put(self, value: Any) -> list[str]:
        """Return the words that spell a value (none: nothing has to be said)."""
        if self.kind in ("on", "off"):
            return [self.flag] if value is (self.kind == "on") else []
        if isinstance(value, list):
            return [self.flag, *map(str, value)]
        return [self.flag, str(value)]

    def take(self, words: Sequence[str]) -> Any:
        """Return the value of the words behind the flag. Raises ValueError."""
        if self.kind in ("on", "off"):
            if words:
                raise ValueError("takes no value")
            return self.kind == "on"
        if not words:
            raise ValueError("needs a value")
        if self.kind == "value" and len(words) > 1:
            raise ValueError("takes one value")
        return list(words) if self.kind in ("values", "listed") else words[0]


def _flags(kind: Literal["on", "value", "values"], *names: str) -> tuple[Flag, ...]:
    return tuple(Flag(flag="--" + name.replace("_", "-"), name=name, kind=kind) for name in names)


# One entry a flag; the first of a setting is written, the others are read.
FLAGS: tuple[Flag, ...] = (
    *_flags("value", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *_flags("on", "group_query_attention"),
    *_flags("value", "num_query_groups", "kv_channels", "vocab_size", "seq_length", "max_position_embeddings"),
    *_flags("value", "position_embedding_type", "normalization"),
    *_flags("on", "use_rotary_position_embeddings", "swiglu", "squared_relu", "quick_geglu", "untie_embeddings_and_output_weights"),
    Flag(flag="--disable-bias-linear", name="add_bias_linear", kind="off"),
    *_flags("on", "add_qkv_bias", "qk_layernorm"),
    *_flags("value", "hidden_dropout", "attention_dropout", "mtp_num_layers", "window_attn_skip_freq", "softmax_type"),
    *_flags("values", "window_size"),
    *_flags("on", "multi_latent_attention"),
    *_flags("value", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *_flags("value", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
    *_flags("value", "moe_router_score_function", "moe_token_dispatcher_type"),
    *_flags("on", "moe_shared_expert_gate", "moe_router_enable_expert_bias", "moe_grouped_gemm", "moe_router_force_load_balancing"),
    *_flags("on", "bf16", "fp16", "use_flash_attn"),
    Flag(flag="--fp8-format", name="fp8"),
    Flag(flag="--fp4-format", name="fp4"),
    *_flags("value", "fp8_recipe", "fp4_recipe", "attention_backend"),
    *_flags("value", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *_flags("value", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *_flags("values", "cp_comm_type"),
    *_flags("on", "sequence_parallel"),
    *_flags("value", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"),
    *_flags("on", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *_flags("value", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *_flags("on", "use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2", "overlap_grad_reduce", "overlap_param_gather"),
    Flag(flag="--use-custom-fsdp", name="use_megatron_fsdp", kind="on"),
    Flag(flag="--torch-fsdp2-no-reshard-after-forward", name="torch_fsdp2_reshard_after_forward", kind="off"),
    *_flags("value", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances", "ckpt_format"),
    *_flags("on", "tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
    *_flags("value", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *_flags("values", "recompute_modules"),
    *_flags("on", "recompute_activations", "moe_layer_recompute"),
    *_flags("on", "optimizer_cpu_offload", "use_precision_aware_optimizer"),
    *_flags("value", "optimizer_offload_fraction", "cpu_offloading_num_layers", "cuda_graph_impl"),
    *_flags("values", "cuda_graph_scope", "cuda_graph_modules"),
    *_flags("on", "enable_cuda_graph", "external_cuda_graph"),
    Flag(flag="--no-check-for-nan-in-loss-and-grad", name="check_for_nan_in_loss_and_grad", kind="off"),
    *_flags("value", "micro_batch_size", "global_batch_size"),
    *_flags("values", "rampup_batch_size"),
)
BY_FLAG: Mapping[str, Flag] = {flag.flag: flag for flag in FLAGS}
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in reversed(FLAGS)}
# Settings that this launcher does not have to say: cpu_offloading_num_layers turns cpu_offloading on.
UNSAID = frozenset({"cpu_offloading"})
# What tells neither an architecture, nor a plan, nor a batch: learning, data, checkpoints, logs, kernels that are on anyway.
_IDLE = re.compile(
    r"--(?:(?:min-|decoupled-)?lr(?:-\w[\w-]*)?|train-(?:iters|samples|data-path)|(?:valid|test)-data-path|eval-(?:iters|interval)|adam-[\w-]+|"
    r"sgd-momentum|weight-decay[\w-]*|(?:start|end)-weight-decay|clip-grad|init-method-std|seed|optimizer|"
    r"(?:no-)?(?:save|load)(?:-(?!main)\w[\w-]*)?|ckpt-(?!format)[\w-]+|(?:no-)?ckpt-fully-[\w-]+|async-save|use-dist-ckpt|dist-ckpt-[\w-]+|auto-detect-ckpt-format|"
    r"finetune|exit-[\w-]+|log-[\w-]+|no-one-logger|logging-level|timing-log-[\w-]+|tensorboard-[\w-]+|wandb-[\w-]+|one-logger-[\w-]+|"
    r"enable-one-logger|data-path|data-cache-path|data-args-path|per-split-data-args-path|split|mock-data|num-workers|dataloader-type|no-mmap-bin-files|"
    r"num-dataset-builder-threads|no-create-attention-mask-in-dataloader|reset-(?:position-ids|attention-mask)|eod-mask-loss|"
    r"tokenizer-[\w-]+|vocab-file|merge-file|tiktoken-[\w-]+|trust-remote-code|vocab-extra-ids|make-vocab-size-divisible-by|"
    r"distributed-(?:backend|timeout-minutes)|local-rank|use-mcore-models|transformer-impl|norm-epsilon|rotary-(?:base|percent)|"
    r"use-rope-scaling|rope-scaling-factor|rotary-scaling-factor|mscale(?:-all-dim)?|no-position-embedding|"
    r"no-masked-softmax-fusion|attention-softmax-in-fp32|apply-layernorm-1p|no-rope-fusion|moe-(?:aux-loss-coeff|z-loss-coeff)|"
    r"moe-router-(?:load-balancing-type|num-groups|group-topk|pre-softmax|topk-scaling-factor|dtype|bias-update-rate)|"
    r"mtp-loss-scaling-factor|manual-gc(?:-interval)?|profile[\w-]*|use-pytorch-profiler|loss-scale[\w-]*|initial-loss-scale|min-loss-scale|"
    r"hysteresis|disable-bf16-reduced-precision-matmul|bert-[\w-]+|override-opt[_-]param-scheduler|use-checkpoint-[\w-]+)"
)


@dataclass(frozen=True, slots=True)
class MegatronLm:
    """pretrain.sh."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = VERSIONS

    @property
    def says(self) -> Mapping[str, str]:
        """Flags of pretrain_gpt.py by plan field."""
        return MappingProxyType({knob: _as_flags(text) for knob, text in megatron_plan.SAYS.items()})

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields without a flag."""
        return megatron_plan.CANNOT

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return pretrain.sh, which trains on made-up data."""
        release = chosen(self, version)
        refuse_unspelled(self, plan)
        traits = frozenset({"scope"} if release == "0.16" else ())
        groups = megatron_core.settings(job, plan, Dialect(launcher=NAME, traits=traits))
        arrays = {title: [_spelled(name, value) for name, value in groups.get(group, {}).items()] for group, title in _TITLES.items()}
        arrays["TRAINING_ARGS"] += _TRAINING
        arrays["DATA_ARGS"] = _DATA
        notes = [megatron_core.checkpoint_note(plan)]
        if job.model.moe:
            notes.append("--moe-router-force-load-balancing spreads tokens evenly for a measurement: take it out to train")
        notes.append("data are made up (--mock-data): put --data-path and a tokenizer in place of DATA_ARGS to train")
        text = _SCRIPT.format(
            release=release,
            environment="\n".join(environment_lines(job, plan)),
            per_node=nodes_of(job.cluster, NAME).each,
            nodes=nodes_of(job.cluster, NAME).count,
            arrays="\n".join(_array(title, words) for title, words in arrays.items() if any(words)),
            use=" \\\n    ".join(f'"${{{title}[@]}}"' for title, words in arrays.items() if any(words)),
        )
        return Written(files={FILE: text}, programs=(FILE,), start=f"MEGATRON_LM=/path/to/Megatron-LM bash {FILE}", notes=tuple(notes))

    def reads(self, name: str, text: str) -> bool:
        """Whether a script launches a training program of Megatron-LM."""
        script = name.endswith((".sh", ".slurm", ".sbatch", ".bash")) or text.startswith("#!")
        return script and _PROGRAMS.search(text) is not None and ("--num-layers" in text or "--tensor-model-parallel-size" in text)

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what the launching line of a script says."""
        script, launch, others = _the_launch(files)
        told, unknown = _told(script.where, launch.arguments)
        gpus = launch.processes
        unknown += [
            Unknown(name=entry.name, value=entry.why, where=f"{script.where}:{entry.line}")
            for entry in script.unresolved
            if "condition" in entry.why
        ]
        assumed = {"launch": f"{script.where}:{launch.line}, the last of {others + 1} lines that launch"} if others else {}
        return megatron_core.found(
            told,
            framework=NAME,
            otherwise={**BARE, "bf16": False},
            gpus=gpus,
            gpus_per_node=launch.per_node,
            unknown=unknown,
            assumed=assumed,
        )


def _the_launch(files: Mapping[str, str]) -> tuple[Script, Launch, int]:
    """Return the script with the line that launches Megatron, the last such line, and how many there are beside it."""
    found = []
    for name, text in files.items():
        script = read_script(text, name)
        found += [(script, launch) for launch in launches(script) if _trains(launch)]
    if not found:
        rule = "has no line that launches a training program of Megatron-LM"
        raise one_problem(next(iter(files)), "", None, rule, "torchrun, srun, deepspeed or python with pretrain_gpt.py")
    script, launch = found[-1]
    return script, launch, len(found) - 1


def _trains(launch: Launch) -> bool:
    flags = {word.text.partition("=")[0] for word in launch.arguments}
    return _PROGRAMS.search(launch.program) is not None or bool(flags & {"--num-layers", "--tensor-model-parallel-size"})


def _told(where: str, words: Sequence[Word]) -> tuple[dict[str, Setting], list[Unknown]]:
    told: dict[str, Setting] = {}
    unknown: list[Unknown] = []
    for word, values in flags_of(words):
        place, flag = f"{where}:{word.line}", BY_FLAG.get(word.text.replace("_", "-"))
        spelled = shown([value.text for value in values])
        if flag is None:
            if not _IDLE.fullmatch(word.text):
                unknown.append(Unknown(name=word.text[:200], value=spelled, where=place))
            continue
        if any(value.missing for value in values):
            unknown.append(Unknown(name=word.text, value=f"{spelled}: not said by this file", where=place))
            continue
        try:
            told[flag.name] = Setting(value=flag.take([value.text for value in values]), where=place, spelled=word.text)
        except ValueError as error:
            raise one_problem(place, word.text, spelled or None, str(error)) from None
    return told, unknown


# -- writing

_TRAINING = [
    ["--train-iters", str(megatron_core.STEPS)],
    ["--lr", "1.0e-5"],
    ["--min-lr", "1.0e-6"],
    ["--lr-decay-style", "cosine"],
    ["--clip-grad", "1.0"],
    ["--log-interval", "1"],
    ["--log-throughput"],
    ["--eval-iters", "0"],
]
_DATA = [["--mock-data"], ["--tokenizer-type", "NullTokenizer"]]
_SCRIPT = """\
#!/bin/bash
# Written by tuner for Megatron-LM (core {release}): a few steps on made-up data.
# MEGATRON_LM is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further arguments are
# handed to {program}.
set -euo pipefail

{{environment}}

MEGATRON_LM=${{{{MEGATRON_LM:?must be the folder of Megatron-LM}}}}
GPUS_PER_NODE=${{{{GPUS_PER_NODE:-{{per_node}}}}}}
NNODES=${{{{NNODES:-{{nodes}}}}}}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${{{{NODE_RANK:-0}}}}"
    --master-addr "${{{{MASTER_ADDR:-localhost}}}}"
    --master-port "${{{{MASTER_PORT:-29500}}}}"
)
{{arrays}}

exec torchrun "${{{{DISTRIBUTED_ARGS[@]}}}}" "$MEGATRON_LM"/{program} \\
    {{use}} \\
    "$@"
""".format(release="{release}", program=PROGRAM)


def _spelled(name: str, value: Any) -> list[str]:
    return [] if name in UNSAID else BY_NAME[name].put(value)


def _array(title: str, flags: Sequence[Sequence[str]]) -> str:
    lines = [" ".join(shlex.quote(word) for word in words) for words in flags if words]
    return f"{title}=(\n" + "\n".join(f"    {line}" for line in lines) + "\n)"


def environment_lines(job: Job, plan: Plan) -> Iterator[str]:
    """Yield the lines of a script that set the environment, each with its reason."""
    for name, value, why in megatron_core.environment(job, plan):
        yield f"unset {name}  # {why}" if not value else f"export {name}={shlex.quote(value)}  # {why}"


def _as_flags(text: str) -> str:
    """Return a description of settings with the settings as flags."""
    return re.sub(r"[a-z]+(?:_[a-z0-9]+)+", lambda m: BY_NAME[m[0]].flag if m[0] in BY_NAME else m[0], text)


def open_launcher() -> Launcher:
    """Return the launcher."""
    return MegatronLm()
