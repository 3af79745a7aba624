"""Parameter counts: by hand for each part, and against the published figure for each preset."""

import pytest

from tuner.cost_model.params import (
    active_parameters,
    embedding_parameters,
    expert_parameters,
    final_norm_parameters,
    head_parameters,
    layer_parameters,
    mtp_parameters,
    parameters,
    position_parameters,
    trained_parameters,
)
from tuner.model import LayerKind, Mla, Model, Moe
from tuner.presets import model, names

DENSE, EXPERTS = LayerKind(0, False), LayerKind(0, True)
SMALL = Model(name="m", layers=2, hidden=8, ffn_hidden=20, heads=4, kv_heads=2, head_dim=3, vocab=50)


def test_a_grouped_query_layer_by_hand() -> None:
    """Queries 8 x 12, keys and values 8 x 6 each, output 12 x 8; gated MLP 3 x 8 x 20; two RMS norms of 8."""
    assert layer_parameters(SMALL, DENSE) == (96 + 48 + 48 + 96, 480, 0, 0, 16)
    assert embedding_parameters(SMALL) == head_parameters(SMALL) == 400
    assert parameters(SMALL) == 2 * (288 + 480 + 16) + 400 + 400 + 8
    assert head_parameters(SMALL.replace(tied_embeddings=True)) == 0


def test_biases_norms_and_positions_by_hand() -> None:
    gpt = SMALL.replace(kv_heads=4, gated_mlp=False, biases=True, norm="layer", positions="learned", max_positions=30, tied_embeddings=True)
    layer = layer_parameters(gpt, DENSE)
    assert layer.attention == 4 * 8 * 12 + 3 * 12
    assert layer.mlp == 2 * 8 * 20 + 20
    assert layer.replicated == 8 + 8 + 2 * 2 * 8  # biases behind the two row-parallel products, two layer norms
    assert position_parameters(gpt) == 30 * 8
    assert final_norm_parameters(gpt) == 16
    assert layer_parameters(SMALL.replace(qkv_bias=True), DENSE).attention - layer_parameters(SMALL, DENSE).attention == (4 + 2 + 2) * 3
    assert layer_parameters(SMALL.replace(output_bias=True), DENSE).replicated == 16 + 8
    assert layer_parameters(SMALL.replace(mlp_bias=True), DENSE)[1] == 480 + 2 * 20
    assert layer_parameters(SMALL.replace(qk_norm=True), DENSE).replicated == 16 + 2 * 3
    assert layer_parameters(SMALL.replace(qk_norm=True, qk_norm_whole=True), DENSE).replicated == 16 + (4 + 2) * 3
    assert layer_parameters(SMALL.replace(attention_sinks=True), DENSE).attention == 288 + 4
    assert position_parameters(SMALL.replace(embedding_norm=True, norm="layer")) == 16


def test_experts_by_hand() -> None:
    moe = Moe(
        experts=6, top_k=2, expert_ffn_hidden=5, shared_expert_ffn_hidden=7, shared_expert_gate=True, router_bias=True, expert_bias=True
    )
    mixture = SMALL.replace(moe=moe)
    one = 3 * 8 * 5 + 2 * 5 + 8
    assert expert_parameters(mixture, moe) == one
    layer = layer_parameters(mixture, EXPERTS)
    assert layer == (288, 0, 3 * 8 * 7, 6 * one, 16 + 8 * 6 + 6 + 8)
    assert active_parameters(mixture) == parameters(mixture) - 2 * 4 * one - 400
    assert active_parameters(mixture.replace(tied_embeddings=True)) == parameters(mixture) - 400 - 2 * 4 * one
    assert active_parameters(SMALL) == parameters(SMALL)


def test_latent_attention_by_hand() -> None:
    """Down 8 x 6 and 8 x (5 + 2), norms 6 and 5, up 6 x 4 x (3 + 2) and 5 x 4 x (3 + 7), output 4 x 7 x 8."""
    latent = SMALL.replace(mla=Mla(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=7))
    layer = layer_parameters(latent, DENSE)
    assert layer.attention == 120 + 200 + 224
    assert layer.replicated == 48 + 56 + 6 + 5 + 16
    straight = SMALL.replace(mla=Mla(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=7))
    assert layer_parameters(straight, DENSE).attention == 8 * 4 * 5 + 200 + 224


def test_mtp_is_trained_but_not_counted() -> None:
    with_mtp = SMALL.replace(mtp_layers=2)
    assert parameters(with_mtp) == parameters(SMALL)
    assert mtp_parameters(with_mtp) == 2 * 8 * 8 + 3 * 8
    assert trained_parameters(with_mtp) == parameters(SMALL) + 2 * (784 + 128 + 24)
    assert trained_parameters(SMALL) == parameters(SMALL)


def test_gpt3_by_hand() -> None:
    """96 layers of 12 h^2 + 13 h, embedding 51,200 h, positions 2,048 h, final norm 2 h (Narayanan et al. 2021, equation 2)."""
    h = 12_288
    assert parameters(model("gpt3-175b")) == 96 * (12 * h * h + 13 * h) + (51_200 + 2_048) * h + 2 * h


def test_the_equation_of_narayanan() -> None:
    """P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)) plus the final norm."""
    for name in ("gpt-1.7b", "gpt-22b", "gpt-145b", "gpt-1t"):
        m = model(name)
        words = 12 * m.layers * m.hidden**2 + 13 * m.layers * m.hidden + (m.vocab + 2048) * m.hidden
        assert parameters(m) == words + 2 * m.hidden


def test_deepseek_v3_by_hand() -> None:
    h = 7168
    attention = h * 1536 + 1536 + 1536 * 128 * 192 + h * 576 + 512 + 512 * 128 * 256 + 128 * 128 * h
    expert = 3 * h * 2048
    dense, sparse = attention + 3 * h * 18432 + 2 * h, attention + 257 * expert + 256 * h + 256 + 2 * h
    assert parameters(model("deepseek-v3")) == 3 * dense + 58 * sparse + 2 * 129_280 * h + h
    assert active_parameters(model("deepseek-v3")) == 3 * dense + 58 * (sparse - 248 * expert) + 129_280 * h + h


# Billions of parameters, in all and for one token: exact counts of the released weights where known, else as published.
PUBLISHED = {
    "bloom-176b": (176.247271424, None),
    "deepseek-v2": (236, 21),
    "deepseek-v2-lite": (15.706484224, 2.4),
    "deepseek-v3": (671, 37),
    "falcon-180b": (179.52256512, None),
    "gemma2-27b": (27.2, None),
    "gemma2-9b": (9.241705984, None),
    "glm-4.5": (355, 32),
    "glm-4.5-air": (106, None),
    "gpt-1.7b": (1.7, None),
    "gpt-145b": (145.6, None),
    "gpt-18b": (18.4, None),
    "gpt-1t": (1008, None),
    "gpt-22b": (22, None),
    "gpt-3.6b": (3.6, None),
    "gpt-310b": (310.1, None),
    "gpt-39b": (39.1, None),
    "gpt-530b": (529.6, None),
    "gpt-7.5b": (7.5, None),
    "gpt-76b": (76.1, None),
    "gpt-oss-120b": (116.83, 5.13),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt2": (0.124439808, None),
    "gpt2-xl": (1.5576112, None),
    "gpt3-175b": (174.6, None),
    "gpt3-20b": (20, None),
    "gpt3-5b": (5, None),
    "grok-1": (314, None),
    "kimi-k2": (1040, 32.6),
    "llama-13b": (13.015864320, None),
    "llama-30b": (32.528943616, None),
    "llama-65b": (65.285660672, None),
    "llama-7b": (6.738415616, None),
    "llama2-13b": (13.015864320, None),
    "llama2-70b": (68.976648192, None),
    "llama2-7b": (6.738415616, None),
    "llama3-405b": (405.853388800, None),
    "llama3-70b": (70.553706496, None),
    "llama3-8b": (8.030261248, None),
    "llama3.2-1b": (1.235814400, None),
    "llama3.2-3b": (3.212749824, None),
    "minimax-m2": (230, 10),
    "mistral-7b": (7.241732096, None),
    "mixtral-8x22b": (140.6, 39),
    "mixtral-8x7b": (46.702792704, 12.9),
    "mt-nlg-530b": (530, None),
    "nemotron-4-15b": (15.6, None),
    "nemotron-4-340b": (341, None),
    "ntp-480b": (503.3, None),  # 12 h^2 L of the sizes it states, h 20480 and L 100; the paper calls it 480B
    "opt-175b": (175, None),
    "qwen2-57b-a14b": (57.4, 14),
    "qwen2.5-72b": (72.7, None),
    "qwen2.5-7b": (7.615616512, None),
    "qwen3-0.6b": (0.596049920, None),
    "qwen3-1.7b": (1.720574976, None),
    "qwen3-14b": (14.8, None),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-30b-a3b": (30.5, 3),
    "qwen3-32b": (32.8, None),
    "qwen3-480b-a35b": (480, 35),
    "qwen3-4b": (4.022468096, None),
    "qwen3-8b": (8.190735360, None),
    "tiny": (0.003475712, None),
    "tiny-moe": (0.005509376, None),
}


@pytest.mark.parametrize("name", names("models"))
def test_each_preset_has_its_published_size(name: str) -> None:
    total, active = PUBLISHED[name]
    exact = len(str(total).partition(".")[2]) >= 6
    assert parameters(model(name)) / 1e9 == pytest.approx(total, rel=1e-9 if exact else 0.03)
    if active is not None:
        assert active_parameters(model(name)) / 1e9 == pytest.approx(active, rel=0.05 if name == "minimax-m2" else 0.03)
