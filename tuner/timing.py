"""One measured operator or collective, a line of JSON: what microbenchmarks and logs of nccl-tests give and the cost model's fit reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tuner.errors import one_problem
from tuner.load import load_spec, parse_json, read_text
from tuner.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Op = Literal["gemm", "attention", "stream", "launch", "issue", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
MOST = 100_000
_size = Annotated[int, Field(ge=0, le=10**12)]
_seconds = Annotated[float, Field(gt=0, le=1e5)]


class Timing(Spec):
    """seconds: median over `samples` of one call, each the mean of a run of calls; spread: half the distance between their quartiles.

    gemm: (m x k) @ (k x n). attention: causal, `batch` sequences of `length` tokens, `heads` queries and `kv_heads` keys of `head_dim`.
    stream: an element-wise kernel that moves `bytes` in all. launch: an empty kernel between others on the device; issue: the host time of
    one. Collectives: `bytes` as nccl-tests counts them (buffer of all_reduce, gathered size of all_gather, input of reduce_scatter, send
    buffer of a rank in all_to_all, message of p2p) among `members` ranks, `stride` apart, on `nodes` nodes. device: what ran it; ranks:
    processes that measured at once; source: the file it was read from, where a log.
    """

    op: Op
    seconds: _seconds
    spread: Annotated[float, Field(ge=0)] = 0.0
    samples: Annotated[int, Field(ge=1)] = 1
    precision: str = ""
    backward: bool = False
    m: _size = 0
    n: _size = 0
    k: _size = 0
    batch: _size = 0
    length: _size = 0
    heads: _size = 0
    kv_heads: _size = 0
    head_dim: _size = 0
    bytes: _size = 0
    members: Annotated[int, Field(ge=1, le=10**7)] = 1
    stride: Annotated[int, Field(ge=1, le=10**7)] = 1
    nodes: Annotated[int, Field(ge=1, le=10**6)] = 1
    device: str = ""
    ranks: Annotated[int, Field(ge=1)] = 1
    source: str = ""


def timing_line(timing: Timing) -> str:
    """Return a timing as its line of JSON, without what is as by default."""
    return json.dumps(timing.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False)


def timing_lines(timings: Iterable[Timing]) -> str:
    """Return timings as the text of their file."""
    return "".join(timing_line(timing) + "\n" for timing in timings)


def read_timings(path: Path) -> list[Timing]:
    """Return the timings of a JSONL file. Raises SpecError naming the line of one that cannot be read."""
    lines = [(number, line) for number, line in enumerate(read_text(path, 64 * 2**20).splitlines(), 1) if line.strip()]
    if not lines or len(lines) > MOST:
        raise one_problem(str(path), "", f"{len(lines)} lines", f"must hold 1 to {MOST} timings", "tuner calibrate --measure writes them")
    return [load_spec(Timing, parse_json(line, f"{path}:{number}"), f"{path}:{number}", units=False) for number, line in lines]
