"""A space of a few hundred plans, and the cost of each by single calls."""

from __future__ import annotations

from typing import Any

from tests.jobs import calibration_of, llama_job
from tuner import presets
from tuner.cost_model.calibration import Calibration
from tuner.cost_model.estimate import estimate
from tuner.cost_model.rules import distinct, legal
from tuner.job import Job
from tuner.search.exhaustive import Found
from tuner.search.space import Space, SpaceSpec, build_space

AXES: dict[str, Any] = {
    "axes": {"recompute": ["none", "full:4", "full"], "micro_batch": [1, 2], "zero": [0, 1], "vpp": [1, 2, 4], "pipeline_layout": ["even"]},
    "fix": {"cp": 1, "offload": "none", "shard_group": 0},
}


def small_job() -> Job:
    """Llama-3 8B on 16 H100."""
    return llama_job(model=presets.model("llama3-8b"), cluster=presets.cluster("h100x16"), global_batch=64)


def small_space(job: Job | None = None, **more: Any) -> Space:
    return build_space(job or small_job(), SpaceSpec(**(AXES | more)))


def tiny_space() -> Space:
    """A few dozen plans."""
    axes: dict[str, Any] = {
        "recompute": ["none", "full"],
        "micro_batch": [1, 2],
        "tp": [1, 2, 4],
        "pp": [1, 2, 4],
        "sequence_parallel": [0],
    }
    fix = AXES["fix"] | {"zero": 1, "vpp": 1, "pipeline_layout": "even"}
    return build_space(small_job(), SpaceSpec(axes=axes, fix=fix))


def one_by_one(space: Space, calibration: Calibration | None = None) -> list[Found]:
    """Every legal plan of the space, estimated as a single plan of Python ints."""
    job = space.job
    known = calibration or calibration_of(job)
    found = []
    for index in range(space.size):
        plan = space.plan_at(index)
        if legal(job, plan) and distinct(job, plan):
            of = estimate(job, plan, known)
            found.append(Found(index, float(of.step_s), float(of.memory_bytes), float(of.p_oom)))
    return found
