"""Coefficients fitted to whole steps, on steps made by the model itself with other coefficients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.jobs import calibration_of, gpt, gpt_job
from tests.published import published
from tuner.accuracy.calibrate import bases_of, calibrate, fit_steps, judged, main, with_kernel
from tuner.accuracy.calibrate_memory import rows_by_framework
from tuner.accuracy.calibrate_memory import text_of as memory_text
from tuner.cost_model.calibration import CalibrationFile, layered
from tuner.cost_model.estimate import estimate
from tuner.cost_model.fit.coefficients import Step
from tuner.cost_model.fit.memory import fit_memory
from tuner.cost_model.fit.residuals import START
from tuner.cost_model.runs import read_runs
from tuner.load import load_spec, load_yaml, parse_yaml
from tuner.measurement import Measurement
from tuner.plan import Plan
from tuner.presets import configs_dir

PLANS = [Plan(tp=tp, pp=pp, micro_batch=mb) for tp in (1, 4) for pp in (1, 2) for mb in (1, 4)]


SMALL = ((8, 512), (16, 1024), (24, 2048))
LARGE = ((4, 4096), (4, 6144), (4, 8192))


def steps(models: tuple[tuple[int, int], ...] = SMALL, **truth: float) -> list[Step]:
    """Steps of three GPTs as a machine with these coefficients would run them."""
    made = []
    for layers, hidden in models:
        job = gpt_job(gpt(layers=layers, hidden=hidden, heads=hidden // 64), cluster=gpt_job().cluster.replace(gpus=16), global_batch=64)
        base = calibration_of(job, "auto").model_copy(update={"measured": None})
        changed = {name: base.coefficients[name].model_copy(update={"value": value}) for name, value in truth.items()}
        machine = base.model_copy(update={"coefficients": {**base.coefficients, **changed}})
        made += [
            Step(
                id=f"own-{hidden}-{layers}-{i}",
                job=job,
                plan=plan,
                step_s=float(estimate(job, plan, machine).step_s),
                series=f"{hidden}",
                source="own",
            )
            for i, plan in enumerate(PLANS)
        ]
    return made


def test_a_slow_host_is_found() -> None:
    """A floor that binds nowhere at the prior has no gradient there; the coarse steps find it all the same."""
    rows = steps(host_per_layer_s=2e-3)
    fitted = fit_steps(rows, bases_of(rows))
    assert fitted is not None
    assert fitted.helps
    assert fitted.overrides["host_per_layer_s"].value == pytest.approx(2e-3, rel=0.1)
    assert fitted.after[0] < 0.02 < fitted.before[0]


def test_a_few_broken_runs_do_not_steer_it() -> None:
    rows = steps(host_per_layer_s=2e-3)
    broken = [dataclasses.replace(row, step_s=row.step_s * 30) if i % 9 == 0 else row for i, row in enumerate(rows)]
    fitted = fit_steps(broken, bases_of(rows))
    assert fitted is not None
    assert fitted.overrides["host_per_layer_s"].value == pytest.approx(2e-3, rel=0.35)


def written(rows: list[Step]) -> str:
    """The text of the file of these rows."""
    texts, _ = calibrate({"megatron-lm": rows}, {"megatron-lm": judged("megatron-lm", rows)}, kernel=START)
    return texts["megatron-lm"]


def test_nothing_is_written_where_too_little_is_known() -> None:
    rows = steps()[:4]
    fitted = judged("megatron-lm", rows)
    assert (fitted.coefficients, fitted.verdict) == ({}, "megatron-lm: 4 rows, too few for coefficients")
    assert calibrate({"megatron-lm": rows}, {"megatron-lm": fitted}, kernel=START)[0] == {}


def test_coefficients_that_gain_nothing_are_declined() -> None:
    fitted = judged("megatron-lm", steps())
    assert list(fitted.coefficients) == ["time_spread_90"]  # how far off the model is as it is
    assert fitted.coefficients["time_spread_90"].value < 0.02
    assert "declined" in fitted.verdict


def test_what_is_written_can_be_read() -> None:
    rows = steps(LARGE, gemm_sustained=0.8)
    file = load_spec(CalibrationFile, parse_yaml(written(rows), "made"), "made")
    assert (file.name, file.framework, file.gpus) == ("megatron-lm", "megatron-lm", ("a100-sxm-80gb",))
    assert file.coefficients["gemm_sustained"].value == pytest.approx(0.8, rel=0.05)  # held a little towards the prior, 0.93
    assert file.coefficients["gemm_sustained"].n == len(rows)
    assert "own-4096" in file.coefficients["gemm_sustained"].source
    assert file.measured is not None
    runs = read_runs(file.measured.runs)
    assert runs.ids == tuple(row.id for row in rows)
    assert float(abs(runs.log_error).max()) < 0.05  # what the coefficients leave


def test_the_runs_of_a_file_correct_its_own_plans() -> None:
    """Every run 1.3 times slower than the model says: the coefficients are declined or the runs take what they leave."""
    rows = [dataclasses.replace(row, step_s=row.step_s * 1.3) for row in steps()]
    file = load_spec(CalibrationFile, parse_yaml(written(rows), "made"), "made")
    job = rows[0].job
    learned = layered(calibration_of(job, "auto").model_copy(update={"measured": None, "kernel": START}), file)
    off = [float(estimate(row.job, row.plan, learned).step_s) / row.step_s - 1 for row in rows]
    assert max(map(abs, off)) < 0.05


def test_the_kernel_stands_at_the_end_of_the_prior() -> None:
    text = "name: prior\ncoefficients: {}\nkernel:\n  offset: 1\n"
    again = with_kernel(text, START)
    assert again.startswith("name: prior\ncoefficients: {}\nkernel:\n  offset: 0.015\n")
    assert with_kernel(again, START) == again


def test_the_command_writes_a_folder(tmp_path: Path) -> None:
    """Rows as they come, in; a file and the kernel out. With the coefficients kept, the same again."""
    folder = configs_dir() / "calibrations"
    (tmp_path / "prior.yaml").write_text((folder / "prior.yaml").read_text())
    rows = tmp_path / "small.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in published("internevo")))
    arguments = [str(rows), "-o", str(tmp_path)]
    assert main(arguments) == 0
    first = (tmp_path / "internevo.yaml").read_text()
    loaded = load_spec(CalibrationFile, load_yaml(tmp_path / "internevo.yaml"), "made")
    assert loaded.coefficients["gemm_sustained"].n == 42
    assert loaded.measured is not None
    assert "kernel:" in (tmp_path / "prior.yaml").read_text()
    assert main([*arguments, "--keep-coefficients"]) == 0
    assert (tmp_path / "internevo.yaml").read_text() == first


def test_memory_files_are_written_where_rows_say_something(tmp_path) -> None:
    """24 runs of two models that take a tenth more than the model says: the file is read back, and step times are left alone."""
    job = gpt_job(attention="flash")
    made = []
    for layers in (24, 48):
        own = job.replace(model=gpt(layers=layers, hidden=4096, heads=32))
        for i, plan in enumerate([*PLANS, *(dataclasses.replace(plan, zero=1) for plan in PLANS[:4])]):
            size = 1.1 * float(estimate(own, plan, calibration_of(own)).memory_bytes)
            made.append(Measurement(id=f"own-{layers}-{i}", job=own, plan=plan, memory_bytes=size))
    rows = rows_by_framework(made)
    assert list(rows) == ["megatron-lm"] and len(rows["megatron-lm"]) == 24
    assert rows_by_framework(made[:12]) == {}
    fitted = fit_memory(rows["megatron-lm"], calibration_of, "own")
    path = tmp_path / "megatron-lm-memory.yaml"
    path.write_text(memory_text("megatron-lm", fitted), encoding="utf-8")
    read = load_spec(CalibrationFile, parse_yaml(path.read_text(), "own"), "own")
    assert read.name == "megatron-lm-memory"
    assert read.coefficients["oom_margin_spread"].value < 0.13
    assert "gemm_sustained" not in read.coefficients
