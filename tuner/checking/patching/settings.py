"""What launch files say, key by key, in a form in which two files can be compared."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tuner.errors import SpecError
from tuner.launch.launchers.texts.launch_line import flags_of, launches
from tuner.launch.launchers.texts.shell import read_script

if TYPE_CHECKING:
    from collections.abc import Mapping

Setting = Any  # a scalar, or a list of words; True for a flag that stands alone
REMOVED = object()
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]{0,160})=(.*)", re.DOTALL)
VARIABLE = re.compile(r"^(export|unset)[ \t]+([A-Z][A-Z0-9_]{2,60})\b.*$", re.MULTILINE)  # of the environment, under $NAME
_PYTHON = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*)\s*=\s*([\w.+-]+|\"[^\"\n]*\"|'[^'\n]*')(?=\s*(?:,|\)|#|$))", re.MULTILINE)
# Keys beside which new ones are put, the best first.
ANCHORS = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.tensor_model_parallel_size",
    "micro_batch_size", "train.micro_batch_size", "global_batch_size", "ici_tensor_parallelism", "ici_fsdp_parallelism",
    "per_device_batch_size", "parallelism.tensor_parallel_degree", "training.local_batch_size", "per_device_train_batch_size", "num_layers",
)  # fmt: skip
GROUPS = dict.fromkeys(  # arguments of DistributedDataParallelConfig
    ("use_distributed_optimizer", "overlap_param_gather", "use_megatron_fsdp", "data_parallel_sharding_strategy"), ("overlap_grad_reduce",)
)


def normal(key: str) -> str:
    """Return a flag without its dashes, as Python would name it."""
    return key.lstrip("-").replace("-", "_")


def settings_of_all(files: Mapping[str, str]) -> dict[str, Setting]:
    """Return {key: value} of all files of a launch, but for models and training programs."""
    found: dict[str, Setting] = {}
    for name, text in files.items():
        if Path(name).name != "config.json" and Path(name).name != "train.py":
            found |= settings_of(name, text)
    return found


def settings_of(name: str, text: str) -> dict[str, Setting]:
    """Return {key: value} of a launch file: flags without their dashes, overrides and dotted keys; {} for what cannot be read."""
    try:
        if name.endswith((".yaml", ".yml")):
            return dict(_flat(yaml.safe_load(text)))
        if name.endswith(".json"):
            return dict(_flat(json.loads(text)))
        if name.endswith(".toml"):
            return dict(_flat(tomllib.loads(text)))
        if name.endswith(".py"):
            return {match[1]: match[2] for match in _PYTHON.finditer(text)}
        return _of_script(name, text)
    except (ValueError, yaml.YAMLError, RecursionError, SpecError):
        return {}


def _flat(value: Any, above: str = "") -> list[tuple[str, Setting]]:
    if not isinstance(value, dict):
        return [(above, value)] if above else []
    return [pair for key, inner in value.items() for pair in _flat(inner, f"{above}.{key}" if above else str(key))]


def _of_script(name: str, text: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {f"${match[2]}": match[0].split("  #")[0] for match in VARIABLE.finditer(text)}
    for launch in launches(read_script(text, name)):
        plain = []
        for word in launch.arguments:
            override = _OVERRIDE.fullmatch(word.text)
            if override and not word.text.startswith("-"):
                found[override[1]] = override[2]
            else:
                plain.append(word)
        for flag, values in flags_of(plain):
            texts = [value.text for value in values]
            found[normal(flag.text)] = True if not texts else texts[0] if len(texts) == 1 else texts
    return found


def alike(one: Setting, other: Setting) -> bool:
    """Whether two values are spelled alike, up to upper and lower case."""

    def text(value: Setting) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return text(one).lower() == text(other).lower()
