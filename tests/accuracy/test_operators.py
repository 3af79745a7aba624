from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tuner
from tests.accuracy.row import GPT
from tests.terminal import run
from tuner import presets
from tuner.cost_model.calibration import calibration_for
from tuner.cost_model.roofline import attention_seconds, gemm_seconds
from tuner.errors import InfrastructureError

SIZES = np.array([128, 4096, 8192])


def products(off: float = 1.1, **changes: Any) -> dict[str, Any]:
    """A table of three products on a GB200, the two that count `off` times as fast as the model says."""
    gpu = presets.gpu("gb200")
    ms = gemm_seconds(SIZES, SIZES, SIZES, precision="bf16", gpu=gpu, calibration=calibration_for("auto", gpu)) * 1e3
    columns = {"gemm_dtype": ["bfloat16"] * 3, "m": SIZES, "n": SIZES, "k": SIZES, "median_ms": ms / np.array([9.0, off, off])}
    return {name: column for name, column in (columns | {"fastest_ms": ms / 20} | changes).items() if column is not None}


def written(path: Path, columns: dict[str, Any]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_products_are_scored_against_the_median(tmp_path: Path) -> None:
    table = written(tmp_path / "gemm_gb200.parquet", products())
    record = tuner.validate(operators=table).record()
    assert list(record) == ["tables", "left_out"] and record["left_out"] == []
    (row,) = record["tables"]
    named = {"file": "gemm_gb200.parquet", "gpu": "gb200", "operator": "gemm", "dtype": "bfloat16", "n": 2}
    assert {name: row[name] for name in named} == named
    assert row["median_abs_err"] == row["p90_abs_err"] == pytest.approx(0.1)
    assert json.loads(run("validate", "--operators", table, "--json").stdout) == record
    assert tuner.validate(table, calibration="none").record()["tables"][0]["median_abs_err"] != row["median_abs_err"]


def test_every_dtype_and_what_no_curve_describes(tmp_path: Path) -> None:
    dtypes = ["bfloat16", "fp8", "int4"]
    table = written(tmp_path / "gemm_gb200.parquet", products(gemm_dtype=dtypes, m=[4096] * 3))
    other = written(tmp_path / "deepep_normal_gb200.parquet", {"node_num": [1]})
    record = tuner.validate([table, other]).record()
    assert [row["dtype"] for row in record["tables"]] == ["bfloat16", "fp8"]
    assert [item["file"] for item in record["left_out"]] == ["gemm_gb200.parquet", "deepep_normal_gb200.parquet"]
    assert record["left_out"][0]["why"].startswith("int4")


def test_attention_and_collectives(tmp_path: Path) -> None:
    gpu = presets.gpu("h100-sxm-80gb")
    used = calibration_for("auto", gpu)
    ms = 1e3 * attention_seconds(2, 4096, 4096, 32, 8, 128, 128, causal=True, window=0, precision="bf16", gpu=gpu, calibration=used)
    columns = {"batch_size": [2], "isl": [4096], "num_heads": [32], "num_key_value_heads": [8], "head_dim": [128]}
    attention = written(tmp_path / "attention_forward_h100_sxm.parquet", columns | {"median_ms": [ms], "fastest_ms": [ms]})
    messages = {"op_name": ["all_gather", "all_reduce", "all_reduce"], "nccl_dtype": ["half", "half", "int8"], "num_gpus": [8, 8, 8]}
    messages |= {"message_size": [2**20, 2**10, 2**24], "median_ms": [0.1, 0.1, 0.1], "fastest_ms": [0.1, 0.1, 0.1]}
    rows = tuner.validate(operators=[attention, written(tmp_path / "nccl_h100_sxm.parquet", messages)]).record()["tables"]
    assert [(row["operator"], row["dtype"], row["n"]) for row in rows] == [
        ("attention_forward", "bfloat16", 1),
        ("nccl", "half", 1),
        ("nccl", "int8", 1),
    ]
    assert rows[0]["median_abs_err"] < 0.1


def test_rows_and_tables_together(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text(json.dumps(GPT) + "\n")
    table = written(tmp_path / "gemm_gb200.parquet", products())
    record = json.loads(run("validate", str(tmp_path / "runs.jsonl"), "--operators", table, "--json").stdout)
    assert len(record["rows"]) == 1 and len(record["tables"]) == 1
    text = run("validate", str(tmp_path / "runs.jsonl"), "--operators", table, table).stdout
    assert "1 rows scored" in text and text.count("10.0 %") >= 4


@pytest.mark.parametrize(
    ("name", "columns", "says"),
    [
        ("gemm_gb200", products(k=None), "k = ''"),
        ("gemm_gb200", products(m=["a", "b", "c"]), "must be numbers"),
        ("gemm_gb200", products(n=[1, None, 2]), "must be numbers without gaps"),
        ("gemm_gb200", products(n=[1, -5, 2]), "-5"),
        ("gemm_gb300x", products(), "gb300x: no such GPU"),
        ("products", products(), "name it OPERATOR_GPU.parquet"),
    ],
)
def test_bad_tables_are_named_with_a_way_out(name: str, columns: dict[str, Any], says: str, tmp_path: Path) -> None:
    table = written(tmp_path / f"{name}.parquet", columns)
    answer = run("validate", "--operators", table, str(tmp_path / "missing.jsonl"))
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
    first, second = answer.stderr.strip().splitlines()
    assert "missing.jsonl" in first
    assert table in second and says in second and second.endswith(")")


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "gemm_gb200.parquet").write_text("no table")
    for name, says in (("gemm_gb200", "not a Parquet file"), ("gemm_gb300", "no such file")):
        answer = run("validate", "--operators", str(tmp_path / f"{name}.parquet"))
        assert answer.returncode == 2 and says in answer.stderr and "Traceback" not in answer.stderr


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = written(tmp_path / "gemm_gb200.parquet", products())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InfrastructureError, match=r"\[operators\]"):
        tuner.validate(operators=table)
