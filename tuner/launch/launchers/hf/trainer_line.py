"""The line that launches a training script: written with torchrun or Accelerate, and read with the arguments of transformers' Trainer.

A script is read word by word and never run: assignments (NAME=VALUE, ${NAME:-VALUE}), products ($((A * B))) and continued lines are
understood, the rest of the shell is not.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, one_problem
from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.tables.vocabulary import SHOWN, Key, truth, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tuner.job import Job

SCRIPT, LAUNCH, MODEL = "train.py", "launch.sh", "model/config.json"
STEPS = 20
_ASSIGNMENT = re.compile(r"(?:export\s{1,9})?(?P<name>[A-Za-z_]\w{0,120})=(?P<value>.*)")
_VARIABLE = re.compile(r"\$\{(?P<braced>[A-Za-z_]\w{0,120})(?:(?::?[-=])(?P<default>[^{}]{0,400}))?\}|\$(?P<plain>[A-Za-z_]\w{0,120})")
_PRODUCT = re.compile(r"\$\(\((?P<factors>[\w\s*${}]{1,200})\)\)")
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
_LONGEST = 100_000  # of a line that is taken apart
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
    "torchrun": {"--nnodes": "nodes", "--nproc-per-node": "each"},
    "deepspeed": {"--num-nodes": "nodes", "--num-gpus": "each"},
    "accelerate": {"--num-machines": "nodes", "--num-processes": "gpus"},
}
_HOW = frozenset(f"--{name}" for name in _HOW_NAMES.split())
_ALONE = frozenset({"--standalone", "--module", "--no-ssh", "--same-network", "--use-deepspeed"})


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


def spread(job: Job, where: str) -> tuple[int, int]:
    """Return nodes, and GPUs of each. Raises SpecError where they do not spread evenly."""
    nodes = -(-job.gpus // job.cluster.gpus_per_node)
    if job.gpus % nodes:
        raise one_problem(where, "gpus", job.gpus, f"do not spread evenly over {nodes} nodes of {job.cluster.gpus_per_node}")
    return nodes, job.gpus // nodes


def script(job: Job, framework: str, exports: Iterable[str], command: Iterable[str]) -> str:
    """Return launch.sh. exports: lines of shell with their reasons; command: its lines, of which all but the last are continued."""
    nodes, each = spread(job, framework)
    what = f"{job.model.name}, {job.gpus} GPUs, {framework}".replace("\n", " ")
    lines = [
        "#!/bin/bash",
        f"# Written by tuner: {what}. Run it once on each node; a scheduler sets the variables.",
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        f"NNODES=${{NNODES:-{nodes}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{each}}}",
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
        if any(word in _LAUNCHERS for word in words[:3]):
            return next(word for word in words if word in _LAUNCHERS)
    return ""


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, command) with continued lines joined, without comments."""
    first, joined = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            first = number
        if line.lstrip().startswith("#") and not joined:
            continue
        if line.endswith("\\") and len(joined) < _LONGEST:
            joined += line[:-1] + "\n"
            continue
        yield first, joined + line
        joined = ""
    if joined:
        yield first, joined


def _multiplied(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with products of whole numbers, and of variables that are some, worked out."""

    def multiply(match: re.Match[str]) -> str:
        factors = [part.strip().lstrip("$").strip("{}") for part in match["factors"].split("*")]
        values = [variables.get(factor, factor) for factor in factors]
        return str(prod(map(int, values))) if all(re.fullmatch(r"\d{1,9}", value) for value in values) else match[0]

    return _PRODUCT.sub(multiply, text)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the variables that the script itself sets, or gives a default, filled in; others stay."""

    def put(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return variables.get(name, match["default"] if match["default"] is not None else match[0])

    return _VARIABLE.sub(put, _multiplied(text, variables))


def read_line(text: str, where: str) -> Line:
    """Return what a launch script says; the last line that launches counts."""
    variables: dict[str, str] = {}
    found = Line(program="", settings={}, places={}, unknown=(), problems=())
    for number, command in _commands(text):
        if len(command) > _LONGEST:
            problem = Problem(where=f"{where}:{number}", path="", value="", rule=f"is longer than {_LONGEST} characters")
            found = Line(program=found.program, settings=found.settings, places=found.places, unknown=found.unknown, problems=(problem,))
            continue
        assigned = _ASSIGNMENT.fullmatch(command.strip())
        if assigned and " " not in assigned["value"].strip().strip("\"'"):
            variables[assigned["name"]] = _filled(assigned["value"].strip().strip("\"'"), variables)
        elif is_launch(command):
            found = _launch(command, number, where, variables)
    return found


def _words(command: str, first: int, variables: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the words of a command with their lines. Raises ValueError for a quote that is not closed."""
    words: list[tuple[str, int]] = []
    for offset, part in enumerate(command.split("\n")):
        words += [(_filled(word, variables), first + offset) for word in shlex.split(_multiplied(part, variables), comments=True)]
    return words


def _launch(command: str, first: int, where: str, variables: Mapping[str, str]) -> Line:
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    unknown: list[Unknown] = []
    problems: list[Problem] = []
    try:
        words = _words(command, first, variables)
    except ValueError as error:
        problems.append(Problem(where=f"{where}:{first}", path="", value=command[:60], rule=f"cannot be taken apart: {error}"))
        return Line(program=is_launch(command), settings={}, places={}, unknown=(), problems=tuple(problems))
    start = next((i for i, (word, _) in enumerate(words) if word in _LAUNCHERS), 0)
    program = words[start][0] if words else ""
    table = {key.path: key for key in ARGUMENTS}
    of_launcher = True
    for name, value, line in _flags(words[start + 1 :]):
        place = f"{where}:{line}"
        if not name.startswith("-"):
            of_launcher = of_launcher and not name.endswith(".py")
            continue
        plain = name.replace("_", "-") if of_launcher else name
        known = _PLACE.get(program, {}).get(plain) if of_launcher else None
        key = None if of_launcher else table.get(name)
        try:
            if known:
                settings[known], places[known] = whole(value), place
            elif key:
                settings[key.name], places[key.name] = key.take(True if value == "" else value), place
            elif not (plain in _HOW if of_launcher else name in IDLE):
                unknown.append(Unknown(name=name[:SHOWN], value=value[:SHOWN], where=place))
        except ValueError as error:
            if "$" in value:
                unknown.append(Unknown(name=name[:SHOWN], value=value[:SHOWN], where=place))
            else:
                problems.append(Problem(where=place, path=name[:SHOWN], value=repr(value)[:80], rule=str(error)))
    if "gpus" not in settings and "each" in settings:
        settings["gpus"] = settings["each"] * settings.get("nodes", 1)
    return Line(program=program, settings=settings, places=places, unknown=tuple(unknown), problems=tuple(problems))


def _flags(words: list[tuple[str, int]]) -> Iterator[tuple[str, str, int]]:
    """Yield (flag, value, line), the value "" where none follows, and ("train.py", "", line) for what is no flag."""
    at = 0
    while at < len(words):
        word, line = words[at]
        at += 1
        if not word.startswith("-"):
            yield word, "", line
        elif "=" in word:
            name, _, value = word.partition("=")
            yield name, value, line
        elif word.replace("_", "-") in _ALONE or at >= len(words) or words[at][0].startswith("-"):
            yield word, "", line
        else:
            yield word, words[at][0], line
            at += 1
