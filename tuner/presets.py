"""Find and read the presets in configs/: by name or alias, or as "NAMExCOUNT" for a cluster of any size, or a file.

One preset is read without parsing the others: a name is a file's name; an alias is looked for in the text of each file first.
"""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tuner.cluster import Cluster, Gpu
from tuner.errors import SpecError, nearest, one_problem
from tuner.failure import FailureData
from tuner.job import Framework
from tuner.load import load_file, load_foreign_json, load_spec, load_yaml, parse_yaml, path_of, read_spec
from tuner.model import Model
from tuner.verbs import callable_module

if TYPE_CHECKING:
    from tuner.spec import Spec

    S = TypeVar("S", bound=Spec)

KINDS = ("gpus", "clusters", "models", "frameworks", "calibrations", "failures", "jobs", "spaces")
_SUFFIXES = (".yaml", ".yml", ".json")
_COUNTED = re.compile(r"(.+?)\s*[x*:]\s*(\d{1,9})", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,90}/[A-Za-z0-9][A-Za-z0-9._-]{0,90}")
_VENDOR = re.compile(r"^(?:nvidia|amd-instinct|amd|intel|google|aws)-(?=.)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+?-]{0,99}")


def configs_dir() -> Path:
    """Return the folder of the presets: configs/ of the checkout, or the copy inside the installed package."""
    here = Path(__file__).resolve().parent
    inside = here / "configs"
    return inside if inside.is_dir() else here.parent / "configs"


def names(kind: str) -> list[str]:
    """Return the names of the presets of a kind (one of KINDS), sorted."""
    return sorted(path.stem for path in (configs_dir() / kind).glob("*.yaml"))


def find(kind: str, text: str) -> Path:
    """Return the file of a preset by its name or alias (upper and lower case are alike), or of a path.

    A text with a slash or with the suffix of a YAML or JSON file is a path. Raises SpecError with the nearest name.
    """
    if _is_path(text):
        return path_of(text)
    path = _lookup(kind, text)
    if path is None:
        raise _unknown(kind, text)
    return path


def model(text: str) -> Model:
    """Return a model: a preset, our YAML file, a Hugging Face config.json, or a folder that holds one.

    An id of the Hugging Face hub (owner/name) means the preset of that name when there is no such file.
    """
    path = _lookup("models", text.rpartition("/")[2]) if _HUB_ID.fullmatch(text) and not Path(text).exists() else None
    path = path or find("models", text)
    if _is_path(text):
        path = _inside(path)
    if path.suffix.lower() == ".json":
        return _model_of(load_foreign_json(path), path)
    return read_spec(path, lambda data: _model_of(data, path))


def _model_of(data: Any, path: Path) -> Model:
    if isinstance(data, dict) and _is_hugging_face(data, path):
        from tuner.hf_config import read_hf_config

        return read_hf_config(data, str(path))
    return load_spec(Model, data, str(path))


def _inside(path: Path) -> Path:
    try:
        return path / "config.json" if path.is_dir() and (path / "config.json").is_file() else path
    except (OSError, ValueError):
        return path


def gpu(text: str) -> Gpu:
    """Return an accelerator: a preset or a YAML file."""
    path = find("gpus", text)
    return load_file(Gpu, path)


def framework(text: str) -> Framework:
    """Return a training framework: a preset or a YAML file."""
    path = find("frameworks", text)
    return load_file(Framework, path)


def failure(text: str) -> FailureData:
    """Return failure data: a preset or a YAML file."""
    path = find("failures", text)
    return load_file(FailureData, path)


def cluster(text: str) -> Cluster:
    """Return a cluster: a preset ("dgx-h100"), a preset with a count of GPUs ("h100x1024"), or a YAML file.

    In a file, `gpu` is a preset's name or a whole description.
    """
    if _is_path(text):
        return _read_cluster(path_of(text))
    if path := _lookup("clusters", text):
        return _read_cluster(path)
    counted = _COUNTED.fullmatch(text.strip()) if len(text) < 120 else None
    if counted is None:
        raise _unknown("clusters", text)
    found = _lookup("clusters", counted[1])
    if found is None:
        raise _unknown("clusters", counted[1])
    return with_gpus(_read_cluster(found), int(counted[2]), text)


def with_gpus(cluster: Cluster, gpus: int, where: str = "cluster") -> Cluster:
    """Return the same kind of cluster with another count of GPUs: part of a node, or whole nodes.

    A rack-wide NVLink domain that does not divide the count is used as the largest part of it, in whole nodes, that does
    (256 GPUs of NVL72 racks: 64 in each, as schedulers place such jobs).
    """
    node = cluster.gpus_per_node
    if gpus < 1 or (gpus > node and gpus % node):
        hint = f"nearest: {max(gpus // node, 1) * node} or {(gpus // node + 1) * node}"
        raise one_problem(where, "gpus", gpus, f"must be whole nodes of {node} GPUs, or part of one node", hint)
    domains = [domain if domain.size is None else domain.replace(size=_used(domain.size, node, gpus)) for domain in cluster.domains]
    # Domains that shrank to the one inside them say nothing any more.
    kept = [d for i, d in enumerate(domains) if d.size is None or i == 0 or d.size > (domains[i - 1].size or 0)]
    changes = {"name": f"{cluster.name}x{gpus}", "gpus": gpus, "gpus_per_node": min(node, gpus), "domains": tuple(kept)}
    try:
        return load_spec(Cluster, _fields(cluster) | changes, where, units=False)
    except SpecError:
        if gpus > 10_000_000:
            raise one_problem(where, "gpus", gpus, "must be at most 10000000") from None
        raise


def _used(size: int, node: int, gpus: int) -> int:
    if gpus <= size or gpus % size == 0:
        return size
    parts = [part for part in range(node, size + 1, node) if gpus % part == 0]
    return max(parts) if parts else size


def _fields(cluster: Cluster) -> dict[str, Any]:
    return {name: getattr(cluster, name) for name in Cluster.model_fields}


def _read_cluster(path: Path) -> Cluster:
    return read_spec(path, lambda data: _cluster_of(data, path))


def _cluster_of(data: Any, path: Path) -> Cluster:
    if isinstance(data, dict) and isinstance(data.get("gpu"), str):
        try:
            data = data | {"gpu": gpu(data["gpu"])}
        except SpecError as error:
            raise SpecError([dataclasses.replace(p, where=f"{path}: gpu: {p.where}") for p in error.problems]) from None
    return load_spec(Cluster, data, str(path))


def read_cluster_text(text: str, where: str) -> Cluster:
    """Return the cluster of a file's text, named `where` in what is wrong with it."""
    return _cluster_of(parse_yaml(text, where), Path(where))


def _is_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.lower().endswith(_SUFFIXES) or text in (".", "..", "~")


def _is_hugging_face(data: dict[str, Any], path: Path) -> bool:
    return any(key in data for key in ("model_type", "architectures", "transformers_version", "text_config")) or (
        path.suffix.lower() == ".json" and not {"layers", "hidden"} & set(data)
    )


def _lookup(kind: str, text: str) -> Path | None:
    if not _NAME.fullmatch(text.strip()):
        return None
    folder = configs_dir() / kind
    for name in dict.fromkeys((text.strip().lower().replace("_", "-"), _plain(text))):
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
        for candidate in sorted(folder.glob("*.yaml")):
            if name in candidate.read_text(encoding="utf-8").lower() and name in _aliases(candidate):
                return candidate
    return None


def _plain(text: str) -> str:
    """Return a name as presets have it: "NVIDIA H100 SXM5" is h100-sxm5, and "TPU v5p" tpu-v5p."""
    return _VENDOR.sub("", re.sub(r"[\s_]+", "-", text.strip().lower()))


@lru_cache(maxsize=1024)
def _aliases(path: Path) -> tuple[str, ...]:
    data = load_yaml(path)
    found = data.get("aliases", []) if isinstance(data, dict) else []
    return tuple(str(alias).lower() for alias in found) if isinstance(found, list) else ()


def _unknown(kind: str, text: str) -> SpecError:
    known = [name for path in (configs_dir() / kind).glob("*.yaml") for name in (path.stem, *_aliases(path))]
    word = {"gpus": "GPU", "failures": "failure data"}.get(kind, kind[:-1])
    hint = nearest(text[:100], known) if text.strip() else f"known: {', '.join(names(kind)[:12])}"
    hint += f"; or a file. `tuner presets {kind}` lists all" if kind in ("models", "clusters", "gpus", "frameworks", "failures") else ""
    if kind == "clusters":
        hint += "; any count of GPUs: NAMExCOUNT, like h100x1024; local: this machine"
    return one_problem(f"{word}", "", text, f"no such {word}", hint)


callable_module(__name__)  # tuner.presets("models") lists them
