"""Plans as text: what is written is read back, and what cannot be read is refused with its place."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import SpecError
from tuner.plan import ALL_LAYERS, CP_KINDS, FULL, OFFLOADS, RECOMPUTE_MODULES, SCHEDULES, Plan
from tuner.plan_text import KNOBS, layout_text, parse_knobs, parse_layout, parse_recompute, plan_record, recompute_text, split_knobs

degrees = st.integers(1, 4096)
flags = st.integers(0, 1)
recomputes = st.one_of(
    st.integers(0, sum(RECOMPUTE_MODULES.values())).map(lambda mask: (mask, ALL_LAYERS)),
    st.integers(1, 1000).map(lambda layers: (FULL, layers)),
    st.just((FULL, ALL_LAYERS)),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    recompute, layers = draw(recomputes)
    counts = {name: draw(degrees) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")}
    return Plan(
        **counts,
        fallback_tp=draw(st.integers(0, 64).filter(lambda n: n != counts["tp"])),  # tp itself is spelled 0
        **{name: draw(flags) for name in ("sequence_parallel", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")},
        recompute=recompute,
        recompute_layers=layers,
        zero=draw(st.integers(0, 3)),
        shard_group=draw(st.integers(0, 4096)),
        schedule=draw(st.sampled_from(sorted(SCHEDULES.values()))),
        embedding_layers=draw(st.integers(0, 9)),
        loss_layers=draw(st.integers(0, 9)),
        offload=draw(st.sampled_from(sorted(OFFLOADS.values()))),
        cp_kind=draw(st.sampled_from(sorted(CP_KINDS.values()))),
    )


@settings(max_examples=200)
@given(plans())
def test_a_record_reads_back_as_its_plan(plan: Plan) -> None:
    record = json.loads(json.dumps(plan_record(plan, 4096)))
    knobs = {name: value for name, value in record.items() if name != "edp"}
    knobs["dp"] = max(knobs["dp"], 1)
    fields = parse_knobs(knobs, "record")
    assert fields.pop("dp") == max(plan.dp(4096), 1)
    assert Plan(**fields) == plan


@settings(max_examples=200)
@given(plans())
def test_a_record_written_as_knobs_reads_back(plan: Plan) -> None:
    record = {name: value for name, value in plan_record(plan, 4096).items() if name in KNOBS and name != "dp"}
    text = ",".join(f"{name}={value}" for name, value in record.items())
    assert Plan(**parse_knobs(split_knobs(text, "--plan"), "--plan")) == plan


@given(recomputes)
def test_recompute_texts(pair: tuple[int, int]) -> None:
    assert parse_recompute(recompute_text(*pair)) == dict(zip(("recompute", "recompute_layers"), pair, strict=True))


@given(st.integers(0, 999), st.integers(0, 999))
def test_layout_texts(embedding: int, loss: int) -> None:
    assert parse_layout(layout_text(embedding, loss)) == {"embedding_layers": embedding, "loss_layers": loss}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("selective", {"recompute": 1, "recompute_layers": ALL_LAYERS}),
        ("mlp+core_attn", {"recompute": 3, "recompute_layers": ALL_LAYERS}),
        ("full:12", {"recompute": FULL, "recompute_layers": 12}),
        ("none", {"recompute": 0, "recompute_layers": ALL_LAYERS}),
    ],
)
def test_recompute_as_people_write_it(text: str, fields: dict[str, int]) -> None:
    assert parse_recompute(text) == fields


def test_short_spellings() -> None:
    assert parse_knobs(split_knobs("tp=8, mb=2 sp=on", "x"), "x") == {"tp": 8, "micro_batch": 2, "sequence_parallel": 1}


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tp", 0),
        ("tp", -1),
        ("tp", 1.5),
        ("tp", float("nan")),
        ("tp", True),
        ("tp", None),
        ("tp", "1e3"),
        ("tp", 10**9),
        ("tp", "٣x"),
        ("zero", 4),
        ("shard_group", -1),
        ("sequence_parallel", "maybe"),
        ("recompute", "half"),
        ("recompute", "none:3"),
        ("recompute", "full:0"),
        ("recompute", "full:x"),
        ("recompute", ""),
        ("pipeline_layout", ""),
        ("pipeline_layout", "embedding=x"),
        ("pipeline_layout", "odd"),
        ("schedule", "2f2b"),
        ("offload", "everything"),
        ("cp_kind", []),
        ("dp", 0),
    ],
)
def test_bad_values_are_refused_with_their_place(knob: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_knobs({knob: value}, "plan.yaml")
    (problem,) = caught.value.problems
    assert (problem.where, problem.path) == ("plan.yaml", knob)
    assert problem.rule


def test_every_problem_is_listed() -> None:
    with pytest.raises(SpecError) as caught:
        parse_knobs({"tp": 0, "pipelines": 2, "zero": 9}, "x")
    assert [problem.path for problem in caught.value.problems] == ["tp", "pipelines", "zero"]


@pytest.mark.parametrize("text", ["", " ", "tp", "tp=8,pp", ","])
def test_knobs_that_are_no_pairs(text: str) -> None:
    with pytest.raises(SpecError, match="must be like tp=8,pp=2"):
        split_knobs(text, "--current")


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(KNOBS), st.text(max_size=8)), st.one_of(st.none(), st.text(max_size=12), st.integers(), st.floats())
    )
)
def test_any_knobs_are_read_or_refused(items: dict[str, object]) -> None:
    try:
        fields = parse_knobs(items, "fuzz")
    except SpecError as error:
        assert error.problems
    else:
        names = {field.name for field in dataclasses.fields(Plan)} | {"dp"}
        assert set(fields) <= names
        assert all(type(value) is int for value in fields.values())


@given(st.text(max_size=30))
def test_any_text_is_split_or_refused(text: str) -> None:
    try:
        assert split_knobs(text, "fuzz")
    except SpecError as error:
        assert error.problems


@pytest.mark.parametrize("text", ["tp=2,tp=4", "micro_batch=1,mb=2", "sp=on sequence_parallel=off"])
def test_a_knob_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="stands twice, first as"):
        split_knobs(text, "--plan")


def test_a_knob_said_twice_alike_is_said_once() -> None:
    assert split_knobs("mb=2,micro_batch=2,tp=8", "--plan") == {"micro_batch": "2", "tp": "8"}
