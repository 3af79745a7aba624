"""Kubernetes: the files as a ConfigMap, and a JobSet or a PyTorchJob that copies them into a pod for each node.

Fields as in kubernetes-sigs/jobset (api/jobset/v1alpha2, examples/pytorch) and kubeflow/training-operator (pkg/apis/kubeflow.org/v1,
pkg/controller.v1/pytorch/envvar.go: it sets MASTER_ADDR, MASTER_PORT and RANK, which counts pods).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from tuner.cluster import Nodes, nodes_of
from tuner.errors import one_problem
from tuner.launch.script import secrets_of
from tuner.launch.wrappers.wrapper import NODE, PORT, added, label, node_script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.launch.launchers.launcher import Written
    from tuner.launch.site import Site

NAME, FILES, JOBSET, PYTORCHJOB = "kubernetes", "files.yaml", "jobset.yaml", "pytorchjob.yaml"
_KEY = "__"  # a key of a ConfigMap has no slash
_LARGEST = 1_000_000  # of a ConfigMap, 1 MiB with its names
_NODES = "nodes"
_RESOURCES = {"mi": "amd.com/gpu"}


def wrap(job: Job, written: Written, site: Site, name: str) -> Written:
    """Return files.yaml, jobset.yaml and pytorchjob.yaml. Raises SpecError without an image, or for files that are too large."""
    if site.container is None:
        raise one_problem(NAME, "container.image", None, "is missing: pods run an image", "--site FILE with container: {image: ...}")
    nodes, named = nodes_of(job.cluster, NAME), label(name)
    files = {**written.files, NODE: node_script(job, written, site, NAME)}
    if sum(len(text.encode()) for text in files.values()) > _LARGEST:
        raise one_problem(NAME, "", None, f"the files are larger than the {_LARGEST:,} bytes of a ConfigMap", "another wrapper")
    keys = {path: path.replace("/", _KEY) for path in files}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": named},
        "data": {keys[path]: text for path, text in files.items()},
    }
    documents = {
        FILES: config,
        JOBSET: _jobset(job, site, nodes, named, keys),
        PYTORCHJOB: _pytorchjob(job, site, nodes, named, keys),
    }
    notes = (
        f"{PYTORCHJOB} is for the Kubeflow training operator, {JOBSET} for JobSet: apply one of them, with {FILES}.",
        *(f"{secret} is secret and not written: make it a key of the Secret {named}-secrets." for secret in secrets_of(site)),
    )
    more = {file: yaml.safe_dump(document, sort_keys=False, allow_unicode=True) for file, document in documents.items()}
    return added({**more, NODE: files[NODE]}, f"kubectl apply -f {FILES} -f {JOBSET}", notes=notes)


def _jobset(job: Job, site: Site, nodes: Nodes, named: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """Pod i of the only job is node i; the first has the name NAME-nodes-0-0 in the subdomain NAME."""
    place = {"MASTER_ADDR": f"{named}-{_NODES}-0-0.{named}", "MASTER_PORT": str(PORT)}
    pod = _pod(job, site, nodes, named, keys, place, "JOB_COMPLETION_INDEX")
    work = {
        "parallelism": nodes.count,
        "completions": nodes.count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": named},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 1 if site.requeue else 0},
            "replicatedJobs": [{"name": _NODES, "replicas": 1, "template": {"spec": work}}],
        },
    }


def _pytorchjob(job: Job, site: Site, nodes: Nodes, named: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """The master is node 0; the operator counts its workers from 1."""
    policy = "OnFailure" if site.requeue else "Never"
    replica = {"restartPolicy": policy, "template": {"spec": _pod(job, site, nodes, named, keys, {}, "RANK")}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if nodes.count > 1:
        replicas["Worker"] = {"replicas": nodes.count - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": named},
        "spec": {"nprocPerNode": str(nodes.each), "runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas},
    }


def _pod(job: Job, site: Site, nodes: Nodes, named: str, keys: Mapping[str, str], place: Mapping[str, str], rank: str) -> dict[str, Any]:
    """Return a pod's specification. The training operator fills in a container of the name pytorch. rank: the variable with the node's."""
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in place.items()]
    variables += [{"name": "NNODES", "value": str(nodes.count)}, {"name": "GPUS_PER_NODE", "value": str(nodes.each)}]
    variables += [{"name": name, "valueFrom": {"secretKeyRef": {"name": f"{named}-secrets", "key": name}}} for name in secrets_of(site)]
    image = site.container.image if site.container else ""
    copy = f"cp -rL /files/. /work && cd /work && NODE_RANK=${rank} exec bash {NODE}"
    resource = next((name for start, name in _RESOURCES.items() if job.cluster.gpu.name.startswith(start)), "nvidia.com/gpu")
    return {
        "containers": [
            {
                "name": "pytorch",
                "image": image,
                "command": ["bash", "-c", copy],
                "env": variables,
                "resources": {"limits": {resource: nodes.each}},
                "volumeMounts": [
                    {"name": "files", "mountPath": "/files", "readOnly": True},
                    {"name": "work", "mountPath": "/work"},
                    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 (a mount point in the pod)
                ],
            }
        ],
        "volumes": [
            {"name": "files", "configMap": {"name": named, "items": [{"key": key, "path": path} for path, key in keys.items()]}},
            {"name": "work", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
