"""Accelerators and how they are wired."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Generic, Self, TypeVar

from pydantic import Field, model_validator

from tuner.errors import one_problem
from tuner.spec import Name, Spec
from tuner.units import Bytes, BytesPerSecond, Count, FlopPerSecond, Hertz, Seconds, Watts

T = TypeVar("T")


class Sourced(Spec, Generic[T]):
    """A figure and where it was read."""

    value: T
    source: Annotated[str, Field(min_length=1)]
    note: str = ""


class Gpu(Spec):
    """One accelerator.

    peak: dense FLOP/s by dtype (bf16, fp16, fp32, tf32, fp8, fp4); memory: bytes the driver reports as usable; hbm: bytes/s;
    sms: streaming multiprocessors (compute units, tensor cores), for tile and wave quantisation; power_cap: the card's own
    cap where it differs from power.
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    vendor: Name
    peak: dict[str, Sourced[FlopPerSecond]]
    memory: Sourced[Bytes]
    hbm: Sourced[BytesPerSecond]
    power: Sourced[Watts] | None = None
    power_cap: Sourced[Watts] | None = None
    sms: Sourced[Count] | None = None
    clock: Sourced[Hertz] | None = None
    l2: Sourced[Bytes] | None = None
    host_link: Sourced[BytesPerSecond] | None = None


class Domain(Spec):
    """A level of the network, from inner to outer: `size` GPUs (None: the whole cluster) reach each other at `bandwidth`
    bytes/s a GPU in one direction, with `latency` seconds.
    """

    name: Name
    size: Count | None
    bandwidth: Sourced[BytesPerSecond]
    latency: Sourced[Seconds]


class Cluster(Spec):
    """`gpus` accelerators of one kind in nested domains (NVLink domain, rail or rack, pod), inner first."""

    name: Name
    gpu: Gpu
    gpus: Annotated[Count, Field(le=10_000_000)]
    gpus_per_node: Count
    domains: tuple[Domain, ...] = Field(min_length=1)
    aliases: tuple[Name, ...] = ()
    price_per_gpu_hour: Annotated[float, Field(gt=0, le=1e6)] | None = None

    @model_validator(mode="after")
    def _nested(self) -> Self:
        sizes = [domain.size for domain in self.domains]
        if any(size is None for size in sizes[:-1]):
            raise ValueError("only the outermost domain may span the whole cluster (size: null)")
        if sizes[-1] is not None and sizes[-1] < self.gpus:
            raise ValueError(f"the outermost domain has {sizes[-1]} GPUs but the cluster {self.gpus}: add a domain with size null")
        inner = [size for size in sizes if size is not None]
        if any(b % a or b <= a for a, b in pairwise(inner)):
            raise ValueError(f"domain sizes {inner} must grow, each a multiple of the one inside it")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs in each domain, inner first; the outermost is the cluster."""
        return tuple(min(domain.size or self.gpus, self.gpus) for domain in self.domains)


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes, and how many accelerators of each."""

    count: int
    each: int


def nodes_of(cluster: Cluster, where: str) -> Nodes:
    """Return the nodes of a cluster. where: who asks. Raises SpecError where its accelerators do not spread evenly."""
    count = -(-cluster.gpus // cluster.gpus_per_node)
    if cluster.gpus % count:
        raise one_problem(where, "gpus", cluster.gpus, f"do not spread evenly over {count} nodes of {cluster.gpus_per_node}")
    return Nodes(count, cluster.gpus // count)
