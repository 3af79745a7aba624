"""The plan that a row ran: stated knobs, notes, defaults of frameworks."""

import pytest

from tests.accuracy.row import changed, read, skipped
from tuner.accuracy.knobs import _from_layout
from tuner.plan import ALL_LAYERS, FULL, RECOMPUTE_MODULES


@pytest.mark.parametrize(
    ("config", "framework", "expected"),
    [
        ({"recompute": "selective"}, "megatron-lm", RECOMPUTE_MODULES["core_attn"]),
        ({"recompute": "selective"}, "torchtitan", RECOMPUTE_MODULES["layernorm"] | RECOMPUTE_MODULES["mlp"]),
        ({"recompute": "selective", "recompute_modules": ["moe_act", "layernorm"]}, "megatron-bridge", 12),
        ({"recompute": ..., "recompute_modules": ["mla_up_proj"]}, "megatron-bridge", 16),
        ({"recompute": "none"}, "maxtext", 0),
        ({"recompute": ...}, "maxtext", FULL),
        ({"recompute": ...}, "nanotron", 0),
    ],
)
def test_recompute(config, framework, expected):
    assert read(changed(config=config, framework=framework)).plan.recompute == expected


def test_every_other_layer():
    row = read(changed(config={"recompute": "selective", "notes": "AC mode: selective-layer", "pp": 1}, framework="torchtitan"))
    assert (row.plan.recompute, row.plan.recompute_layers) == (FULL, 48)
    assert read(changed()).plan.recompute_layers == ALL_LAYERS


@pytest.mark.parametrize(
    ("config", "framework", "zero", "group"),
    [
        ({"distributed_optimizer": True}, "megatron-lm", 1, 0),
        ({"distributed_optimizer": False}, "megatron-bridge", 0, 0),
        ({"fsdp": True, "fsdp_shard_group": 64}, "megatron-bridge", 3, 64),
        ({"fsdp": True, "fsdp_shard_group": 1}, "megatron-bridge", 3, 0),
        ({"fsdp": True, "notes": "FSDP SHARD_GRAD_OP"}, "llm-foundry", 2, 0),
        ({"fsdp": False}, "torchtitan", 1, 0),
        ({"zero_stage": 2, "distributed_optimizer": True}, "deepspeed", 2, 0),
        ({}, "torchtitan", 3, 0),
        ({}, "megatron-lm", 0, 0),
        ({"distributed_optimizer": True, "notes": "zero1 sharding group size 8; pack"}, "internevo", 1, 8),
    ],
)
def test_sharding(config, framework, zero, group):
    plan = read(changed(config=config, framework=framework)).plan
    assert (plan.zero, plan.shard_group) == (zero, group)


def test_a_source_that_says_it_once_for_all_rows():
    row = read(changed(framework="megatron-deepspeed", source={"title": "vTrain (MICRO'24) measured data"}))
    assert row.plan.zero == 0
    assert read(changed(framework="megatron-deepspeed")).plan.zero == 1


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "framework", "embedding", "loss"),
    [
        (96, 8, 1, "megatron-lm", 0, 0),
        (126, 8, 8, "megatron-bridge", 1, 1),  # Llama 3.1 405B: 126 layers with embedding and loss make 128
        (61, 16, 1, "megatron-bridge", 1, 2),  # DeepSeek-V3
        (95, 4, 1, "megatron-deepspeed", 0, 0),
        (96, 8, 1, "aleph-alpha-scaling", 1, 2),
        (96, 1, 1, "aleph-alpha-scaling", 0, 0),
    ],
)
def test_uneven_stages(layers, pp, vpp, framework, embedding, loss):
    plan = read(changed(model={"layers": layers}, config={"pp": pp, "vpp": vpp}, framework=framework)).plan
    assert (plan.embedding_layers, plan.loss_layers) == (embedding, loss)


def test_nanotron_deals_layers_by_cost():
    """Llama 1.34B of the Ultra-Scale runs: logits 2048 x 131072, a layer 4 x 2048^2 + 3 x 2048 x 8192: 4 layers. The layer that crosses
    a stage's share stays on it, so that the first of two stages has 11 of 20 layers' worth, as 21 dealt evenly give.
    """
    model = {
        "layers": 16,
        "hidden": 2048,
        "ffn_hidden": 8192,
        "heads": 32,
        "kv_heads": 32,
        "head_dim": 64,
        "vocab": 131072,
        "gated_mlp": True,
    }
    plan = read(changed(model=model, framework="nanotron")).plan
    assert round(2048 * 131072 / (4 * 2048**2 + 3 * 2048 * 8192)) == 4
    assert (plan.embedding_layers, plan.loss_layers) == (0, 5)


def test_a_pipeline_layout_in_the_notes():
    """Et*4|(t*4|)*14tmL: 4 layers on the first chunk, 14 chunks of 4, then one with the MTP layer and the loss: 61 layers."""
    assert _from_layout("Et*4|(t*4|)*14tmL") == {"embedding_layers": 0, "loss_layers": 3}
    assert "pp_layout" in skipped(changed(config={"notes": "pp_layout=Ex*4|L"}))


def test_notes_say_what_overlaps():
    notes = {
        "TP comm overlap (userbuffers) off; recompute and overlap read from the recipe": (0, 1),
        "TP comm overlap (userbuffers) on": (1, 1),
        "gradient all-reduce NOT overlapped": (1, 0),
    }
    for text, expected in notes.items():
        plan = read(changed(config={"notes": text}, framework="nemo")).plan
        assert (plan.tp_overlap, plan.dp_overlap) == expected


@pytest.mark.parametrize(
    ("notes", "graphs", "offload"),
    [
        ("cuda_graph=local scope=full_iteration", 1, 0),
        ("cuda_graph=none scope=full_iteration", 0, 0),
        ("cuda_graph=transformer_engine scope=['attn', 'moe_router']; moe dispatcher=hybridep", 1, 0),
        ("cuda_graph=transformer_engine scope=['moe_router', 'moe_preprocess']", 0, 0),
        ("cuda_graph=none; activation cpu offload layers=20; megatron fsdp", 0, 2),
        ("optimizer state CPU offload 0 percent", 0, 0),
        ("optimizer state CPU offload 50 percent", 0, 1),
        ("FSDP FULL_SHARD, activation CPU offload False", 0, 0),
    ],
)
def test_graphs_and_offload(notes, graphs, offload):
    plan = read(changed(config={"notes": notes}, framework="megatron-bridge")).plan
    assert (plan.cuda_graphs, plan.offload) == (graphs, offload)


def test_moe_expert_tensor_parallelism_defaults_to_tp_in_megatron():
    moe = {"experts": 8, "top_k": 2, "expert_ffn_hidden": 32768}
    row = changed(model={"moe": moe, "gated_mlp": True}, config={"ep": 8, "tp": 4}, framework="nemo")
    assert read(row).plan.etp == 4
    assert "etp=4" in read(row).assumed
    assert read(changed(row, config={"etp": 1})).plan.etp == 1


def test_expert_tensor_parallelism_that_leaves_no_room_for_ep_was_1():
    """Megatron-Bridge 25.09: Qwen3 235B on 64 GB200 at tp 2 and ep 64, so that etp 2 would need 128 ranks."""
    moe = {"experts": 128, "top_k": 8, "expert_ffn_hidden": 1536}
    row = changed(model={"moe": moe, "gated_mlp": True}, cluster={"gpus": 64}, config={"ep": 64, "tp": 2, "pp": 1}, framework="nemo")
    assert read(row).plan.etp == 1
    assert "etp=1" in read(row).assumed
