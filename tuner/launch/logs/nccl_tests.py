"""Logs of nccl-tests and rccl-tests (all_reduce_perf and its siblings): their tables as timings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem
from tuner.load import read_text
from tuner.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BYTES = 64 * 2**20
OPS = {
    "all_reduce_perf": "all_reduce", "all_gather_perf": "all_gather", "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all", "sendrecv_perf": "p2p",
}  # fmt: skip
_PERF = re.compile(r"\b(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv)(?=_perf|[-_. ]|$)", re.IGNORECASE)
_OTHER = re.compile(r"\b(broadcast|reduce|gather|scatter|hypercube)_perf\b")
_NOISE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|^\[\d+,\d+\](?:<\w+>)?:|^\s*\d+:\s(?=\s*[#\d])")
_RANK = re.compile(r"#?\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_THREADS = re.compile(r"nThreads?\s+(\d+)\s+nGpus\s+(\d+)")
# size, count, type, redop, then root (in newer releases), time, algbw, busbw and errors, out of place and in place
_CELL = r"(?:-?[\d.]+(?:e[+-]?\d+)?|N/A)"
_ROW = re.compile(rf"\s*(\d+)\s+\d+\s+[a-z]\w*\s+\w+\s+({_CELL}(?:\s+{_CELL}){{7,8}})\s*$")
_HALVES = 8


@dataclass(slots=True)
class _State:
    """What the lines so far say of the table that follows them. op None: a collective that the model has no use for."""

    op: str | None
    ranks: dict[int, str] = field(default_factory=dict)
    device: str = ""
    counted: int = 0
    in_table: bool = False

    @property
    def members(self) -> int:
        return len(self.ranks) if len(self.ranks) > 1 else max(self.counted, len(self.ranks))

    @property
    def nodes(self) -> int:
        return max(len(set(self.ranks.values())), 1)


def read_nccl_log(path: Path) -> tuple[list[Timing], int]:
    """Return the timings of a log, out of place and in place, and how many halves of rows had wrong results. Raises SpecError."""
    return parse_nccl_log(read_text(path, MOST_BYTES), str(path))


def parse_nccl_log(text: str, where: str) -> tuple[list[Timing], int]:
    """Return the timings of a log's text. The name of the test is looked for in its lines, then in the file's name."""
    state = _State(_named(Path(where).name) or "")
    found: list[Timing] = []
    wrong = 0
    for line in text.splitlines():
        clean = _NOISE.sub("", _NOISE.sub("", line))
        row = _ROW.match(clean)
        if row is None:
            _note(state, clean)
        elif state.op is not None:
            timings, bad = _timings(state, int(row[1]), row[2].split()[-_HALVES:], where)
            found += timings
            wrong += bad
    if not found:
        rule = "holds no table of nccl-tests" if not wrong else f"holds {wrong} rows, all with wrong results"
        raise one_problem(where, "", "", rule, f"the output of {', '.join(OPS)}")
    return found, wrong


def _named(text: str) -> str | None:
    match = _PERF.search(text)
    if match is None:
        return None
    plain = match[1].lower().replace("_", "")
    return next(op for name, op in OPS.items() if name.removesuffix("_perf").replace("_", "") == plain)


def _note(state: _State, line: str) -> None:
    """Take what a line outside the table says: the test's name, a rank, the number of devices."""
    if rank := _RANK.match(line):
        if state.in_table:
            state.ranks, state.in_table = {}, False
        if rank[2] in (None, "0"):
            state.ranks[int(rank[1])] = rank[3]
        state.device = rank[4].strip() or state.device
    elif counts := _THREADS.search(line):
        state.counted = int(counts[1]) * int(counts[2])
    elif "_perf" in line:
        if _OTHER.search(line):
            state.op = None
        elif name := _named(line):
            state.op = name


def _timings(state: _State, size: int, cells: list[str], where: str) -> tuple[list[Timing], int]:
    state.in_table = True
    if not state.op or state.members < 2:
        what = "which collective it measures" if not state.op else "how many ranks took part"
        hint = "name the file after the test, like all_reduce_perf.log" if not state.op else "keep its lines that begin with # Rank"
        raise one_problem(where, "", "", f"does not say {what}", hint)
    found = list(_halves(cells))
    fields: dict[str, Any] = {"op": state.op, "bytes": size, "device": state.device, "source": Path(where).name, "nodes": state.nodes}
    fields |= {"members": 2 if state.op == "p2p" else state.members, "ranks": state.members}
    right = [us for us, errors in found if errors == 0 and us > 0 and size > 0]
    return [Timing(**fields, seconds=us * 1e-6) for us in right], sum(errors > 0 for _, errors in found)


def _halves(cells: list[str]) -> Iterator[tuple[float, float]]:
    """Yield (microseconds, wrong elements) out of place and in place; a half that was not measured says N/A."""
    for part in (cells[:4], cells[4:]):
        if len(part) >= 3 and part[0] != "N/A":
            errors = float(part[3]) if len(part) > 3 and part[3] != "N/A" else 0.0
            yield float(part[0]), errors if errors > 1e-3 else 0.0  # old releases print the largest difference
