"""Rows of any content: scored or skipped with a reason, each once, in strict JSON; and no row that can be scored is dropped."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tuner
from tests.accuracy.row import GPT, changed
from tests.test_hostile_files import ODD, broken, numbers, places
from tuner import presets
from tuner.cli.output import json_text

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

MOE = changed(
    id="moe",
    model={"gated_mlp": True, "tied_embeddings": False, "kv_heads": 8},
    cluster={"gpu": "h100", "gpus": 512},
    config={"tp": 1, "ep": 8, "pp": 4, "vpp": 2, "precision": "bf16"},
    measured={"tflops_per_gpu": ..., "memory_gb": 70.0, "step_time_s": 20.0},
) | {"release": "26.02"}
MOE["model"]["moe"] = {"experts": 8, "top_k": 2, "expert_ffn_hidden": 16384}


def validated(rows: list[Any], folder: Path) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    record: dict[str, Any] = json.loads(json_text(tuner.validate(path).record()))
    return record


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rows_with_values_gone_wrong(data: st.DataObject, tmp_path_factory: TempPathFactory) -> None:
    rows = [{"id": "good"} | {key: value for key, value in GPT.items() if key != "id"}]
    for _ in range(30):
        row = data.draw(st.sampled_from((GPT, MOE)))
        rows.append(broken(row, data.draw(st.sampled_from(places(row))), data.draw(st.sampled_from((*ODD, ...)))))
    found = validated(rows, tmp_path_factory.mktemp("rows"))
    assert len(found["rows"]) + len(found["skipped"]) == len(rows)
    assert all(item["why"] for item in found["skipped"])
    assert all(math.isfinite(n) for n in numbers(found["summary"]))
    assert all(math.isfinite(n) and n >= 0 for n in numbers(found["rows"]))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_row_that_states_what_a_score_needs_is_scored(data: st.DataObject, tmp_path_factory: TempPathFactory) -> None:
    needed = {"model": ("layers", "hidden", "heads", "seq_len"), "cluster": ("gpu", "gpus")}
    needed |= {"config": ("tp", "pp", "micro_batch", "global_batch")}
    words: dict[str, tuple[Any, ...]] = {
        "framework": (*presets.names("frameworks"), "veScale", "x.yaml", "", "a/b"),
        "precision": ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4", "fp8-current", "int4", "BF16", "tf32"),
        "attention": ("flash2", "unfused", "sdpa", "FLASH3", "ring"),
        "recompute": ("none", "full", "selective", "block", "FULL"),
        "pipeline_schedule": ("1f1b", "dualpipe", "ZBV", "gpipe"),
        "task": ("pretrain", "sft", "lora", "dpo"),
        "gpu": (*presets.names("gpus"), "a100", "NVIDIA H200", "TPU v5p"),
        "inter_node": ("400 Gb/s", "Slingshot", "", "0 Gb/s", "8x200G per node"),
        "name": ("llama3-8b", "opt-175b", "gpt2", "none of these", "", "x/y.json", "z" * 300),
        "seq_len": (1, 1000, 8192, 1_048_576),
        "gpus_per_node": (1, 2, 3, 8, 72),
        "nvlink_domain": (1, 4, 8, 72),
        "vpp": (0, 1, 3, None),
        "micro_batch": (1, 7, 64),
    }
    rows = []
    for i in range(20):
        row = changed(data.draw(st.sampled_from((GPT, MOE))), id=f"row {i}")
        for key, values in data.draw(
            st.sets(st.sampled_from(sorted(words)), max_size=5).map(lambda keys: {k: words[k] for k in sorted(keys)})
        ).items():
            section = next((row[s] for s in ("model", "cluster", "config") if key in row[s] or key in needed.get(s, ())), None)
            section = row if key in ("framework", "task") else row["config"] if section is None else section
            section[key] = data.draw(st.sampled_from(values))
        for section, keys in needed.items():
            optional = [key for key in row[section] if key not in keys]
            for key in data.draw(st.sets(st.sampled_from(optional), max_size=2)) if optional else ():
                del row[section][key]
        rows.append(row)
    assert validated(rows, tmp_path_factory.mktemp("rows"))["skipped"] == []


@pytest.mark.parametrize("model", presets.names("models"))
@pytest.mark.parametrize("cluster", ["a100x8", "gb200-nvl72x72", "mi300xx16", "tpu-v5p-podx256", "aws-trn2x64", "gaudi3-nodex8"])
def test_figures_of_every_model_are_finite_and_not_negative(model: str, cluster: str) -> None:
    record = tuner.estimate(
        model=model, cluster=cluster, seq_len=512, global_batch=1024, framework="generic", plan="micro_batch=1"
    ).record()
    figures = numbers(json.loads(json_text(record)))
    assert len(figures) > 50
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
