"""The activation formulas of Korthikanti et al. 2022 (arXiv 2205.05198), table 2, exactly."""

from __future__ import annotations

import pytest

from tests.jobs import gpt, gpt_job
from tuner.cost_model.activations import layer_activations
from tuner.plan import RECOMPUTE_MODULES, Plan

CORE = RECOMPUTE_MODULES["core_attn"]
# (layers, hidden, heads) of the paper's 22B, 175B, 530B and 1T models, table 3.
MODELS = [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128), (128, 25600, 160)]


@pytest.mark.parametrize(("layers", "hidden", "heads"), MODELS)
@pytest.mark.parametrize("b", [1, 4])
def test_table_2(layers: int, hidden: int, heads: int, b: int) -> None:
    job = gpt_job(gpt(layers=layers, hidden=hidden, heads=heads))
    s, h, a, t = 2048, hidden, heads, 8
    kind = job.model.kind(0)

    def bytes_(**plan: int) -> float:
        return float(layer_activations(job, Plan(micro_batch=b, **plan), kind).bytes)

    sbh = s * b * h
    assert bytes_() == pytest.approx(sbh * (34 + 5 * a * s / h), rel=1e-12)
    assert bytes_(tp=t) == pytest.approx(sbh * (10 + 24 / t + 5 * a * s / (h * t)), rel=1e-12)
    assert bytes_(tp=t, sequence_parallel=1) == pytest.approx(sbh / t * (34 + 5 * a * s / h), rel=1e-12)
    assert bytes_(tp=t, recompute=CORE) == pytest.approx(sbh * (10 + 24 / t), rel=1e-12)
    assert bytes_(tp=t, sequence_parallel=1, recompute=CORE) == pytest.approx(34 * sbh / t, rel=1e-12)


def test_full_recompute_keeps_the_input_only() -> None:
    job = gpt_job()
    one = layer_activations(job, Plan(tp=8), job.model.kind(0))
    assert float(one.layer_input) == 2 * 2048 * 12288  # 2sbh, not sharded
    sharded = layer_activations(job, Plan(tp=8, sequence_parallel=1), job.model.kind(0))
    assert float(sharded.layer_input) == 2 * 2048 * 12288 / 8


def test_gpt3_share_of_attention() -> None:
    """5as/h is 80 for GPT-3 175B: 70 % of 114 (the paper, section 5)."""
    job = gpt_job()
    core = layer_activations(job, Plan(), job.model.kind(0))
    assert float(core.core_attention) / float(core.bytes) == pytest.approx(80 / 114, rel=1e-12)


def test_recomputing_a_fused_kernel_saves_nothing() -> None:
    job = gpt_job(attention="flash")
    kind = job.model.kind(0)
    assert layer_activations(job, Plan(recompute=CORE), kind).bytes == layer_activations(job, Plan(), kind).bytes
