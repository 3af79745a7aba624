"""Which known model has given dimensions, and which kind of cluster a name means."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.cluster import Cluster, Domain
from tuner.errors import SpecError
from tuner.launch.detection import named_cluster
from tuner.load import load_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.model import Model

CORE = ("layers", "hidden", "heads")
SHAPE = ("layers", "hidden", "heads", "ffn_hidden", "kv_heads")
_COUNTED = re.compile(r"(.+?)\s*[x*:]\s*(\d{1,9})")


def counted(text: str) -> tuple[str, int | None]:
    """Return the kind and count of "h100x64" (count None: none named)."""
    if is_file(text) or presets_name(text):
        return text, None
    match = _COUNTED.fullmatch(text.strip()) if len(text) < 120 else None
    return (match[1], int(match[2])) if match else (text, None)


def presets_name(text: str) -> bool:
    """Whether a text is a cluster preset's own name."""
    return text.strip().lower() in presets.names("clusters")


def is_file(text: str) -> bool:
    """Whether a text names a file (or this machine) rather than a preset."""
    return "/" in text or text.lower().endswith((".yaml", ".yml", ".json")) or text.startswith("local")


def kind_of(text: str) -> Cluster | None:
    """Return the cluster of a kind's name, "h100x64" or "h100"; None where there is none."""
    try:
        return named_cluster(counted(text)[0]) if not is_file(text) or Path(text).exists() else None
    except SpecError:
        return None


def with_nodes_of(base: Cluster, per_node: int) -> Cluster | None:
    """Return a cluster with nodes of another size, whose fastest links are those of a node; None where its links are not the nodes'."""
    first = base.domains[0]
    if first.size != base.gpus_per_node or per_node > base.gpus_per_node:
        return None
    domains: tuple[Domain, ...] = (first.replace(size=per_node), *base.domains[1:])
    fields = {name: getattr(base, name) for name in Cluster.model_fields}
    try:
        return load_spec(Cluster, fields | {"gpus_per_node": per_node, "domains": domains, "gpus": per_node * 2}, "cluster", units=False)
    except SpecError:
        return None


@cache
def _shapes() -> tuple[Model, ...]:
    return tuple(presets.model(name) for name in presets.names("models"))


def model_like(told: Mapping[str, Any], words: str = "") -> Model | None:
    """Return the known model whose dimensions are all those that are told. Of several: one whose family `words` names, else the one with
    the largest vocabulary, which needs the most memory.
    """
    if not all(name in told for name in CORE):
        return None
    moe = told.get("moe") or {}
    alike = [
        model
        for model in _shapes()
        if all(getattr(model, name) == told[name] for name in (*SHAPE, "vocab") if name in told)
        and (model.moe is not None) == bool(moe)
        and (not moe or model.moe is None or model.moe.experts == moe.get("experts", model.moe.experts))
    ]
    text = re.sub(r"[^a-z0-9]", "", words.lower())
    return max(alike, key=lambda m: (_family(m) in text, m.vocab), default=None)


def _family(model: Model) -> str:
    """Return "llama3" of llama3-70b and llama3.1-70b."""
    return re.sub(r"[^a-z0-9]", "", re.split(r"[-.]", model.name.lower())[0])
