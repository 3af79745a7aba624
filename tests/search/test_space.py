"""The space holds distinct, legal-somewhere plans, and what a person fixes or limits."""

from __future__ import annotations

import dataclasses
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import gpt_job, llama_job, moe_job
from tuner import presets
from tuner.cost_model.rules import distinct, legal
from tuner.errors import SpecError
from tuner.job import Job
from tuner.load import load_spec
from tuner.plan import ALL_LAYERS, FULL, Plan
from tuner.search.axes import loss_in_layers, micro_batches, pipeline_layouts, tensor_degrees
from tuner.search.blocks import blocks, values_in_use
from tuner.search.limits import parse_limit
from tuner.search.space import MOST_PLANS, Space, SpaceSpec, build_space, complete, default_space, knob_axis

SMALL: dict[str, Any] = {
    "axes": {"recompute": ["none", "full:2", "full"], "micro_batch": [1, 2], "zero": [0, 1]},
    "fix": {"cp": 1, "offload": "none"},
}


def gpt3() -> Job:
    return gpt_job(attention="flash")


def small(**more: Any) -> Space:
    return build_space(llama_job(cluster=presets.cluster("h100x16"), global_batch=64), SpaceSpec(**(SMALL | more)))


def legal_plans(space: Space) -> int:
    return sum(int(np.broadcast_to(b.allowed, b.shape).sum()) for b in blocks(space))


def words(space: Space, knob: str) -> list[str]:
    axis = next(a for a in space.axes if knob in a.knobs)
    return list(dict.fromkeys(row[axis.knobs.index(knob)] for row in axis.words))


@pytest.fixture(scope="module")
def gpt3_space() -> Space:
    return default_space(gpt3())


def test_gpt3_has_over_a_million_distinct_plans(gpt3_space: Space) -> None:
    fields = list(chain.from_iterable(a.fields for a in gpt3_space.axes))
    assert len(fields) == len(set(fields))  # no two axes set the same field, and no axis has a value twice, so no plan is twice in it
    for axis in gpt3_space.axes:
        rows = list(zip(*axis.fields.values(), strict=True))
        assert len(rows) == len(set(rows))
    assert 1_000_000 < legal_plans(gpt3_space) <= MOST_PLANS
    assert not gpt3_space.thinned


@pytest.mark.parametrize(
    "job", [gpt3(), moe_job(), llama_job(framework=presets.framework("torchtitan"))], ids=["gpt3", "moe", "torchtitan"]
)
def test_every_value_is_legal_with_some_others(job: Job) -> None:
    space = default_space(job)
    assert values_in_use(space) == [list(range(len(a))) for a in space.axes]


def test_gpt3_axes(gpt3_space: Space) -> None:
    assert words(gpt3_space, "tp") == ["1", "2", "4", "8", "16", "32"]  # divide 96 heads and 1,024 GPUs
    assert words(gpt3_space, "pp") == ["1", "2", "4", "8", "16", "32"]  # 64 divides neither 96 layers nor 97 to 104
    assert words(gpt3_space, "micro_batch") == ["1", "2", "3", "4", "6", "8", "12", "16", "24", "32"]
    assert {"none", "layernorm", "mlp", "layernorm+mlp", "full", "full:1", "full:11"} <= set(words(gpt3_space, "recompute"))
    assert words(gpt3_space, "ep") == words(gpt3_space, "etp") == ["1"]


def test_a_space_of_experts_is_thinned_to_what_a_core_sweeps_at_once() -> None:
    job = moe_job(model=presets.model("deepseek-v3"), cluster=presets.cluster("h100x1024"), global_batch=4096)
    space = default_space(job)
    assert space.thinned[0] == "shard_group"
    assert legal_plans(space) <= MOST_PLANS
    assert len(words(space, "ep")) > 5
    written = build_space(job, SpaceSpec(axes={"shard_group": [0, 64]}))
    assert words(written, "shard_group") == ["0", "64"]


def test_axes_beside_a_space_thin_none_of_its_own() -> None:
    job = llama_job(cluster=presets.cluster("h100x512"), global_batch=512)
    usual, both = default_space(job), build_space(job, SpaceSpec(), beside={"fallback_tp": (0, 3, 7)})
    assert both.thinned == usual.thinned
    for knob in ("recompute", "shard_group", "micro_batch", "tp"):
        assert words(both, knob) == words(usual, knob)
    assert words(both, "fallback_tp") == ["0", "3", "7"]
    assert build_space(job, SpaceSpec(axes={"fallback_tp": [0, 3, 7]}), most_plans=1_000_000).thinned


def test_61_layers_pipeline_by_counting_embedding_and_loss() -> None:
    job = moe_job(model=presets.model("deepseek-v3"), cluster=presets.cluster("h100x1024"), global_batch=4096)
    layouts = pipeline_layouts(job)
    assert any(sum(pair) == 3 for pair in layouts)  # 64 units divide by 4, 8 and 16
    assert "16" in words(default_space(job), "pp")


def test_logits_cost_layers() -> None:
    llama3_8b = presets.model("llama3-8b")  # 128,256 x 4,096 = 525 M; a layer 218.1 M
    assert loss_in_layers(llama3_8b) == 3
    assert loss_in_layers(gpt3().model) == 1  # 51,200 x 12,288 = 629 M; a layer 1.81 G


def test_widths_bound_tensor_parallelism() -> None:
    assert tensor_degrees(llama_job()) == (1, 2, 4, 8, 16, 32, 64)
    assert tensor_degrees(llama_job(framework=presets.framework("torchtitan"))) == (1, 2, 4, 8)  # 8 KV heads, not copied
    assert micro_batches(llama_job()) == (1, 2, 4, 8)  # 65,536 tokens of 8,192


def test_blocks_are_the_plans_that_the_rules_allow() -> None:
    space = small()
    job = space.job
    expected = {i for i in range(space.size) if legal(job, space.plan_at(i)) and distinct(job, space.plan_at(i))}
    for max_rows, min_rows in ((1, 1), (50, 10), (1_000_000, 1_000_000)):
        found: list[int] = []
        decided = 0
        for block in blocks(space, max_rows=max_rows, min_rows=min_rows):
            decided += block.decides
            if block.plan is not None:
                found += block.indices(space, np.flatnonzero(np.broadcast_to(block.allowed, block.shape))).tolist()
        assert len(found) == len(set(found))
        assert set(found) == expected
        assert decided == space.size


def test_a_plan_is_the_same_by_index_in_a_table_and_in_the_grid() -> None:
    space = small()
    picks = [0, 1, space.size // 3, space.size - 1]
    table, grid = space.plans_at(picks), space.grid()
    for row, index in enumerate(picks):
        assert space.plan_at(index) == table.row(row) == grid.row(index)
        assert space.words_at(index)["tp"] == str(space.plan_at(index).tp)


def test_fix_and_limit_narrow_the_axes() -> None:
    space = small(fix=SMALL["fix"] | {"tp": 8}, limit=["pp<=2", "recompute!=full"])
    assert words(space, "tp") == ["8"]
    assert words(space, "pp") == ["1", "2"]
    assert words(space, "recompute") == ["none", "full:2"]


def test_short_names_of_knobs() -> None:
    space = build_space(gpt3(), SpaceSpec(axes={"sp": [1]}, fix={"mb": 2}, limit=["mb*tp<=16"]))
    assert words(space, "micro_batch") == ["2"]
    assert words(space, "sequence_parallel") == ["1"]
    assert words(space, "tp") == ["2", "4", "8"]


def test_limits_of_products_and_of_derived_degrees() -> None:
    space = small(limit=["tp*pp<=4", "microbatches>=8"])
    plans = [space.plan_at(i) for i in range(space.size)]
    inside = [p for p in plans if legal(space.job, p) and distinct(space.job, p) and p.tp * p.pp <= 4 and p.microbatches(16, 64) >= 8]
    assert legal_plans(space) == len(inside) > 0
    fixed = small(fix=SMALL["fix"] | {"dp": 2})
    found = [
        fixed.plan_at(int(i))
        for b in blocks(fixed)
        if b.plan
        for i in b.indices(fixed, np.flatnonzero(np.broadcast_to(b.allowed, b.shape)))
    ]
    assert found
    assert all(p.dp(16) == 2 for p in found)


def test_a_space_without_a_legal_plan_keeps_its_values() -> None:
    space = small(fix=SMALL["fix"] | {"tp": 3})
    assert legal_plans(space) == 0
    assert words(space, "tp") == ["3"]


def test_everything_wrong_with_a_space_is_said_at_once() -> None:
    spec = SpaceSpec(axes={"tpp": [1], "pp": [0, 2], "zero": [1]}, fix={"zero": 7, "recompute": "half"}, limit=["pp<<4", "heads<=2"])
    with pytest.raises(SpecError) as caught:
        build_space(gpt3(), spec, "space.yaml")
    text = str(caught.value)
    for part in (
        "axes.tpp",
        "did you mean",
        "pp = 0",
        "axes.zero: is fixed as well",
        "zero = 7",
        "recompute = 'half'",
        "'pp<<4'",
        "'heads'",
    ):
        assert part in text, part


def test_a_limit_that_leaves_nothing_names_the_axis() -> None:
    with pytest.raises(SpecError, match="leaves no value of pp"):
        build_space(gpt3(), SpaceSpec(limit=["pp>1000"]))


def test_an_unknown_key_of_a_space_file_is_an_error() -> None:
    with pytest.raises(SpecError, match="axis"):
        load_spec(SpaceSpec, {"axis": {"tp": [1]}}, "space.yaml")


def test_a_plan_without_a_fallback_falls_back_to_its_own_degree() -> None:
    fixed = {"pp": 8, "cp": 1, "vpp": 1, "micro_batch": 1, "zero": 0, "offload": "none", "pipeline_layout": "even", "recompute": "none"}
    space = build_space(gpt3(), SpaceSpec(axes={"tp": [4, 8], "fallback_tp": [0, 3, 7]}, fix=fixed, limit=["fallback_tp>=4"]))
    assert space.size < 100
    kept = {(int(plan.tp), int(plan.fallback)) for plan in (space.plan_at(i) for i in range(space.size)) if space.allows(plan)}
    assert kept == {(4, 4), (8, 8), (8, 7)}


@pytest.mark.parametrize("text", ["tp*cp<=8", "mb >= 2", "dp*tp*pp*cp == gpus", "zero<2", "recompute==none", "pipeline_layout!=even"])
def test_limits_that_parse(text: str) -> None:
    limit = parse_limit(text)
    assert isinstance(bool(limit.holds(gpt3(), Plan(tp=8, pp=8))), bool)


def test_limits_compare_as_written() -> None:
    job, plan = gpt3(), Plan(tp=8, pp=8, micro_batch=2)
    held = {
        text: bool(parse_limit(text).holds(job, plan))
        for text in ("tp*pp<=64", "tp*pp<64", "dp=16", "microbatches==48", "2*tp>pp", "pp!=8", "fallback_tp>=8")
    }
    assert held == {
        "tp*pp<=64": True,
        "tp*pp<64": False,
        "dp=16": True,
        "microbatches==48": True,
        "2*tp>pp": True,
        "pp!=8": False,
        "fallback_tp>=8": True,
    }


@pytest.mark.parametrize(
    "text", ["", "tp", "tp<=", "<=8", "__import__('os')<=1", "tp<=8<=9", "tp<=8.5", "tp<=-1", "recompute<=full", "schedule==best"]
)
def test_limits_that_do_not(text: str) -> None:
    with pytest.raises(SpecError):
        parse_limit(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_a_limit_parses_or_is_refused(text: str) -> None:
    try:
        parse_limit(text).holds(gpt3(), Plan(tp=2))
    except SpecError as error:
        assert str(error)


def test_a_framework_s_runtime_knobs_are_on_where_the_rules_allow() -> None:
    job = gpt_job(framework=presets.framework("megatron-bridge"), attention="flash")
    defaults = job.framework.defaults
    assert defaults.dp_overlap.value
    plan = complete(job, {"tp": np.array([1, 8]), "pp": 32, "sequence_parallel": 1})
    assert np.broadcast_to(plan.dp_overlap, 2).tolist() == [1, 1]
    assert complete(job, {"tp": 32, "pp": 32}).dp_overlap == 0  # a single replica
    on = job.framework.replace(defaults=defaults.replace(tp_overlap=defaults.dp_overlap))
    overlap = complete(job.replace(framework=on), {"tp": np.array([[1], [8]]), "sequence_parallel": np.array([[0, 1]])}).tp_overlap
    assert overlap.tolist() == [[0, 0], [0, 1]]
    assert complete(job.replace(framework=on), {"tp": 8, "sequence_parallel": 1, "tp_overlap": 0}).tp_overlap == 0


def test_knobs_that_nobody_states_take_the_framework_s_default() -> None:
    titan = complete(llama_job(framework=presets.framework("torchtitan")), {"tp": 8, "pp": 2})
    assert (titan.zero, titan.sequence_parallel, titan.embedding_layers, titan.loss_layers) == (3, 1, 1, 1)
    megatron = complete(llama_job(), {"tp": 8, "recompute": FULL})
    assert megatron == Plan(tp=8, recompute=FULL, recompute_layers=ALL_LAYERS)


def test_an_axis_spells_each_value_once() -> None:
    axis = knob_axis("recompute", ["selective", "core_attn", "full:3", "none"], "space")
    assert axis.words == (("selective",), ("full:3",), ("none",))
    assert axis.fields == {"recompute": (1, FULL, 0), "recompute_layers": (ALL_LAYERS, 3, ALL_LAYERS)}


def test_tied_axes_hold_what_a_product_would() -> None:
    """Joining tied knobs drops only combinations that no rule lets through."""
    axes: dict[str, Any] = {"tp": [1, 2, 8], "pp": [1, 2, 4], "vpp": [1, 2], "recompute": ["none", "full:3"], "zero": [0, 1, 2]}
    space = small(axes=axes, fix=SMALL["fix"] | {"micro_batch": 1, "shard_group": 0, "pipeline_layout": "even"})
    job = space.job
    names = [knob for a in space.axes for knob in a.knobs]
    assert len(names) == len(set(names))
    separate = {knob: words(space, knob) for knob in names}
    together = 0
    for row in product(*separate.values()):
        fields: dict[str, int] = {}
        for knob, word in zip(separate, row, strict=True):
            fields |= {name: column[0] for name, column in knob_axis(knob, [word], "space").fields.items()}
        plan = complete(job, fields)
        together += bool(legal(job, plan)) and bool(distinct(job, plan))
    assert together == legal_plans(space)


def test_plans_are_frozen_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().plan_at(0).tp = 2  # type: ignore[misc]


def test_a_degree_of_1_to_fall_back_to_is_held() -> None:
    """As an axis's value it stands alone: 1 is not tp's own value there."""
    space = build_space(gpt3(), SpaceSpec(fix={"tp": 8, "pp": 8, "fallback_tp": 1}))
    assert space.plan_at(0).fallback_tp == 1
