"""Text for people: tables that fit the page, numbers with their units, the arithmetic of a plan."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tuner
from tuner.answers import plain
from tuner.report import words
from tuner.report.estimate import estimate_text
from tuner.report.explain import explain_text
from tuner.report.search import search_text
from tuner.report.sheet import ranking_csv
from tuner.report.table import Column, Page, Table, flow, referenced, wrapped

cells = st.lists(st.text("abc1 ", max_size=12), min_size=3, max_size=3)


@given(st.lists(st.tuples(cells, st.integers(0, 4)), min_size=1, max_size=6), st.integers(10, 90))
def test_a_table_drops_columns_and_never_wraps(columns: list[tuple[list[str], int]], width: int) -> None:
    table = Table([Column(f"c{i}", content, rank=rank) for i, (content, rank) in enumerate(columns)])
    if not any(rank == 0 for _, rank in columns):
        return
    page = Page(width=width)
    lines = table.lines(page)
    assert len(lines) == 4
    shown = {column.title for column in table.shown(page)}
    assert shown >= {f"c{i}" for i, (_, rank) in enumerate(columns) if rank == 0}
    if any(rank for i, (_, rank) in enumerate(columns) if f"c{i}" in shown):
        assert max(map(len, lines)) <= width
    assert set(table.hidden(page)).isdisjoint(shown)


def test_the_highest_rank_goes_first() -> None:
    table = Table([Column("a", ["12345"]), Column("b", ["12345"], rank=1), Column("c", ["12345"], rank=2)])
    assert [len(table.shown(Page(width=width))) for width in (19, 18, 12, 11, 5)] == [3, 2, 2, 1, 1]
    assert table.hidden(Page(width=12)) == ["c"]


def test_numbers_keep_their_units_when_a_line_breaks() -> None:
    assert wrapped("it needs 93.4 GB of memory", Page(width=20)) == ["it needs 93.4 GB of", "memory"]
    assert all(not line.startswith(("GB", "%")) for line in wrapped("x 1 GB " * 40 + "y 5 % " * 40, Page(width=23)))


def test_parts_flow_over_lines() -> None:
    assert flow(["aaaa", "bbbb", "cccc"], Page(width=12)) == ["aaaa | bbbb", "cccc"]


def test_equal_references_share_a_mark() -> None:
    assert referenced(["a", "b", "a", ""], Page()) == (["[1]", "[2]", "[1]", ""], ["[1] a", "[2] b"])


@pytest.mark.parametrize(("value", "text"), [(0.0, "< 0.1 %"), (0.012, "1.2 %"), (0.5, "50.0 %"), (0.9999, "> 99.9 %"), (1.0, "> 99.9 %")])
def test_probabilities(value: float, text: str) -> None:
    assert words.probability(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(21.34, "21.3 s"), (0.132, "0.132 s"), (0.0132, "13.2 ms"), (2e-5, "20 us"), (1234.5, "1,234 s")]
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


def test_the_mesh_is_spelled_out() -> None:
    plan = {"tp": 4, "cp": 1, "pp": 4, "dp": 4, "ep": 8, "etp": 1, "edp": 2}
    assert words.mesh(plan, {"gpus": 64}) == "64 GPUs = tp 4 x pp 4 x dp 4; experts: 64 = ep 8 x pp 4 x edp 2"


def test_plain_values_are_jsons() -> None:
    import numpy as np

    assert plain({"a": np.float64(1.5), "b": (np.int64(2), float("nan"), float("inf")), 3: None}) == {
        "a": 1.5,
        "b": [2, None, None],
        "3": None,
    }


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    job = {"model": "mixtral-8x7b", "cluster": "h100x16", "seq_len": 4096, "global_batch": 64, "tokens": "1B", "price": 2.5}
    return tuner.search(**job, current="tp=8,pp=2,ep=4,etp=2,recompute=full", limit=["tp<=8"], top=5).record()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 240])
@pytest.mark.parametrize("detail", [0, 1])
def test_a_ranking_fits_the_page(found: dict[str, object], width: int, detail: int) -> None:
    text = search_text(found, Page(width=width), detail=detail)
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"best (is|would\s+be)", text)
    assert "yours" in text
    assert "limits" in text
    for knob in ("tp", "pp", "mb"):
        assert f"  {knob}" in text


def test_wider_pages_show_more(found: dict[str, object]) -> None:
    narrow, wide = (search_text(found, Page(width=width)) for width in (60, 240))
    assert "not shown at this width" in narrow
    assert "not shown at this width" not in wide
    for title in ("recompute", "zero", "90 % range", "days", "cost", "basis", "P(OOM)"):
        assert title in wide


QUESTION = {"model": "llama3-70b", "cluster": "h100x64", "seq_len": 8192, "global_batch": 512}


def flat(text: str) -> str:
    return " ".join(text.split())


def test_one_s_own_plan_that_does_not_run_is_said_so_with_stage_and_rule() -> None:
    record = tuner.search(**QUESTION, current="tp=8,pp=4,vpp=3", top=1).record()
    text = flat(search_text(record, Page()))
    assert "is illegal: pp*vpp = 4*3 must divide layers = 80" in text
    assert re.search(r"does not fit: stage 0 needs [\d.]+ of 84.9 GB \(activations [\d.]+ = [\d.]+ in flight\); P\(OOM\)", text)
    assert "if yours ran, best would be" in text
    assert not record["current"]["legal"]
    assert not record["current"]["fits"]
    fine = tuner.search(**QUESTION, current="tp=8,pp=4,recompute=full,sp=true", top=1).record()
    assert (fine["current"]["legal"], fine["current"]["fits"], fine["current"]["why_not_fit"]) == (True, True, "")
    assert "yours best is" in flat(search_text(fine, Page()))


def test_near_equals_are_counted_and_the_count_is_explained() -> None:
    record = tuner.search(**QUESTION, top=3).record()
    count = next(row["like"] for row in record["ranking"] if row["like"])
    text = flat(search_text(record, Page()))
    assert f" +{count} " in text
    assert f"+{count}: that many more plans differ from this one" in text
    every = tuner.search(**QUESTION, top=3, all=True).record()
    assert [row["like"] for row in every["ranking"]] == [None] * 3
    assert "that many more" not in search_text(every, Page())
    assert every["ranking"][0]["plan"] == record["ranking"][0]["plan"]


def test_the_limit_of_p_oom_and_thinned_axes_are_named() -> None:
    record = tuner.search(**QUESTION, max_p_oom="12.5%", top=1).record()
    assert "fit (P(OOM) < 12.5 %)" in flat(search_text(record, Page()))
    assert record["space"]["max_p_oom"] == 0.125
    assert "thinned" not in search_text(record | {"space": record["space"] | {"thinned": []}}, Page())
    thinned = record | {"space": record["space"] | {"thinned": ["vpp", "pipeline_layout"]}}
    assert "thinned not every value of vpp, pipeline layout was tried" in flat(search_text(thinned, Page()))


def test_a_plan_is_compared_with_the_best_term_by_term() -> None:
    answer = tuner.explain(**QUESTION, plan="tp=8,pp=4,recompute=full,sp=true").record()
    best = answer["best"]
    found = tuner.search(**QUESTION, top=1).record()["ranking"][0]
    assert best["plan"] == found["plan"]
    assert best["step_s"] == found["step_s"]
    for terms, own, other in (("time", "step_s", "step_s"), ("memory", "memory_bytes", "memory_bytes")):
        assert sum(term["value"] for term in best[terms]) == pytest.approx(answer[own], rel=1e-12)
        assert sum(term["best"] for term in best[terms]) == pytest.approx(best[other], rel=1e-12)
    gaps = [abs(term["difference"]) for term in best["time"]]
    assert gaps == sorted(gaps, reverse=True)
    text = flat(explain_text(answer, Page()))
    assert "not chosen: it is slower" in text
    assert "time against the best this plan best difference recompute" in text
    assert tuner.explain(**QUESTION, plan="tp=8,pp=4", no_search=True).record()["best"] is None
    knobs = {name: value for name, value in best["plan"].items() if name not in ("dp", "edp")}
    again = tuner.explain(**QUESTION, plan=knobs).record()
    assert (again["best"]["changes"], again["best"]["why_not"]) == ([], "")
    assert "this is the best plan that a search finds" in explain_text(again, Page())


def test_colours_only_when_asked(found: dict[str, object]) -> None:
    assert "\x1b[" not in search_text(found, Page(width=100))
    assert "\x1b[" in search_text(found, Page(width=100, color=True))


@pytest.mark.parametrize("width", [60, 120])
def test_estimates_and_explanations_fit_the_page(width: int) -> None:
    question = {"model": "deepseek-v3", "cluster": "h100x2048", "seq_len": 4096, "global_batch": 8192, "plan": "tp=4,pp=16,ep=8,zero=1"}
    for text in (
        estimate_text(tuner.estimate(**question).record(), Page(width)),
        explain_text(tuner.explain(**question).record(), Page(width)),
    ):
        assert max(map(len, text.splitlines())) <= width
        assert "experts: 2,048 = " in " ".join(text.split())


def test_an_explanation_cites_and_sums_up() -> None:
    record = tuner.explain(model="llama3-70b", cluster="h100x64", seq_len=8192, global_batch=512, plan="tp=2,pp=4,zero=1").record()
    assert sum(term["value"] for term in record["step"]) == pytest.approx(record["step_s"], rel=1e-12)
    assert sum(term["share"] for term in record["step"]) == pytest.approx(1.0)
    assert all(term["ref"] and term["what"] for term in record["step"])
    worst = record["stages"][record["worst_stage"]]
    assert sum(term["value"] for term in worst["memory"]) == pytest.approx(record["memory_bytes"], rel=1e-12)
    assert max(stage["memory_bytes"] for stage in record["stages"]) == record["memory_bytes"]


def test_the_way_out_of_a_plan_that_does_not_fit_is_legal_and_fits() -> None:
    question = {"model": "llama3-70b", "cluster": "h100x64", "seq_len": 8192, "global_batch": 512}
    way = tuner.explain(**question, plan="tp=1,pp=2,zero=1").record()["nearest_that_fits"]
    assert way["changes"]
    knobs = {name: value for name, value in way["plan"].items() if name not in ("dp", "edp")}
    again = tuner.estimate(**question, plan=knobs)
    assert again.legal
    assert again.cost.fits
    assert again.cost.step_s == way["step_s"]


def test_a_ranking_as_a_sheet(found: dict[str, object]) -> None:
    rows = list(csv.DictReader(io.StringIO(ranking_csv(found))))
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5", "yours"]
    ranking = found["ranking"]
    assert isinstance(ranking, list)
    assert float(rows[0]["step_s"]) == ranking[0]["step_s"]
    assert rows[0]["tp"] == str(ranking[0]["plan"]["tp"])
