"""Hugging Face configurations: every family that is read counts its published parameters; the others are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.cost_model.params import active_parameters, parameters
from tuner.errors import SpecError
from tuner.hf_config import read_hf_config
from tuner.hf_config.families import FAMILIES
from tuner.hf_config.refusals import UNMODELLED
from tuner.model import Model, SlidingWindow
from tuner.presets import model

FOLDER = Path(__file__).parent / "fixtures" / "hf"


def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return data


def read(name: str, **changes: Any) -> Model:
    return read_hf_config(config(name) | changes, f"{name}.json")


def refusal(data: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read_hf_config(data, "config.json")
    return str(caught.value)


# Parameters of the released weights, exact where the digits are all given, and billions active for one token.
SIZES: dict[str, tuple[float, float | None]] = {
    "apertus-8b": (8.05e9, None),
    "bloom": (176_247_271_424, None),
    "chatglm3-6b": (6_243_584_000, None),
    "command-r": (34_980_831_232, None),
    "command-r7b": (8.03e9, None),
    "dbrx": (131_596_523_520, 36),
    "deepseek-v2-lite": (15_706_484_224, 2.4),
    "deepseek-v3": (671e9, 37),
    "dots.llm1": (142e9, 14),
    "ernie-4.5-21b-a3b": (21.8e9, None),
    "exaone-4.0-32b": (32_003_216_384, None),
    "falcon-40b": (41_303_293_952, None),
    "falcon-7b": (6_921_720_704, None),
    "gemma-2-9b": (9_241_705_984, None),
    "gemma-3-1b": (999_885_952, None),
    "gemma-7b": (8_537_680_896, None),
    "glm-4-9b-0414": (9_400_279_040, None),
    "glm-4.5-air": (106e9, None),
    "gpt-j-6b": (6.05e9, None),
    "gpt-neox-20b": (20_554_567_680, None),
    "gpt-oss-20b": (20_914_757_184, 3.61),
    "gpt2": (124_439_808, None),
    "granite-3.0-8b": (8_170_848_256, None),
    "hunyuan-a13b": (80.4e9, 13),
    "internlm2-7b": (7_737_708_544, None),
    "kimi-k2": (1.03e12, 32.6),
    "ling-lite": (16.8e9, None),
    "llama-2-13b": (13_015_864_320, None),
    "minicpm3-4b": (4.07e9, None),
    "mistral-7b": (7_241_732_096, None),
    "mixtral-8x7b": (46_702_792_704, 12.9),
    "mpt-7b": (6_649_286_656, None),
    "nemotron-4-340b": (341e9, None),
    "olmo-2-7b": (7_298_617_344, None),
    "olmoe-1b-7b": (6_919_161_856, None),
    "opt-125m": (125_239_296, None),
    "phi-2": (2.78e9, None),
    "phi-3-mini": (3_821_079_552, None),
    "phi-3.5-moe": (41.9e9, 6.6),
    "qwen-7b": (7_721_324_544, None),
    "qwen2-57b-a14b": (57.4e9, 14),
    "qwen2-7b": (7_615_616_512, None),
    "qwen3-30b-a3b": (30_532_122_624, 3),
    "seed-oss-36b": (36_151_104_512, None),
    "smollm3-3b": (3_075_098_624, None),
    "stablelm-3b": (2_795_443_200, None),
    "starcoder2-3b": (3_030_371_328, None),
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "opt-350m")


@pytest.mark.parametrize("name", NAMES)
def test_each_family_has_its_published_size(name: str) -> None:
    found = model(str(FOLDER / f"{name}.json"))
    total, active = SIZES[name]
    tolerance = 0.0 if isinstance(total, int) else 0.01
    assert parameters(found) == pytest.approx(total, rel=tolerance, abs=0)
    if active is not None:
        assert active_parameters(found) / 1e9 == pytest.approx(active, rel=0.05)
    assert found.name == name


def test_presets_equal_the_configurations_they_cite() -> None:
    pairs = [("gpt-oss-20b", "gpt-oss-20b"), ("deepseek-v3", "deepseek-v3"), ("bloom-176b", "bloom"), ("mistral-7b", "mistral-7b")]
    pairs += [
        ("mixtral-8x7b", "mixtral-8x7b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("kimi-k2", "kimi-k2"),
        ("qwen2-57b-a14b", "qwen2-57b-a14b"),
    ]
    pairs += [("glm-4.5-air", "glm-4.5-air"), ("gemma2-9b", "gemma-2-9b"), ("gpt2", "gpt2"), ("deepseek-v2-lite", "deepseek-v2-lite")]
    for preset, name in pairs:
        cited = {"name": "", "source": "", "aliases": ()}
        assert model(preset).model_dump() | cited == read(name).model_dump() | cited, preset


def test_windows() -> None:
    assert read("gpt-oss-20b").sliding_window == SlidingWindow(size=128, full_every=2)
    assert read("gemma-3-1b").sliding_window == SlidingWindow(size=512, full_every=6)
    assert read("exaone-4.0-32b").sliding_window == SlidingWindow(size=4096, full_every=4)
    assert read("mistral-7b").sliding_window == SlidingWindow(size=4096)
    assert read("mistral-7b", sliding_window=None).sliding_window is None
    assert read("phi-3-mini", sliding_window=262144).sliding_window is None  # longer than any sequence: it never binds
    assert read("qwen2-7b").sliding_window is None
    assert read("qwen2-7b", use_sliding_window=True, max_window_layers=0, sliding_window=4096).sliding_window == SlidingWindow(size=4096)
    without_key = {key: value for key, value in config("mistral-7b").items() if key != "sliding_window"}
    assert read_hf_config(without_key, "config.json").sliding_window == SlidingWindow(size=4096)  # MistralConfig's default
    shifted = ["full_attention", "sliding_attention"] * 12
    assert read("gpt-oss-20b", layer_types=shifted).sliding_window == SlidingWindow(size=128, full_every=2)


def test_expert_layers() -> None:
    assert read("deepseek-v3").leading_dense_layers == 3
    moe = read("qwen2-57b-a14b", decoder_sparse_step=2).moe
    assert moe is not None and (moe.first_dense_layers, moe.every) == (0, 2)
    moe = read("qwen2-57b-a14b", mlp_only_layers=[0, 1]).moe
    assert moe is not None and (moe.first_dense_layers, moe.every) == (2, 1)
    moe = read("deepseek-v3", moe_layer_freq=[0] * 5 + [1] * 56).moe
    assert moe is not None and moe.first_dense_layers == 5
    assert "irregular patterns of expert layers" in refusal(config("qwen2-57b-a14b") | {"mlp_only_layers": [5]})
    assert read("deepseek-v3", n_routed_experts=None).moe is None


def test_switched_off_variants() -> None:
    off = {"use_mla": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "attention_head_dim": 128}
    assert read("hunyuan-a13b", **off) == read("hunyuan-a13b")
    assert "latent-attention variants" in refusal(config("hunyuan-a13b") | {"use_mla": True})
    assert "experts that differ from layer to layer" in refusal(config("hunyuan-a13b") | {"moe_topk": [8] * 31 + [4]})


def test_quantised_checkpoints_describe_the_same_model() -> None:
    plain = read("llama-2-13b")
    for quantization in ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_algo": "NVFP4", "group_size": 16}):
        assert read("llama-2-13b", quantization_config=quantization) == plain


def test_dropout_defaults_and_switches() -> None:
    assert read("gpt2").dropout
    assert not read("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).dropout
    assert not read("llama-2-13b").dropout
    assert read("llama-2-13b", attention_dropout=0.1).dropout


def test_text_parts() -> None:
    text = config("qwen3-30b-a3b") | {"model_type": "qwen3_vl_moe_text"}
    assert read_hf_config(text, "config.json").layers == 48
    assert read_hf_config({"model_type": "wrapper", "text_config": config("llama-2-13b")}, "config.json").layers == 40
    towers = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"depth": 24}}
    message = refusal(towers)
    assert "qwen3_vl_moe: a vision or audio tower (vision_config)" in message
    assert "pass the text part alone" in message
    both = refusal(towers | {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}})
    assert "linear-attention" in both and "vision" in both and "pass the text" not in both


@pytest.mark.parametrize("family", sorted(UNMODELLED))
def test_an_unmodelled_family_is_refused_by_its_part(family: str) -> None:
    message = refusal(config("llama-2-13b") | {"model_type": family})
    assert f"{family}: {UNMODELLED[family]} are not modelled" in message
    assert family not in FAMILIES


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("layer_types", ["linear_attention", "full_attention"] * 20, "layers of type linear_attention"),
        ("layer_types", ["chunked_attention"] * 40, "layers of type chunked_attention"),
        ("attention_chunk_size", 8192, "chunked attention"),
        ("index_topk", 2048, "sparse attention"),
        ("sparse_attention_config", {"topk": 16}, "sparse attention"),
        ("mamba_num_heads", 64, "Mamba"),
        ("ssm_state_size", 128, "Mamba"),
        ("linear_num_key_heads", 16, "linear-attention"),
        ("full_attention_interval", 4, "linear-attention"),
        ("compress_ratios", [4] * 40, "compressed attention"),
        ("hc_mult", 4, "residual streams"),
        ("num_kv_shared_layers", 10, "residual streams"),
        ("swa_num_key_value_heads", 8, "head counts of their own"),
        ("attn_output_gate", True, "gates of the attention output"),
        ("moe_latent_size", 1024, "latent space"),
        ("hybrid_override_pattern", "M-M*", "heterogeneous"),
        ("block_configs", [{"attention": {}}], "heterogeneous"),
        ("is_encoder_decoder", True, "encoder-decoder"),
        ("use_bidirectional_attention", "all", "encoder-decoder"),
        ("lru_width", 2560, "recurrent"),
        ("packing", True, "packed sequences"),
        ("use_cla", True, "across layers"),
        ("sliding_window", 4096, "sliding windows of this family"),
        ("num_experts", 8, "sizes that this key describes"),
        ("novel_branch_dim", 64, "sizes that this key describes"),
        ("novel_pattern", [0, 1] * 20, "patterns over the layers"),
        ("novel_module_config", {"a": 1}, "parts that this key describes"),
        ("vision_config", {"depth": 3}, "vision or audio tower"),
    ],
)
def test_a_key_that_changes_cost_is_never_ignored(key: str, value: Any, part: str) -> None:
    message = refusal(config("llama-2-13b") | {key: value})
    assert key in message
    assert part in message
    absent: Any = False if isinstance(value, (bool, int)) and key != "sliding_window" else None
    assert read("llama-2-13b", **{key: absent}).layers == 40


def test_keys_without_cost_are_ignored() -> None:
    extra = {
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "bos_token_id": 1, "eos_token_id": [1, 2], "max_length": 20, "num_beams": 1,
        "output_attentions": False, "id2label": {"0": "LABEL_0"}, "auto_map": {"AutoConfig": "x.Y"}, "attention_dropout": 0.0,
        "bad_words_ids": None,
    }  # fmt: skip
    assert read("llama-2-13b", **extra) == read("llama-2-13b")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "big"}, "hidden_size = 'big': must be a whole number"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": -4}, "hidden_size = -4: must be a whole number from 1"),
        ({"hidden_size": 10**30}, "must be a whole number from 1 to 2147483648"),
        ({"hidden_size": 4096.5}, "must be a whole number"),
        ({"hidden_size": True}, "must be a whole number"),
        ({"hidden_size": 5121}, "must divide hidden_size = 5121"),
        ({"num_hidden_layers": 10**6}, "must be a whole number from 1 to 10000"),
        ({"num_key_value_heads": 7}, "must be a multiple of kv_heads = 7"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': must be true or false"),
        ({"attention_dropout": 5}, "must be a rate from 0 to 1"),
        ({"layer_types": ["full_attention"]}, "must be a list with an entry for each of 40 layers"),
        ({"layer_types": "full"}, "must be a list"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 3}, "must name the family"),
        ({"model_type": "lama"}, "this family is not known (did you mean llama?)"),
        ({"vocab_size": [1]}, "vocab_size"),
    ],
)
def test_garbage_is_refused(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(config("llama-2-13b") | changes)


def test_all_problems_at_once() -> None:
    message = refusal({"model_type": "llama", "hidden_size": "x"})
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        assert f"config.json: {key}" in message


def test_a_projected_embedding_is_refused() -> None:
    assert "projections of the embedding" in refusal(config("opt-350m"))


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**40), 10**40),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["full_attention", 0, 1, 8]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
CONFIGS = [config(name) for name in NAMES]
KEYS = sorted({key for data in CONFIGS for key in data})


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(CONFIGS), st.dictionaries(st.sampled_from(KEYS), values, max_size=3), st.lists(st.sampled_from(KEYS), max_size=2))
def test_any_damage_is_read_or_refused(data: dict[str, Any], changes: dict[str, Any], dropped: list[str]) -> None:
    damaged = {key: value for key, value in (data | changes).items() if key not in dropped}
    try:
        assert parameters(read_hf_config(damaged, "config.json")) > 0
    except SpecError as error:
        assert all(problem.where == "config.json" and problem.rule for problem in error.problems)
