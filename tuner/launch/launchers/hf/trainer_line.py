"""The line that launches a training script: written with torchrun or Accelerate, and read with the arguments of transformers' Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cluster import nodes_of
from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.tables.vocabulary import SHOWN, Key, Told, truth, understood, whole
from tuner.launch.launchers.texts.launch_line import flags_of, launches
from tuner.launch.launchers.texts.shell import read_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tuner.errors import Problem
    from tuner.job import Job
    from tuner.launch.launchers.tables.vocabulary import Said
    from tuner.launch.launchers.texts.launch_line import Launch
    from tuner.launch.launchers.texts.shell_names import Word

SCRIPT, LAUNCH, MODEL = "train.py", "launch.sh", "model/config.json"
STEPS = 20
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
_KERNELS = {"sdpa": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash", "eager": "unfused"}


def _kernel(value: Any) -> str:
    if value not in _KERNELS:
        raise ValueError(f"must be one of {', '.join(_KERNELS)}")
    return _KERNELS[value]


# Arguments of transformers' TrainingArguments and of the scripts in wide use.
ARGUMENTS = (
    Key(path="--max_seq_length", name="seq_len", take=whole),
    Key(path="--per_device_train_batch_size", name="micro_batch", take=whole),
    Key(path="--gradient_accumulation_steps", name="accumulation", take=whole),
    Key(path="--attn_implementation", name="attention", put=lambda kernel: "eager" if kernel == "unfused" else "sdpa", take=_kernel),
    Key(path="--gradient_checkpointing", name="recompute", take=truth),
    Key(path="--max_length", name="seq_len", take=whole, written=False),
    Key(path="--block_size", name="seq_len", take=whole, written=False),
    Key(path="--model_max_length", name="seq_len", take=whole, written=False),
    Key(path="--bf16", name="bf16", take=truth, written=False),
    Key(path="--fp16", name="fp16", take=truth, written=False),
)
# What tells neither job nor plan: where models, data and results are, schedules of learning, how often something is written.
_IDLE_NAMES = """
model_name_or_path config_name tokenizer_name output_dir overwrite_output_dir dataset_name dataset_config_name train_file data_path
do_train do_eval per_device_eval_batch_size tf32 max_steps num_train_epochs learning_rate weight_decay warmup_steps warmup_ratio
lr_scheduler_type max_grad_norm seed
logging_steps logging_dir save_steps save_strategy save_total_limit eval_strategy evaluation_strategy eval_steps report_to run_name
deepspeed deepspeed_config push_to_hub trust_remote_code
"""
_HOW_NAMES = """
node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id max-restarts standalone tee log-dir module hostfile include exclude
launcher no-ssh config-file machine-rank main-process-ip main-process-port mixed-precision same-network use-deepspeed
deepspeed-config-file dynamo-backend
"""
IDLE = frozenset(f"--{name}" for name in _IDLE_NAMES.split())
_PLACE = {
    "torchrun": {"--nnodes": "nodes", "--nproc_per_node": "each"},
    "deepspeed": {"--num_nodes": "nodes", "--num_gpus": "each"},
    "accelerate": {"--num_machines": "nodes", "--num_processes": "gpus"},
}
_HOW = frozenset(f"--{name.replace('-', '_')}" for name in _HOW_NAMES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a launch script says. program: what starts its processes; settings: of ARGUMENTS, and gpus, nodes; places: where each stands."""

    program: str
    settings: dict[str, Any]
    places: dict[str, str]
    unknown: tuple[Unknown, ...]
    problems: tuple[Problem, ...]


def arguments_of(settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the script's arguments that spell these settings."""
    words: list[str] = []
    for key in ARGUMENTS:
        value = settings.get(key.name) if key.written and key.name in names else None
        if value is not None and value is not False:
            words += [key.path] if value is True else [key.path, str(key.put(value))]
    return words


def script(job: Job, framework: str, exports: Iterable[str], command: Iterable[str]) -> str:
    """Return launch.sh. exports: lines of shell with their reasons; command: its lines, of which all but the last are continued."""
    nodes = nodes_of(job.cluster, framework)
    what = f"{job.model.name}, {job.gpus} GPUs, {framework}".replace("\n", " ")
    lines = [
        "#!/bin/bash",
        f"# Written by tuner: {what}. Run it once on each node; a scheduler sets the variables.",
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        f"NNODES=${{NNODES:-{nodes.count}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{nodes.each}}}",
        "NODE_RANK=${NODE_RANK:-0}",
        "MASTER_ADDR=${MASTER_ADDR:-localhost}",
        "MASTER_PORT=${MASTER_PORT:-29500}",
        f"STEPS=${{STEPS:-{STEPS}}}",
        *exports,
        "",
        " \\\n    ".join(command),
    ]
    return "\n".join(lines) + "\n"


def is_launch(text: str) -> str:
    """Return which of the launchers a shell script calls, "" where none."""
    for line in text[:200_000].splitlines():
        words = line[:2000].split()
        if any(word in LAUNCHERS for word in words[:3]):
            return next(word for word in words if word in LAUNCHERS)
    return ""


def read_line(text: str, where: str) -> Line:
    """Return what a launch script says; the last line that launches counts. Raises SpecError for text that cannot be taken apart."""
    found = [launch for launch in launches(read_script(text, where)) if launch.by in LAUNCHERS]
    return _said(found[-1], where) if found else Line(program="", settings={}, places={}, unknown=(), problems=())


def _said(launch: Launch, where: str) -> Line:
    placed = [Key(path=path, name=name, take=whole) for path, name in _PLACE[launch.by].items()]
    options = [(f"--{name}", word.text, word, bool(word.missing)) for name, word in launch.options.items()]
    parts = [_understood(placed, options, _HOW, where), _understood(ARGUMENTS, _arguments(launch), IDLE, where)]
    settings = parts[0].settings | parts[1].settings
    if "gpus" not in settings and "each" in settings:
        settings["gpus"] = settings["each"] * (launch.nodes or 1)
    return Line(
        program=launch.by,
        settings=settings,
        places=parts[0].places | parts[1].places,
        unknown=tuple(unknown for part in parts for unknown in part.unknown),
        problems=tuple(problem for part in parts for problem in part.problems),
    )


def _arguments(launch: Launch) -> Iterator[tuple[str, Any, Word, bool]]:
    """Yield (flag, value, where it stands, whether the script does not say it) of the program's arguments."""
    for flag, values in flags_of(launch.arguments):
        yield flag.text, " ".join(word.text for word in values) if values else True, flag, any(word.missing for word in values)


def _understood(keys: Iterable[Key], words: Iterable[tuple[str, Any, Word, bool]], idle: frozenset[str], where: str) -> Said:
    told, unresolved = {}, []
    for name, value, word, missing in words:
        item = Told(value=value, where=f"{where}:{word.line}")
        if missing and name not in idle:
            unresolved.append(Unknown(name=name[:SHOWN], value=str(value)[:SHOWN], where=item.where))
        else:
            told[name] = item
    said = understood(keys, told, dict.fromkeys(idle))
    said.unknown += unresolved
    return said
