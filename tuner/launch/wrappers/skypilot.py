"""SkyPilot: a task on so many nodes of a cloud, that runs node.sh on each (docs.skypilot.co, running-jobs/distributed-jobs)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from tuner.cluster import nodes_of
from tuner.errors import one_problem
from tuner.launch.script import secrets_of
from tuner.launch.wrappers.wrapper import NODE, added, label, node_script

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Written
    from tuner.launch.site import Site

NAME, TASK = "skypilot", "skypilot.yaml"
# Names of its catalog (sky/catalog, release 0.14.1), by ours.
ACCELERATORS = {
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB",
    "b200-sxm-180gb": "B200",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx-4090": "RTX4090",
    "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}
_RUN = f"""\
export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
export NNODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK GPUS_PER_NODE=$SKYPILOT_NUM_GPUS_PER_NODE
bash {NODE}
"""


def wrap(job: Job, written: Written, site: Site, name: str) -> Written:
    """Return skypilot.yaml and node.sh. Raises SpecError for an accelerator that its catalog has no name for."""
    nodes, gpu = nodes_of(job.cluster, NAME), job.cluster.gpu.name
    if gpu not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise one_problem(NAME, "gpu", gpu, "has no name in SkyPilot's catalog that is known here", f"known: {known}; or another wrapper")
    resources: dict[str, Any] = {"accelerators": f"{ACCELERATORS[gpu]}:{nodes.each}"}
    if site.container is not None:
        resources["image_id"] = f"docker:{site.container.image}"
    task: dict[str, Any] = {"name": label(name), "num_nodes": nodes.count, "workdir": ".", "resources": resources}
    if secrets := secrets_of(site):
        task["secrets"] = dict.fromkeys(secrets)  # null: given with --secret NAME when it is launched
    task["run"] = _RUN
    text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
    return added({TASK: text, NODE: node_script(job, written, site, NAME)}, f"sky launch {TASK}")
