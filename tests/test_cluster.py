from typing import Any

import pytest
from pydantic import ValidationError

from tuner.cluster import Cluster, Domain, Sourced
from tuner.presets import cluster

H100 = cluster("dgx-h100")


def domain(size: int | None, bandwidth: float = 1e9) -> Domain:
    return Domain(name="d", size=size, bandwidth=Sourced(value=bandwidth, source="s"), latency=Sourced(value=1e-6, source="s"))


def with_domains(gpus: int, *sizes: int | None) -> Cluster:
    return Cluster(name="c", gpu=H100.gpu, gpus=gpus, gpus_per_node=1, domains=tuple(domain(size) for size in sizes))


def test_sizes_are_those_of_the_cluster_where_a_domain_is_larger() -> None:
    assert with_domains(64, 8, None).sizes == (8, 64)
    assert with_domains(4, 8, None).sizes == (4, 4)
    assert with_domains(256, 8, 64, 256).sizes == (8, 64, 256)


@pytest.mark.parametrize(
    ("gpus", "sizes", "says"),
    [
        (64, (None, 8), "only the outermost domain"),
        (64, (8, 32), "the outermost domain has 32 GPUs but the cluster 64"),
        (64, (8, 12, None), "each a multiple of the one inside it"),
        (64, (8, 8, None), "must grow"),
        (64, (), "at least 1 item"),
        (0, (None,), "greater than or equal to 1"),
    ],
)
def test_impossible_networks(gpus: int, sizes: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        with_domains(gpus, *sizes)


def test_nvlink_figures_are_one_direction_for_each_gpu() -> None:
    """NVLink's headline counts both directions: 600, 900 and 1,800 GB/s for A100, H100 and Blackwell."""
    rates = {"dgx-a100": 300e9, "dgx-h100": 450e9, "dgx-b200": 900e9, "gb200-nvl72": 900e9, "gb300-nvl72": 900e9}
    for name, rate in rates.items():
        assert cluster(name).domains[0].bandwidth.value == rate, name


def test_networks_between_nodes() -> None:
    """200 Gb/s HDR for each A100, 400 Gb/s NDR for each H100, an 800 Gb/s ConnectX-8 for each GB300; p4d shares 400 Gb/s among eight."""
    rates = {"dgx-a100": 25e9, "dgx-h100": 50e9, "gb300-nvl72": 100e9, "aws-p4d": 6.25e9, "aws-p5": 50e9}
    for name, rate in rates.items():
        assert cluster(name).domains[1].bandwidth.value == rate, name
