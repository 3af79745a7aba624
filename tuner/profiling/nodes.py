"""Which nodes fail or are slow, by the runs of a search."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.launch.trial import Result
    from tuner.profiling.ledger import Entry

FAULTS, SLOW = 2, 2  # runs in which a node failed, or was slow, before that is taken for the node's


def failing(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the nodes under which runs failed FAULTS times: those that the scheduler names, or the run's only one."""
    met = Counter(node for entry in entries for node in _blamed(entry.result))
    return tuple(sorted(node for node, times in met.items() if times >= FAULTS))


def _blamed(result: Result) -> tuple[str, ...]:
    if result.end != "infrastructure":
        return ()
    return tuple(dict.fromkeys(result.failed_nodes or (result.nodes if len(result.nodes) == 1 else ())))


def slow(entries: Sequence[Entry], gpus: int) -> tuple[str, ...]:
    """Return the nodes whose ranks stood out as slow in SLOW runs, and in most of the runs that they took part in.

    Only runs over several nodes whose ranks all compute the same (no pipeline) tell a slow node from a plan's slow stage.
    """
    took, stood = Counter[str](), Counter[str]()
    for entry in entries:
        nodes = entry.result.nodes
        if entry.plan.get("pp", 1) != 1 or len(nodes) < 2 or gpus % len(nodes) or entry.result.step_s is None:
            continue
        took.update(nodes)
        stood.update({nodes[rank // (gpus // len(nodes))] for rank in entry.result.slowest_ranks if rank < gpus})
    return tuple(sorted(node for node, times in stood.items() if times >= SLOW and 2 * times > took[node]))
