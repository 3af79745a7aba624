"""Trainers' logs as measured runs: what they are of is said once or for each, and held against what they say themselves."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tuner
from tests.terminal import run
from tests.test_cli import ROW
from tuner import presets
from tuner.errors import SpecError
from tuner.launch.logs import FORMATS
from tuner.logged import LOGS_OF, WITHOUT_LOGS, kind_of, read_logs

LOGS = Path(__file__).parent / "fixtures/logs"
JOB: dict[str, Any] = {"model": "llama3-8b", "cluster": "h100x64", "seq_len": 8192, "global_batch": 128}
OPTIONS = ("-m", "llama3-8b", "-c", "h100x64", "-s", "8192", "-b", "128")
KEYS = (
    "log",
    "current",
    "plan",
    "model",
    "cluster",
    "seq_len",
    "global_batch",
    "framework",
    "release",
    "precision",
    "gpus",
    "task",
    "tokens",
)
PLANS = ("tp=1,zero=1,recompute=full", "tp=2,zero=1", "tp=2,pp=2,zero=1", "tp=4,zero=1", "tp=4,pp=2,zero=1", "tp=8,zero=1")


def megatron(path: Path, step_s: float, steps: int = 12, batch: int = 128) -> Path:
    """A log whose steps after the third take 0.99, 1 and 1.01 times this long, and whose first takes three times as long."""
    lines = []
    for n in range(1, steps + 1):
        ms = 1e3 * step_s * (3 if n == 1 else 1 + 0.01 * (n % 3 - 1))
        lines.append(
            f" [2026-11-03 07:19:37] iteration {n:8d}/      {steps} | consumed samples: {batch * n:12d} | elapsed time per iteration (ms): "
            f"{ms:.1f} | global batch size:   {batch} | lm loss: 1.0E+01 | number of nan iterations:   0 |"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Logs of six layouts on a machine that takes 1.35 times what is predicted, one that ran out of memory, and their runs file."""
    entries = []
    for i, plan in enumerate(PLANS):
        predicted = tuner.estimate(**JOB, plan=plan).cost.step_s
        megatron(tmp_path / f"run{i}.log", 1.35 * predicted)
        entries.append({"log": f"run{i}.log", "current": plan})
    (tmp_path / "oom.log").write_text(
        "  File megatron/training/training.py\n[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.\n"
    )
    entries.append({"log": "oom.log", "current": {"tp": 1, "recompute": "none"}})
    (tmp_path / "runs.yaml").write_text(json.dumps(JOB | {"runs": entries}))  # JSON is YAML
    return tmp_path


def test_a_handful_of_logs_makes_a_calibration(folder: Path) -> None:
    answer = tuner.calibrate(folder / "runs.yaml", name="ours")
    record = answer.record()
    assert (record["framework"], record["rows"], record["plans"], record["helps"]) == ("megatron-lm", 6, 6, True)
    shipped, own = record["tried"]
    assert shipped["median_abs_err"] == pytest.approx(1 - 1 / 1.35, abs=0.01)
    assert own["median_abs_err"] < 0.02
    first = record["logs"][0]
    predicted = tuner.estimate(**JOB, plan=PLANS[0]).cost.step_s
    assert first["launcher"] == "megatron-lm"
    assert first["step_s"] == pytest.approx(1.35 * predicted, rel=1e-3)
    assert first["predicted_s"] == pytest.approx(predicted, rel=1e-9)
    assert (first["steps"], first["spread_s"]) == (9, pytest.approx(0.01 * 1.35 * predicted, rel=0.01))
    assert record["skipped"] == [{"id": str(folder / "oom.log"), "why": record["logs"][6]["why"]}]
    assert record["logs"][6]["why"].startswith("ran out of memory")
    file = folder / "ours.yaml"
    file.write_text(answer.text)
    after = tuner.estimate(**JOB, plan=PLANS[3], calibration=str(file)).cost.step_s
    assert after == pytest.approx(1.35 * tuner.estimate(**JOB, plan=PLANS[3]).cost.step_s, rel=0.03)


def test_a_handful_that_teaches_nothing_is_declined(folder: Path) -> None:
    for i, plan in enumerate(PLANS):
        megatron(folder / f"run{i}.log", tuner.estimate(**JOB, plan=plan).cost.step_s)
    record = tuner.calibrate(folder / "runs.yaml").record()
    assert (record["helps"], record["too_few"], record["way"]) == (False, False, "shipped")


def test_fewer_than_three_layouts_are_shown_and_declined(folder: Path) -> None:
    record = tuner.calibrate([folder / "run1.log", folder / "run2.log"], **JOB, plan=PLANS[1]).record()  # two logs of one plan
    assert (record["rows"], record["plans"], record["helps"], record["too_few"]) == (2, 1, False, True)
    assert [way["way"] for way in record["tried"]] == ["shipped"]
    assert record["logs"][0]["predicted_s"] == pytest.approx(record["logs"][0]["step_s"] / 1.35, rel=1e-3)


def test_command_line_and_function_say_the_same(folder: Path) -> None:
    ours = tuner.calibrate(folder / "runs.yaml").record()
    assert json.loads(run("calibrate", str(folder / "runs.yaml"), "--json").stdout) == json.loads(json.dumps(ours))
    theirs = run("calibrate", "run1.log", *OPTIONS, "--current", PLANS[1], "--json", cwd=folder)
    assert theirs.returncode == 1
    assert json.loads(theirs.stdout)["logs"][0]["plan"] == PLANS[1]


@pytest.mark.parametrize("columns", ["60", "120"])
def test_the_report_fits_the_page(folder: Path, columns: str) -> None:
    found = run("calibrate", "runs.yaml", "-o", "ours.yaml", cwd=folder, COLUMNS=columns)
    assert found.returncode == 0, found.stderr
    assert all(len(line) <= int(columns) for line in found.stdout.splitlines())
    assert "run0.log" in found.stdout
    assert "left out: oom.log: ran out of memory" in found.stdout
    assert "kept: own runs alone" in found.stdout
    assert found.stderr == "wrote ours.yaml\n"
    assert (folder / "ours.yaml").read_text().startswith("# Written by `tuner calibrate`")


def test_what_a_run_says_wins_over_the_top_and_the_command_line_over_both(folder: Path) -> None:
    megatron(folder / "half.log", 1.0, batch=64)
    entries = [{"log": "half.log", "current": "tp=2", "global_batch": 64}, {"log": "run0.log"}]
    (folder / "some.yaml").write_text(json.dumps(JOB | {"seq_len": 4096, "current": "tp=4", "runs": entries}))
    rows, _ = read_logs([folder / "some.yaml"], {"seq_len": "2k"})
    assert [(row.job.global_batch, row.job.seq_len, row.plan.tp) for row in rows] == [(64, 2048, 2), (128, 2048, 4)]
    assert rows[0].framework == "megatron-lm"


def test_runs_of_equal_jobs_share_one_job(folder: Path) -> None:
    rows, _ = read_logs([folder / "runs.yaml"], {})
    assert len({id(row.job) for row in rows}) == 1


def test_a_job_file_says_what_logs_are_of(folder: Path) -> None:
    (folder / "job.yaml").write_text(json.dumps(JOB | {"current": PLANS[1], "tokens": "15T"}))
    rows, _ = read_logs([folder / "run1.log"], {"job": str(folder / "job.yaml")})
    assert (rows[0].plan.tp, rows[0].job.tokens) == (2, None)


def test_a_framework_that_nobody_names_is_that_of_the_log(tmp_path: Path) -> None:
    shutil.copy(LOGS / "torchtitan.log", tmp_path)
    shutil.copy(LOGS / "workload.log", tmp_path)
    job = JOB | {"global_batch": 64}
    rows, logs = read_logs([tmp_path / "torchtitan.log"], {**job, "plan": "tp=2,zero=3"})
    assert rows[0].job.framework.name == "torchtitan"
    assert rows[0].step_s == pytest.approx((8192 / 4096 + 8192 / 4100) / 2)
    assert (rows[0].memory_kind, rows[0].memory_bytes) == ("reserved", pytest.approx(52.6 * 2**30))
    assert logs[0].launcher == "torchtitan"
    rows, _ = read_logs([tmp_path / "workload.log"], {**job, "plan": "tp=2"})
    assert rows[0].job.framework.name == "generic"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("megatron-lm", {"framework": "torchtitan"}, "is a log of megatron-lm; the run's framework is torchtitan"),
        ("megatron-lm", {"framework": "internevo"}, "is a log of megatron-lm; the run's framework is internevo"),
        ("megatron-lm", {"seq_len": 8192}, "seq_len = 4096: is what the log says; the run is described with 8192"),
        ("megatron-lm", {"plan": "tp=8,pp=4"}, "tp = 4: is what the log says; the run is described with 8"),
        ("megatron-lm", {"cluster": "h100x128"}, "gpus = 64: is what the log says; the run is described with 128"),
        ("nemo", {}, "global_batch = 8: is what the log says; the run is described with 128"),
    ],
)
def test_a_contradiction_is_an_error(name: str, options: dict[str, Any], words: str) -> None:
    given = JOB | {"seq_len": 4096, "plan": "tp=4,pp=4"} | options
    with pytest.raises(SpecError, match=words):
        read_logs([LOGS / f"{name}.log"], given)


@pytest.mark.parametrize(
    ("name", "plan", "why"),
    [
        ("oom", "tp=1", "ran out of memory, which a fit of step times has no use for: torch.OutOfMemoryError"),
        ("watchdog", "tp=1", "no step time is left behind 3 warm-up steps (1 logged); it ended with: .E1103"),
        ("refused", "tp=1", "no step is logged; it ended with: AssertionError: uneven"),
        ("host-memory", "tp=1", "no step time is left behind 3 warm-up steps (1 logged); it ended with: out of host memory"),
    ],
)
def test_a_log_without_a_step_time_is_left_out_with_its_reason(name: str, plan: str, why: str) -> None:
    rows, logs = read_logs([LOGS / f"{name}.log"], JOB | {"plan": plan})
    assert rows == []
    assert logs[0].why.startswith(why.replace(".E", "[E"))


def test_what_is_strange_about_a_log_is_noted() -> None:
    rows, logs = read_logs([LOGS / "restart.log"], JOB | {"global_batch": 64, "plan": "tp=2"})
    assert rows[0].step_s == 1.002
    assert logs[0].note == "the loss is no number from step 8 on; 2 launches, the last counts"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs: []", "runs: must be a list of"),
        ("- a", "runs: must be a list of"),
        ("{model: tiny, sequence: 3, runs: [{log: a.log, current: tp=1}]}", "sequence: unknown key .did you mean seq_len"),
        ("runs: [{log: a.log, curent: tp=1}]", r"runs\[0\].curent: unknown key .did you mean current"),
        ("runs: [{log: a.log, current: tp=1, plan: tp=2}]", r"runs\[0\]: stands twice, as plan and as current"),
        ("runs: [{log: 5}, tp=2]", r"runs\[0\]: must be like .*\n.*runs\[1\]: must be like"),
        ("runs: [{log: gone.log, current: tp=1}]", "gone.log: cannot be read: No such file"),
        ("{model: tiny, cluster: h100x64, seq_len: 128, global_batch: 128, runs: [{log: a.log, current: tp=3}]}", "must divide the 64"),
        ("{model: tiny, cluster: h100x64, seq_len: 128, global_batch: 128, runs: [{log: a.log}]}", "plan: is missing .the layout of a.log"),
        ("{task: lora, model: llama3-8b, cluster: h100x64, seq_len: 128, global_batch: 128, current: tp=1, runs: [{log: a.log}]}",
         "task = 'lora': must be pretrain"),
    ],
)  # fmt: skip
def test_a_wrong_runs_file_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    megatron(tmp_path / "a.log", 1.0)
    (tmp_path / "runs.yaml").write_text(text)
    with pytest.raises(SpecError, match=words):
        read_logs([tmp_path / "runs.yaml"], {})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from(["tp=2", "a.log", "tiny", "h100x64", "8k", "megatron-lm", "runs", "log", "current"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    top=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), runs=st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES)) | VALUES
)
def test_no_runs_file_raises_anything_but_what_a_person_can_act_on(tmp_path: Path, top: dict[str, Any], runs: Any) -> None:
    if not (tmp_path / "a.log").exists():
        megatron(tmp_path / "a.log", 1.0)
    (tmp_path / "runs.yaml").write_text(json.dumps(JOB | top | {"runs": runs}))
    with suppress(SpecError):
        rows, logs = read_logs([tmp_path / "runs.yaml"], {})
        assert len(logs) == len(runs)
        assert all(row.step_s and row.step_s > 0 for row in rows)


def test_refusals_of_the_command_line(folder: Path) -> None:
    def said(*arguments: str) -> str:
        found = run("calibrate", *arguments, cwd=folder)
        assert found.returncode == 2
        return found.stderr

    assert said("runs.yaml", "-p", "tp=2") == "tuner: --plan = 'tp=2': contradicts runs.yaml, whose runs have their own (leave one out)\n"
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    assert said("rows.jsonl", "-m", "tiny").startswith("tuner: --model: is about trainers' logs, and no file is one")
    (folder / "notes.txt").write_text("all went well\n")
    assert "must tell enough: has no line of a log of workload, primus" in said("notes.txt", *OPTIONS)
    assert "--cluster: is missing" in said("run1.log")
    assert "gone.log: no such file" in said("gone.log", *OPTIONS)
    assert "No such option: --price" in said("run1.log", "--price", "2")


def test_kinds_of_files(folder: Path) -> None:
    (folder / "rows").write_text("\n" + json.dumps(ROW))
    kinds = {name: kind_of(folder / name) for name in ("runs.yaml", "run1.log", "rows", "gone", ".")}
    assert kinds == {"runs.yaml": "runs", "run1.log": "log", "rows": "rows", "gone": "unread", ".": "unread"}


def test_logs_and_rows_go_together(folder: Path) -> None:
    row = ROW | {"framework": "megatron-lm"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    alone = tuner.calibrate(folder / "runs.yaml").record()["rows"]
    assert tuner.calibrate([folder / "runs.yaml", folder / "rows.jsonl"]).record()["rows"] == alone + 1


def test_frameworks_and_launchers_are_those_that_exist() -> None:
    known = set(presets.names("frameworks"))
    assert {*LOGS_OF, *WITHOUT_LOGS} <= known
    assert {launcher for launchers in LOGS_OF.values() for launcher in launchers} == set(FORMATS) - {"workload"}
