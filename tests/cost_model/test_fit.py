import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tuner import presets
from tuner.cost_model.calibration import CalibrationFile, calibration_for
from tuner.cost_model.collectives import Group, collective_seconds
from tuner.cost_model.curves import Fit, GemmCurve, Tile
from tuner.cost_model.fit import attention, experts, gemm, lattice, links, published
from tuner.cost_model.fit.__main__ import dump, main
from tuner.cost_model.fit.tables import SOURCE, Table, errors, find_gpu, find_link, named, read, split
from tuner.cost_model.roofline import attention_seconds, gemm_seconds
from tuner.errors import SpecError
from tuner.files import write
from tuner.load import load_spec, load_yaml

TRUE = GemmCurve(
    launch_s=4e-6,
    tiles=(Tile(m=128, n=128, efficiency=0.7), Tile(m=64, n=64, efficiency=0.6), Tile(m=128, n=128, splits=4, efficiency=0.7)),
    prologue_k=200.0,
    partial_wave=0.5,
    memory=0.7,
    reduction=2.0,
    fit=Fit(source="made up"),
)


def products(gpu="h100_sxm", noise=0.02):
    """Times that a known curve gives, with noise that does not change from run to run."""
    m, n, k = (
        axis.ravel() for axis in np.meshgrid([256, 512, 1000, 2048, 4096, 16384], [256, 1024, 4096, 8192, 16384], [256, 1024, 4096, 16384])
    )
    table = Table(operator="gemm", gpu=gpu, columns={"m": m, "n": n, "k": k, "gemm_dtype": np.full(len(m), "bfloat16"), "seconds": 1.0 * m})
    seconds = gemm.predict(TRUE, table, "bfloat16") * np.exp(np.random.default_rng(1).normal(0, noise, len(m)))
    return Table(operator="gemm", gpu=gpu, columns=table.columns | {"seconds": seconds})


def test_a_known_curve_is_found_again():
    found = gemm.fit_gpu(products(), "bfloat16", None)
    assert found.fit.median <= 0.02 and found.fit.held_out_median <= 0.03
    assert found.launch_s == pytest.approx(TRUE.launch_s, rel=0.15)
    assert found.fit.n == 120 and found.fit.source == SOURCE


def test_the_fit_is_deterministic():
    assert gemm.fit_gpu(products(), "bfloat16", None) == gemm.fit_gpu(products(), "bfloat16", None)


def test_pooling_finds_what_gpus_share():
    tables = [products(gpu) for gpu in ("a100_sxm", "h100_sxm", "h200_sxm")]
    pooled = gemm.fit_pooled(tables, "bfloat16")
    assert pooled.fit.held_out == "each GPU in turn"
    assert pooled.fit.held_out_median <= 0.05


@pytest.mark.parametrize("name", ["h100_sxm", "b200_sxm"])
def test_what_is_scored_is_what_is_used(name):
    gpu = find_gpu(name)
    used = calibration_for("auto", gpu)
    table = products(name)
    m, n, k = table["m"], table["n"], table["k"]
    assert (
        gemm.predict(used.gemm["bfloat16"], table, "bfloat16") == gemm_seconds(m, n, k, precision="bf16", gpu=gpu, calibration=used)
    ).all()
    rows = attention.gqa(
        Table(
            operator="attention_forward",
            gpu=name,
            columns={
                "batch_size": np.array([2]),
                "isl": np.array([4096]),
                "num_heads": np.array([32]),
                "num_key_value_heads": np.array([8]),
                "head_dim": np.array([128]),
                "seconds": np.array([1.0]),
                "median": np.array([1.0]),
            },
        )
    )
    used_seconds = attention_seconds(2, 4096, 4096, 32, 8, 128, 128, causal=True, window=0, precision="bf16", gpu=gpu, calibration=used)
    assert attention.predict(used.attention["gqa"], rows)[0] == used_seconds
    node = presets.cluster({"h100_sxm": "dgx-h100", "b200_sxm": "dgx-b200"}[name])
    messages = Table(
        operator="nccl",
        gpu=name,
        columns={"members": np.array([8]), "bytes": np.array([10**8]), "half": np.array([True]), "seconds": np.ones(1)},
    )
    for op in links.OP_OF.values():
        alone = collective_seconds(op, 10**8, Group(8, 1), cluster=node, calibration=used)
        assert links.predict(used.collectives[op], op, messages, find_link(name))[0] == alone


def messages(gpu="h100_sxm"):
    """30 us and three quarters of the link, halved below 16 MB."""
    sizes = np.array([2.0**i for i in range(10, 31)])
    n, size = (axis.ravel() for axis in np.meshgrid([2, 4, 8], sizes))
    rate = 0.75 * 450e9 * np.where(size < 2**24, 0.5, 1.0)
    columns = {"members": n, "bytes": size, "half": np.full(len(n), True), "seconds": 3e-5 + size * (n - 1) / n / rate}
    return Table(operator="nccl", gpu=gpu, columns=columns)


def test_known_links_are_found_again():
    curve = links.fit_gpu(messages(), "all_gather", 450e9)
    assert curve.latency(2) == pytest.approx(3e-5, rel=0.05)
    assert curve.efficiency(8, 2.0**29) == pytest.approx(0.75, rel=0.03)
    assert curve.fit.median <= 0.03


def test_a_size_without_rows_follows_its_neighbour():
    table = messages()
    curve = links.fit_gpu(table.where(table["members"] < 8), "all_gather", 450e9)
    assert curve.efficiency(8, 1e9) == curve.efficiency(4, 1e9)
    grown = links.with_eight(curve, links.fit_gpu(table, "all_gather", 450e9), "eight as elsewhere")
    assert grown.efficiency(8, 1e9) == pytest.approx(0.75, rel=0.05)
    assert "eight as elsewhere" in grown.fit.source


def test_grouped_products_are_found_again():
    rng = np.random.default_rng(2)
    count = 400
    columns = {
        "moe_dtype": np.full(count, "bfloat16"),
        "num_tokens": rng.choice([512, 2048, 8192], count),
        "hidden_size": rng.choice([2048, 4096, 7168], count),
        "inter_size": rng.choice([1024, 2048], count),
        "topk": rng.choice([2, 8], count),
        "num_experts": rng.choice([8, 64, 256], count),
        "moe_tp_size": np.ones(count, dtype=int),
        "moe_ep_size": rng.choice([1, 4], count),
        "seconds": np.ones(count),
        "median": np.ones(count),
    }
    rows = experts.select(Table(operator="moe_forward", gpu="h100_sxm", columns=columns), "bfloat16")
    axes = (experts.ROWS_AXIS, experts.GROUPS_AXIS)
    true = (
        calibration_for("none", find_gpu("h100_sxm"))
        .grouped["bfloat16"]
        .model_copy(
            update={"factor": lattice.grid(axes, np.full(len(axes[0]) * len(axes[1]), 1.3)), "routing_s": 2e-5, "routing_passes": 3.0}
        )
    )
    seconds = experts.predict(true, TRUE, rows, "bfloat16")
    measured = Table(operator="moe_forward", gpu="h100_sxm", columns=rows.columns | {"seconds": seconds, "median": 1.5 * seconds})
    found = experts.fit_gpu(measured, TRUE, "bfloat16")
    assert found.fit.median <= 0.02
    assert found.factor(512, 16) == pytest.approx(1.3, rel=0.05)
    assert found.typical(512, 16) == pytest.approx(1.5, rel=0.03)


def test_published_levels_are_met():
    pooled = calibration_for("none", presets.gpu("mi300x")).gemm["bfloat16"]
    curve = published.scaled(pooled, presets.gpu("mi300x"), "bfloat16", 700.0, "a blog")
    used = calibration_for("none", presets.gpu("mi300x"))
    used = used.model_copy(update={"gemm": used.gemm | {"bfloat16": curve}})
    sizes = np.array([2048, 4096, 8192, 16384])
    m, n, k = np.meshgrid(sizes, sizes, sizes)
    rates = 2.0 * m * n * k / gemm_seconds(m, n, k, precision="bf16", gpu=presets.gpu("mi300x"), calibration=used)
    assert rates.max() / 1e12 == pytest.approx(700.0, rel=0.01)


def test_a_sibling_is_as_much_faster_as_published():
    gpu = presets.gpu("h100-sxm-80gb")
    used = calibration_for("auto", gpu)
    curve = published.sibling(used.gemm["bfloat16"], (1.1, 1.02))
    faster = used.model_copy(update={"gemm": used.gemm | {"bfloat16": curve}})

    def ratio(m, n, k):
        first, second = (gemm_seconds(m, n, k, precision="bf16", gpu=gpu, calibration=c) for c in (used, faster))
        return first / second

    assert ratio(4096, 4096, 4096) == pytest.approx(1.1, rel=0.02)
    assert ratio(32768, 16384, 16384) == pytest.approx(1.02, rel=0.01)
    assert ratio(64, 256, 128) == pytest.approx(1.0, rel=0.05)


def test_a_correction_interpolates_what_it_saw():
    x = np.linspace(1, 9, 200)
    grid = lattice.correction(((1.0, 3.0, 9.0),), [x], np.log(1.0 + 0.02 * x), smooth=0.01, ridge=0.01)
    assert grid(5.0) == pytest.approx(1.10, rel=0.01)


def test_factors_that_multiply_are_told_apart():
    x, y = (axis.ravel() for axis in np.meshgrid(np.linspace(1, 9, 30), np.linspace(1, 9, 30)))
    odd = (np.arange(len(x)) % 3 == 0) & (y > 4)
    logs = np.log(1.0 + 0.02 * x) + np.where(odd, 0.2, 0.0)
    terms = [lattice.Term(((1.0, 5.0, 9.0),), [x], 0.01), lattice.Term(((1.0, 9.0),), [y], 0.01, odd)]
    first, second = lattice.corrections(terms, logs, ridge=0.01)
    assert first(5.0) == pytest.approx(1.10, rel=0.01)
    assert second(8.0) == pytest.approx(np.exp(0.2), rel=0.01)


def test_a_share_of_the_shapes_is_left_out():
    table = products()
    kept, left = split(table, 0.25)
    pairs = [{*zip(part["n"].tolist(), part["k"].tolist(), strict=True)} for part in (kept, left)]
    assert len(pairs[0]) == 15 and len(pairs[1]) == 5 and not pairs[0] & pairs[1]
    assert len(kept) + len(left) == len(table)


def test_the_command_prints_errors_on_shapes_left_out(tmp_path, capsys):
    import pyarrow
    from pyarrow import parquet

    for gpu in ("gb200", "h100_sxm"):
        table = products(gpu)
        columns = {name: table[name] for name in ("gemm_dtype", "m", "n", "k")} | {"median_ms": table["seconds"] * 1e3}
        parquet.write_table(pyarrow.table(columns | {"fastest_ms": table["seconds"] * 1e3}), tmp_path / f"gemm_{gpu}.parquet")
    assert main([str(tmp_path), "--hold-out", "0.25", "--leave-out", "gb200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["gemm", "gb200", "bfloat16", "n", "30"],
        ["gemm", "h100_sxm", "bfloat16", "n", "30"],
        ["gemm", "gb200", "bfloat16", "n", "120"],
    ]
    for options in (["--hold-out", "1.5"], ["--leave-out", "b200"], []):
        assert main([str(tmp_path), *options]) == 2
    assert "must lie between 0 and 1 (0.25 leaves out a quarter)" in capsys.readouterr().err


def test_rows_with_equal_keys_are_held_out_together():
    n, k = np.array([1, 1, 2, 2, 3, 4, 5, 6]), np.array([1, 1, 1, 2, 1, 1, 1, 1])
    part = lattice.folds(n, k)
    assert part[0] == part[1]
    assert set(lattice.folds(np.arange(100))) == {0, 1, 2, 3}


def test_errors_by_hand():
    assert errors(np.array([1.1, 0.8, 1.0]), np.ones(3)) == pytest.approx((0.1, 0.18))


@pytest.mark.parametrize(
    ("stem", "found"),
    [
        ("gemm_h100_sxm", ("gemm", "h100_sxm")),
        ("attention_forward_gb200", ("attention_forward", "gb200")),
        ("deepep_normal_h100_sxm", None),
        ("gemm_", None),
    ],
)
def test_names_of_tables(stem, found):
    assert named(stem) == found


def test_a_written_file_is_read_as_it_was(tmp_path):
    file = CalibrationFile(name="mine", gpus=("gb200",), gemm={"bfloat16": gemm.fit_gpu(products(), "bfloat16", None)})
    path = tmp_path / "mine.yaml"
    write(path, dump(file))
    assert load_spec(CalibrationFile, load_yaml(path), "mine") == file
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "\ud800")
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_command_refuses_what_it_cannot_use(tmp_path, capsys):
    assert main([str(tmp_path), "-o", str(tmp_path / "nowhere")]) == 2
    assert "must be a folder" in capsys.readouterr().err
    assert main([str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "no table of an operator" in capsys.readouterr().err


def test_the_benchmark_scores_a_table(tmp_path, capsys):
    import pyarrow
    from pyarrow import parquet

    spec = importlib.util.spec_from_file_location("operators", Path(__file__).parents[2] / "benchmarks" / "operators.py")
    operators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(operators)
    gpu = presets.gpu("gb200")
    m, n, k = np.array([128, 4096, 8192]), np.array([1024, 4096, 8192]), np.array([1024, 4096, 8192])
    ms = gemm_seconds(m, n, k, precision="bf16", gpu=gpu, calibration=calibration_for("auto", gpu)) * 1e3 / np.array([9.0, 1.1, 1.1])
    columns = {"gemm_dtype": ["bfloat16"] * 3, "m": m, "n": n, "k": k, "median_ms": ms, "fastest_ms": ms}
    parquet.write_table(pyarrow.table(columns), tmp_path / "gemm_gb200.parquet")
    assert operators.main([str(tmp_path / "gemm_gb200.parquet"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["gpu"], row["operator"], row["dtype"], row["n"]) == ("gb200", "gemm", "bfloat16", 2)
    assert row["median_abs_err"] == pytest.approx(0.1) and row["p90_abs_err"] == pytest.approx(0.1)
    assert operators.main([str(tmp_path / "gemm_gb200.parquet"), "--calibration", "none"]) == 0
    assert "10.0 %" not in capsys.readouterr().out
    assert operators.main([str(tmp_path / "other.parquet")]) == 2


def test_tables_are_read_and_wrong_ones_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    good = {"gemm_dtype": ["bfloat16"] * 2, "m": [1, 2], "n": [3, 4], "k": [5, 6], "median_ms": [1.5, 0.0], "fastest_ms": [1.0, 1.0]}
    parquet.write_table(pyarrow.table(good), tmp_path / "gemm_gb200.parquet")
    table = read(tmp_path / "gemm_gb200.parquet", "gemm", "gb200")
    assert len(table) == 1 and table["seconds"].tolist() == [1.5e-3]
    for name, change in (("k", None), ("m", ["a", "b"]), ("n", [1, None])):
        wrong = {key: column for key, column in (good | {name: change}).items() if column is not None}
        parquet.write_table(pyarrow.table(wrong), tmp_path / "wrong.parquet")
        with pytest.raises(SpecError, match=name):
            read(tmp_path / "wrong.parquet", "gemm", "gb200")
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(SpecError, match="not a Parquet file"):
        read(tmp_path / "text.parquet", "gemm", "gb200")
    with pytest.raises(SpecError, match="no such file"):
        read(tmp_path / "none.parquet", "gemm", "gb200")
