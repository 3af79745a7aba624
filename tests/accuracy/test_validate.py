"""The validation document, with a model that is known and with the real one."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.accuracy.row import GPT, changed
from tuner.accuracy.rows import Reader
from tuner.accuracy.validate import document, predict, table, validate

TIMES = {1: 40.0, 2: 36.0, 4: 33.0, 8: 32.0, 16: 35.0}


def rows():
    """A series over tp with measured times, one row run twice, a superseded, an SFT, a memory and an OOM row."""
    base = changed(measured={"tflops_per_gpu": ...})
    found = [changed(base, id=f"tp{tp}", config={"tp": tp}, measured={"step_time_s": s}) for tp, s in TIMES.items()]
    found.append(changed(base, id="again", config={"tp": 8}, measured={"step_time_s": 34.0}))
    found.append(changed(base, id="old", release="1.0", superseded="by 2.0", measured={"step_time_s": 64.0}))
    found.append(changed(base, id="tuned", task="sft", measured={"step_time_s": 16.0}))
    found.append(changed(base, id="memory", config={"tp": 2}, measured={"memory_gb": 50.0}))
    found.append(changed(base, id="big", config={"tp": 1}, outcome="oom"))
    return found


def toy(job, plan, calibration):
    """A model that says 32 s + (9 - tp) / 4, with 10 % to either side, and 100 GB / tp of memory."""
    step = 32.0 + (9 - plan.tp) / 4
    memory = 100e9 / plan.tp
    return SimpleNamespace(
        step_s=step, low_s=step * 0.9, high_s=step * 1.1, memory_bytes=memory, p_oom=(plan.tp < 2) * 1.0, worst_stage=0 * plan.tp
    )


def no_memory(job, plan, calibration, stage):
    raise AssertionError("no row here counts anything but the device")


@pytest.fixture
def found():
    reader = Reader()
    measurements = [reader.row(row, "file") for row in rows()]
    return document(predict(measurements, toy, no_memory, lambda job: None), [])


def test_rows_keep_their_order_and_fields(found):
    assert [row["id"] for row in found["rows"]] == ["tp1", "tp2", "tp4", "tp8", "tp16", "again", "old", "tuned", "memory", "big"]
    keys = {"id", "framework", "measured_step_s", "predicted_step_s", "low_s", "high_s", "measured_bytes", "predicted_bytes", "p_oom"}
    assert all(set(row) == keys | {"outcome", "assumed"} for row in found["rows"])
    first = found["rows"][0]
    assert (first["measured_step_s"], first["predicted_step_s"], first["measured_bytes"], first["outcome"]) == (40.0, 34.0, None, "ok")
    assert found["rows"][-1]["measured_step_s"] is None


def test_time_counts_current_pretraining_rows(found):
    """tp 1: 34 of 40 is -15 %; 2: 33.75 of 36; 4: 33.25 of 33; 8: 32.25 of 32 and of 34; 16: 30.25 of 35."""
    time = found["summary"]["time"]
    errors = [34 / 40 - 1, 33.75 / 36 - 1, 33.25 / 33 - 1, 32.25 / 32 - 1, 30.25 / 35 - 1, 32.25 / 34 - 1]
    assert time["n"] == 6
    assert time["bias"] == pytest.approx(np.mean(errors))
    assert time["median_abs_err"] == pytest.approx(np.median(np.abs(errors)))
    assert time["p90_abs_err"] == pytest.approx(np.percentile(np.abs(errors), 90))
    assert time["coverage90"] == pytest.approx(4 / 6)  # 40 > 37.4 and 35 > 33.3
    assert found["summary"]["apart"]["superseded"]["n"] == 1
    assert found["summary"]["apart"]["sft"]["median_abs_err"] == pytest.approx(32.25 / 16 - 1)


def test_memory_and_fit(found):
    assert found["summary"]["memory"]["n"] == 1
    assert found["summary"]["memory"]["bias"] == pytest.approx(0.0)
    assert found["summary"]["memory"]["coverage90"] is None
    assert found["summary"]["fit"] == {"true_fit": 8, "false_fit": 0, "true_oom": 1, "false_oom": 1}


def test_series_by_source_and_means(found):
    """Predicted order 16 8 4 2 1; measured medians 33 (tp 8), 33 (tp 4), 35, 36, 40: the fastest predicted took 35."""
    summary = found["summary"]
    (one,) = summary["series"]
    assert one["key"] == {
        "source": "file",
        "model": "gpt-175b",
        "gpu": "a100-sxm-80gb",
        "gpus": 1024,
        "seq_len": 2048,
        "global_batch": 1536,
        "precision": "fp16",
        "release": None,
        "task": "pretrain",
    }
    assert one["n"] == 5
    assert one["regret"] == pytest.approx(35 / 33 - 1)
    assert one["kendall_tau"] == pytest.approx((7 - 2) / np.sqrt(10 * 9))
    (source,) = summary["by_source"]
    assert (source["source"], source["n"]) == ("file", 10)
    assert source["regret"] == summary["mean_regret"] == pytest.approx(35 / 33 - 1)
    assert source["kendall_tau"] == summary["mean_kendall_tau"]


def test_the_document_is_json(found):
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_allocated_memory_is_compared_with_allocated(tmp_path):
    row = changed(measured={"memory_gb": 50.0}, notes="peak allocated 46.6 GiB")
    peak = SimpleNamespace(allocated=np.array([45e9]), reserved=np.array([55e9]))
    (scored,) = predict([Reader().row(row, "file")], toy, lambda *_: peak, lambda job: None)
    assert scored.said.memory_bytes == 45e9


def test_a_table_of_plans_has_int_columns():
    plans = [Reader().row(row, "f").plan for row in rows()[:3]]
    assert table(plans).tp.tolist() == [1, 2, 4]
    assert table(plans).tp.dtype == np.int64


def test_the_real_model_scores_a_file(tmp_path):
    path = tmp_path / "narayanan.jsonl"
    path.write_text("\n".join([json.dumps(GPT), json.dumps(changed(suspect="no")), "nonsense"]), encoding="utf-8")
    found = validate([path], "none")
    (row,) = found["rows"]
    assert row["measured_step_s"] == pytest.approx(31.466, abs=0.001)
    assert row["low_s"] < row["predicted_step_s"] < row["high_s"]
    assert row["predicted_step_s"] == pytest.approx(31.466, rel=0.3)
    assert [item["id"] for item in found["skipped"]] == ["narayanan2021-175b", "narayanan:3"]


def test_batched_rows_are_predicted_as_alone(tmp_path):
    """Rows of one job are estimated as a table; each must come out as when it stands alone."""
    together = tmp_path / "all.jsonl"
    every = [changed(id=f"tp{tp}pp{pp}", config={"tp": tp, "pp": pp}) for tp in (1, 2, 4, 8) for pp in (1, 3, 8)]
    together.write_text("\n".join(json.dumps(row) for row in every), encoding="utf-8")
    of_all = {row["id"]: row for row in validate([together], "none")["rows"]}
    for i, row in enumerate(every[::5]):
        alone = tmp_path / f"one{i}.jsonl"
        alone.write_text(json.dumps(row), encoding="utf-8")
        assert validate([alone], "none")["rows"] == [of_all[row["id"]]]
