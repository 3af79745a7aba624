"""Which nodes fail and which are slow."""

from __future__ import annotations

from typing import Any

from tuner.launch.trial import Result
from tuner.profiling.ledger import Entry
from tuner.profiling.nodes import failing, slow


def entry(end: Any = "ok", pp: int = 1, **more: Any) -> Entry:
    fields: dict[str, Any] = {"step_s": 1.0, "nodes": ("a", "b"), "versions": {}}
    return Entry(key="k", number=0, plan={"pp": pp}, result=Result(end=end, **(fields | more)))


def test_a_node_that_failed_twice() -> None:
    named = entry("infrastructure", failed_nodes=("b",))
    alone = entry("infrastructure", nodes=("a",))
    assert failing([named, entry(), alone]) == ()
    assert failing([named, alone, named, alone]) == ("a", "b")
    assert failing([entry("infrastructure")] * 5 + [entry("failed", nodes=("a",))] * 5) == ()  # which of two it was, nobody says


def test_a_node_whose_ranks_are_slow_in_most_runs() -> None:
    late, early = entry(slowest_ranks=(5, 4)), entry(slowest_ranks=(0,))
    assert slow([late, late, early], 8) == ("b",)
    assert slow([late], 8) == () == slow([late, early] * 2, 8)
    assert slow([entry(pp=2, slowest_ranks=(5,))] * 3, 8) == ()  # a stage that has more to do
    assert slow([entry(nodes=("a",), slowest_ranks=(5,))] * 3, 8) == ()
