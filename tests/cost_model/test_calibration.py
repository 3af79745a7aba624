from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.cost_model.flat import GPU, calibration, gemm_curve
from tuner import presets
from tuner.cost_model.calibration import (
    COLLECTIVES,
    DTYPE_OF,
    DTYPES,
    CalibrationFile,
    Override,
    PriorFile,
    calibration_for,
    from_prior,
    layered,
    load_calibration,
)
from tuner.cost_model.curves import Grid
from tuner.errors import SpecError
from tuner.job import PRECISIONS
from tuner.load import load_spec, load_yaml

SHIPPED = sorted((presets.configs_dir() / "calibrations").glob("*.yaml"))
FITTED = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200", "gb300")


def _shipped(name):
    path = presets.configs_dir() / "calibrations" / f"{name}.yaml"
    return load_spec(CalibrationFile, load_yaml(path), str(path))


def test_every_shipped_file_is_read_and_small():
    assert SHIPPED
    for path in SHIPPED:
        runs = "\nmeasured" in path.read_text()  # a line each
        assert path.stat().st_size < (400_000 if runs else 75_000)
        kind = PriorFile if path.stem == "prior" else CalibrationFile
        assert load_spec(kind, load_yaml(path), str(path)).name == path.stem


def test_every_gpu_of_a_file_is_a_preset():
    for path in SHIPPED:
        if path.stem != "prior":
            over = _shipped(path.stem)
            assert [presets.gpu(name).name for name in (*over.gpus, *over.relatives)] == [*over.gpus, *over.relatives]


@pytest.mark.parametrize("name", FITTED)
def test_stored_residuals_are_within_the_bars(name):
    over = _shipped(name)
    product = over.gemm["bfloat16"].fit
    assert product.n > 10_000
    assert product.median <= 0.06 and product.held_out_median <= 0.06
    assert product.p90 <= 0.20 and product.held_out_p90 <= 0.20
    for op in COLLECTIVES:
        fit = over.collectives[op].fit
        assert fit.n >= 25
        assert fit.median <= 0.08 and fit.held_out_median <= 0.08


def test_pooled_curves_predict_a_gpu_left_out():
    fit = _shipped("pooled").gemm["bfloat16"].fit
    assert fit.held_out == "each GPU in turn"
    assert fit.held_out_median <= 0.08


def test_none_is_the_prior_and_says_default():
    gpu = presets.gpu("h100-sxm-80gb")
    used = calibration_for("none", gpu)
    assert used.layers == ("prior", "pooled")
    assert used.gpu == gpu.name
    assert {c.source for c in used.coefficients.values()} == {"default"}
    assert all(c.value == c.prior and c.words and c.based_on for c in used.coefficients.values())
    assert set(used.gemm) == set(used.grouped) == set(DTYPES) and set(used.collectives) == set(COLLECTIVES)
    assert set(DTYPE_OF) == set(PRECISIONS) and set(DTYPE_OF.values()) <= set(DTYPES)


def test_auto_takes_the_gpus_own_file():
    used = calibration_for("auto", presets.gpu("h100-sxm-80gb"))
    assert used.layers == ("prior", "pooled", "h100-sxm-80gb")
    assert used.based_on == ""
    assert used.gemm["bfloat16"] == _shipped("h100-sxm-80gb").gemm["bfloat16"]
    assert used.gemm["nvfp4"] == _shipped("pooled").gemm["nvfp4"]


@pytest.mark.parametrize(
    ("gpu", "other"), [("h800-sxm-80gb", "h100-sxm-80gb"), ("a800-sxm-80gb", "a100-sxm-80gb"), ("h20", "h100-sxm-80gb")]
)
def test_auto_takes_a_relatives_file_and_says_so(gpu, other):
    used = calibration_for("auto", presets.gpu(gpu))
    assert used.gpu == gpu
    assert used.based_on == other


def test_a_gpu_without_file_or_relative_keeps_the_pooled_curves():
    used = calibration_for("auto", GPU)
    assert used.layers == ("prior", "pooled")


def test_a_name_or_a_file_is_taken(tmp_path):
    gpu = presets.gpu("h100-sxm-80gb")
    assert calibration_for("gb200", gpu).based_on == "gb200"
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\ncoefficients:\n  fragmentation: {value: 1.3, source: 12 of our runs, n: 12, residual: 0.05}\n")
    used = calibration_for(str(mine), gpu)
    assert used["fragmentation"] == 1.3
    coefficient = used.coefficients["fragmentation"]
    assert (coefficient.source, coefficient.n, coefficient.residual) == ("12 of our runs", 12, 0.05)
    assert coefficient.prior == calibration_for("none", gpu)["fragmentation"]


def test_framework_and_release_files_come_last(tmp_path, monkeypatch):
    folder = tmp_path / "calibrations"
    folder.mkdir()
    for path in SHIPPED:
        if path.stem in ("prior", "pooled", "gb200"):
            (folder / path.name).write_text(path.read_text())
    for name, extra, value in (("a-release", "release: '2'\n", 1.3), ("b-framework", "", 1.2)):
        (folder / f"{name}.yaml").write_text(
            f"name: {name}\nframework: nemo\ngpus: [gb200]\n{extra}coefficients:\n  fragmentation: {{value: {value}, source: rows}}\n"
        )
    monkeypatch.setattr("tuner.cost_model.calibration.configs_dir", lambda: tmp_path)
    gpu = presets.gpu("gb200")
    assert calibration_for("auto", gpu).layers == ("prior", "pooled", "gb200")
    assert calibration_for("auto", gpu, framework="nemo").layers == ("prior", "pooled", "gb200", "b-framework")
    used = calibration_for("auto", gpu, framework="nemo", release="2")
    assert used.layers == ("prior", "pooled", "gb200", "b-framework", "a-release")
    assert (used["fragmentation"], used.framework, used.release) == (1.3, "nemo", "2")
    job = SimpleNamespace(cluster=SimpleNamespace(gpu=gpu), framework=SimpleNamespace(name="nemo", relatives=()), release="2")
    assert load_calibration("auto", job).hash == used.hash
    relative = SimpleNamespace(name="megatron-lm", relatives=("torchtitan", "nemo"))
    job = SimpleNamespace(cluster=SimpleNamespace(gpu=gpu), framework=relative, release="2")
    assert load_calibration("auto", job).layers == used.layers
    assert calibration_for("auto", presets.gpu("h100-sxm-80gb"), framework="nemo").framework == ""


def test_a_relative_lends_coefficients_but_not_how_sure_its_runs_make_them():
    gpu = presets.gpu("a100-sxm-80gb")
    lent = calibration_for("auto", gpu, framework="deepspeed-of-mine", relatives=("megatron-deepspeed",))
    own, bare = calibration_for("auto", gpu, framework="megatron-deepspeed"), calibration_for("auto", gpu)
    assert lent["gemm_sustained"] == own["gemm_sustained"] != bare["gemm_sustained"]
    assert lent["time_spread_90"] == bare["time_spread_90"] > own["time_spread_90"]
    assert lent["oom_margin_spread"] == bare["oom_margin_spread"]
    assert own.measured is not None and lent.measured is None


def test_a_frameworks_memory_lies_beneath_its_step_times():
    used = calibration_for("auto", presets.gpu("b200-sxm-180gb"), framework="torchtitan")
    assert used.layers[-2:] == ("torchtitan-memory", "torchtitan")
    assert used.coefficients["oom_margin_spread"].n > 20
    assert calibration_for("auto", presets.gpu("h100-sxm-80gb"), framework="nanotron")["gathered_inputs_kept"] > 0


@pytest.mark.parametrize("text", ["h100-smx-80gb", "", "../x", "/dev/null/x"])
def test_unknown_names_are_refused_with_a_way_out(text):
    with pytest.raises(SpecError, match="none, auto, a name or a file") as caught:
        calibration_for(text, GPU)
    assert caught.value.exit_code == 2


def test_unknown_coefficients_are_refused_with_the_nearest_name():
    over = CalibrationFile(name="mine", coefficients={"fragmentatoin": Override(value=1.0, source="rows")})
    prior = load_spec(PriorFile, load_yaml(presets.configs_dir() / "calibrations" / "prior.yaml"), "prior")
    with pytest.raises(SpecError, match="did you mean fragmentation"):
        layered(from_prior(prior, _shipped("pooled")), over)


def test_wrong_files_are_refused(tmp_path):
    for text in ("name: x\ngemmm: {}\n", "name: x\ngemm: {bf16: 1}\n", "[]\n", ""):
        path = tmp_path / "x.yaml"
        path.write_text(text)
        with pytest.raises(SpecError):
            calibration_for(str(Path(path)), GPU)
        path.unlink()


def test_calibrations_are_values():
    used = calibration_for("auto", presets.gpu("h100-sxm-80gb"))
    with pytest.raises(ValidationError):
        used.name = "other"
    with pytest.raises(ValueError, match="read-only"):
        used.gemm["bfloat16"].correction.table[0] = 2.0
    with pytest.raises(KeyError):
        used["no_such_coefficient"]


def test_the_hash_follows_the_numbers():
    plain = calibration()
    assert plain.hash == calibration().hash
    assert plain.hash != calibration(kernel_launch_s=1e-6).hash
    assert plain.hash != calibration(gemm=gemm_curve(memory=0.6)).hash


def test_a_grid_by_hand():
    grid = Grid(axes=((1.0, 3.0), (10.0, 20.0)), values="1 2\n3 6")
    assert grid(1, 10) == 1.0
    assert grid(2, 10) == 2.0
    assert grid(2, 15) == 3.0
    assert grid(0, 5) == 1.0 and grid(99, 99) == 6.0
    cube = Grid(axes=((1.0, 2.0),) * 3, values="1 2 3 4 5 6 7 8")
    assert cube(1.5, 1.5, 1.5) == 4.5
    assert cube(2, 1, 1.5) == 5.5


@pytest.mark.parametrize(
    ("axes", "values"),
    [
        (((1.0, 1.0),), "1 1"),
        (((2.0, 1.0),), "1 1"),
        (((1.0,),), "1"),
        (((1.0, 2.0),), "1 2 3"),
        (((1.0, 2.0),), "1 -2"),
        (((1.0, 2.0),), "1 nan"),
        (((1.0, 2.0),), "1 x"),
    ],
)
def test_impossible_grids_are_refused(axes, values):
    with pytest.raises(ValidationError):
        Grid(axes=axes, values=values)


@given(
    x=st.lists(st.floats(0.1, 1e6), min_size=1, max_size=20),
    y=st.floats(0.1, 1e6),
    z=st.lists(st.integers(1, 10**6), min_size=1, max_size=20),
)
def test_grids_of_numbers_and_arrays_agree_to_the_last_bit(x, y, z):
    grid = _shipped("h100-sxm-80gb").gemm["bfloat16"].correction
    table = grid(np.array(x)[:, None], y, np.array(z))
    low, high = grid.table.min(), grid.table.max()
    assert ((table >= low * (1 - 1e-12)) & (table <= high * (1 + 1e-12))).all()
    for i, one in enumerate(x):
        for j, other in enumerate(z):
            assert grid(one, y, other) == table[i, j]
