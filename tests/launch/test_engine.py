"""Every layout trains the same model: losses and parameters of a few steps are those of one unsharded process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.layouts import Layout, of_ranks, run_all

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[Layout], dict[str, Any]]

ONE = [
    *of_ranks(1, "llama", "micro_batch=2", "micro_batch=8", "recompute=full", "recompute=full:3", "recompute=core_attn", "recompute=mlp",
              "recompute=layernorm", "recompute=core_attn+mlp+layernorm"),
    *of_ranks(1, "llama", "recompute=core_attn", attention="unfused"),
    *of_ranks(1, "moe", "recompute=moe", "recompute=moe_act", "recompute=shared_experts", "recompute=moe_act+shared_experts+layernorm"),
]  # fmt: skip
TWO = [
    *of_ranks(2, "llama", "tp=2", "tp=2,sp=1", "pp=2", "pp=2,schedule=gpipe", "pp=2,vpp=2", "pp=2,schedule=zb-1p", "zero=0,micro_batch=2",
              "zero=0,dp_overlap=1", "zero=1", "zero=1,dp_overlap=1", "zero=2,dp_overlap=1", "zero=3,dp_overlap=1",
              "zero=3,dp_overlap=1,recompute=full", "cp=2", "cp=2,cp_kind=all_gather", "cp=2,cp_kind=a2a", "cp=2,recompute=core_attn",
              "tp=2,recompute=core_attn+mlp+layernorm", "tp=2,sp=1,recompute=mlp+layernorm", "tp=2,sp=1,recompute=full:2"),
    *of_ranks(2, "five", "pp=2", "pp=2,pipeline_layout=embedding=1+loss=2"),
    *of_ranks(2, "gpt", "tp=2", "tp=2,sp=1", "pp=2", "pp=2,zero=3,dp_overlap=1", "zero=1", "zero=3,dp_overlap=1", "cp=2"),
    *of_ranks(2, "odd", "tp=2", "tp=2,sp=1", "pp=2,recompute=layernorm"),
    *of_ranks(2, "odd", "tp=2,recompute=core_attn", attention="unfused"),
    *of_ranks(2, "moe", "ep=2", "ep=2,zero=1", "ep=2,zero=3,dp_overlap=1", "ep=1,zero=3,dp_overlap=1", "tp=2,sp=1,ep=2", "pp=2"),
    *of_ranks(2, "moe", "ep=2", "tp=2,sp=1", "ep=2,zero=3,dp_overlap=1", routing="learned"),
]  # fmt: skip
FOUR = [
    *of_ranks(4, "llama", "tp=4", "tp=4,sp=1", "pp=4,pipeline_layout=embedding=1+loss=1", "pp=4,schedule=zb-1p", "zero=1,shard_group=2",
              "zero=3,dp_overlap=1,shard_group=2", "zero=2,dp_overlap=1,shard_group=2", "cp=4", "tp=2,pp=2,vpp=2,sp=1",
              "pp=2,vpp=2,zero=1,dp_overlap=1", "pp=2,zero=3,dp_overlap=1", "pp=2,vpp=2,zero=3,dp_overlap=1,recompute=full:2",
              "tp=2,zero=3,dp_overlap=1,sp=1", "tp=2,cp=2,sp=1", "cp=2,zero=3,dp_overlap=1", "cp=2,zero=1", "cp=2,pp=2,cp_kind=a2a"),
    *of_ranks(4, "llama", "pp=2,zero=1,dp_overlap=1", microbatches=2),
    *of_ranks(4, "llama", "pp=2,zero=1,dp_overlap=1", "pp=2,vpp=2,zero=3,dp_overlap=1", "pp=2,tp=2,schedule=zb-1p", turns="2,4"),
    *of_ranks(4, "llama", "zero=0,dp_overlap=1", turns="2,1"),
    *of_ranks(4, "gpt", "tp=2,pp=2,sp=1", "pp=2,zero=1"),
    *of_ranks(4, "odd", "tp=4,sp=1"),
    *of_ranks(4, "moe", "pp=2,ep=2", "ep=4,zero=1", "ep=2,zero=3,dp_overlap=1", "tp=2,sp=1,ep=2,zero=3,dp_overlap=1", "tp=2,sp=1,ep=4",
              "cp=2,ep=2,recompute=moe", "pp=2,ep=2,schedule=zb-1p"),
]  # fmt: skip
EIGHT = [
    *of_ranks(8, "llama", "tp=2,pp=2,zero=1,dp_overlap=1", "tp=2,cp=2,zero=1,sp=1", "tp=2,pp=2,zero=3,dp_overlap=1,sp=1,schedule=gpipe",
              "tp=2,pp=2,cp=2,sp=1,recompute=full", "tp=2,zero=3,dp_overlap=1,shard_group=2,sp=1"),
    *of_ranks(8, "moe", "pp=2,ep=4,zero=1", "tp=2,sp=1,pp=2,ep=2"),
]  # fmt: skip
BROKEN = [
    *of_ranks(4, "llama", "tp=2", broken="tp backward"),
    *of_ranks(4, "llama", "zero=0", broken="gradient sum"),
    *of_ranks(4, "llama", "tp=2,sp=1", broken="partial norms"),
]
HALF = of_ranks(4, "llama", "tp=2,sp=1,zero=1", "pp=2,zero=3,dp_overlap=1", "cp=2,zero=0", precision="bf16")
LAYOUTS = [*ONE, *TWO, *FOUR, *EIGHT]
REFERENCES = list(dict.fromkeys(layout.reference for layout in (*LAYOUTS, *BROKEN, *HALF)))


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """What a layout gave; the first question about a count of ranks runs all layouts of that count."""
    found: dict[int, dict[str, dict[str, Any]]] = {}

    def ask(layout: Layout) -> dict[str, Any]:
        if layout.ranks not in found:
            alike = [other for other in (*REFERENCES, *LAYOUTS, *HALF, *BROKEN) if other.ranks == layout.ranks]  # broken ones last
            found[layout.ranks] = run_all(alike, tmp_path_factory.mktemp(f"ranks{layout.ranks}-"))
        record = found[layout.ranks][str(layout)]
        assert "error" not in record, record["error"]
        return record

    return ask


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_trains_the_unsharded_model(answer: Answer, layout: Layout) -> None:
    got, wanted = answer(layout), answer(layout.reference)
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert got["norm"] == pytest.approx(wanted["norm"], rel=1e-6)


@pytest.mark.parametrize("layout", BROKEN, ids=str)
def test_a_collective_left_out_is_noticed(answer: Answer, layout: Layout) -> None:
    got, wanted = answer(layout), answer(layout.reference)
    assert got["losses"][1:] != pytest.approx(wanted["losses"][1:], rel=1e-4)


@pytest.mark.parametrize("layout", HALF, ids=str)
def test_sixteen_bits_train_nearly_the_same_model(answer: Answer, layout: Layout) -> None:
    got, wanted = answer(layout), answer(layout.reference)
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-2)
    assert got["losses"] != wanted["losses"]


def test_the_first_steps_learn(answer: Answer) -> None:
    losses = answer(Layout(ranks=1, knobs="tp=1"))["losses"]
    assert abs(losses[0] - losses[2]) > 0.05  # so that a wrong gradient shows
