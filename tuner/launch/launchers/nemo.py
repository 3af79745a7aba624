"""NeMo 2.0: pretrain.py, which calls llm.pretrain with objects of its own classes; such files, and recipes with assignments to their
parts, read from the syntax tree and never run.

Classes and keywords were checked against release 2.4.0 (nemo/lightning/pytorch/strategies/megatron_strategy.py, callbacks, plugins,
collections/llm). Fields of GPTConfig are those of Megatron-Core's TransformerConfig.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tuner.cluster import nodes_of
from tuner.errors import one_problem
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, refuse_unspelled
from tuner.launch.launchers.megatron import core as megatron_core
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.launch.launchers.megatron.model import BARE
from tuner.launch.launchers.megatron.nemo_keywords import (
    BY_PLACE,
    CLASSES,
    DATA,
    DDP,
    DISTRIBUTED_OPTIMIZERS,
    IDLE_KEYWORDS,
    KEYWORDS,
    MODEL,
    MODEL_CLASS,
    OPTIMIZER,
    OVERLAP,
    PATHS,
    PLUGIN,
    PRECISIONS,
    RECIPES,
    STRATEGY,
    UNSAID,
    Keyword,
)
from tuner.launch.launchers.megatron_lm import environment_lines
from tuner.launch.launchers.primus import preset_of
from tuner.launch.launchers.tables.settings import Dialect, Setting, refusal, shown
from tuner.launch.launchers.texts.python_source import read_python

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.launch.launchers.texts.python_source import Said
    from tuner.plan import Plan

NAME = "nemo"
FILE, SCRIPT = "pretrain.py", "launch.sh"
_DIALECT = Dialect(
    launcher=NAME,
    traits=frozenset({"vpp", "no-mla", "no-window", "no-forced-balance", "no-optimizer-offload", "graphs-flag"}),
)


@dataclass(frozen=True, slots=True)
class Nemo:
    """pretrain.py and launch.sh."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """Keywords by plan field."""
        told = {knob: text for knob, text in megatron_plan.SAYS.items() if knob not in self.cannot}
        return MappingProxyType(told | {"vpp": _VPP, "cuda_graphs": "enable_cuda_graph"})

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields without a keyword."""
        why = "MegatronCommOverlapCallback of release 2.4 does not know it"
        return MappingProxyType(dict(megatron_plan.CANNOT) | {"ep_overlap": why})

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return pretrain.py and launch.sh, which train on made-up data."""
        del version
        refuse_unspelled(self, plan)
        if job.attention == "unfused":
            raise refusal(_DIALECT, "attention", job.attention, "attention_backend is an enumeration that was not checked")
        if job.precision not in PLUGIN:
            raise refusal(_DIALECT, "precision", job.precision, f"MegatronMixedPrecision is written for {', '.join(PLUGIN)}")
        settings: dict[str, Any] = {}
        for group in megatron_core.settings(job, plan, _DIALECT).values():
            settings |= group
        text = _program(job, plan, settings)
        script = _SCRIPT.format(
            environment="\n".join(environment_lines(job, plan)),
            per_node=nodes_of(job.cluster, NAME).each,
            nodes=nodes_of(job.cluster, NAME).count,
        )
        notes = [megatron_core.checkpoint_note(plan), f"the number of nodes and GPUs stands in {FILE} and in {SCRIPT}: change both"]
        if job.model.moe:
            notes.append("an untrained router loads experts unevenly: the first steps may be slower than foretold")
        return Written(files={FILE: text, SCRIPT: script}, programs=(SCRIPT,), start=f"bash {SCRIPT}", notes=tuple(notes))

    def reads(self, name: str, text: str) -> bool:
        """Whether a Python file is a recipe of NeMo 2.0."""
        return name.endswith(".py") and "nemo" in text and ("MegatronStrategy" in text or "pretrain_recipe" in text or "_recipe(" in text)

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what a recipe says."""
        sources = {name: text for name, text in files.items() if name.endswith(".py")}
        if not sources:
            raise one_problem(next(iter(files)), "", None, "is no recipe of NeMo", "name the Python file as well")
        (name, text), *others = sources.items()
        said = read_python(text, name)
        reading = _Reading(told={}, unknown=[], facts={})
        for entry in said:
            _take(name, entry, reading)
        nodes, devices = reading.facts.get("num_nodes"), reading.facts.get("devices")
        sizes = (nodes, devices) if isinstance(nodes, int) and isinstance(devices, int) else (None, None)
        own = any(entry.owner[-1] == MODEL for entry in said)
        preset = "" if own else _preset(said)
        assumed = {}
        if not own:
            assumed["recipe"] = f"{preset or 'a recipe'} sets what is not told here, and was not read: {NAME}'s defaults are taken for it"
        reading.unknown += [Unknown(name=path, value="a second file is not read", where=path) for path, _ in others]
        found = megatron_core.found(
            reading.told,
            framework=NAME,
            otherwise=BARE if own else {},
            gpus=sizes[0] * sizes[1] if sizes[0] and sizes[1] else None,
            gpus_per_node=sizes[1],
            unknown=reading.unknown,
            assumed=assumed,
            model=preset,
        )
        precision = reading.precision
        return replace(found, job={**found.job, **({"precision": precision} if precision else {})})


_VPP = "virtual_pipeline_model_parallel_size, and what pipeline_model_parallel_layout holds"


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What is gathered of a file."""

    told: dict[str, Setting]
    unknown: list[Unknown]
    facts: dict[str, Any]
    precision: str = ""


def _owner(path: tuple[str, ...]) -> str:
    """Return the class that a call or an assigned path means, or ""."""
    last = path[-1]
    if last in CLASSES:
        return CLASSES[last]
    if MODEL_CLASS.fullmatch(last):
        return MODEL
    if last == "config":
        return MODEL if "model" in path or len(path) == 1 else OPTIMIZER
    if last in PATHS:
        return PATHS[last]
    if last == "callbacks":
        return OVERLAP
    return last


def _take(where: str, entry: Said, reading: _Reading) -> None:
    owner, place = _owner(entry.owner), f"{where}:{entry.line}"
    if owner in PRECISIONS:
        reading.precision = PRECISIONS[owner]
        return
    if owner in DISTRIBUTED_OPTIMIZERS:
        reading.told.setdefault("use_distributed_optimizer", Setting(value=True, where=place, spelled=owner))
        return
    if not entry.name:
        return
    if owner == "Trainer" and entry.name == "plugins" and isinstance(entry.value, str):
        reading.precision = PRECISIONS.get(entry.value.split(".")[-1], reading.precision)
        return
    size = {"num_nodes": "num_nodes", "devices": "devices", "num_gpus_per_node": "devices"}.get(entry.name)
    if size and owner in ("Trainer", "pretrain_recipe") and not entry.missing:
        reading.facts[size] = entry.value
        return
    if owner == "MegatronMixedPrecision":
        _take_precision(place, entry, reading)
        return
    keyword = BY_PLACE.get((owner, entry.name))
    if keyword is None:
        known = owner in IDLE_KEYWORDS and entry.name in IDLE_KEYWORDS[owner]
        ours = owner in IDLE_KEYWORDS or owner in {k.owner for k in KEYWORDS}
        if ours and not known:
            reading.unknown.append(Unknown(name=".".join((*entry.owner, entry.name)), value=shown(entry.value), where=place))
    elif entry.missing:
        reading.unknown.append(Unknown(name=f"{owner}.{entry.name}", value=f"{shown(entry.value)}: not said by this file", where=place))
    else:
        _tell(place, keyword, entry, reading)


def _tell(place: str, keyword: Keyword, entry: Said, reading: _Reading) -> None:
    spelled = f"{keyword.owner}.{keyword.keyword}"
    try:
        value = keyword.take(entry.value)
    except ValueError as error:
        raise one_problem(place, spelled, shown(entry.value), str(error)) from None
    if keyword.kind == "fsdp" and entry.value == "pytorch":
        reading.told["use_torch_fsdp2"] = Setting(value=True, where=place, spelled=spelled)
        return
    if value is None and keyword.name in reading.told:
        return  # a callback that leaves it to another setting
    reading.told[keyword.name] = Setting(value=value, where=place, spelled=spelled)


def _take_precision(place: str, entry: Said, reading: _Reading) -> None:
    if entry.name == "precision" and entry.value in ("bf16-mixed", "16-mixed", "32"):
        plain = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32": "fp32"}[entry.value]
        reading.precision = reading.precision or plain
    elif entry.name == "fp8" and entry.value:
        reading.precision = "fp8"
    elif entry.name == "fp8_recipe" and entry.value in RECIPES:
        if reading.precision.startswith(("fp8", "mxfp8")):
            reading.precision = RECIPES[entry.value]
    elif entry.name not in IDLE_KEYWORDS["MegatronMixedPrecision"]:
        reading.unknown.append(Unknown(name=".".join((*entry.owner, entry.name)), value=shown(entry.value), where=place))


def _preset(said: tuple[Said, ...]) -> str:
    """Return the preset of llm.llama3_70b.pretrain_recipe(...) or of a configuration such as Llama3Config70B, or ""."""
    for entry in said:
        if entry.owner[-1].endswith("_recipe") and len(entry.owner) > 1 and (found := preset_of(entry.owner[-2])):
            return found
        match = re.fullmatch(r"([A-Za-z]+)(\d*)Config(\d+x\d+B|\d+B)", entry.owner[-1])
        if match and (found := preset_of(f"{match[1]}{match[2]}_{match[3]}")):
            return found
    return ""


# -- writing


def _program(job: Job, plan: Plan, settings: Mapping[str, Any]) -> str:
    parts: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        spelled = [entry for entry in KEYWORDS if entry.name == name]
        if not spelled and name not in UNSAID:
            raise KeyError(name)
        for entry in spelled:
            if (put := entry.put(value)) is not None:
                parts.setdefault(entry.owner, {})[entry.keyword] = put
    parts[DATA] = {key: value for key, value in parts[DATA].items() if key != "seq_length"} | {"seq_length": job.seq_len}
    if "rampup_batch_size" in parts[DATA]:
        parts[DATA]["rampup_batch_size"] = [int(n) for n in parts[DATA]["rampup_batch_size"]]
    if plan.cuda_graphs:
        parts[STRATEGY]["use_te_rng_tracker"] = True
    return _PROGRAM.format(
        precision=_arguments(PLUGIN[job.precision], 12),
        activation="F.silu" if job.model.gated_mlp else "F.gelu",
        model=_arguments(parts[MODEL]),
        strategy=_arguments(parts[STRATEGY], 8),
        ddp=_arguments(parts[DDP], 12),
        overlap=_arguments(parts[OVERLAP]),
        data=_arguments(parts[DATA]),
        vocab=job.model.vocab,
        optimizer=_arguments(parts[OPTIMIZER]),
        per_node=nodes_of(job.cluster, NAME).each,
        nodes=nodes_of(job.cluster, NAME).count,
        steps=megatron_core.STEPS,
        half="bf16" if job.precision != "fp16" else "fp16",
        dtype="bfloat16" if job.precision != "fp16" else "half",
    )


def _arguments(values: Mapping[str, Any], indent: int = 8) -> str:
    return "\n".join(f"{' ' * indent}{name}={value!r}," for name, value in values.items())


_PROGRAM = '''\
"""Written by tuner for NeMo 2.0: a few steps on made-up data. Start it with launch.sh."""

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

NUM_NODES = {nodes}
GPUS_PER_NODE = {per_node}


def main():
    config = llm.GPTConfig(
        activation_func={activation},
{model}
    )
    strategy = nl.MegatronStrategy(
        pipeline_dtype=torch.{dtype},
{strategy}
        ddp=DistributedDataParallelConfig(
{ddp}
        ),
    )
    overlap = MegatronCommOverlapCallback(
{overlap}
    )
    data = llm.MockDataModule(
        tokenizer=get_nmt_tokenizer(library="null", model_name="NullTokenizer", vocab_size={vocab}),
{data}
    )
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        {half}=True,
{optimizer}
    )
    trainer = nl.Trainer(
        accelerator="gpu",
        devices=GPUS_PER_NODE,
        num_nodes=NUM_NODES,
        max_steps={steps},
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        strategy=strategy,
        plugins=nl.MegatronMixedPrecision(
            params_dtype=torch.{dtype},
            pipeline_dtype=torch.{dtype},
            autocast_enabled=False,
            grad_reduce_in_fp32=False,
{precision}
        ),
        callbacks=[overlap],
    )
    llm.pretrain(
        model=llm.GPTModel(config, tokenizer=data.tokenizer),
        data=data,
        trainer=trainer,
        log=nl.NeMoLogger(ckpt=None),
        optim=nl.MegatronOptimizerModule(config=optimizer),
    )


if __name__ == "__main__":
    main()
'''
_SCRIPT = """\
#!/bin/bash
# Written by tuner for NeMo 2.0. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set.
set -euo pipefail
cd "$(dirname "$0")"

{environment}

exec torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank "${{NODE_RANK:-0}}" \\
    --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" pretrain.py "$@"
"""


def open_launcher() -> Launcher:
    """Return the launcher."""
    return Nemo()
