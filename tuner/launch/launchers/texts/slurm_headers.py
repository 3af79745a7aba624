"""The #SBATCH lines of a launch script, and what Slurm sets in a job that has them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tuner.launch.launchers.texts.shell_names import Word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEADER = re.compile(r"#SBATCH\s{1,20}(--?[A-Za-z][\w-]{0,40})(?:[= ]\s{0,20}(\S{1,200}))?")
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task"}


def headers_of(text: str) -> Iterator[tuple[str, Word]]:
    """Yield (option by its long name, value) of the #SBATCH lines."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#SBATCH") and (found := _HEADER.match(line)):
            yield _SHORT.get(found[1], found[1]), Word(text=found[2] or "", line=number)


def count_of(word: Word | None) -> int | None:
    """Return the number of "8", "h100:8" or "2-2"; None where it is none or a range."""
    if word is None:
        return None
    number = word.text.rsplit(":", 1)[-1]
    low, _, high = number.partition("-")
    return int(low) if re.fullmatch(r"\d{1,6}", low) and high in ("", low) and int(low) else None


def gres_of(word: Word | None) -> int | None:
    """Return the accelerators of "gpu:8" or "gpu:h100:8,tmpfs:1"."""
    parts = word.text.split(",") if word else []
    return next((count_of(Word(text=part, line=0)) for part in parts if part.startswith("gpu:")), None)


def slurm_variables(headers: Mapping[str, Word]) -> dict[str, Word]:
    """Return what Slurm sets in a job with these headers."""
    nodes, gpus = headers.get("--nodes"), count_of(headers.get("--gpus-per-node")) or gres_of(headers.get("--gres"))
    tasks = headers.get("--ntasks-per-node")
    told = {
        "SLURM_NNODES": count_of(nodes),
        "SLURM_JOB_NUM_NODES": count_of(nodes),
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": gpus,
    }
    told |= {"SLURM_NTASKS_PER_NODE": count_of(tasks), "SLURM_NTASKS": count_of(headers.get("--ntasks"))}
    return {name: Word(text=str(value), line=0) for name, value in told.items() if value}
