"""The workload as a runner starts it: a trial folder in, lines out."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.layouts import Layout, torchrun
from tuner.launch import workload
from tuner.launch.logs.formats import WORKLOAD
from tuner.launch.outcome import Ending, result_of
from tuner.launch.short_steps import ShortStep, at_pinned_batch
from tuner.launch.trial import TRIAL, Trial, json_text

if TYPE_CHECKING:
    from pathlib import Path


RINGS = (("p2p", "fp32"), ("p2p", "bf16"), ("all_gather", "fp32"))


def trial_in(folder: Path, layout: Layout, **changes: Any) -> None:
    trial = Trial(number=1, job=layout.job, plan=layout.plan, folder=folder, steps=3, warmup=1, **changes)
    (folder / TRIAL).write_text(json_text(trial.record()))


def lines(text: str, kind: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(f"{kind} ")) for line in text.splitlines() if line.startswith(f"{kind} ")]


def test_a_trial_runs_from_its_folder(tmp_path: Path) -> None:
    trial_in(tmp_path, Layout(ranks=2, knobs="pp=2,recompute=full:1"), microbatches=4)
    done = torchrun(2, "tuner.launch.workload", "--trial", str(tmp_path))
    assert done.returncode == 0, done.stderr
    steps, ranks, versions = (lines(done.stdout, kind) for kind in ("tuner-step", "tuner-rank", "tuner-versions"))
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["seconds"] > 0 and 3 < step["loss"] < 6 for step in steps)
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    assert all(rank["host_peak_bytes"] > 10**7 and rank["compute_s"] > 0 for rank in ranks)
    assert set(ranks[0]) == {"rank", "max_allocated_bytes", "max_reserved_bytes", "host_peak_bytes", "compute_s"}
    assert [step["microbatches"] for step in steps] == [4, 4, 4]
    assert len(versions) == 1
    assert {"tuner", "python", "torch"} <= set(versions[0])


def test_short_steps_say_what_the_whole_step_takes(tmp_path: Path) -> None:
    """The median of whole steps and the line through the medians of short ones, of one plan in two launches; not their times."""
    layout = Layout(ranks=2, knobs="pp=2", global_batch=64)
    pinned = int(layout.plan.microbatches(2, 64))
    found, medians = [], []
    for name, short in (("whole", None), ("short", (2, 4))):
        folder = tmp_path / name
        folder.mkdir()
        trial = Trial(number=1, job=layout.job, plan=layout.plan, folder=folder, steps=12, warmup=4, short=short)
        (folder / TRIAL).write_text(json_text(trial.record()))
        done = torchrun(2, "tuner.launch.workload", "--trial", str(folder))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        found.append(result_of(trial, Ending(exit_code=0), lines, WORKLOAD))
        steps = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("tuner-step ")]
        of = {count: [s["seconds"] for s in steps if s["step"] > 4 and s["microbatches"] == count] for count in short or (pinned,)}
        medians.append({count: median(seconds) for count, seconds in of.items()})
    whole, line = found
    assert [(result.end, result.steps) for result in found] == [("ok", 8), ("ok", 8)]
    assert (whole.basis, line.basis) == ("", f"steps of 2 and 4 of {pinned} micro batches")
    assert whole.step_s == pytest.approx(medians[0][pinned])
    points = [ShortStep(microbatches=count, seconds=seconds) for count, seconds in medians[1].items()]
    assert line.step_s == pytest.approx(at_pinned_batch(points, pinned).seconds)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    monkeypatch.setattr("sys.argv", ["workload", "--trial", str(folder)])
    assert workload.main() == workload.REFUSED
    return capsys.readouterr().out.splitlines()


def test_a_refusal_is_one_line_each(tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trial_in(tmp_path, Layout(ranks=2, knobs="tp=2,offload=optimizer,cuda_graphs=1"))
    assert refused(capsys, alone, tmp_path) == [
        "tuner-refused: offload: the workload has none",
        "tuner-refused: cuda_graphs: the workload has none",
    ]


def test_only_the_first_rank_says_it(tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone.setenv("RANK", "1")
    trial_in(tmp_path, Layout(ranks=2, knobs="offload=optimizer"))
    assert refused(capsys, alone, tmp_path) == []


def test_a_count_of_processes_that_is_not_the_jobs(tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trial_in(tmp_path, Layout(ranks=4, knobs="tp=2"))
    assert refused(capsys, alone, tmp_path) == ["tuner-refused: the job has 4 accelerators, but torchrun started 2 processes"]


def test_a_start_without_torchrun(tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone.delenv("MASTER_ADDR")
    trial_in(tmp_path, Layout(ranks=1, knobs="tp=1"))
    assert refused(capsys, alone, tmp_path)[0].startswith("tuner-refused: start it by torchrun")


def test_a_ring_in_fp32_is_refused_on_gpus(tmp_path: Path) -> None:
    layouts = [Layout(ranks=2, knobs=f"cp=2,cp_kind={kind}", precision=precision) for kind, precision in RINGS]
    trials = [Trial(number=1, job=layout.job, plan=layout.plan, folder=tmp_path) for layout in layouts]
    assert [bool(workload._about_gpus(trial)) for trial in trials] == [True, False, False]


def test_a_folder_without_a_trial(tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = refused(capsys, alone, tmp_path)
    assert said.startswith("tuner-refused: ")
    assert "no such file" in said
