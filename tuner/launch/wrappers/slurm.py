"""Slurm: a batch job that starts node.sh once on each of its nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tuner.cluster import nodes_of
from tuner.errors import Problem, SpecError
from tuner.launch.slurm_script import ADDRESS, places
from tuner.launch.wrappers.wrapper import NODE, added, label, node_script, quoted

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Written
    from tuner.launch.site import Site

NAME, JOB = "slurm", "job.sbatch"
# What sbatch takes from a #SBATCH line as it stands: it drops quotes and backslashes, and what follows a # or a space is not the value's.
_PLAIN = re.compile(r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:/@%+=*&|()\[\]-]+)?")


def wrap(job: Job, written: Written, site: Site, name: str) -> Written:
    """Return job.sbatch and node.sh. Raises SpecError for a setting of the site that a batch script's header cannot hold."""
    nodes = nodes_of(job.cluster, NAME)
    named = {key: getattr(site, key) for key in ("account", "partition", "qos", "constraint", "reservation")}
    options = [f"--job-name={label(name)}", *places(site, nodes.count, nodes.each), "--ntasks-per-node=1", "--output=slurm-%j.log"]
    options += ["--requeue" if site.requeue else "--no-requeue", *(f"--{key}={value}" for key, value in named.items() if value)]
    options += site.slurm_options
    unfit = [option for option in options if not _PLAIN.fullmatch(option)]
    if unfit:
        rule = "cannot stand in the header of a batch script"
        raise SpecError([Problem(where=NAME, path=option.partition("=")[0], value=option[:80], rule=rule) for option in unfit])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"# Written by tuner: submit it in this folder, which all nodes must see: sbatch {JOB}",
        "set -eo pipefail",
        'cd -- "$SLURM_SUBMIT_DIR"',
        'nodes="$SLURM_JOB_NODELIST"',
        ADDRESS,
        f"export NNODES={nodes.count} GPUS_PER_NODE={nodes.each}",
        "unset NODE_RANK  # each node has its own, SLURM_NODEID",
        f"exec srun --ntasks={nodes.count} --ntasks-per-node=1 --kill-on-bad-exit=1{_container(site)} bash {NODE}",
    ]
    text = "\n".join(lines) + "\n"
    return added({JOB: text, NODE: node_script(job, written, site, NAME)}, f"sbatch {JOB}", programs=(JOB,))


def _container(site: Site) -> str:
    """Return pyxis' options; the folder is mounted where it is."""
    if site.container is None:
        return ""
    mounts = "".join(f"{mount}," for mount in site.container.mounts)
    image = quoted(f"--container-image={site.container.image}")
    here = '"$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"'
    return f' {image} {quoted("--container-mounts=" + mounts)}{here} --container-workdir="$SLURM_SUBMIT_DIR"'
