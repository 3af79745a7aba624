"""Scripts and options of a trial on Slurm. Options go on the command line, where nothing interprets a value; scripts quote all of them."""

from __future__ import annotations

import hashlib
import math
import shlex
from typing import TYPE_CHECKING

from tuner.cluster import Nodes, nodes_of
from tuner.errors import one_problem
from tuner.launch.local import torchrun
from tuner.launch.script import TASK, task_script
from tuner.launch.supervised import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.launch.command import Command
    from tuner.launch.site import Site
    from tuner.launch.trial import Trial

JOB, LAUNCH, TICKET, EXIT = "job.sh", "launch.sh", "ticket.txt", "exit.txt"
ADDRESS = """\
first=$(scontrol show hostnames "$nodes" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
MASTER_PORT=$((20000 + RANDOM % 20000))
export MASTER_ADDR MASTER_PORT"""
# What salloc was asked for, which srun would take for each step.
_FORGET = "unset SLURM_GPUS SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NNODES SLURM_EXCLUSIVE"
_CANCEL = """\
for i in $(seq 20); do
    left=$(squeue --noheader --steps "--jobs=$1" --format='%i %j' | while read -r id name; do [ "$name" != "$2" ] || echo "$id"; done)
    [ -n "$left" ] || exit 0
    scancel $left
    sleep 0.5
done"""


def job_name(trial: Trial) -> str:
    """Return the name of a trial's job or step: it finds what an interrupted search left."""
    return "tuner-" + hashlib.sha256(str(trial.folder.absolute()).encode()).hexdigest()[:20]


def _nodes(trial: Trial) -> Nodes:
    return nodes_of(trial.job.cluster, "slurm")


def place_options(site: Site, trial: Trial) -> list[str]:
    """Return the options of sbatch and srun that say how many nodes and accelerators a trial takes."""
    return places(site, _nodes(trial).count, _nodes(trial).each)


def places(site: Site, nodes: int, each: int) -> list[str]:
    """Return the options of sbatch and srun that ask for so many nodes, with `each` accelerators."""
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    asked = {
        "gpus-per-node": f"--gpus-per-node={kind}{each}",
        "gres": f"--gres=gpu:{kind}{each}",
        "gpus-per-task": f"--gpus-per-task={kind}{each}",
    }
    options = [f"--nodes={nodes}", *([asked[site.gpus]] if site.gpus in asked else [])]
    return options + ([f"--cpus-per-task={site.cpus_per_task}"] if site.cpus_per_task else [])


def sbatch_options(site: Site, trial: Trial, per: str, exclude: Sequence[str]) -> list[str]:
    """Return the options of a job of its own. The time limit is behind the supervisor's own, which knows how to end a trial cleanly."""
    named = {key: getattr(site, key) for key in ("account", "partition", "qos", "constraint", "reservation")}
    minutes = math.ceil((2 * trial.wall_s + 300) / 60)  # two attempts, and the waits around them
    return [
        "--parsable", f"--job-name={job_name(trial)}", f"--chdir={trial.folder.absolute()}", "--output=slurm.log", "--open-mode=append",
        f"--time={minutes}", f"--ntasks-per-node={_tasks(trial, per)}",
        *place_options(site, trial), "--requeue" if site.requeue else "--no-requeue",
        *(f"--{key}={value}" for key, value in named.items() if value), *([f"--exclude={','.join(exclude)}"] if exclude else []),
        *site.slurm_options,
    ]  # fmt: skip


def _tasks(trial: Trial, per: str) -> int:
    return _nodes(trial).each if per == "gpu" else 1


def job_script(site: Site, trial: Trial, ticket: str) -> str:
    """Return the batch script. The ticket keeps a job that an earlier, killed search submitted from running in a folder used anew."""
    folder = shlex.quote(str(trial.folder.absolute()))
    return f"""\
#!/bin/bash
# Written by tuner: supervises one trial on the nodes of a Slurm job.
folder={folder}
[ "$(cat -- "$folder"/{TICKET})" = {shlex.quote(ticket)} ] || exit 0
cd -- {shlex.quote(str(ROOT))} || exit 71
{shlex.quote(site.python)} -m tuner.launch.supervisor "$folder" >>"$folder"/supervisor.log 2>&1 &
supervisor=$!
trap 'kill -TERM "$supervisor"' TERM
while :; do
    wait "$supervisor"
    code=$?
    kill -0 "$supervisor" 2>/dev/null || break
done
printf '%s %s\\n' "$SLURM_JOB_ID" "$code" >"$folder"/.exit.new && mv -f -- "$folder"/.exit.new "$folder"/{EXIT}
exit "$code"
"""


def launch_script(site: Site, trial: Trial, per: str, step: Sequence[str], nodes: Sequence[str]) -> str:
    """Return what starts a trial's tasks. per: once on the job's first node ("job"), on each node, or for each accelerator; step: options
    of srun that say in which allocation; nodes: those of it (empty: the job's own).
    """
    task = shlex.quote(f"{trial.folder.absolute()}/{TASK}")
    listed = shlex.quote(",".join(nodes)) if nodes else '"$SLURM_JOB_NODELIST"'
    lines = ["#!/bin/bash", "# Written by tuner: starts a trial's tasks on its nodes.", "set -eo pipefail", f"nodes={listed}", ADDRESS]
    if nodes:
        lines.append(_FORGET)
    if per == "job":
        return "\n".join([*lines, f"exec bash {task}"]) + "\n"
    each = _tasks(trial, per)
    options = [
        f"--job-name={job_name(trial)}",
        *place_options(site, trial),
        f"--ntasks={each * nodes_of(trial.job.cluster, 'slurm').count}",
    ]
    options += [f"--ntasks-per-node={each}", "--kill-on-bad-exit=1"]
    options += [*(["--nodelist=" + ",".join(nodes)] if nodes else []), *step, *_container(site, trial)]
    return "\n".join([*lines, f"exec srun {shlex.join(options)} bash {task}"]) + "\n"


def trial_task(site: Site, trial: Trial, command: Command | None, module: str) -> tuple[str, str]:
    """Return the script that each task runs, and `per`. Raises SpecError, InfrastructureError."""
    free = [] if site.container else [_free(site)]
    if command is not None:
        return command.task(trial, site, "slurm", before=tuple(free) if command.per == "node" else ()), command.per
    here = f"--nnodes={nodes_of(trial.job.cluster, 'slurm').count} --nproc-per-node={nodes_of(trial.job.cluster, 'slurm').each}"
    place = (
        '--node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
        if _nodes(trial).count > 1
        else "--standalone"
    )
    body = torchrun(site, module, str(trial.folder.absolute()), f"{here} {place}")
    return task_script(site, str(ROOT), [body], before=free), "node"


def cancel_steps(trial: Trial, allocation: str) -> tuple[str, ...]:
    """Return a command that ends what is left of a trial's steps in an allocation."""
    return ("bash", "-c", _CANCEL, "tuner", allocation, job_name(trial))


def _free(site: Site) -> str:
    tools = "command -v nvidia-smi rocm-smi >/dev/null 2>&1"
    look = f"(cd -- {shlex.quote(str(ROOT))} && exec {shlex.quote(site.python)} -m tuner.launch.devices --wait 60)"
    return f"if {tools}; then {look}; fi"


def _container(site: Site, trial: Trial) -> list[str]:
    """Return pyxis' options. The trial's folder and this package are mounted where they are."""
    if site.container is None:
        return []
    own = [str(trial.folder.absolute()), str(ROOT)]
    for path in own:
        if "," in path or ":" in path:
            raise one_problem("slurm", "trial folder", path, "cannot be mounted into a container", "use a path without comma and colon")
    mounts = [*site.container.mounts, *(f"{path}:{path}" for path in own)]
    return [f"--container-image={site.container.image}", f"--container-mounts={','.join(mounts)}"]
