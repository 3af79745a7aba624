"""What a source says once for all its rows, and so not in each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tuner.accuracy.fields import Row


# What a memory figure counts: bytes in tensors, bytes the caching allocator holds, or all of the device's (context, NCCL) as nvidia-smi.
MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """title: words of the source's title, in lower case; where: read there; zero: its ZeRO stage; node: the cluster preset it ran on;
    memory: what its memory figures count; zero_3: the framework of its ZeRO-3 runs.
    """

    title: str
    where: str
    zero: int | None = None
    node: str | None = None
    memory: MemoryKind | None = None
    zero_3: str | None = None


FACTS = (
    Fact(title="vtrain (micro'24)", zero=0, where="VIA-Research/vTrain README: data parallelism reduces whole gradients; no ZeRO"),
    Fact(
        title="ultra-scale playbook benchmarks",
        node="aws-p5",
        memory="allocated",
        where="huggingface/nanotron run_multinode.sh, the benchmark's base script: partition hopper-prod, FSx storage of AWS; "
        "src/nanotron/helpers.py: Mem Alloc (GB) is torch.cuda.max_memory_allocated (figures down to 1 GB leave no room for a context)",
    ),
    Fact(
        title="narayanan et al. 2021",
        zero_3="deepspeed",
        where="arXiv 2104.04473 section 5.2: ZeRO-3 without model parallelism, by DeepSpeed",
    ),
    Fact(title="torchtitan", memory="reserved", where="pytorch/torchtitan torchtitan/components/metrics.py: max_reserved_gib"),
    Fact(title="zero bubble", memory="allocated", where="sail-sg/zero-bubble-pipeline-parallelism: torch.cuda.max_memory_allocated"),
    Fact(title="bigscience", memory="device", where="bigscience-workshop/bigscience chronicles: nvidia-smi"),
)
_NOTHING = Fact(title="", where="")


def fact_of(row: Row) -> Fact:
    """Return what the row's source says for all its rows; an empty fact for others."""
    title = (row.top.section("source").text("title") or "").lower()
    return next((fact for fact in FACTS if fact.title in title), _NOTHING)


def memory_kind(row: Row) -> MemoryKind | None:
    """Return what the row's memory figure counts: as its notes say, or its source; None when neither does."""
    notes = f"{row.notes} {(row.top.text('notes') or '').lower()}"
    said = re.search(r"(?:peak|memory is|max) (allocated|reserved)|(nvidia-smi)", notes)
    if said is None:
        return fact_of(row).memory
    return "device" if said[2] else "allocated" if said[1] == "allocated" else "reserved"
