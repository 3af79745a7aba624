"""Public reports of people's runs with a known answer: what fitted, what ran out, and which of two layouts was faster.

Figures are those of the reports; benchmarks/reports.py reads a whole file of such reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reports
from tests.jobs import calibration_of
from tuner import presets
from tuner.cost_model.estimate import Estimate, estimate, peak_memory
from tuner.job import Job
from tuner.load import load_yaml
from tuner.model import Model
from tuner.plan import FULL, RECOMPUTE_MODULES, Plan

GPT_181B = Model(
    name="gpt-181b",
    layers=72,
    hidden=14336,
    ffn_hidden=57344,
    heads=64,
    kv_heads=64,
    head_dim=224,
    vocab=250880,
    gated_mlp=False,
    tied_embeddings=True,
    norm="layer",
    biases=True,
    dropout=True,
    positions="learned",
)


def job(model: str | Model, cluster: str, framework: str, **fields: Any) -> Job:
    found = presets.model(model) if isinstance(model, str) else model
    return Job(model=found, cluster=presets.cluster(cluster), framework=presets.framework(framework), **fields)


def said(of: Job, plan: Plan) -> Estimate:
    return estimate(of, plan, calibration_of(of))


def allocated(of: Job, plan: Plan, stage: int = 0) -> float:
    return float(peak_memory(of, plan, calibration_of(of), stage).allocated)


def test_llama3_70b_fits_64_h100() -> None:
    """FlagOpen/FlagPerf training/nvidia/llama3_70B-megatron: 55 GiB at tp 8, pp 4, dp 2 (its script sets sequence parallelism and the
    distributed optimizer); without either the same layout would run out.
    """
    of = job("llama3-70b", "dgx-h100x64", "megatron-lm", seq_len=8192, global_batch=512)
    plan = Plan(tp=8, pp=4, micro_batch=1, sequence_parallel=1, zero=1, recompute=RECOMPUTE_MODULES["core_attn"])
    assert float(said(of, plan).p_oom) < 0.5
    assert 0.75 < allocated(of, plan) / (55 * 2**30) < 1.25
    assert float(said(of, replace(plan, sequence_parallel=0, zero=0)).p_oom) > 0.5


def test_llama2_70b_prefers_a_longer_pipeline_on_h800() -> None:
    """FlagOpen/FlagPerf training/nvidia/llama2_70B-megatron, 32 H800: tp 4, pp 8 ran 791 tokens/s/GPU, tp 8, pp 4 642, at 12 GiB more."""
    of = job("llama2-70b", "hgx-h800x32", "megatron-lm", seq_len=4096, global_batch=44)
    wide, long = (Plan(tp=tp, pp=32 // tp, sequence_parallel=1, zero=1) for tp in (8, 4))
    assert 1.1 < float(said(of, wide).step_s / said(of, long).step_s) < 1.35
    assert allocated(of, long) > allocated(of, wide)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_181b_prefers_a_shorter_pipeline_that_needs_more_memory(micro_batch: int) -> None:
    """bigscience-workshop tr11-176B-ml/chronicles-prequel.md, 384 A100, 2021-02-21: at each micro batch pp 6 was 2-2.5 % faster than pp 12
    and took 7-9 GB more.
    """
    of = job(GPT_181B, "a100x384", "megatron-deepspeed", seq_len=2048, global_batch=2048, precision="fp16", attention="unfused")
    short, long = (Plan(tp=8, pp=pp, zero=1, micro_batch=micro_batch, recompute=FULL) for pp in (6, 12))
    assert float(said(of, short).step_s) < float(said(of, long).step_s)
    assert 5e9 < float(said(of, short).memory_bytes - said(of, long).memory_bytes) < 11e9


def test_llama3_405b_on_128_h100_needs_tensor_parallelism() -> None:
    """pytorch/torchtitan pull 554: FSDP over 128 H100 alone ran out at 8k tokens, FSDP 16 x TP 8 ran."""
    of = job("llama3.1-405b", "hgx-h100-96gb-500wx128", "torchtitan", seq_len=8192, global_batch=128)
    assert float(said(of, Plan(zero=3, recompute=FULL)).p_oom) > 0.5
    assert float(said(of, Plan(tp=8, zero=3, sequence_parallel=1, recompute=FULL)).p_oom) < 0.5


def test_the_first_of_four_stages_holds_20_gib_more_than_the_last() -> None:
    """7B on 4 stages: 46.8, 38.9, 31.7, 26.9 GiB (public report): 1F1B keeps 4, 3, 2 and 1 micro batches."""
    of = job("llama2-7b", "h100x4", "megatron-lm", seq_len=4096, global_batch=64)
    stages = [allocated(of, Plan(pp=4, micro_batch=2), stage) / 2**30 for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert 15 < stages[0] - stages[3] < 25


def test_recomputing_fused_attention_saves_nothing() -> None:
    """NVIDIA/Megatron-LM issue 1225: 25.5 -> 24.9 GB where the formula of unfused attention says 70 % less."""
    of = job("llama3-8b", "h100x8", "megatron-lm", seq_len=8192, global_batch=32)
    plan = Plan(tp=4, sequence_parallel=1, zero=1)
    redone = replace(plan, recompute=RECOMPUTE_MODULES["core_attn"])
    assert allocated(of, redone) > 0.95 * allocated(of, plan)
    assert float(said(of, redone).step_s) >= float(said(of, plan).step_s)


# --- every report of tests/fixtures/user_reports.yaml, as benchmarks/reports.py reads it ---

REPORTS = [case for case in load_yaml(Path(__file__).parent / "fixtures" / "user_reports.yaml") if case["confidence"] != "partial"]
APART = 1.01  # layouts whose speeds the report gives within 1 % of each other have no known order
SPEED_FACTOR = 1.5  # a `perf` report is met within this factor

# What the model gets wrong, with its numbers; each must be moved out when a repair turns it right.
WRONG_FIT = {
    "bigscience-bf16-oom-set/5": "206B ran out where 73 GB are predicted; a 203B of the same weight a stage fits, the report says",
    "longvita-7-qwen2.5-14b-1layer-seq-sweep/4": "32k ran out of 96 GB with an unfused kernel, not named; a fused one takes 28 GB",
    "titan-1789-dsv3-16b-8xh100/3": "ran with 81.5 GB; the nearest recompute to saving every other product keeps 122 GB",
    "axolotl-2412-smollm-16k-1xh100/1": "ran out in the second backward; 75 GB predicted, a chance of 0.23",
}
WRONG_ORDER = {
    "flagperf-llama1-7b-paddle-a100x8-40g/tp2pp4>tp2-zero1": "x1.03 observed, x0.95 predicted: the bubble is seen, what sharding costs not",
    "flagperf-llama1-7b-paddle-a100x8-40g/tp2pp4>tp2-zero2": "x1.03 observed, x0.95 predicted: the bubble is seen, what sharding costs not",
}
WRONG_SPEED = {
    "modelzoo-qwen3-30b-8xb200/1": "5,400 tokens/s/GPU (7 % MFU) observed, 21,000 predicted; GB200 in 8 bits: 23,000 (NVIDIA)",
}


def variants(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return case.get("variants") or [{}]


def name(case: Mapping[str, Any], index: int) -> str:
    return f"{case['id']}/{variants(case)[index].get('name') or index + 1}"


def known(found: Iterable[tuple[str, Any]], wrong: Mapping[str, str]) -> list[Any]:
    """Parameters of (name, what), those of `wrong` expected to fail; a name of `wrong` that is not there is a mistake."""
    every = dict(found)
    assert not set(wrong) - set(every)
    return [
        pytest.param(what, id=key, marks=[pytest.mark.xfail(strict=True, raises=AssertionError, reason=wrong[key])] if key in wrong else [])
        for key, what in every.items()
    ]


@cache
def seen(report: str) -> list[reports.Seen]:
    case = next(case for case in REPORTS if case["id"] == report)
    return [reports.seen(case, variant, "auto") for variant in variants(case)]


def trusted(case: Mapping[str, Any], index: int) -> bool:
    variant = variants(case)[index]
    return reports.merged(case, variant, "model").get("arch_from") in ("public", "report", "published")


def outcomes() -> Iterator[tuple[str, Any]]:
    for case in REPORTS:
        for index, variant in enumerate(variants(case)):
            if trusted(case, index):
                yield name(case, index), (case["id"], index, variant)


@pytest.mark.parametrize("what", known(outcomes(), WRONG_FIT))
def test_it_fits_or_not_as_reported(what: tuple[str, int, Mapping[str, Any]]) -> None:
    report, index, _ = what
    said = seen(report)[index]
    assert said.scored and not said.why_not, said.why_not
    assert said.fits is not None
    assert (said.p_oom < 0.5) == said.fits, f"p_oom {said.p_oom:.2f}, device {said.device_memory / 1e9:.1f} GB"


def orders() -> Iterator[tuple[str, Any]]:
    for case in REPORTS:
        for better, worse in combinations(case.get("order", []), 2):
            yield f"{case['id']}/{better}>{worse}", (case["id"], better, worse)


@pytest.mark.parametrize("what", known(orders(), WRONG_ORDER))
def test_the_faster_layout_is_faster(what: tuple[str, str, str]) -> None:
    report, better, worse = what
    said = {item.variant: item for item in seen(report)}
    fast, slow = said[better], said[worse]
    if fast.speed and slow.speed and fast.speed / slow.speed < APART:
        return
    assert fast.said_speed > slow.said_speed, f"x{fast.said_speed / slow.said_speed:.2f} predicted"


def measured_speeds() -> Iterator[tuple[str, Any]]:
    for case in REPORTS:
        if case["kind"] == "perf":
            for index in range(len(variants(case))):
                yield name(case, index), (case["id"], index)


@pytest.mark.parametrize("what", known(measured_speeds(), WRONG_SPEED))
def test_the_speed_is_near_what_was_seen(what: tuple[str, int]) -> None:
    report, index = what
    said = seen(report)[index]
    assert said.speed
    assert 1 / SPEED_FACTOR < said.said_speed / said.speed < SPEED_FACTOR, f"x{said.said_speed / said.speed:.2f}"


def test_partial_reports_are_shown_and_not_scored() -> None:
    every = load_yaml(Path(__file__).parent / "fixtures" / "user_reports.yaml")
    partial = [case for case in every if case["confidence"] == "partial"]
    assert partial
    for case in partial:
        assert not any(reports.seen(case, variant, "none").scored for variant in variants(case))


def test_deepseek_v3_keeps_its_speed_from_256_to_1024_gb300() -> None:
    """NVIDIA: 98.5 % of the speed of a GPU is kept while the batch grows with the GPUs (mxfp8, pp 2, vpp 8, ep 32, micro batch 2)."""
    steps = []
    for gpus in (256, 1024):
        of = job("deepseek-v3", f"gb300-nvl72x{gpus}", "megatron-bridge", seq_len=4096, global_batch=16 * gpus, precision="mxfp8")
        plan = Plan(pp=2, vpp=8, ep=32, micro_batch=2, zero=1, recompute=RECOMPUTE_MODULES["mla_up_proj"], loss_layers=3, dp_overlap=1)
        steps.append(float(said(of, plan).step_s))
    assert steps[0] / steps[1] == pytest.approx(0.985, abs=0.015)
