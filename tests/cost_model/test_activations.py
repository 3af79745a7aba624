"""The activation formulas of Korthikanti et al. 2022 (arXiv 2205.05198), table 2, exactly."""

from __future__ import annotations

import pytest

from tests.jobs import gpt, gpt_job, llama_job, moe_job
from tuner import presets
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


def test_gathered_inputs_that_stay_are_whole() -> None:
    """Two block inputs of 2 s b h instead of their t-th: 2 x 2 x (1 - 1/8) s b h = 3.5 s b h more."""
    job = gpt_job()
    plan, kind = Plan(tp=8, sequence_parallel=1), job.model.kind(0)
    more = float(layer_activations(job, plan, kind, 1.0).bytes) - float(layer_activations(job, plan, kind).bytes)
    assert more == pytest.approx(3.5 * 2048 * 12288, rel=1e-12)


def per_token(job, plan: Plan | None = None) -> float:
    """Bytes a token and hidden unit, without the fused kernel's log-sum-exp (4 bytes a head)."""
    model = job.model
    one = layer_activations(job, plan or Plan(), model.kind(0))
    return (float(one.bytes) / job.seq_len - 4 * model.heads) / model.hidden


def test_nanotron_keeps_the_stacked_qkv_and_two_gate_products() -> None:
    """The layer of Llama 1.34B (ffn 4h): inputs of layer and norm 2 + 2, of blocks 4, q k v 6, copied k v 4, attention 2, MLP 8 x 4."""
    model = presets.model("llama3-70b").replace(
        name="nanotron-llama-1.34b", layers=16, hidden=2048, ffn_hidden=8192, heads=32, kv_heads=32, head_dim=64, vocab=131072
    )
    job = llama_job(model=model, framework=presets.framework("nanotron"), seq_len=4096)
    assert per_token(job) == pytest.approx(2 + 2 + 4 + 6 + 4 + 2 + 32)


def test_quantised_products_keep_quantised_inputs() -> None:
    """Llama-3 70B (8 of 64 heads are keys', ffn 3.5 h): 2 + 2 + 4 + 2.5 + 2 + 3.5 x 6 = 33.5 in bf16; in fp8 the blocks' inputs are 2, the
    attention's output 2 + 1, the MLP 3.5 x 5.
    """
    assert per_token(llama_job()) == pytest.approx(2 + 2 + 4 + 2.5 + 2 + 21)
    assert per_token(llama_job(precision="fp8")) == pytest.approx(2 + 2 + 2 + 2.5 + 3 + 17.5)
    titan = llama_job(precision="fp8", framework=presets.framework("torchtitan"))
    assert per_token(titan) == pytest.approx(33.5)


def test_a_norm_of_single_kernels_keeps_three_tensors_more() -> None:
    """Aleph Alpha Scaling: two norms x (4 + 2) bytes, and act(x) of the gate: 2 x 3.5."""
    job = llama_job(framework=presets.framework("aleph-alpha-scaling"))
    assert per_token(job) == pytest.approx(33.5 + 12 + 7)


def test_experts_that_weigh_the_activation_keep_no_output() -> None:
    """2 bytes x 4,096 tokens x top 6 x hidden 2,048 less."""
    job = moe_job()
    kept = job.replace(framework=job.framework.replace(weighed_activation=None))
    kind = job.model.kind(5)
    less = float(layer_activations(kept, Plan(), kind).experts) - float(layer_activations(job, Plan(), kind).experts)
    assert less == 2 * 4096 * 6 * 2048
