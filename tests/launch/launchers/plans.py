"""Jobs and random legal plans of them, for every launcher's tests."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tuner import presets
from tuner.job import Job
from tuner.plan import Plan
from tuner.plan_text import idle_record
from tuner.search.axes import default_axes
from tuner.search.space import AXES, SpaceSpec, build_space

if TYPE_CHECKING:
    from tuner.launch.launchers.launcher import Launcher

SIZES = {"llama3-8b": ("h100x16", 8192, 64), "llama3-70b": ("h100x128", 8192, 256), "mixtral-8x7b": ("h100x64", 4096, 256)}


@cache
def job_of(framework: str, model: str = "llama3-70b") -> Job:
    """Return a job of this model under this framework."""
    cluster, seq_len, batch = SIZES[model]
    return Job(
        model=presets.model(model),
        cluster=presets.cluster(cluster),
        framework=presets.framework(framework),
        seq_len=seq_len,
        global_batch=batch,
    )


SWITCHES = ("tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")


def spellable_space(job: Job, cannot: frozenset[str]) -> SpaceSpec:
    """Return the space without values of knobs that a launcher says it cannot spell, so that more of the sampled plans can be written."""
    axes: dict[str, list[str | int]] = {knob: [0, 1] for knob in SWITCHES if knob not in cannot}
    fix: dict[str, str | int] = {knob: value for knob, value in idle_record(job.gpus).items() if knob in cannot and knob in AXES}
    if "cp_kind" not in cannot:
        axes["cp_kind"] = ["p2p", "all_gather", "a2a"]
    if cannot & {"embedding_layers", "loss_layers"}:
        fix["pipeline_layout"] = "even"
    if "recompute_layers" in cannot and "recompute" not in cannot:
        axes["recompute"] = [value for value in default_axes(job)["recompute"] if ":" not in str(value)]
    return SpaceSpec(axes=axes, fix=fix)


@cache
def legal_plans(
    framework: str, model: str = "llama3-70b", count: int = 60, seed: int = 0, cannot: frozenset[str] | None = None
) -> tuple[Plan, ...]:
    """Return random legal plans of the job's whole space, runtime knobs included; cannot: knobs that are to stay idle."""
    job = job_of(framework, model)
    spec = SpaceSpec(axes={knob: [0, 1] for knob in SWITCHES}) if cannot is None else spellable_space(job, cannot)
    space = build_space(job, spec, most_plans=10**9)
    random = np.random.default_rng(seed)
    found: list[Plan] = []
    for _ in range(400):
        indices = random.integers(0, space.size, 2000)
        table = space.plans_at(indices.tolist())
        good = np.flatnonzero(np.broadcast_to(space.allows(table), len(indices)))
        found += [space.plan_at(int(indices[i])) for i in good[: count - len(found)]]
        if len(found) >= count:
            break
    assert len(found) >= count // 2, f"{len(found)} legal plans of {framework} in 800,000"
    return tuple(found)


def plans_of(launcher: Launcher, model: str = "llama3-70b") -> tuple[Plan, ...]:
    """Return plans of the whole space, and as many of those knobs alone that the launcher can spell."""
    return legal_plans(launcher.framework, model) + spellable_plans(launcher, model)


def spellable_plans(launcher: Launcher, model: str = "llama3-70b") -> tuple[Plan, ...]:
    """Return random legal plans that use no knob which the launcher says that it cannot spell."""
    return legal_plans(launcher.framework, model, count=120, seed=1, cannot=frozenset(launcher.cannot))
