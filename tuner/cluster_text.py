"""A Cluster as the text of its file: every quantity with its unit, every figure with its source; it loads back to the same value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from tuner import presets
from tuner.cluster import Cluster, Sourced
from tuner.errors import SpecError
from tuner.presets import read_cluster_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.cluster import Gpu

UNITS = {"peak": "FLOP/s", "memory": "B", "hbm": "B/s", "power": "W", "power_cap": "W", "clock": "Hz", "l2": "B", "host_link": "B/s"}
_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SHORT = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def quantity_text(value: float, unit: str) -> str:
    """Return a quantity with the largest prefix that keeps its value to the last bit: 450 GB/s, 0.8 us, 84943715697 B."""
    steps = _SHORT if unit == "s" else tuple((factor, prefix + unit) for factor, prefix in _STEPS)
    for factor, name in steps:
        text = f"{value / factor:.6g}"
        if "e" not in text and float(text) * factor == value and value >= factor:
            return f"{text} {name}"
    return f"{int(value) if value == int(value) else value!r} {unit}"


def _figure(figure: Sourced[Any], unit: str) -> dict[str, Any]:
    value = quantity_text(figure.value, unit) if unit else figure.value
    return {"value": value, "source": figure.source} | ({"note": figure.note} if figure.note else {})


def _gpu(gpu: Gpu) -> Any:
    try:
        if presets.gpu(gpu.name) == gpu:
            return gpu.name
    except SpecError:  # of no preset
        pass
    data: dict[str, Any] = {"name": gpu.name, "vendor": gpu.vendor}
    data["peak"] = {name: _figure(figure, UNITS["peak"]) for name, figure in gpu.peak.items()}
    for name in ("memory", "hbm", "power", "power_cap", "sms", "clock", "l2", "host_link"):
        if (figure := getattr(gpu, name)) is not None:
            data[name] = _figure(figure, UNITS.get(name, ""))
    return data


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as the content of its file."""
    domains = [
        {"name": d.name, "size": d.size, "bandwidth": _figure(d.bandwidth, "B/s"), "latency": _figure(d.latency, "s")}
        for d in cluster.domains
    ]
    data = {
        "name": cluster.name,
        "gpu": _gpu(cluster.gpu),
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "domains": domains,
    }
    price = {} if cluster.price_per_gpu_hour is None else {"price_per_gpu_hour": cluster.price_per_gpu_hour}
    return data | price


def file_text(data: dict[str, Any], comments: Iterable[str] = ()) -> str:
    """Return the text of a file with comments on top."""
    head = "".join(f"# {' '.join(line.split())}\n" for line in comments)
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def cluster_text(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """Return the text of a cluster's file, after reading it back."""
    text = file_text(cluster_data(cluster), comments)
    read_cluster_text(text, cluster.name)
    return text
