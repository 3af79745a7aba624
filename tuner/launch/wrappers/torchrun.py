"""Nodes started by hand: node.sh, run once on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cluster import nodes_of
from tuner.launch.wrappers.wrapper import NODE, added, node_script

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Written
    from tuner.launch.site import Site

NAME = "torchrun"


def wrap(job: Job, written: Written, site: Site, name: str) -> Written:
    """Return node.sh, which a person (or a parallel shell) starts on every node with its rank and the first node's address."""
    del name
    count = nodes_of(job.cluster, NAME).count
    start = f"bash {NODE}" if count == 1 else f"MASTER_ADDR=FIRST_NODE NODE_RANK=0..{count - 1} bash {NODE}"
    notes = () if count == 1 else (f"Start {NODE} on all {count} nodes, each with its NODE_RANK; the folder must be on all of them.",)
    return added({NODE: node_script(job, written, site, NAME)}, start, notes=notes)
