"""What microbenchmarks ask, and that they run: two processes of gloo, for a few seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.terminal import ROOT
from tuner.errors import InfrastructureError
from tuner.launch import measure as module
from tuner.launch.measure import measure
from tuner.launch.questions import COLLECTIVES, questions

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def test_a_short_budget_leaves_some_of_each_kind() -> None:
    asked = questions(4, 4, accelerated=False, precision="fp32")
    assert {q["op"] for q in asked} == {"gemm", "attention", "stream", "launch", "issue", "p2p", *COLLECTIVES}
    assert {q["op"] for q in asked[:12]} >= {"gemm", "attention", "issue", "all_reduce"}
    assert all(q["precision"] == "fp32" for q in asked)
    assert len({json.dumps(q, sort_keys=True) for q in asked}) == len(asked)


def test_one_process_has_no_links() -> None:
    assert not {q["op"] for q in questions(1, 1, accelerated=True, precision="bf16")} & {"p2p", *COLLECTIVES}


def test_groups_across_nodes() -> None:
    asked = questions(16, 8, accelerated=True, precision="bf16")
    groups = {(q["members"], q["stride"]): q["nodes"] for q in asked if q["op"] == "all_reduce"}
    assert groups == {(2, 1): 1, (4, 1): 1, (8, 1): 1, (16, 1): 2, (2, 8): 2}
    assert {(q["stride"], q["nodes"]) for q in asked if q["op"] == "p2p"} == {(1, 1), (8, 2)}


@needs_torch
def test_two_processes_measure_every_kind() -> None:
    told: list[tuple[object, ...]] = []
    timings, asked = measure(2, 6.0, progress=lambda *words: told.append(words))
    assert asked == len(questions(2, 2, accelerated=False, precision="fp32"))
    assert {t.op for t in timings} >= {"gemm", "attention", "issue", "all_reduce"}
    assert all(t.seconds > 0 and t.ranks == 2 and t.precision == "fp32" for t in timings)
    assert {t.members for t in timings if t.op in COLLECTIVES} == {2}
    assert told[0] == ("starting torch",)
    assert told[-1][0] == "measuring operators and links:"


@needs_torch
def test_alone_and_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "tuner.launch.microbench", "-o", str(path), "--budget", "1", "--precision", "bf16"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows
    assert {row["precision"] for row in rows} == {"bf16"}


@needs_torch
def test_processes_that_fail_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()  # comes before the installed one
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('a torch that does not load')\n")
    monkeypatch.setattr(module, "_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    with pytest.raises(InfrastructureError, match="the microbenchmarks ended with exit code"):
        measure(1, 5.0)


def _children(parent: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.add(int(path.parent.name))
    return found


@needs_torch
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_interrupt_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def interrupt(words: str, done: int = 0, _of: int = 0) -> None:
        if done >= 3:
            (agent,) = (pid for pid in _children(os.getpid()) if "torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_text())
            seen.update({agent} | _children(agent))
            raise KeyboardInterrupt(words)

    with pytest.raises(KeyboardInterrupt):
        measure(2, 30.0, progress=interrupt)
    assert len(seen) == 3
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in seen):
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {[pid for pid in seen if Path(f'/proc/{pid}').exists()]}")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InfrastructureError, match="needs torch"):
        measure(2, 5.0)
