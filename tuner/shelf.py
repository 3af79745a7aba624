"""Presets as records: what `tuner presets` lists and shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.errors import nearest, one_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.cluster import Cluster, Gpu
    from tuner.failure import FailureData
    from tuner.job import Framework
    from tuner.model import Model

ABOUT = {
    "gpus": "accelerators: peaks, memory, bandwidth",
    "clusters": "nodes and racks; with a count, like h100x1024, a --cluster",
    "models": "architectures, a --model",
    "frameworks": "defaults and rules of training frameworks, a --framework",
    "calibrations": "fitted coefficients and curves, a --calibration",
    "failures": "how often GPUs fail, repairs, restarts, a --failure-data of `tuner failures`",
    "jobs": "worked examples, a --job",
    "spaces": "axes to search, a --space",
}


@dataclass(frozen=True, slots=True)
class PresetsAnswer:
    """kind None: `found` lists the kinds; name None: it lists the presets of the kind; else it is one preset."""

    kind: str | None
    name: str | None
    found: Any

    def record(self) -> Any:
        """Return the answer as JSON's types."""
        return self.found


def kind_of(text: str) -> str:
    """Return the kind that a word means: models, model, MODELS."""
    word = text.strip().lower()
    for kind in presets.KINDS:
        if word in (kind, kind[:-1]):
            return kind
    raise one_problem("kind", "", text, "is no kind of preset", nearest(word[:40], [*presets.KINDS, *(k[:-1] for k in presets.KINDS)]))


def look(kind: str | None = None, name: str | None = None) -> PresetsAnswer:
    """Return the kinds, the presets of a kind, or one preset (by name, alias or file)."""
    if kind is None:
        kinds = [{"kind": k, "presets": len(presets.names(k)), "about": ABOUT[k]} for k in presets.KINDS]
        return PresetsAnswer(None, None, kinds)
    kind = kind_of(kind)
    if name is None:
        return PresetsAnswer(kind, None, [{"name": each} | summary(kind, load_preset(kind, each)) for each in presets.names(kind)])
    return PresetsAnswer(kind, name, whole(kind, name))


def load_preset(kind: str, name: str) -> Any:
    """Return a preset as its spec. Raises SpecError when it does not load."""
    if kind == "calibrations":
        return _calibration(name)
    if kind == "jobs":
        from tuner.request import JOB_KEYS, read_range, read_request

        return read_range(read_request({"job": name}, keys=JOB_KEYS))
    from tuner.launch.detection import named_cluster

    if kind == "spaces":
        from tuner.load import load_file
        from tuner.search.space import SpaceSpec

        return load_file(SpaceSpec, presets.find("spaces", name))
    readers: dict[str, Callable[[str], Any]] = {
        "gpus": presets.gpu,
        "clusters": named_cluster,
        "models": presets.model,
        "frameworks": presets.framework,
        "failures": presets.failure,
    }
    return readers[kind](name)


def _calibration(name: str) -> Any:
    from tuner.cost_model.calibration import PRIOR, CalibrationFile, PriorFile
    from tuner.load import load_file

    path = presets.find("calibrations", name)
    return load_file(PriorFile if path.stem == PRIOR else CalibrationFile, path)


def summary(kind: str, spec: Any) -> dict[str, Any]:
    """Return what tells a preset of this kind from its neighbours."""
    return _SUMMARIES[kind](spec) if kind in _SUMMARIES else {}


def _gpu(gpu: Gpu) -> dict[str, Any]:
    peak = {f"{name}_flops": figure.value for name, figure in gpu.peak.items() if name in ("bf16", "fp8", "fp4")}
    return {"vendor": gpu.vendor, "memory_bytes": gpu.memory.value, "hbm": gpu.hbm.value} | peak


def _cluster(cluster: Cluster) -> dict[str, Any]:
    domains = [
        {"name": domain.name, "size": domain.size, "bandwidth": domain.bandwidth.value, "latency": domain.latency.value}
        for domain in cluster.domains
    ]
    return {"gpu": cluster.gpu.name, "gpus_per_node": cluster.gpus_per_node, "domains": domains, "aliases": list(cluster.aliases)}


def _model(model: Model) -> dict[str, Any]:
    from tuner.cost_model.params import active_parameters, parameters

    return {
        "parameters": int(parameters(model)),
        "active_parameters": int(active_parameters(model)),
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "experts": model.moe.experts if model.moe else None,
        "vocab": model.vocab,
    }


def _framework(framework: Framework) -> dict[str, Any]:
    stated = {name: getattr(framework.defaults, name) for name in type(framework.defaults).model_fields}
    defaults = {name: figure.value for name, figure in stated.items() if figure is not None}
    return {"rules": list(framework.rules), "aliases": list(framework.aliases), "defaults": defaults}


def _calibration_summary(file: Any) -> dict[str, Any]:
    fields = ("framework", "release", "gpus", "relatives")
    stated = {name: getattr(file, name, "") for name in fields}
    fits = {
        f"{group}.{name}": {"n": curve.fit.n, "median": curve.fit.median, "p90": curve.fit.p90}
        for group in ("gemm", "grouped", "attention", "collectives")
        for name, curve in getattr(file, group, {}).items()
    }
    return {name: list(v) if isinstance(v, tuple) else v for name, v in stated.items()} | {
        "coefficients": len(file.coefficients),
        "fits": fits,
    }


def _failures(data: FailureData) -> dict[str, Any]:
    return {
        "mtbf_hours": data.mtbf.value / 3600.0,
        "hardware_share": data.hardware_share.value,
        "repair_hours": data.repair.value / 3600.0,
        "restart_minutes": data.restart.value / 60.0,
        "power_cap": data.power_cap.value,
        "aliases": list(data.aliases),
    }


def _job(question: Any) -> dict[str, Any]:
    job, counts = question
    gpus = str(counts[0]) if len(counts) == 1 else f"{counts[0]}..{counts[-1]}"
    return {
        "model": job.model.name,
        "cluster": job.cluster.name,
        "gpus": gpus,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "precision": job.precision,
        "task": job.task,
        "framework": job.framework.name,
    }


_SUMMARIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gpus": _gpu,
    "clusters": _cluster,
    "models": _model,
    "frameworks": _framework,
    "calibrations": _calibration_summary,
    "failures": _failures,
    "jobs": _job,
}


def whole(kind: str, name: str) -> dict[str, Any]:
    """Return one preset with every figure it states, and the file it stands in."""
    spec = load_preset(kind, name)
    fields = spec.model_dump(mode="json") if hasattr(spec, "model_dump") else {}
    path = presets.find(kind, name) if kind != "clusters" else _cluster_file(name)
    counted = summary(kind, spec) if kind in ("models", "jobs") else {}
    seen = found_here(name) if kind == "clusters" else {}
    return {"name": getattr(spec, "name", name)} | counted | fields | {"file": str(path) if path else None} | seen


def found_here(name: str) -> dict[str, list[str]]:
    """Return what was seen of this machine and what was assumed, where that is the cluster that is meant."""
    from tuner.launch.detection import local, local_count

    if local_count(name) is None:
        return {}
    found = local(name)
    return {"detected": list(found.seen), "assumed": list(found.assumed)}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """text: a cluster's file; missing: the figures in it that a person must fill in before it can be read."""

    text: str
    seen: tuple[str, ...]
    assumed: tuple[str, ...]
    missing: tuple[str, ...]


def cluster_file(name: str) -> ClusterFile:
    """Return a cluster as the text of its file: a preset, a preset with a count, or this machine ("local")."""
    from tuner.cluster_text import cluster_text, file_text
    from tuner.launch.detection import Detected, local, local_count

    here = local_count(name) is not None
    found = local(name) if here else Detected(cluster=presets.cluster(name))
    comments = [*(f"seen: {line}" for line in found.seen), *(f"assumed: {line}" for line in found.assumed)]
    if found.cluster is None:
        text = file_text(found.draft, [*comments, *(f"fill in: {path}" for path in found.missing)])
    else:
        text = cluster_text(found.cluster, comments)
    return ClusterFile(text, found.seen, found.assumed, found.missing)


def _cluster_file(name: str) -> Any:
    from tuner.errors import SpecError

    try:
        return presets.find("clusters", name)
    except SpecError:  # a counted cluster, like h100x1024
        return None
