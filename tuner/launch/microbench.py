"""Microbenchmarks of this machine's devices and links, by torchrun or in one process: `python -m tuner.launch.microbench -o FILE`.

The same code on gloo and CPU, NCCL and accelerators. Every rank measures at once, as in a training step, so that processes that share
cores or links are seen sharing them. A sample is the mean of a run of calls of at least SAMPLE_S; a record has the median of SAMPLES of
them, after a warm-up. Rank 0 writes a record a line (tuner.timing.Timing) as it goes, and stops asking when the budget is used up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.launch.questions import questions
from tuner.timing import COLLECTIVE_OPS, Timing, timing_line, timing_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.launch.questions import Question

SAMPLE_S = 0.02
SAMPLES = 5
MESSAGE_SAMPLES = 9  # of collectives, whose ranks also wait for one another
LONGEST_CALL_S = 2.0  # a call that takes longer is not repeated, and says so by its samples
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Rank(NamedTuple):
    """A process among its peers. torch: the module; groups: process groups by (members, stride), None where this rank is in none."""

    torch: Any
    rank: int
    world: int
    local: int
    device: Any
    dtype: Any
    groups: dict[tuple[int, int], Any]

    @property
    def cuda(self) -> bool:
        """Whether it has an accelerator."""
        return bool(self.device.type == "cuda")

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value."""
        if self.world == 1:
            return value
        box = [value]
        self.torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        self.torch.distributed.all_gather_object(found, value)
        return found


def joined(precision: str) -> Rank:
    """Return the process that runs, in the group that torchrun's environment names (alone where there is none)."""
    import torch

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Rank(torch, rank, world, local, device, getattr(torch, DTYPES[precision or ("bf16" if cuda else "fp32")]), {})


def with_groups(rank: Rank, asked: list[Question]) -> Rank:
    """Return the rank with a process group for each (members, stride) that is asked about; all ranks make all groups in one order."""
    groups: dict[tuple[int, int], Any] = {}
    for members, stride in sorted({(q["members"], q.get("stride", 1)) for q in asked if q["op"] in COLLECTIVE_OPS}):
        groups[members, stride] = None
        span = members * stride
        for first in range(0, rank.world - span + 1, span):
            for offset in range(stride):
                ranks = list(range(first + offset, first + offset + span, stride))
                made = rank.torch.distributed.new_group(ranks)
                if rank.rank in ranks:
                    groups[members, stride] = (made, ranks)
    return rank._replace(groups=groups)


def measured(rank: Rank, question: Question) -> Timing | None:
    """Return the timing of one question over all ranks; None where no rank could answer (too little memory)."""
    call, fits = _call(rank, question)
    if not all(rank.gathered(fits)):
        return None
    own = None if call is None else _samples(rank, call, MESSAGE_SAMPLES if question["op"] in COLLECTIVE_OPS else SAMPLES)
    if call is None:
        _join_in(rank)
    answers = [answer for answer in rank.gathered(own) if answer]
    if not answers:
        return None
    # A collective is over when its last rank is; devices that work alone are told by the middle one.
    chosen = max(answers) if question["op"] in COLLECTIVE_OPS else sorted(answers)[len(answers) // 2]
    seconds = chosen[0] / (2 if question["op"] == "p2p" else question.get("repeats", 1))
    fields = {name: value for name, value in question.items() if name != "repeats"}
    return Timing(**fields, seconds=seconds, spread=chosen[1], samples=chosen[2], ranks=rank.world)


def _samples(rank: Rank, call: Callable[[], Any], count: int) -> tuple[float, float, int]:
    """Return (median, spread, samples) of the seconds of one call; all ranks make as many calls as rank 0 finds right."""
    call()
    once = _timed(rank, call, 1)
    long = rank.agreed(once) > LONGEST_CALL_S
    once = min(once, _timed(rank, call, 1 if long else 2))
    calls = rank.agreed(max(1, min(100_000, round(SAMPLE_S / max(once, 1e-9)))))
    count = 1 if long else count
    times = sorted(_timed(rank, call, calls) for _ in range(count))
    spread = (times[-1 - count // 4] - times[count // 4]) / 2
    return statistics.median(times), spread, count


def _join_in(rank: Rank) -> None:
    """Answer what rank 0 agrees with those who measure, for a rank that is in no group of the question."""
    rank.agreed(None)
    rank.agreed(None)


def _timed(rank: Rank, call: Callable[[], Any], calls: int) -> float:
    rank.wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    rank.wait()
    return (time.perf_counter() - start) / calls


def _call(rank: Rank, question: Question) -> tuple[Callable[[], Any] | None, bool]:
    """Return what one call of a question is (None where this rank has no part in it), and whether its memory was there."""
    makers = {"gemm": _gemm, "attention": _attention, "stream": _stream, "launch": _launch, "issue": _issue, "p2p": _p2p}
    try:
        return makers.get(question["op"], _collective)(rank, question), True
    except rank.torch.OutOfMemoryError:
        return None, False


def _gemm(rank: Rank, q: Question) -> Callable[[], Any]:
    torch = rank.torch
    x = torch.randn(q["m"], q["k"], dtype=rank.dtype, device=rank.device)
    w = torch.randn(q["n"], q["k"], dtype=rank.dtype, device=rank.device)
    out = torch.empty(q["m"], q["n"], dtype=rank.dtype, device=rank.device)
    return lambda: torch.mm(x, w.t(), out=out)


def _attention(rank: Rank, q: Question) -> Callable[[], Any]:
    torch = rank.torch
    heads = (q["heads"], q["kv_heads"], q["kv_heads"])
    shapes = [(q["batch"], n, q["length"], q["head_dim"]) for n in heads]
    inputs = [torch.randn(s, dtype=rank.dtype, device=rank.device, requires_grad=q.get("backward", False)) for s in shapes]
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q["heads"] != q["kv_heads"]
    if not q.get("backward"):
        return lambda: attend(*inputs, is_causal=True, enable_gqa=grouped)
    out = attend(*inputs, is_causal=True, enable_gqa=grouped)
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _stream(rank: Rank, q: Question) -> Callable[[], Any]:
    """Adding two tensors: two reads and a write of each element."""
    torch = rank.torch
    a, b, out = (torch.ones(q["bytes"] // (3 * rank.dtype.itemsize), dtype=rank.dtype, device=rank.device) for _ in range(3))
    return lambda: torch.add(a, b, out=out)


def _issue(rank: Rank, q: Question) -> Callable[[], Any]:  # noqa: ARG001
    """Giving the device a kernel that does next to nothing, from Python."""
    one = rank.torch.zeros(1, device=rank.device)
    return lambda: one.add_(1.0)


def _launch(rank: Rank, q: Question) -> Callable[[], Any]:
    """`repeats` such kernels one after another: replayed from a graph where the device has them, so that the host is out of it."""
    torch = rank.torch
    one = torch.zeros(1, device=rank.device)

    def kernels() -> None:
        for _ in range(q["repeats"]):
            one.add_(1.0)

    if not rank.cuda:
        return kernels
    kernels()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    return lambda: graph.replay()


def _collective(rank: Rank, q: Question) -> Callable[[], Any] | None:
    torch, dist = rank.torch, rank.torch.distributed
    found = rank.groups[q["members"], q.get("stride", 1)]
    if found is None:
        return None
    group = found[0]
    each = max(1, q["bytes"] // (rank.dtype.itemsize * q["members"]))
    whole, part = (torch.zeros(each * n, dtype=rank.dtype, device=rank.device) for n in (q["members"], 1))
    if q["op"] == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if q["op"] == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if q["op"] == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    other = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(other, whole, group=group)


def _p2p(rank: Rank, q: Question) -> Callable[[], Any] | None:
    """A message there and one back: twice the time of one."""
    dist = rank.torch.distributed
    found = rank.groups[2, q.get("stride", 1)]
    if found is None:
        return None
    group, (first, second) = found
    buffer = rank.torch.zeros(max(1, q["bytes"] // rank.dtype.itemsize), dtype=rank.dtype, device=rank.device)

    def sends() -> None:
        dist.send(buffer, second, group=group)
        dist.recv(buffer, second, group=group)

    def answers() -> None:
        dist.recv(buffer, first, group=group)
        dist.send(buffer, first, group=group)

    return sends if rank.rank == first else answers


def _device_name(rank: Rank) -> str:
    if rank.cuda:
        return str(rank.torch.cuda.get_device_name(rank.device))
    from tuner.launch.detection import read_machine

    return f"{read_machine().cpu.model or 'CPU'}, one thread"


def run(precision: str, budget_s: float, tell: Callable[[str], None]) -> list[Timing]:
    """Return the timings of this machine (rank 0 has them all); tell: takes a line for each question asked, rank 0 only."""
    rank = joined(precision)
    words = next(name for name, dtype in DTYPES.items() if rank.dtype == getattr(rank.torch, dtype))
    asked = questions(rank.world, rank.local, accelerated=rank.cuda, precision=words)
    rank = with_groups(rank, asked)
    device, parent, started = _device_name(rank), os.getppid(), time.monotonic()
    found: list[Timing] = []
    for number, question in enumerate(asked):
        if not rank.agreed(time.monotonic() - started < budget_s) or os.getppid() != parent:
            break
        timing = measured(rank, question)
        if rank.rank == 0:
            if timing is not None:
                found.append(timing.model_copy(update={"device": device}))
            tell(json.dumps({"done": number + 1, "of": len(asked)}) + ("\n" + timing_line(found[-1]) if timing else ""))
    if rank.world > 1:
        rank.torch.distributed.destroy_process_group()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuner.launch.microbench", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="file for the records; without it they go to stdout as they come")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="", help="bf16 on accelerators, fp32 on CPUs")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="no question is begun after as long (60)")
    options = parser.parse_args(arguments)

    def tell(line: str) -> None:
        (sys.stdout if options.output is None else sys.stderr).write(line + "\n")
        sys.stdout.flush()

    found = run(options.precision, options.budget, tell)
    if options.output is not None and found:
        from tuner.files import write

        write(options.output, timing_lines(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
