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
from typing import TYPE_CHECKING, Any

from tuner.cluster import nodes_of
from tuner.errors import one_problem
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, refuse_unspelled
from tuner.launch.launchers.megatron import core as megatron_core
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.launch.launchers.megatron.bridge_keys import (
    BY_KEY,
    DTYPES,
    GPUS_OF_NODE,
    IDLE_FLAGS,
    IDLE_KEYS,
    KEYS,
    ONLY_READ,
    PERFORMANCE,
    PRECISIONS,
    UNSAID,
    plain,
)
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
    from tuner.launch.launchers.texts.shell import Script
    from tuner.launch.launchers.texts.shell_names import Word
    from tuner.plan import Plan

NAME = "megatron-bridge"
FILE = "pretrain.sh"
RECIPE = "vanilla_gpt_pretrain_config"
_DIALECT = Dialect(launcher=NAME, traits=frozenset({"vpp", "no-mla"}))
_RECIPES = re.compile(r"run_recipe\.py")
_PERFORMANCE = re.compile(r"(?:setup_experiment|run_script)\.py")


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
            per_node=nodes_of(job.cluster, NAME).each,
            nodes=nodes_of(job.cluster, NAME).count,
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
            per_node = _number(read.facts.get("gpus_per_node")) or GPUS_OF_NODE.get(read.facts.get("gpu", ""))
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
        spelled = [key for key in KEYS if key.name == name and not key.key.startswith(ONLY_READ)]
        if not spelled and name not in UNSAID:
            raise KeyError(name)
        for key in spelled:
            yield key.key, key.put(value)


def _take_override(where: str, word: Word, read: _Read) -> None:
    name, _, raw = word.text.lstrip("+~").partition("=")
    place, key = f"{where}:{word.line}", BY_KEY.get(name)
    if word.missing:
        read.unknown.append(Unknown(name=name, value=f"{shown(raw)}: not said by this file", where=place))
        return
    value = plain(raw)
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
    elif not IDLE_KEYS.fullmatch(name):
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
        if text not in DTYPES:
            raise one_problem(place, word.text, text, f"must be one of {', '.join(DTYPES)}")
        read.precision = DTYPES[text]
    elif word.text in IDLE_FLAGS:
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
