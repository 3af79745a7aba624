# ruff: noqa: E501
"""Each rule refuses what its framework refuses, says why with numbers, and offers a way out that works."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import gpt, gpt_job, llama_job, moe_job
from tuner import presets
from tuner.cost_model.rules import FAMILIES, NOT_ABOUT_A_PLAN, RULES, broken, distinct, enforced, legal, masks
from tuner.job import Job, RampUp
from tuner.model import Moe
from tuner.plan import ALL_LAYERS, FULL, OFFLOADS, RECOMPUTE_MODULES, SCHEDULES, Plan
from tuner.plan_text import recompute_text
from tuner.search.space import complete

CORE, MLP, NORM, ACT, UP, MOE, SHARED = RECOMPUTE_MODULES.values()
GOOD = Plan(tp=8, pp=8, micro_batch=1, sequence_parallel=1, zero=1)


def gpt3(framework: str = "megatron-lm", **changes: Any) -> Job:
    return gpt_job(framework=presets.framework(framework), **changes)


def llama(framework: str = "megatron-lm", **changes: Any) -> Job:
    return llama_job(framework=presets.framework(framework), **changes)


def moe(framework: str = "megatron-lm", **changes: Any) -> Job:
    return moe_job(framework=presets.framework(framework), **changes)


# rule id -> (job, a plan that breaks it, what the text says)
BROKEN: dict[str, tuple[Job, Plan, str]] = {
    "range-tp": (gpt3(), Plan(tp=0), "tp = 0 must be from 1"),
    "range-zero": (gpt3(), Plan(zero=4), "zero = 4 must be from 0 to 3"),
    "range-recompute": (gpt3(), Plan(recompute=256), "recompute = 256 must be from 0 to 255"),
    "mesh": (gpt3(), Plan(tp=3, pp=8), r"tp\*pp\*cp = 3\*8\*1 must divide gpus = 1024; nearest tp: 4"),
    "expert-mesh": (moe(), Plan(ep=64, etp=8), r"etp\*ep\*pp = 8\*64\*1 must divide gpus = 256; nearest ep: 32, etp: 4"),
    "dense-experts": (gpt3(), Plan(tp=8, ep=2), "ep = 2, etp = 1: gpt-96x12288 has no experts, so both must be 1; nearest ep: 1"),
    "experts-ep": (moe(), Plan(ep=24), "ep = 24 must divide experts = 64; nearest ep: 32"),
    "batch": (gpt3(), Plan(tp=8, pp=1, micro_batch=5), r"micro_batch\*dp = 5\*128 must divide global_batch = 1536; nearest micro_batch: 6"),
    "ramp-up": (
        gpt3(ramp_up=RampUp(start=24, increment=24, samples=1000)),
        Plan(tp=8, pp=8, micro_batch=2),
        r"micro_batch\*dp = 2\*16 must divide the batch ramp-up's start = 24 and increment = 24",
    ),
    "shard-group": (gpt3(), Plan(tp=8, pp=8, zero=1, shard_group=3), r"must divide dp\*cp = 16\*1 \(zero = 1\); nearest shard_group: 2"),
    "heads-tp": (llama(model=gpt(layers=60, hidden=6656, heads=52)), Plan(tp=8), "tp = 8 must divide heads = 52; nearest tp: 4"),
    "kv-heads-tp": (llama(model=gpt(layers=80, hidden=8192, heads=60).replace(kv_heads=12)), Plan(tp=20), "tp = 20 must divide kv_heads = 12"),
    "kv-heads-tp-whole": (llama("torchtitan"), Plan(tp=16), "tp = 16 must divide kv_heads = 8; nearest tp: 8"),
    "heads-cp": (llama(model=presets.model("llama3-8b").replace(heads=24, kv_heads=8)), Plan(tp=4, cp=4, cp_kind=2), r"tp\*cp = 4\*4 must divide heads = 24"),
    "ffn-tp": (gpt3(model=gpt(layers=96, hidden=12288, heads=96).replace(ffn_hidden=32764)), Plan(tp=8, pp=8), "tp = 8 must divide ffn_hidden = 32764; nearest tp: 4"),
    "vocab-tp": (llama("nanotron", model=presets.model("llama3-70b").replace(vocab=50257)), Plan(tp=8), "vocab = 50257, which nanotron does not pad"),
    "seq-cp": (llama(seq_len=8190), Plan(cp=2), r"2\*cp = 4 must divide seq_len = 8190; nearest cp: 1"),
    "seq-sp": (llama(seq_len=8196), Plan(tp=8, sequence_parallel=1), "tp = 8 must divide seq_len/cp = 8196/1 = 8196"),
    "seq-tp-cp": (llama("torchtitan", seq_len=8200), Plan(tp=8, cp=2), r"tp\*2\*cp = 8\*2\*2 must divide seq_len = 8200"),
    "tp-across-domain": (gpt3(), Plan(tp=16), "tp = 16 leaves the .* domain of 8 GPUs; nearest tp: 8"),
    "chunks": (gpt3(), Plan(pp=64, vpp=2), r"pp\*vpp = 64\*2 chunks need a layer each, and layers = 96"),
    "layers-pp-vpp": (
        llama(cluster=presets.cluster("h100x56"), global_batch=560),
        Plan(pp=7, vpp=2),
        r"pp\*vpp = 7\*2 must divide layers = 80; nearest",
    ),
    "vpp-pp": (gpt3(), Plan(tp=8, vpp=2), "vpp = 2 needs pp > 1; nearest vpp: 1, pp: 2"),
    "vpp-microbatches": (gpt3(), Plan(tp=8, pp=8, vpp=2, micro_batch=8), "pp = 8 must divide microbatches = 12 where vpp = 2 > 1; nearest vpp: 1, micro_batch: 6"),
    "schedule-vpp": (gpt3("megatron-lm-zero-bubble"), Plan(tp=8, pp=8, vpp=2, schedule=2), "schedule zb-1p holds one chunk a stage, so vpp = 2 must be 1"),
    "schedule-megatron": (gpt3(), Plan(tp=8, pp=8, schedule=SCHEDULES["zb-1p"]), "schedule = zb-1p: megatron-lm has 1f1b"),
    "schedule-deepspeed": (gpt3("megatron-deepspeed"), Plan(tp=8, pp=8, schedule=1), "schedule = gpipe: megatron-deepspeed has 1f1b"),
    "schedule-nanotron": (llama("nanotron"), Plan(tp=8, pp=8, schedule=3), "schedule = zb-2p: nanotron has 1f1b, gpipe"),
    "vpp-single": (llama("nanotron"), Plan(pp=8, vpp=2), "vpp = 2: nanotron has no interleaved schedule; nearest vpp: 1"),
    "microbatches-pp": (llama("torchtitan"), Plan(tp=1, pp=16, micro_batch=16), "microbatches = 8 must be at least pp = 16; nearest micro_batch: 8"),
    "microbatches-rounds": (llama("torchtitan"), Plan(pp=3, vpp=2), "microbatches = 25 must divide into 8 rounds of at least pp = 3; nearest micro_batch: 3, pp: 4"),
    "microbatches-stages": (llama("torchtitan"), Plan(pp=16, vpp=2, micro_batch=8), r"microbatches = 16 are fewer than the stages, pp\*vpp = 16\*2"),
    "bubble": (gpt3(), Plan(tp=1, pp=32, micro_batch=3), "microbatches = 16 < pp = 32"),
    "tied-pp": (llama("torchtitan", model=presets.model("llama3.2-1b")), Plan(pp=2), "pp = 2: llama3.2-1b ties its embeddings, which needs pp = 1; nearest pp: 1"),
    "recompute-mixed": (gpt3(), Plan(tp=8, recompute=FULL | MLP), "full recompute already drops every module"),
    "recompute-parts": (gpt3(), Plan(tp=8, recompute=ACT), "recompute = moe_act names a part that gpt-96x12288 does not have"),
    "recompute-nested": (moe(), Plan(recompute=MOE | ACT), "moe contains moe_act and shared_experts"),
    "full-layers": (gpt3(), Plan(tp=8, pp=8, recompute=FULL, recompute_layers=13), "full:13: a stage of pp = 8 holds 12 layers; nearest recompute_layers: 12, pp: 4"),
    "full-layers-all": (gpt3(), Plan(tp=8, pp=8, recompute=FULL, recompute_layers=12), "full:12 is all layers of a stage, which is spelled full"),
    "full-layers-vpp": (gpt3(), Plan(tp=8, pp=8, vpp=4, recompute=FULL, recompute_layers=6), "full:6: each of vpp = 4 chunks recomputes the same number of layers; nearest recompute_layers: 4, vpp: 3"),
    "recompute-whole": (llama("nanotron"), Plan(recompute=MLP), "recompute = mlp: nanotron recomputes all layers or nothing"),
    "core-attn-flash": (llama(), Plan(recompute=CORE), "fused attention keeps no scores"),
    "zero-pp-megatron": (gpt3(), Plan(tp=8, pp=2, zero=2), r"zero = 2 shards gradients or weights, which needs pp = 1 \(pp = 2\); nearest zero: 1, pp: 1"),
    "zero-pp-deepspeed": (gpt3("megatron-deepspeed"), Plan(tp=8, pp=2, zero=3), r"zero = 3 needs pp = 1 \(pp = 2\)"),
    "zero-nanotron": (llama("nanotron"), Plan(zero=3), "zero = 3: nanotron shards the optimizer only"),
    "zero-fsdp": (llama("torchtitan"), Plan(zero=1), "zero = 1: torchtitan replicates"),
    "offload-activations": (llama(), Plan(tp=8, pp=4, offload=OFFLOADS["activations"]), r"activation offload needs pp = 1, no recompute and no CUDA graphs \(pp = 4"),
    "offload-optimizer": (llama(), Plan(tp=8, offload=OFFLOADS["optimizer"]), r"offload of the optimizer needs zero >= 1, the distributed optimizer \(zero = 0\); nearest zero: 1"),
    "offload-nanotron": (llama("nanotron"), Plan(offload=1), "nanotron offloads nothing"),
    "tp-overlap-sp": (gpt3(), Plan(tp=8, tp_overlap=1), "tp_overlap needs sequence_parallel; nearest tp_overlap: 0, sequence_parallel: 1"),
    "ep-overlap": (moe(), Plan(ep=8, ep_overlap=1, pp=2, recompute=FULL), "ep_overlap needs ep > 1"),
    "moe-tp-sp": (moe(), Plan(tp=2), "a mixture of experts at tp = 2 needs sequence_parallel; nearest sequence_parallel: 1"),
    "ep-tp": (moe("torchtitan"), Plan(tp=8, ep=4), "ep = 4 must be at least tp = 8; nearest ep: 8, tp: 4"),
    "ep-mesh": (moe("torchtitan"), Plan(pp=128, ep=4, zero=3), r"ep = 4 must divide dp_shard\*cp\*tp = 2\*1\*1 "),
    "etp-torchtitan": (moe("torchtitan"), Plan(tp=2, etp=2, ep=2), "etp = 2: torchtitan has no expert tensor parallelism"),
    "accelerate-mesh": (llama("accelerate"), Plan(pp=2, zero=3, dp_overlap=1), "pp = 2, ep = 1, etp = 1 must be 1: accelerate has tp, cp and data parallelism; nearest pp: 1"),
    "accelerate-fsdp": (llama("accelerate"), Plan(tp=2, dp_overlap=1), r"tp = 2 or cp = 1 above 1 needs zero = 2 or 3 \(zero = 0\) over dp\*cp > 1 \(32\*1\); nearest zero: 2, tp: 1"),
    "accelerate-cp": (llama("accelerate"), Plan(cp=2, cp_kind=2, zero=3, dp_overlap=1), "cp_kind = a2a: the ring attention of accelerate has p2p and all_gather"),
    "accelerate-sp": (llama("accelerate"), Plan(tp=2, sequence_parallel=1, zero=3, dp_overlap=1), "transformers keeps whole sequences"),
    "accelerate-overlap": (llama("accelerate"), Plan(zero=3), "dp_overlap = 0, tp_overlap = 0, cuda_graphs = 0: data-parallel overlap cannot be switched off"),
    "fused-softmax": (gpt3(model=gpt(layers=70, hidden=13824, heads=108)), Plan(tp=4, micro_batch=2), r"\(heads/tp\)\*micro_batch = 27\*2 is no multiple of 4"),
    "sequence-parallel-alone": (gpt3(), Plan(sequence_parallel=1), "sequence_parallel does nothing at tp = 1"),
    "sequence-parallel-tp1": (gpt3(), Plan(sequence_parallel=1), "the config class refuses it, the launcher switches it off"),
    "tp-overlap-alone": (gpt3(), Plan(tp_overlap=1), "tp_overlap does nothing at tp = 1"),
    "ep-overlap-alone": (moe("torchtitan"), Plan(ep_overlap=1), "ep_overlap does nothing at ep = 1"),
    "cp-kind-alone": (llama(), Plan(cp_kind=1), "cp_kind does nothing at cp = 1"),
    "schedule-alone": (llama("nanotron"), Plan(schedule=1), "schedule does nothing at pp = 1"),
    "embedding-layers-alone": (gpt3(), Plan(embedding_layers=1), "pipeline_layout embedding=N does nothing at pp = 1; nearest pipeline_layout: even"),
    "loss-layers-alone": (gpt3(), Plan(loss_layers=1), "pipeline_layout loss=N does nothing at pp = 1; nearest pipeline_layout: even"),
    "zero-alone": (gpt3(), Plan(tp=32, pp=32, zero=1), r"zero = 1 shards nothing at dp\*cp = 1; nearest zero: 0"),
    "dp-overlap-alone": (gpt3(), Plan(tp=32, pp=32, dp_overlap=1), r"dp_overlap does nothing at dp\*cp = 1"),
    "shard-group-whole": (gpt3(), Plan(tp=8, pp=8, zero=1, shard_group=16), r"shard_group = 16 of dp\*cp = 16 ranks: all is spelled 0"),
    "fallback-tp": (gpt3(), Plan(tp=8, pp=8, fallback_tp=9), "fallback_tp = 9 must not exceed tp = 8"),
    "fallback-tp-zero": (llama("torchtitan"), Plan(tp=8, zero=3, fallback_tp=7), "zero = 3 shards weights or gradients over replicas, which fallback_tp = 7"),
    "fallback-tp-experts": (moe(), Plan(tp=8, etp=8, fallback_tp=6), "has experts, whose expert-parallel groups fall back instead"),
    "fallback-tp-experimental": (gpt3(), Plan(tp=8, pp=8, fallback_tp=7), "no released framework runs nonuniform tensor parallelism"),
    "layers-without-full": (gpt3(), Plan(tp=8, recompute_layers=4), "recompute_layers = 4 means nothing without full recompute"),
}  # fmt: skip


def test_each_rule_has_its_own_id_a_source_and_a_known_family() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.source
        assert rule.families
        assert set(rule.families) <= set(FAMILIES)
        assert set(rule.knobs) <= {field.name for field in dataclasses.fields(Plan)}


def test_each_rule_but_ranges_of_the_same_kind_has_an_example() -> None:
    assert {rule.id for rule in RULES if not rule.id.startswith("range-")} <= set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_says_why(name: str) -> None:
    job, plan, text = BROKEN[name]
    said = {rule.id: message for rule, message in broken(job, plan)}
    assert name in said
    assert re.search(text, said[name]), said[name]


@pytest.mark.parametrize("name", BROKEN)
def test_severity_decides_what_the_masks_leave_out(name: str) -> None:
    job, plan, _ = BROKEN[name]
    severities = {rule.severity for rule, _ in broken(job, plan)}
    assert bool(legal(job, plan)) == ("error" not in severities)
    assert bool(distinct(job, plan)) == ("duplicate" not in severities)


@pytest.mark.parametrize("name", BROKEN)
def test_the_nearest_value_mends_the_rule(name: str) -> None:
    job, plan, _ = BROKEN[name]
    rule = next(rule for rule in RULES if rule.id == name)
    message = next(message for broke, message in broken(job, plan) if broke is rule)
    for knob, value in re.findall(r"(\w+): (\d+)", message.partition("; nearest ")[2]):
        mended = dataclasses.replace(plan, **{knob: int(value)})
        assert rule.holds(job, mended)
        errors = {r.id for r, _ in broken(job, plan) if r.severity == "error"}
        assert {r.id for r, _ in broken(job, mended) if r.severity == "error"} < errors | {""}


def test_a_good_plan_breaks_nothing() -> None:
    assert broken(gpt3(attention="flash"), GOOD) == []
    assert legal(gpt3(), GOOD)
    assert distinct(gpt3(), GOOD)


@pytest.mark.parametrize("framework", presets.names("frameworks"))
def test_each_framework_names_known_families(framework: str) -> None:
    assert set(presets.framework(framework).rules) <= set(FAMILIES)


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("framework", presets.names("frameworks"))
def test_what_a_framework_does_when_not_told_is_legal(framework: str, model: str) -> None:
    job = llama(framework, model=presets.model(model))
    assert legal(job, complete(job, {}))


def test_a_default_that_recomputes_the_mlp_recomputes_the_experts() -> None:
    """torchtitan issue 1789: a 16B DeepSeek-V3 on 8 H100 at 4 sequences of 4k peaks at 73.3 GiB; with its experts kept it would not fit."""
    assert recompute_text(complete(llama("torchtitan", model=presets.model("qwen3-30b-a3b")), {}).recompute) == "layernorm+moe"
    assert recompute_text(complete(moe("torchtitan"), {}).recompute) == "mlp+layernorm+moe"  # its first layer is dense
    assert recompute_text(complete(llama("torchtitan"), {}).recompute) == "mlp+layernorm"


def test_a_framework_enforces_its_own_rules_only() -> None:
    nanotron, megatron = llama("nanotron"), llama()
    uneven = Plan(tp=4, pp=8, embedding_layers=1, zero=1)  # 81 units on 8 stages
    assert legal(nanotron, uneven)
    assert [rule.id for rule, _ in broken(megatron, uneven)] == ["layers-pp-vpp"]
    assert {rule.id for rule in enforced(nanotron, "error")} & {"zero-nanotron", "moe-tp-sp"} == {"zero-nanotron"}


def test_stages_may_count_the_embedding_and_the_loss_as_layers() -> None:
    job = llama(model=presets.model("llama3-8b").replace(layers=30))
    assert not legal(job, Plan(pp=4))
    assert legal(job, Plan(pp=4, embedding_layers=1, loss_layers=1))
    assert legal(job, Plan(pp=4, vpp=4, embedding_layers=1, loss_layers=1))
    assert [rule.id for rule, _ in broken(job, Plan(pp=16, embedding_layers=1, loss_layers=17))] == ["chunks"]  # 3 units a stage


def test_nanotron_gives_a_costly_head_a_stage_of_its_own() -> None:
    """huggingface/nanotron helpers.py build_model: blocks go to stages by cumulated cost (published runs: 1.3B on 8 stages, loss = 4)."""
    plan = Plan(pp=8, loss_layers=4)
    fields = {"model": gpt(layers=16, hidden=2048, heads=32), "cluster": presets.cluster("h100x8"), "global_batch": 256}
    assert legal(llama("nanotron", **fields), plan)
    assert "chunks" in {rule.id for rule, _ in broken(llama(**fields), plan)}
    assert "chunks" in {rule.id for rule, _ in broken(llama("nanotron", **fields), Plan(pp=32, loss_layers=4))}


# Public reports of refused configurations (https://github.com/...): what was tried, and the rule that refuses it.
REPORTS: tuple[tuple[str, Job, Plan, str | None, Plan | None], ...] = (
    (
        "deepspeedai/DeepSpeed/issues/3634",  # llama-30b: num_heads (52) must be divisible by mp_size (8)
        llama("deepspeed", model=gpt(layers=60, hidden=6656, heads=52), cluster=presets.cluster("a100x8")),
        Plan(tp=8),
        "heads-tp",
        Plan(tp=4),
    ),
    (
        "pytorch/torchtitan/issues/2574",  # qwen3.5-122b-a10b, 2 KV heads, tp 4 or 8
        llama("torchtitan", model=presets.model("llama3-70b").replace(kv_heads=2)),
        Plan(tp=4, zero=3),
        "kv-heads-tp-whole",
        Plan(tp=2, zero=3),
    ),
    (
        "pytorch/torchtitan/issues/2574 under Megatron-LM",  # which copies KV heads
        llama(model=presets.model("llama3-70b").replace(kv_heads=2)),
        Plan(tp=4),
        None,
        None,
    ),
    (
        "NVIDIA/Megatron-LM/issues/468",  # 80 layers, pp 16, 2 layers a virtual stage: 64 layers were trained
        llama(cluster=presets.cluster("h100x128")),
        Plan(pp=16, vpp=2),
        "layers-pp-vpp",
        Plan(pp=16, vpp=5),
    ),
    (
        "NVIDIA/Megatron-LM/issues/1304",  # 30 layers on 4 stages: 28 were built
        llama(model=gpt(layers=30, hidden=4096, heads=32)),
        Plan(pp=4),
        "layers-pp-vpp",
        Plan(pp=2),
    ),
    (
        "NVIDIA/Megatron-LM/issues/1303",  # 40 layers on 16 stages
        llama(model=gpt(layers=40, hidden=5120, heads=40), cluster=presets.cluster("a100x16")),
        Plan(pp=16),
        "layers-pp-vpp",
        Plan(pp=8, tp=2),
    ),
    ("NVIDIA/Megatron-LM/issues/1587", moe(), Plan(tp=2, ep=8), "moe-tp-sp", Plan(tp=2, ep=8, sequence_parallel=1)),
    ("ROCm/Megatron-LM/pull/85", llama(), Plan(tp=8), None, None),  # a dense model needs no sequence parallelism
    (
        "vllm-project/vllm/issues/52435",  # 256 experts on 3 ranks
        llama(
            model=presets.model("llama3-8b").replace(moe=Moe(experts=256, top_k=8, expert_ffn_hidden=2048)),
            cluster=presets.cluster("h100x3"),
            global_batch=12,
        ),
        Plan(ep=3),
        "experts-ep",
        Plan(ep=1),
    ),
    ("pytorch/torchtitan/pull/4794", moe("torchtitan"), Plan(tp=8, ep=4, zero=3), "ep-tp", Plan(tp=8, ep=8, zero=3)),
    (
        "NVIDIA-NeMo/Megatron-Bridge/pull/3107",  # llama3-70b on 32 H100, pp 4, activations offloaded
        llama(cluster=presets.cluster("h100x32")),
        Plan(tp=8, pp=4, offload=OFFLOADS["activations"]),
        "offload-activations",
        Plan(tp=8, pp=4, offload=OFFLOADS["optimizer"]),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("where", "job", "plan", "rule", "instead"), REPORTS, ids=[report[0] for report in REPORTS])
def test_public_reports_of_refusals(where: str, job: Job, plan: Plan, rule: str | None, instead: Plan | None) -> None:
    errors = {r.id for r, _ in broken(job, plan) if r.severity == "error"}
    assert (rule in errors) if rule else not errors
    assert instead is None or legal(job, instead)


def test_bigscience_fused_softmax() -> None:
    """bigscience chronicles-prequel: 108 heads at tp 8 and micro batch 4 left the fused softmax; tp 4 keeps it."""
    job = gpt_job(model=gpt(layers=64, hidden=13824, heads=108), cluster=presets.cluster("a100x384"), global_batch=2048)
    assert "heads-tp" in {rule.id for rule, _ in broken(job, Plan(tp=8, micro_batch=4))}
    assert "fused-softmax" in {rule.id for rule, _ in broken(job, Plan(tp=8, micro_batch=3))}
    assert "fused-softmax" not in {rule.id for rule, _ in broken(job, Plan(tp=4, micro_batch=4))}


# The rules of Megatron-LM (d98e8a64dd) and torchtitan (b5bcd76c6), each with the rules here that state it.
STATED: dict[str, tuple[str, ...]] = {
    "world % (tp*pp*cp) == 0": ("mesh",),
    "world % (etp*ep*pp) == 0 for MoE": ("expert-mesh",),
    "ep divides dp_shard*cp*tp, ep >= tp (torchtitan)": ("ep-mesh", "ep-tp"),
    "heads % tp == 0": ("heads-tp",),
    "kv % tp == 0 or tp % kv == 0; torchtitan, Hugging Face: kv % tp == 0": ("kv-heads-tp", "kv-heads-tp-whole"),
    "Ulysses: heads % cp == 0": ("heads-cp",),
    "(layers + counted embedding + counted loss) % pp == 0": ("layers-pp-vpp",),
    "uneven split: every stage % vpp == 0": ("layers-pp-vpp", "chunks"),
    "(layers/pp) % layers_per_virtual_stage == 0": ("layers-pp-vpp",),
    "vpp > 1 needs pp > 1": ("vpp-pp",),
    "vpp: microbatches % pp == 0": ("vpp-microbatches",),
    "microbatches >= pp, warning below total stages (torchtitan)": ("microbatches-pp", "microbatches-rounds", "microbatches-stages"),
    "tied embeddings refused with pp > 1 (torchtitan)": ("tied-pp",),
    "gbs % (mbs*dp) == 0, also every ramp-up size": ("batch", "ramp-up"),
    "seq % (2*cp) == 0; (seq/cp) % tp == 0 with SP; tokens % (tp*2*cp) == 0 (torchtitan)": ("seq-cp", "seq-sp", "seq-tp-cp"),
    "padded vocab % tp == 0": ("vocab-tp",),
    "sequence_parallel with tp == 1: warning": ("sequence-parallel-tp1",),
    "tp_comm_overlap requires sequence_parallel": ("tp-overlap-sp",),
    "MoE and tp > 1 require sequence_parallel": ("moe-tp-sp",),
    "experts % ep == 0; ep > 1 only for MoE": ("experts-ep", "dense-experts"),
    "full recompute: 1 <= num_layers <= layers/pp; selective forbids both": ("full-layers", "recompute-mixed", "layers-without-full"),
    "core_attn recompute with fused attention: warning": ("core-attn-flash",),
    "moe_act needs experts, mla_up_proj needs MLA": ("recompute-parts",),
    "EP overlap; MTP with it: at most one layer": ("ep-overlap",),
    "activation offload": ("offload-activations",),
    "FSDP2 in Megatron: pp == 1": ("zero-pp-megatron",),
}


def test_the_known_rules_are_stated_or_named_as_not_about_a_plan() -> None:
    ids = {rule.id for rule in RULES}
    assert all(set(rules) <= ids for rules in STATED.values())
    others = " ".join(text for text, _ in NOT_ABOUT_A_PLAN)
    for word in ("distribute_saved_activations", "hybrid context", "fp8 and fp4", "overlap_param_gather", "group", "p2p"):
        assert word in others
    assert all(reason for _, reason in NOT_ABOUT_A_PLAN)


plans = st.builds(
    Plan,
    **{name: st.sampled_from((1, 2, 3, 4, 5, 8, 16, 64, 4096)) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")},
    sequence_parallel=st.integers(0, 1),
    recompute=st.integers(0, 255),
    recompute_layers=st.sampled_from((1, 3, 12, ALL_LAYERS)),
    zero=st.integers(0, 4),
    shard_group=st.sampled_from((0, 1, 3, 8)),
    schedule=st.integers(0, 3),
    embedding_layers=st.integers(0, 3),
    loss_layers=st.integers(0, 3),
    offload=st.integers(0, 3),
    tp_overlap=st.integers(0, 1),
    ep_overlap=st.integers(0, 1),
    cp_kind=st.integers(0, 2),
)
JOBS = (gpt3(), llama("torchtitan"), moe(), moe("torchtitan"), llama("nanotron"), gpt3("megatron-deepspeed"), llama("generic"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(JOBS), st.lists(plans, min_size=2, max_size=6))
def test_masks_agree_with_single_plans(job: Job, several: list[Plan]) -> None:
    names = [field.name for field in dataclasses.fields(Plan)]
    table = Plan(**{name: np.array([getattr(plan, name) for plan in several]) for name in names})
    good = np.broadcast_to(legal(job, table), len(several))
    for plan, verdict in zip(several, good, strict=True):
        assert bool(legal(job, plan)) == bool(verdict)
        errors = [rule for rule, _ in broken(job, plan) if rule.severity == "error"]
        assert bool(errors) != bool(verdict)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(JOBS), plans)
def test_a_text_never_fails(job: Job, plan: Plan) -> None:
    for _, text in broken(job, plan):
        assert text


def test_a_mask_spans_only_the_axes_of_its_rule() -> None:
    plan = Plan(
        tp=np.array([1, 2, 4, 8]).reshape(4, 1, 1), pp=np.array([1, 2, 4]).reshape(1, 3, 1), micro_batch=np.array([1, 2]).reshape(1, 1, 2)
    )
    sizes = {rule.id: np.size(mask) for rule, mask in zip(enforced(gpt3(), "error"), masks(gpt3(), plan, "error"), strict=True)}
    assert sizes["heads-tp"] == 4
    assert sizes["mesh"] == 12
    assert sizes["batch"] == 24
    assert sizes["range-pp"] == 3


def test_degrees_below_one_break_their_range_and_divide_nothing() -> None:
    table = Plan(tp=np.array([0, -3, 8]), micro_batch=np.array([0, 1, 1]))
    assert legal(gpt3(), table).tolist() == [False, False, True]
    assert [rule.id for rule, _ in broken(gpt3(), Plan(tp=0, pp=-1))] == ["range-tp", "range-pp"]
