"""How the workload deals layers to stages: as the cost model thinks it does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.launch.layouts import Layout
from tuner.cost_model.pipeline import stage_layers
from tuner.launch.engine.stages import chunk_layers
from tuner.plan import Plan


def test_layers_by_hand() -> None:
    assert chunk_layers(5, Plan(pp=2)) == [range(3), range(3, 5)]
    assert chunk_layers(5, Plan(pp=2, embedding_layers=1, loss_layers=2)) == [range(3), range(3, 5)]
    assert chunk_layers(8, Plan(pp=2, vpp=2)) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert chunk_layers(2, Plan(pp=4, embedding_layers=1, loss_layers=1)) == [range(0), range(1), range(1, 2), range(2, 2)]


LEGAL = [
    (pp, vpp, first, last)
    for pp in (1, 2, 3, 4)
    for vpp in (1, 2, 3)
    for first, last in ((0, 0), (1, 0), (1, 1), (0, 2))
    if last <= (14 + first + last) // (pp * vpp)
]


@pytest.mark.parametrize(("pp", "vpp", "first", "last"), LEGAL)
def test_every_layer_is_held_once_and_stages_hold_what_the_model_counts(pp: int, vpp: int, first: int, last: int) -> None:
    plan = Plan(pp=pp, vpp=vpp, embedding_layers=first, loss_layers=last)
    layout = Layout(ranks=1, knobs="tp=1")
    job = layout.job.replace(model=layout.job.model.replace(layers=14))
    chunks = chunk_layers(14, plan)
    assert [layer for chunk in chunks for layer in chunk] == list(range(14))
    held = [sum(len(chunk) for chunk in chunks[stage::pp]) for stage in range(pp)]
    assert held == list(np.atleast_1d(stage_layers(job, plan, np.arange(pp)).total))
