"""Logs of nccl-tests as timings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.terminal import ROOT
from tuner.errors import SpecError
from tuner.launch.logs.nccl_tests import parse_nccl_log, read_nccl_log

LOGS = ROOT / "tests/fixtures/nccl"


@pytest.mark.parametrize(
    ("name", "op", "members", "nodes", "rows", "wrong"),
    [
        ("all_reduce-8.log", "all_reduce", 8, 1, 48, 0),
        ("all_reduce-16-mpirun.log", "all_reduce", 16, 2, 48, 0),
        ("alltoall-old.log", "all_to_all", 8, 1, 15, 1),  # no root column, in place N/A, one row with wrong results
    ],
)
def test_tables(name: str, op: str, members: int, nodes: int, rows: int, wrong: int) -> None:
    timings, left_out = read_nccl_log(LOGS / name)
    assert (len(timings), left_out) == (rows, wrong)
    assert {(t.op, t.members, t.nodes, t.device) for t in timings} == {(op, members, nodes, "NVIDIA H100 80GB HBM3")}
    assert {t.source for t in timings} == {name}


def test_both_columns_are_read_in_seconds() -> None:
    timings, _ = read_nccl_log(LOGS / "all_reduce-8.log")
    first, second = (t for t in timings if t.bytes == 2**20)
    line = next(line for line in (LOGS / "all_reduce-8.log").read_text().splitlines() if line.split()[:1] == ["1048576"])
    assert (first.seconds, second.seconds) == (float(line.split()[5]) * 1e-6, float(line.split()[9]) * 1e-6)


HEAD = "# nThread 1 nGpus 4 minBytes 8\n"
ROW = "  1048576  262144  float  sum  10094  50.0  87.5  0e+00  10141  50.0  87.5  0e+00\n"


def test_whole_microseconds_of_an_old_release_are_no_root() -> None:
    timings, _ = parse_nccl_log(HEAD + ROW, "logs/all_reduce_perf.txt")
    assert [t.seconds for t in timings] == [pytest.approx(10094e-6), pytest.approx(10141e-6)]
    assert {(t.members, t.nodes) for t in timings} == {(4, 1)}


def test_several_tests_in_one_log_and_those_without_a_use() -> None:
    text = f"{HEAD}$ all_gather_perf -g 4\n{ROW}$ broadcast_perf -g 4\n{ROW}$ reduce_scatter_perf -g 4\n\x1b[1m{ROW}"
    timings, _ = parse_nccl_log(text, "all.log")
    assert [t.op for t in timings] == ["all_gather"] * 2 + ["reduce_scatter"] * 2


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (HEAD + ROW, "run.log", "does not say which collective it measures"),
        (ROW, "all_reduce.log", "does not say how many ranks took part"),
        ("hello\n", "all_reduce.log", "holds no table of nccl-tests"),
        (HEAD + ROW.replace("0e+00", "3e+02"), "all_reduce.log", "all with wrong results"),
        (HEAD + ROW[:40], "all_reduce.log", "holds no table"),  # cut off
        ("", "all_reduce.log", "holds no table"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_nccl_log(text, name)


def test_a_missing_file_is_said() -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_nccl_log(Path("no-such.log"))
