"""Files of ten jobs, judged by the parsers that take a file, and spoilt ones, which these must refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.launch.launchers.jobs import JOBS, exported
from tests.oracles.environments import Missing, python_of
from tests.oracles.processes import judged
from tests.slurm.cluster import slurm
from tuner import presets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a parser took and refused. wrong: what it should have judged otherwise."""

    version: str
    taken: int
    refused: int
    wrong: tuple[str, ...]
    seconds: float


@cache
def written() -> Mapping[tuple[str, str], Mapping[str, str]]:
    """Return {(job, format): files} of each job in each format that spells it."""
    return {(job, name): w.files for job in JOBS for name, w in exported(job).written.items()}


def _texts(name: str, file: str) -> Iterator[tuple[str, str]]:
    for (job, what), found in written().items():
        if what == name:
            yield job, found[file]


def _accelerate() -> Iterator[tuple[dict[str, Any], bool]]:
    for job, text in _texts("accelerate", "accelerate.yaml"):
        yield {"name": job, "text": text}, True
        yield {"name": f"{job}, an unknown key", "text": f"{text}\nno_such_key: 1\n"}, False


def _deepspeed() -> Iterator[tuple[dict[str, Any], bool]]:
    for job, text in _texts("deepspeed", "ds_config.json"):
        data = json.loads(text)
        each = data["train_micro_batch_size_per_gpu"] * data.get("gradient_accumulation_steps", 1)
        case = {"name": job, "text": text, "ranks": data["train_batch_size"] // each}
        yield case, True
        yield case | {"name": f"{job}, batch + 1", "text": json.dumps(data | {"train_batch_size": data["train_batch_size"] + 1})}, False
        stage = data["zero_optimization"] | {"stage": 5}
        yield case | {"name": f"{job}, stage 5", "text": json.dumps(data | {"zero_optimization": stage})}, False


def _maxtext() -> Iterator[tuple[dict[str, Any], bool]]:
    for job, text in _texts("maxtext", "train.yml"):
        case = {"gpus": presets.cluster(JOBS[job][1]).gpus, "arguments": []}
        yield case | {"name": job, "text": text}, True
        yield case | {"name": f"{job}, an unknown key", "text": f"{text}\nno_such_key: 1\n"}, False


def _sky() -> Iterator[tuple[dict[str, Any], bool]]:
    for job in JOBS:
        found = exported(job, ("megatron-lm", "skypilot")).written
        for text in (w.files["skypilot.yaml"] for w in found.values() if "skypilot.yaml" in w.files):
            yield {"name": job, "text": text}, True
            yield {"name": f"{job}, a misspelt key", "text": text.replace("num_nodes:", "num_node:")}, False


PARSERS: Mapping[str, tuple[str, Callable[[], Iterator[tuple[dict[str, Any], bool]]]]] = {
    "accelerate": ("torch", _accelerate),
    "deepspeed": ("torch", _deepspeed),
    "maxtext": ("maxtext", _maxtext),
    "sky": ("sky", _sky),
}


def all_checks() -> list[Checked]:
    """Return what each parser says, sbatch and shellcheck too. A parser that cannot be had here is said so, as wrong."""
    return [*(_parsed(name) for name in PARSERS), _sbatch(), _shellcheck()]


def _parsed(name: str) -> Checked:
    environment, make = PARSERS[name]
    cases = list(make())
    try:
        answer = judged(python_of(environment), name, [case for case, _ in cases])
    except (Missing, RuntimeError) as error:
        return Checked(version=name, taken=0, refused=0, wrong=(str(error),), seconds=0.0)
    verdicts = [(case["name"], expected, answer.verdicts[case["name"]]) for case, expected in cases]
    return Checked(
        version=answer.version,
        taken=sum(verdict.accepted for _, _, verdict in verdicts),
        refused=sum(not verdict.accepted for _, _, verdict in verdicts),
        wrong=tuple(f"{which}: {verdict.why or 'taken'}" for which, expected, verdict in verdicts if verdict.accepted != expected)
        or (() if cases else ("no file was written for it",)),
        seconds=answer.seconds,
    )


def _sbatch() -> Checked:
    """Slurm's own test of batch scripts, in a cluster of the project's tests."""
    start, taken, refused, wrong = time.monotonic(), 0, 0, []
    with slurm(nodes=2, gpus=8) as cluster, tempfile.TemporaryDirectory() as folder:
        version = subprocess.run(
            ["sbatch", "--version"], env=os.environ | {"SLURM_CONF": str(cluster.conf)}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for job in ("llama3-8b-fsdp", "gpt2-xl"):
            for w in exported(job, ("megatron-lm", "slurm")).written.values():
                for name, text in w.files.items():
                    if not name.endswith(".sbatch"):
                        continue
                    for spoilt in (False, True):
                        path = Path(folder) / name
                        path.write_text(text.replace("#SBATCH --nodes=", "#SBATCH --nodes=9") if spoilt else text)
                        environment = os.environ | {"SLURM_CONF": str(cluster.conf)}
                        done = subprocess.run(["sbatch", "--test-only", name], cwd=folder, env=environment, capture_output=True, text=True)
                        taken, refused = taken + (not done.returncode), refused + bool(done.returncode)
                        if bool(done.returncode) != spoilt:
                            wrong.append(f"{job}{', too many nodes' if spoilt else ''}: {done.stderr.strip()}")
    if not taken:
        wrong.append("no batch script was written")
    return Checked(version=version, taken=taken, refused=refused, wrong=tuple(wrong), seconds=time.monotonic() - start)


def _shellcheck() -> Checked:
    start = time.monotonic()
    program = shutil.which("shellcheck")
    if program is None:
        return Checked(version="shellcheck", taken=0, refused=0, wrong=("is not installed",), seconds=0.0)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[1]
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for (job, name), found in written().items():
            for file, text in found.items():
                if file.endswith((".sh", ".sbatch")):
                    path = Path(folder) / f"{job}-{name}-{Path(file).name}"
                    path.write_text(text)
                    paths.append(str(path))
        done = subprocess.run([program, "-f", "gcc", *paths], capture_output=True, text=True)
        bad = Path(folder) / "bad.sh"
        bad.write_text("#!/bin/bash\ncd $1\n")
        refused = subprocess.run([program, str(bad)], capture_output=True).returncode != 0
    wrong = tuple(done.stdout.strip().splitlines()[:5]) + (() if refused else ("an unquoted word is taken",))
    return Checked(version=f"shellcheck {version}", taken=len(paths), refused=int(refused), wrong=wrong, seconds=time.monotonic() - start)
