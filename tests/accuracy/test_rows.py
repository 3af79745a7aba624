"""Reading published rows: what is stated, what is filled in, what is left out and why."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tuner
from tests.accuracy.row import GPT, changed, read, skipped
from tuner import presets
from tuner.accuracy.fields import MAX_BYTES, Skipped
from tuner.accuracy.inter_node import inter_node_bandwidth
from tuner.accuracy.rows import Reader, read_files
from tuner.errors import SpecError
from tuner.measurement import Measurement
from tuner.plan import FULL


def test_a_stated_row_is_read_as_it_stands():
    row = read(GPT)
    plan, job = row.plan, row.job
    assert (plan.tp, plan.pp, plan.cp, plan.micro_batch, plan.recompute) == (8, 8, 1, 1, FULL)
    assert plan.dp(job.gpus) == 16
    assert job.precision == "fp16"
    assert job.cluster.domains[-1].bandwidth.value == 25e9  # 8 x 200 Gb/s for 8 GPUs
    assert job.attention == "unfused"  # the source is of 2021
    assert {"attention=unfused", "cp=1", "zero=0", "vpp=1"} <= set(row.assumed)
    assert not any(a.startswith(("tp=", "recompute=", "precision=", "inter_node=")) for a in row.assumed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"suspect": "two numbers disagree"}, "suspect: two numbers disagree"),
        ({"config": {"tp": ..., "micro_batch": ...}}, "not stated: config.tp, config.micro_batch"),
        ({"model": {"heads": None}}, "not stated: model.heads"),
        ({"cluster": {"gpu": "unstated"}}, "cluster.gpu is not stated"),
        ({"cluster": {"gpu": "b200?"}}, "not certain"),
        ({"cluster": {"gpu": "a9000"}}, "no such GPU"),
        ({"cluster": {"gpu": "../../etc/passwd"}}, "must be the name of a GPU"),
        ({"measured": {"tflops_per_gpu": ...}}, "no time and no memory figure"),
        ({"measured": {"tflops_per_gpu": ...}, "outcome": "oom_or_crash"}, "oom_or_crash"),
        ({"measured": {"tflops_per_gpu": -3.0}}, "from 10^-12"),
        ({"measured": {"tflops_per_gpu": "fast"}}, "from 10^-12"),
        ({"config": {"tp": 0}}, "whole number"),
        ({"config": {"tp": True}}, "whole number"),
        ({"config": {"tp": 2.5}}, "whole number"),
        ({"config": {"tp": 10**30}}, "whole number"),
        ({"config": {"tp": 512}}, "exceeds cluster.gpus"),
        ({"config": {"zero_stage": 4}}, "0 to 3"),
        ({"config": {"recompute_modules": "core_attn", "recompute": "selective"}}, "list of names"),
        ({"measured": {"tflops_per_gpu": 5e-324}}, "from 10^-12"),
        ({"measured": {"tflops_per_gpu": 1e308}}, "from 10^-12"),
        ({"model": {"kv_heads": 7}}, "multiple of kv_heads"),
        ({"model": "gpt"}, "must be an object"),
        ({"measured": []}, "must be an object"),
    ],
)
def test_what_cannot_be_scored_is_skipped_with_the_reason(change, words):
    assert words in skipped(changed(**change))


@pytest.mark.parametrize(
    ("change", "assumed"),
    [
        ({"config": {"recompute": "some"}}, "recompute=none (no recompute is called 'some')"),
        ({"config": {"precision": "fp8"}}, "precision=bf16 (a100-sxm-80gb has no fp8)"),
        ({"config": {"precision": "fp6"}}, "precision=bf16 (no precision is called 'fp6')"),
        ({"config": {"attention": "linear"}}, "attention=unfused (no attention is called 'linear')"),
        ({"config": {"pipeline_schedule": "chimera"}}, "schedule=1f1b (no pipeline schedule is called 'chimera')"),
        ({"task": "rlhf"}, "task=sft (no task is called 'rlhf')"),
        ({"flops_convention": "marketing"}, "flops_convention=model (no flops convention is called 'marketing')"),
        ({"framework": "my-own-trainer"}, "framework=generic (no preset is called my-own-trainer)"),
        ({"config": {"cp": 0, "vpp": 0, "ep": 0}}, ""),
        ({"cluster": {"inter_node": "0 Gb/s"}}, "inter_node="),
        ({"model": {"seq_len": 1_000_003}}, ""),
        ({"model": {"name": "x" * 300}}, ""),
        ({"model": {"name": "\x1b[31m\n"}}, ""),
        ({"id": "i" * 400}, ""),
    ],
)
def test_a_word_that_is_not_known_is_scored_as_the_default_and_noted(change, assumed):
    row = read(changed(**change))
    assert row.step_s is not None
    assert any(text.startswith(assumed) for text in row.assumed)


def test_learned_positions_reach_as_far_as_the_row_went():
    opt = {"name": "opt-175b", "tied_embeddings": False, "vocab": 50272, "seq_len": 8192}
    row = read(changed(model=opt))
    assert row.job.model.positions == "learned"
    assert row.job.model.max_positions >= 8192


def test_out_of_memory_needs_no_figure():
    row = read(changed(outcome="oom", measured={"tflops_per_gpu": ...}))
    assert (row.outcome, row.step_s, row.memory_bytes) == ("oom", None, None)


def test_memory_units():
    assert read(changed(measured={"memory_gb": 40.0})).memory_bytes == 40e9
    assert read(changed(measured={"memory_gib": 2.0})).memory_bytes == 2.0 * 2**30


def test_what_a_memory_figure_counts():
    assert "memory=device" in read(changed(measured={"memory_gb": 40.0})).assumed
    row = read(changed(measured={"memory_gb": 40.0}, notes="peak allocated 37.3 GiB, reserved 39 GiB"))
    assert row.memory_kind == "allocated"
    assert read(changed(source={"title": "torchtitan docs/performance.md history"})).memory_kind == "reserved"


def test_hybrid_is_the_nearest_transformer():
    """Nemotron-H 56B (54 MLP, 54 Mamba-2, 10 attention layers). A Mamba-2 mixer has 8192 (2 x 16384 + 2 x 8 x 256 + 256) + 16384 x 8192
    = 438.3e6 weights, an attention layer 2 x 8192 x 128 (64 + 8) = 151.0e6: 466.3e6 a layer, which is 214 heads beside 8 of keys, in
    eights.
    """
    hybrid = {"mlp_layers": 54, "mamba_layers": 54, "attention_layers": 10}
    hybrid |= {"mamba_num_heads": 256, "mamba_head_dim": 64, "mamba_state_dim": 256, "mamba_groups": 8}
    model = {"layers": 118, "hidden": 8192, "ffn_hidden": 32768, "heads": 64, "kv_heads": 8, "head_dim": 128, "tied_embeddings": False}
    row = read(changed(model=model | {"hybrid": hybrid}))
    found = row.job.model
    assert (found.layers, found.heads, found.sliding_window.size, found.sliding_window.full_every) == (54, 216, 128, 5)
    assert any(a.startswith("hybrid=54 transformer layers") for a in row.assumed)
    pattern = {"pattern": "MEMEM*EMEMEM*E", "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_groups": 8}
    assert read(changed(model=model | {"hybrid": pattern})).job.model.layers == 6
    assert "hybrid" in skipped(changed(model=model | {"hybrid": {"mamba_num_heads": 4}}))


def test_sliding_window_in_words():
    pattern = "alternating sliding window 128 / full (window_attn_skip_freq 2); linear biases; attention sinks"
    model = read(changed(model={"attention_pattern": pattern})).job.model
    assert (model.sliding_window.size, model.sliding_window.full_every, model.attention_sinks) == (128, 2, True)


def test_gpt_has_dropout_where_its_framework_defaults_to_it():
    named = changed(model={"name": "no preset is called so"})
    assert read(named).job.model.dropout
    assert not read(changed(named, framework="torchtitan")).job.model.dropout
    assert not read(changed(named, model={"gated_mlp": True})).job.model.dropout


def test_details_come_from_the_preset_of_the_name_if_its_shape_is_the_same():
    assert read(changed(framework="torchtitan")).job.model.positions == "learned"
    gated = {"gated_mlp": True, "tied_embeddings": False}
    assert read(changed(model=gated | {"name": "no preset is called so"})).job.model.positions == "rotary"
    other = read(changed(model=gated | {"layers": 95}))  # the name of a preset, not its shape
    assert other.job.model.positions == "rotary"


def test_unknown_framework_is_generic_and_says_so():
    row = read(changed(framework="homegrown"))
    assert (row.job.framework.name, row.framework) == ("generic", "homegrown")
    assert any("homegrown" in a for a in row.assumed)
    assert read(changed(framework="/etc/passwd")).job.framework.name == "generic"


@pytest.mark.parametrize(
    ("text", "per_node", "expected"),
    [
        ("8x200Gb/s HDR InfiniBand per node (Selene)", 8, 25e9),
        ("400 Gb/s InfiniBand per GPU (Eos)", 8, 50e9),
        ("4x100Gb RoCE per node", 8, 6.25e9),
        ("4x Omni-Path 100 per node", 8, 6.25e9),
        ("800 Gb/s total per node (vTrain config value)", 8, 12.5e9),
        ("400 Gb/s RDMA per GPU", 4, 50e9),
        ("3.2 Tb/s EFA per node", 8, 50e9),
        ("1600 Gbps per node", 8, 25e9),
        ("8 x NDR per node", 8, 50e9),
        ("2 x HDR per node", 4, 12.5e9),
        ("50 GB/s per GPU", 8, 50e9),
        ("RoCE RDMA", 8, None),
        ("Ethernet", 8, None),
    ],
)
def test_inter_node_words(text, per_node, expected):
    assert inter_node_bandwidth(text, per_node) == expected


def test_network_not_stated_is_the_usual_one_and_noted():
    row = read(changed(cluster={"inter_node": ...}))
    assert any(a.startswith("inter_node=") for a in row.assumed)
    assert not any(a.startswith("inter_node=") for a in read(changed(cluster={"inter_node": ..., "gpus": 8}, config={"pp": 1})).assumed)


def test_part_of_a_node_and_nvlink_racks():
    assert read(changed(cluster={"gpus": 4}, config={"tp": 4, "pp": 1})).job.cluster.sizes[0] == 4
    rack = read(changed(cluster={"gpu": "gb200", "gpus": 256, "gpus_per_node": 4, "nvlink_domain": 72, "inter_node": ...}))
    assert rack.job.cluster.sizes == (64, 256)
    odd = read(changed(cluster={"gpus": 12}, config={"tp": 4, "pp": 3}))
    assert odd.job.gpus == 12


def test_a_card_of_unstated_size_is_noted():
    assert "gpu=a100-sxm-80gb" in read(changed(cluster={"gpu": "a100"})).assumed


def test_rows_of_one_job_share_it():
    reader = Reader()
    first, second = (reader.row(changed(config={"tp": tp}), "f") for tp in (4, 8))
    assert first.job is second.job
    assert first.job is not reader.row(changed(config={"global_batch": 768}), "f").job
    assert [a for a in first.assumed if a.startswith("attention=")] == [a for a in second.assumed if a.startswith("attention=")]


def write(tmp_path, *lines, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_bad_lines_are_skipped_with_their_number(tmp_path):
    lines = [json.dumps(GPT), "{", "[1, 2]", "", '{"id": "x", "measured": {"mfu": NaN}}', '{"a": 1e999}', "[" * 5000, json.dumps({"id": 5})]
    measurements, left_out = read_files([write(tmp_path, *lines)])
    assert [m.id for m in measurements] == ["narayanan2021-175b"]
    assert [item.id for item in left_out] == ["rows:2", "rows:3", "rows:5", "rows:6", "rows:7", "rows:8"]
    assert left_out[0].why.startswith("line 2 is not JSON")
    assert "NaN" in left_out[2].why


@pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe\x00", b"model: gpt\n", b"not json", b"\x00" * 100])
def test_a_file_without_a_row_is_refused(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        read_files([path])


def test_missing_and_huge_files_are_refused(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        read_files([tmp_path / "none.jsonl"])
    huge = tmp_path / "huge.jsonl"
    with huge.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(SpecError, match="at most"):
        read_files([huge])
    with pytest.raises(SpecError, match="folder"):
        read_files([Path(tmp_path)])


def test_a_node_that_no_cluster_has_is_skipped():
    assert "size = 2147483649" in skipped(changed(cluster={"gpus_per_node": 2**31 + 1}))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES = [(s, k) for s in ("model", "cluster", "config", "measured") for k in GPT[s]] + [
    ("model", k) for k in ("moe", "mla", "hybrid", "attention_pattern", "mtp_layers")
]
PLACES += [
    ("config", k)
    for k in ("vpp", "cp", "ep", "notes", "zero_stage", "fsdp", "recompute_modules", "attention", "fused_norm", "pipeline_schedule")
]


TOP = ["id", "source", "framework", "release", "task", "outcome", "superseded", "notes", "mfu_peak_tflops"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.tuples(st.sampled_from(PLACES), ANYTHING), min_size=1, max_size=3),
    top=st.dictionaries(st.sampled_from(TOP), ANYTHING, max_size=2),
)
def test_no_row_raises(places, top):
    """Whatever stands in a row, the answer is a measurement or a reason."""
    row = copy.deepcopy(GPT) | top
    for (section, key), value in places:
        row[section][key] = value
    found = Reader().row(row, "file", 3)
    assert isinstance(found, (Measurement, Skipped))
    if isinstance(found, Skipped):
        assert found.why


def test_zero_3_of_narayanan_ran_deepspeed():
    """arXiv 2104.04473, section 5.2; the row keeps the name it states."""
    title = "Narayanan et al. 2021"
    rows = [changed(framework="megatron-lm", source={"title": title}, config={"zero_stage": stage}) for stage in (0, 3)]
    made = [read(row) for row in rows]
    assert [row.job.framework.name for row in made] == ["megatron-lm", "deepspeed"]
    assert [row.framework for row in made] == ["megatron-lm", "megatron-lm"]


@pytest.mark.parametrize("gpu", presets.names("gpus"))
def test_a_row_on_any_known_accelerator_is_read(gpu):
    row = read(changed(cluster={"gpu": gpu, "gpus_per_node": ..., "nvlink_domain": ...}, config={"precision": ...}))
    assert row.job.cluster.gpu.name == gpu
    assert row.job.gpus == 1024


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    odd = changed(config={"notes": "a\u2028b\x85c\x0b"})
    path.write_text(json.dumps(odd, ensure_ascii=False) + "\r\n" + json.dumps(GPT) + "\n", encoding="utf-8")
    found, left_out = read_files([path])
    assert (len(found), left_out) == (2, [])


def test_half_a_surrogate_pair_in_a_text_is_no_reason_to_drop_a_row():
    row = read(changed(id="\ud800x", framework="\udfff", model={"name": "\ud800"}))
    assert row.id == "?x"


def test_every_file_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SpecError) as caught:
        tuner.validate([tmp_path / "empty.jsonl", tmp_path / "missing.jsonl", "~nobody-of-that-name/x.jsonl"])
    assert [problem.rule for problem in caught.value.problems] == [
        "is empty",
        "no such file",
        "names the home folder of an unknown user",
    ]
