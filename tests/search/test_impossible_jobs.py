"""Jobs that no plan can run: the search says why, and no axis is empty."""

import pytest

import tuner
from tests.jobs import llama_job
from tuner import presets
from tuner.errors import SpecError
from tuner.search.axes import default_axes
from tuner.search.space import SpaceSpec, build_space


@pytest.mark.parametrize("seq_len", [1, 7])
def test_a_length_that_a_framework_cannot_split_leaves_no_legal_plan(seq_len: int) -> None:
    found = tuner.search(model="tiny", cluster="h100x8", seq_len=seq_len, global_batch=8, framework="torchtitan")
    assert not found.feasible
    assert f"must divide seq_len = {seq_len}" in str(found.why_nothing)


@pytest.mark.parametrize("framework", presets.names("frameworks"))
@pytest.mark.parametrize(("gpus", "seq_len", "batch"), [(1, 1, 1), (7, 7, 3), (8, 1, 1)])
def test_each_knob_has_a_value_whatever_the_job(framework: str, gpus: int, seq_len: int, batch: int) -> None:
    cluster = presets.cluster(f"h100x{gpus}")
    job = llama_job(cluster=cluster, framework=presets.framework(framework), seq_len=seq_len, global_batch=batch)
    assert [knob for knob, values in default_axes(job).items() if not values] == []


def test_values_that_cannot_divide_are_left_out_before_anything_is_tabled() -> None:
    every = list(range(1, 3001))
    space = build_space(llama_job(), SpaceSpec(axes={"tp": every, "pp": every, "cp": every, "micro_batch": every}))
    assert max(space.shape) < 1000
    assert space.size < 10**9


def test_a_space_with_more_meshes_than_memory_takes_is_refused() -> None:
    job = llama_job(cluster=presets.cluster("h100x5040000"), global_batch=5_040_000)
    every = list(range(1, 50_001))
    with pytest.raises(SpecError, match=r"of tp x .* are more than 100,000,000 meshes"):
        build_space(job, SpaceSpec(axes={"tp": every, "pp": every, "cp": every, "vpp": every, "micro_batch": every}))
