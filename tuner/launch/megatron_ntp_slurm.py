"""Which process runs where, when replicas have different counts of processes: a Slurm heterogeneous job.

Of C context slices, slot s of slice c of replica d sat on GPU g = (d C + c) n1 + s of the job while all was well (Megatron-LM's order of
ranks: tp, then cp, then dp), that is on GPU g mod G of node g // G, with G GPUs a node. GPUs that failed stay where they are, so nodes
whose missing GPUs differ are parts of their own: within a part any node may stand for any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.launch.megatron_ntp import Layout

MOST_PARTS = 128  # MAX_HET_JOB_COMPS of Slurm's src/slurmctld/job_mgr.h
TASK = "task.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Nodes that use the same GPUs. gpus: those, of each node; nodes: their numbers in the job before; ranks: {node: ranks, in the order of
    gpus}.
    """

    gpus: tuple[int, ...]
    nodes: tuple[int, ...]
    ranks: dict[int, tuple[int, ...]]


def parts(layout: Layout, node: int) -> list[Part]:
    """Return the parts of the job, on nodes of `node` GPUs: first those with GPUs that are not used, whole nodes last."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, (replica, slice_, _, slot) in enumerate(layout.places()):
        gpu = (layout.was(replica) * layout.cp + slice_) * layout.tp + slot
        found.setdefault(gpu // node, []).append((gpu % node, rank))
    kinds: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for number in sorted(found):
        gpus, ranks = zip(*sorted(found[number]), strict=True)
        kinds.setdefault(gpus, {})[number] = ranks
    every = [Part(gpus=gpus, nodes=tuple(ranks), ranks=ranks) for gpus, ranks in kinds.items()]
    return sorted(every, key=lambda part: (len(part.gpus) == node, part.nodes[0]))


def table(layout: Layout, every: list[Part]) -> str:
    """Return ranks.txt: a line for each of Slurm's processes, in their order: rank, GPU, and what the rank is."""
    places = layout.places()
    lines = []
    for number, part in enumerate(every):
        for node in part.nodes:
            for rank, gpu in zip(part.ranks[node], part.gpus, strict=True):
                replica, slice_, place, slot = places[rank]
                what = f"part {number} node {node} replica {replica} (was {layout.was(replica)}) slice {slice_} tp {place} slot {slot}"
                lines.append(f"{rank} {gpu} {what}")
    return "\n".join(lines) + "\n"


def task(world: int) -> str:
    """Return task.sh: one process, with its rank and its GPU."""
    return f"""#!/bin/bash
# One process: looks up its rank and its GPU, by Slurm's count of processes through all parts of the job.
set -euo pipefail
cd "$(dirname "$0")"
mapfile -t ranks <"${{NTP_RANKS:-ranks.txt}}"
read -r RANK CUDA_VISIBLE_DEVICES _ <<<"${{ranks[SLURM_PROCID]}}"
export RANK CUDA_VISIBLE_DEVICES LOCAL_RANK=0 WORLD_SIZE="${{NTP_WORLD:-{world}}}"
# One queue, so that reductions keep the order in which resharding launches them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# shellcheck source=/dev/null
source ./arguments.sh
[ "${{NTP_PARITY:-}}" = 1 ] || ARGUMENTS+=("${{WHOLE_RUN[@]}}")
exec "${{PYTHON:-python3}}" pretrain_ntp.py "${{PRETRAIN:?the path of pretrain_gpt.py in Megatron-LM}}" "${{ARGUMENTS[@]}}" "$@"
"""


def batch(every: list[Part], node: int, *, name: str, before: tuple[str, ...] = ()) -> str:
    """Return the batch script: a part each, as Slurm counts processes by node; `before`: lines of shell."""
    blocks = []
    for number, part in enumerate(every):
        unused = [gpu for gpu in range(node) if gpu not in part.gpus]
        lacks = f"without GPU {', '.join(map(str, unused))}" if unused else "whole"
        numbers = ", ".join(map(str, part.nodes[:16])) + (", ..." if len(part.nodes) > 16 else "")
        blocks.append(
            f"# Part {number}, {lacks}: node {numbers} of the job before (give names with --nodelist).\n"
            f"#SBATCH --nodes={len(part.nodes)}\n"
            f"#SBATCH --ntasks-per-node={len(part.gpus)}\n"
            f"#SBATCH --gpus-per-node={node}\n"
        )
    first = next((i, part.nodes.index(n)) for i, part in enumerate(every) for n in part.nodes if 0 in part.ranks[n])
    hosts = f"SLURM_JOB_NODELIST_HET_GROUP_{first[0]}" if len(every) > 1 else "SLURM_JOB_NODELIST"
    group = f"--het-group={','.join(map(str, range(len(every))))} " if len(every) > 1 else ""
    return (
        f"#!/bin/bash\n#SBATCH --job-name={name}\n"
        + "#SBATCH hetjob\n".join(blocks)
        + "set -euo pipefail\n"
        + "".join(f"{line}\n" for line in before)
        + "# Rank 0 listens.\n"
        + f'MASTER_ADDR=$(scontrol show hostnames "${hosts}" | sed -n {first[1] + 1}p)\n'
        + 'export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"\n'
        + f'srun {group}--distribution=block --kill-on-bad-exit=1 ./{TASK} "$@"\n'
    )
