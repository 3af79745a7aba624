"""Primus (AMD) with its Megatron backend: pretrain.yaml, whose `overrides:` are arguments of Megatron-LM by their Python names.

A key is any argument that Megatron's parser knows (primus/backends/megatron/argument_builder.py); what is not said is what `model:` and
trainer_base.yaml say (AMD-AGI/Primus primus/configs). Texts like ${NAME:8} take the environment's value or 8.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from tuner import presets
from tuner.cluster import nodes_of
from tuner.errors import Problem, SpecError, one_problem
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, refuse_unspelled
from tuner.launch.launchers.megatron import core as megatron_core
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.launch.launchers.megatron.model import BARE
from tuner.launch.launchers.tables.settings import Dialect, Setting, shown
from tuner.launch.launchers.texts.shell import read_script
from tuner.load import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tuner.job import Job
    from tuner.launch.launchers.texts.shell import Script
    from tuner.plan import Plan

NAME = "primus"
FILE, SCRIPT = "pretrain.yaml", "launch.sh"
BASE = "language_model.yaml"
_DIALECT = Dialect(launcher=NAME, traits=frozenset({"graphs-flag"}))
# Names of Megatron's arguments are the settings' own, but for these.
KEYS: Mapping[str, str] = {
    name: name for name in megatron_core.KINDS if name not in ("cpu_offloading", "virtual_pipeline_model_parallel_size")
}
# primus/configs/models/megatron/language_model.yaml, primus/configs/modules/megatron/trainer_base.yaml
_BASE: Mapping[str, Any] = {
    **BARE,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "bf16": True,
    "data_parallel_sharding_strategy": "no_shard",
}
_TRAINER = {"bf16": True, "data_parallel_sharding_strategy": "no_shard"}
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w{0,100})(?::([^{}]{0,200}))?\}")
_IDLE = re.compile(
    r"(?:wandb|mlflow|tensorboard|log|disable|profile|use_pytorch_profiler|torch_profiler)_\w+|stderr_sink_level|(?:min_)?lr(?:_\w+)?|train_iters|"
    r"(?:train|valid|test)_data_path|data_path|mock_data|adam_\w+|weight_decay|clip_grad|eod_mask_loss|init_method_std|norm_epsilon|"
    r"eval_(?:iters|interval)|split|seed|finetune|auto_continue_train|(?:no_)?(?:load|save)(?:_\w+)?|exit_on_missing_checkpoint|num_workers|"
    r"tokenizer_(?:type|model)|rotary_base|moe_(?:aux_loss_coeff|z_loss_coeff)|moe_router_(?:dtype|load_balancing_type|num_groups|group_topk|"
    r"topk_scaling_factor|pre_softmax|bias_update_rate)|mtp_loss_scaling_factor|manual_gc\w*|make_vocab_size_divisible_by|profile|optimizer"
)


@dataclass(frozen=True, slots=True)
class Primus:
    """pretrain.yaml and launch.sh."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """Keys under `overrides:` by plan field."""
        return MappingProxyType({knob: f"overrides: {text}" for knob, text in megatron_plan.SAYS.items()} | {"cuda_graphs": _GRAPHS})

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields without a key."""
        return MappingProxyType(dict(megatron_plan.CANNOT) | {"schedule": _SCHEDULE})

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return pretrain.yaml and launch.sh, which train on made-up data."""
        del version
        refuse_unspelled(self, plan)
        overrides: dict[str, Any] = {}
        for settings in megatron_core.settings(job, plan, _DIALECT).values():
            overrides |= {KEYS[name]: _put(name, value) for name, value in settings.items() if name in KEYS}
        overrides |= {
            "train_iters": megatron_core.STEPS,
            "eval_iters": 0,
            "mock_data": True,
            "tokenizer_type": "NullTokenizer",
            "log_throughput": True,
            "finetune": False,
            "save": None,
            "load": None,
        }
        trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": BASE, "overrides": overrides}
        document = {
            "work_group": "${PRIMUS_TEAM:tuner}",
            "user_name": "${PRIMUS_USER:root}",
            "exp_name": "${PRIMUS_EXP_NAME:tuner-pretrain}",
            "workspace": "${PRIMUS_WORKSPACE:./output}",
            "modules": {"pre_trainer": trainer},
        }
        text = "# Written by tuner for Primus with the Megatron backend: a few steps on made-up data.\n"
        script = _LAUNCH.format(
            nodes=nodes_of(job.cluster, NAME).count,
            per_node=nodes_of(job.cluster, NAME).each,
            environment="\n".join(_environment(job, plan)),
        )
        notes = [megatron_core.checkpoint_note(plan)]
        if job.model.moe:
            notes.append("moe_router_force_load_balancing spreads tokens evenly for a measurement: take it out to train")
        notes.append(f"the model is spelled out on top of {BASE}; kernels of Primus-Turbo are not switched on")
        return Written(
            files={FILE: text + yaml.safe_dump(document, sort_keys=False, allow_unicode=True), SCRIPT: script},
            programs=(SCRIPT,),
            start=f"PRIMUS=/path/to/Primus bash {SCRIPT}",
            notes=tuple(notes),
        )

    def reads(self, name: str, text: str) -> bool:
        """Whether a file is a configuration of the Megatron backend, or launches Primus."""
        if name.endswith((".yaml", ".yml")):
            return "framework: megatron" in text and "overrides:" in text and "modules:" in text
        return name.endswith(".sh") and ("primus-cli" in text or "run_pretrain.sh" in text)

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what a configuration says; a launching script beside it tells the number of GPUs."""
        configs = {name: text for name, text in files.items() if name.endswith((".yaml", ".yml"))}
        if not configs:
            raise one_problem(next(iter(files)), "", None, "is no configuration of Primus", "name the YAML file as well")
        (name, text), *others = configs.items()
        scripts = [read_script(script, path) for path, script in files.items() if path not in configs]
        nodes, per_node = _size(scripts)
        told, unknown, preset = _read_config(name, text)
        model = preset_of(preset)
        if preset and not model and preset != BASE:
            unknown.append(Unknown(name="model", value=preset, where=name))
        unknown += [Unknown(name=path, value="a second configuration is not read", where=path) for path, _ in others]
        return megatron_core.found(
            told,
            framework=NAME,
            otherwise=_BASE if preset == BASE else _TRAINER,
            gpus=nodes * per_node if nodes and per_node else None,
            gpus_per_node=per_node,
            unknown=unknown,
            model=model,
        )


_GRAPHS = "overrides: enable_cuda_graph"
_SCHEDULE = "its zero-bubble schedules are settings of their own (zero_bubble.yaml), which were not checked"


def _put(name: str, value: Any) -> Any:
    """Return a setting as YAML."""
    if name == "cp_comm_type":
        return value[0]
    if name == "window_size":
        return [int(part) for part in value[0].split(",")]
    if name == "rampup_batch_size":
        return [int(part) for part in value]
    return value


def _read_config(name: str, text: str) -> tuple[dict[str, Setting], list[Unknown], str]:
    """Return the settings, what is not understood, and the model's file of a configuration."""
    data = parse_yaml(text, name)
    trainers = data.get("modules") if isinstance(data, dict) else None
    trainer = next((t for t in trainers.values() if isinstance(t, dict) and "overrides" in t), None) if isinstance(trainers, dict) else None
    if trainer is None or not isinstance(trainer.get("overrides") or {}, dict):
        raise one_problem(name, "modules", None, "must have a trainer with overrides")
    if trainer.get("framework") not in (None, "megatron"):
        raise one_problem(name, "framework", str(trainer["framework"])[:80], "is not read: megatron alone is")
    lines = _lines(text)
    told: dict[str, Setting] = {}
    unknown: list[Unknown] = []
    problems: list[Problem] = []
    for key, raw in (trainer.get("overrides") or {}).items():
        where = f"{name}:{lines[key]}" if key in lines else name
        value, missing = _filled(raw)
        if missing:
            unknown.append(Unknown(name=str(key), value=f"{shown(raw)}: not said by this file", where=where))
        elif isinstance(value, dict) and key in KEYS:
            problems.append(Problem(where=where, path=str(key), value="", rule="must be one value"))
        elif key in KEYS:
            told[key] = Setting(
                value=str(value) if isinstance(value, int) and not isinstance(value, bool) else value, where=where, spelled=key
            )
        elif not _IDLE.fullmatch(str(key)[:200]):
            unknown.append(Unknown(name=str(key)[:200], value=shown(value), where=where))
    if problems:
        raise SpecError(problems)
    model, missing = _filled(trainer.get("model") or "")
    return told, unknown, "" if missing else str(model)


def _filled(value: Any) -> tuple[Any, bool]:
    """Return a value with ${NAME:default} filled in by the default, and whether one has none."""
    if not isinstance(value, str) or "${" not in value:
        return value, False
    missing = any(found[2] is None for found in _VARIABLE.finditer(value))
    filled = _VARIABLE.sub(lambda found: found[2] or "", value)
    return filled, missing


def _lines(text: str) -> dict[str, int]:
    """Return the line of each key under `overrides:`."""
    found: dict[str, int] = {}
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s{0,100}([\w-]{1,200})\s{0,20}:", line):
            inside = inside or match[1] == "overrides"
            if inside:
                found.setdefault(match[1], number)
    return found


def preset_of(file: str) -> str:
    """Return the preset of a model file such as llama3.1_70B.yaml, or ""."""
    name = file.removesuffix(".yaml").replace("_", "-").lower()
    if not re.fullmatch(r"[a-z0-9.-]{1,80}", name):
        return ""
    try:
        return presets.find("models", name).stem
    except SpecError:
        return ""


def _size(scripts: list[Script]) -> tuple[int | None, int | None]:
    """Return nodes and GPUs of each that launching scripts tell."""
    sizes: list[int | None] = []
    for variable in ("NNODES", "GPUS_PER_NODE"):
        texts = [script.variables[variable].text for script in scripts if variable in script.variables]
        sizes.append(int(texts[-1]) if texts and re.fullmatch(r"[1-9]\d{0,5}", texts[-1]) else None)
    return sizes[0], sizes[1]


_LAUNCH = """\
#!/bin/bash
# Written by tuner for Primus. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set.
set -euo pipefail
cd "$(dirname "$0")"

{environment}
PRIMUS=${{PRIMUS:?must be the folder of Primus}}
NNODES=${{NNODES:-{nodes}}}
GPUS_PER_NODE=${{GPUS_PER_NODE:-{per_node}}}
export NNODES GPUS_PER_NODE

exec bash "$PRIMUS"/runner/primus-cli direct -- train pretrain --config "$PWD"/pretrain.yaml "$@"
"""


def _environment(job: Job, plan: Plan) -> Iterator[str]:
    for name, value, why in megatron_core.environment(job, plan):
        if name == "CUDA_DEVICE_MAX_CONNECTIONS":
            yield f"unset {name}  # {why}" if not value else f"export {name}={shlex.quote(value)}  # {why}"


def open_launcher() -> Launcher:
    """Return the launcher."""
    return Primus()
