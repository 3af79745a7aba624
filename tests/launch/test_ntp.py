"""Replicas of different tensor-parallel degree train the model that one process trains, also when ranks are killed under way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.ntp_worker import STEPS, Case
from tests.terminal import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Answer = Callable[[Case], dict[str, Any]]

EXACT = 1e-12
CASES = [
    Case(degrees=(4, 3), samples=(3, 2)),
    Case(degrees=(4, 3), samples=(3, 2), overlap=False),
    Case(degrees=(4, 3), samples=(3, 2), sequence_parallel=True),
    Case(degrees=(4, 3), samples=(3, 2), model="split", sequence_parallel=True, clip=0.5),
    Case(degrees=(4, 3), samples=(3, 2), model="gpt", micro_batch=1, sequence_parallel=True),
    Case(degrees=(4, 3, 2), samples=(3, 2, 1)),
    Case(degrees=(4, 3, 2), samples=(3, 2, 1), model="split", clip=0.5),
    Case(degrees=(3, 5), samples=(1, 4), model="split"),
    Case(degrees=(2, 1), samples=(3, 2), sequence_parallel=True),
    Case(degrees=(4, 4), samples=(3, 2)),
    Case(degrees=(8, 7), samples=(3, 2), model="wide"),
    Case(degrees=(8, 7), samples=(3, 2), model="wide", sequence_parallel=True, micro_batch=1),
]
SINGLE = Case(degrees=(4, 3), samples=(3, 2), arithmetic="fp32")
HALF = Case(degrees=(4, 3), samples=(3, 2), arithmetic="bf16", sequence_parallel=True)
BROKEN = [
    Case(degrees=(4, 2), samples=(3, 2), broken="order"),
    Case(degrees=(4, 3), samples=(3, 2), broken="way back"),
    Case(degrees=(4, 3), samples=(3, 2), sequence_parallel=True, broken="partial sums"),
]
LOST = [
    Case(degrees=(4, 4), samples=(3, 2), steps=4, lost=((6, 2, "backward"),)),
    Case(degrees=(4, 4), samples=(3, 2), steps=4, lost=((1, 2, "update"),), sequence_parallel=True),
    Case(degrees=(4, 4), samples=(3, 2), steps=4, model="split", lost=((7, 2, "commit"),)),
    Case(degrees=(4, 4), samples=(3, 2), steps=4, lost=((1, 2, "backward"), (6, 2, "backward"))),
    Case(degrees=(4, 3), samples=(3, 2), steps=4, lost=((5, 1, "backward"), (0, 3, "update"))),
]
NOT_ENOUGH = Case(degrees=(2, 2), samples=(3, 2), steps=3, lost=((0, 2, "backward"), (2, 2, "backward")))


def run_all(cases: list[Case], folder: Path) -> tuple[dict[str, list[dict[str, Any]]], str]:
    wanted, answers = folder / "cases.json", folder / "answers.jsonl"
    wanted.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    answers.touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "tests.launch.ntp_worker", str(wanted), str(answers)]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
    found: dict[str, list[dict[str, Any]]] = {str(case): [] for case in cases}
    for record in map(json.loads, answers.read_text().splitlines()):
        found[record["case"]].append(record)
    return found, said


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """The largest differences of a case's ranks; the first question runs all cases, forked from one process."""
    found, said = {}, []

    def ask(case: Case) -> dict[str, Any]:
        if not said:
            records, log = run_all([*CASES, SINGLE, HALF, *BROKEN, *LOST, NOT_ENOUGH], tmp_path_factory.mktemp("ntp-"))
            found.update(records)
            said.append(log)
        ranks = [record for record in found[str(case)] if record["rank"] >= 0]
        errors = [record["error"] for record in ranks if "error" in record]
        assert not errors, errors[0]
        ends = [record["code"] for record in found[str(case)] if record["rank"] < 0]
        assert ranks or ends, said[0][-6000:]
        names = ranks[0]["worst"] if ranks else ()
        worst = {name: max(record["worst"][name] for record in ranks) for name in names}
        return {"ranks": len(ranks), "degrees": ranks[0].get("degrees") if ranks else None, "said": said[0], "ends": ends, **worst}

    return ask


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_parameters_are_those_of_one_process(answer: Answer, case: Case) -> None:
    got = answer(case)
    assert case.steps == STEPS
    assert got["ranks"] == sum(case.degrees)
    for name in ("gradients", "parameters", "losses", "norms"):
        assert got[name] < EXACT, name


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_what_is_left_out_is_noticed(answer: Answer, case: Case) -> None:
    assert answer(case)["gradients"] > 1e-4
    assert answer(case)["parameters"] > 1e-4


def test_single_precision_is_near(answer: Answer) -> None:
    got = answer(SINGLE)
    assert 1e-12 < got["gradients"] < 1e-5
    assert got["losses"] < 1e-5


def test_sixteen_bits_train_nearly_the_same_model(answer: Answer) -> None:
    got = answer(HALF)
    assert 1e-5 < got["losses"] < 3e-2
    assert got["parameters"] < 1e-2


@pytest.mark.parametrize("case", LOST, ids=str)
def test_killed_ranks_are_gone_on_without_and_nothing_is_lost(answer: Answer, case: Case) -> None:
    """In place: the survivors' processes have run from the first step to the last, and no file was read."""
    got = answer(case)
    born = len(case.lost)
    assert got["ends"] == [0]
    assert got["ranks"] == sum(case.degrees) - born
    assert sum(got["degrees"]) == got["ranks"]
    assert got["parameters"] < EXACT
    assert got["gradients"] < EXACT


def test_units_that_died_everywhere_end_the_run_with_the_reason(answer: Answer) -> None:
    got = answer(NOT_ENOUGH)
    assert got["ends"] == [4]
    assert got["ranks"] == 0
    assert "tuner-failed: rank 1 could not go on without [0, 2]: unit 0 was on lost ranks alone" in got["said"]
