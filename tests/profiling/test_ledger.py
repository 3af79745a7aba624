"""The ledger: lines that last, once each, whatever stands around them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.profiling.searches import candidates, ok
from tuner.errors import InfrastructureError
from tuner.launch.trial import Result
from tuner.profiling.ledger import Entry, append, key_of, read, tells

PLAN = {"tp": 2}


def entry(number: int = 0, **more: object) -> Entry:
    fields: dict[str, object] = {"key": "k", "study": "s", "number": number, "plan": PLAN, "result": ok(1.5, started=10.0, ended=12.0)}
    return Entry(**(fields | more))  # type: ignore[arg-type]


def test_entries_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    assert read(path) == []
    kept = [entry(0, said_s=1.0, low_s=0.5, high_s=2.0), entry(1, reference=True, key="other")]
    assert [append(path, one) for one in kept] == [True, True]
    assert read(path) == kept and read(path, {"other"}) == kept[1:]


def test_a_run_stands_there_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert append(path, entry()) and not append(path, entry(said_s=3.0))
    assert append(path, entry(study="another")) and append(path, entry(result=ok(1.5, started=11.0)))
    assert len(read(path)) == 3


@pytest.mark.parametrize(
    "junk",
    [b'{"key": "k", "numb', b"\xff\xfe\n", b"[1, 2]\n", b'{"key": 1, "result": {}}\n', b'{"key":"k","result":{"end":"x"}}\n', b"[" * 5000],
)
def test_lines_that_are_no_entries_are_passed_over(junk: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append(path, entry(0))
    with path.open("ab") as file:
        file.write(junk)
    assert [one.number for one in read(path)] == [0]
    append(path, entry(1))
    assert [one.number for one in read(path)] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"study": []}, {"study": None}, {"number": "0"}, {"number": True}, {"number": 0.0}, {"number": -2}, {"plan": []}, {"reference": 1},
        {"said_s": "x"}, {"predicted_s": float("nan")}, {"low_s": [1.0]}, {"high_s": 10**400}, {"more": 1},
    ],
)  # fmt: skip
def test_a_field_of_another_type_makes_no_entry(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (entry(0).record() | change, entry(1).record())))
    assert [one.number for one in read(path)] == [1]
    assert append(path, entry(2)) and [one.number for one in read(path)] == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": 0.0}, {"step_s": -1.0}, {"step_s": 1e-10}, {"step_s": float("nan")}, {"step_s": float("inf")}, {"step_s": "1"},
        {"step_s": True}, {"step_s": 1e300}, {"started": []}, {"started": "1"}, {"memory_bytes": True}, {"nodes": 3}, {"end": []},
    ],
)  # fmt: skip
def test_a_result_with_a_figure_that_is_none_makes_no_entry(change: dict[str, object], tmp_path: Path) -> None:
    path, record = tmp_path / "m.jsonl", entry(0).record()
    path.write_text(json.dumps(record | {"result": record["result"] | change}) + "\n")
    assert read(path) == []


def test_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    threads = [threading.Thread(target=lambda: [append(path, entry(number)) for number in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.number for one in read(path)) == list(range(20))


def test_what_cannot_be_kept_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfrastructureError, match="cannot be kept"):
        append(tmp_path / "file" / "m.jsonl", entry())
    with pytest.raises(InfrastructureError, match="cannot be read"):
        read(tmp_path)


def test_a_key_is_of_what_is_measured() -> None:
    of = candidates(2)
    job = of.job
    key = key_of(job, of.plans[0], "v1")
    assert key == key_of(job.replace(tokens=10**12), of.plans[0], "v1")
    others = {key_of(job, of.plans[1], "v1"), key_of(job, of.plans[0], "v2"), key_of(job.replace(seq_len=4096), of.plans[0], "v1")}
    assert len(others | {key}) == 4


def test_what_says_something_of_a_plan() -> None:
    ends = {"ok": True, "oom": True, "failed": True, "infrastructure": False, "stopped": True}
    assert {end: tells(Result(end=end, versions={})) for end in ends} == ends  # type: ignore[arg-type]
    assert not tells(Result(end="stopped", reason="interrupted", step_s=1.0, versions={}))
