"""Launch scripts: a torchrun command with its environment, each variable with the reason it is set."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tuner.cluster import nodes_of
from tuner.launch.launchers.texts.overrides import VERSION_LINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tuner.job import Job
    from tuner.launch.launchers.texts.overrides import Script

TORCHRUN = frozenset({"nnodes", "nproc_per_node"})
EXPANDABLE = "fragmentation does not turn a plan that fits into one that does not"


def header(job: Job, what: str) -> list[str]:
    """Return the first lines of a script."""
    return ["#!/usr/bin/env bash", f"# {what}: {job.model.name} on {job.gpus} x {job.cluster.gpu.name}.", "set -euo pipefail"]


def exported(variables: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return `export NAME=value` lines, each under its reason; a value of "" unsets the variable."""
    lines = []
    for name, value, reason in variables:
        lines += [f"# {reason}", f"export {name}={shlex.quote(value)}" if value else f"unset {name}"]
    return lines


def torchrun_script(
    job: Job, what: str, variables: Iterable[tuple[str, str, str]], before: Sequence[str], command: Sequence[str], version: str = ""
) -> str:
    """Return a script that starts torchrun on each node. before: lines run first; command: words behind torchrun's own, a line each,
    quoted by the caller where they come from a specification; version: remembered in a comment that is read back.
    """
    nodes = nodes_of(job.cluster, what)
    lines = [
        *header(job, what),
        *([f"{VERSION_LINE} {version}"] if version else []),
        'here="$(cd "$(dirname "$0")" && pwd)"',
        f'NNODES="${{NNODES:-{nodes.count}}}"',
        f'NPROC_PER_NODE="${{NPROC_PER_NODE:-{nodes.each}}}"',
        *exported(variables),
        *before,
        'exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" \\',
        '    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" --rdzv-id "${RUN_ID:-tuner}" \\',
        *(f"    {word} \\" for word in command[:-1]),
        f"    {command[-1]}",
    ]
    return "\n".join(lines) + "\n"


def gpus_of(script: Script) -> tuple[int | None, int | None]:
    """Return (GPUs, GPUs a node) that a script's torchrun starts; None where it does not say. NGPU is that of torchtitan's run_train.sh."""
    each = script.integer(("nproc_per_node", "NPROC_PER_NODE", "NGPU"), TORCHRUN)
    nodes = script.integer(("nnodes", "NNODES"), TORCHRUN)
    if each is None:
        return None, None
    return each * (nodes or 1), each
