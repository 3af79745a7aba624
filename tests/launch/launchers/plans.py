"""Jobs and random legal plans of them, for every launcher's tests."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tuner import presets
from tuner.job import Job
from tuner.plan import Plan
from tuner.search.space import RUNTIME, SpaceSpec, build_space
from tuner.spelling import spellable

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


@cache
def legal_plans(
    framework: str, model: str = "llama3-70b", count: int = 60, seed: int = 0, cannot: frozenset[str] | None = None
) -> tuple[Plan, ...]:
    """Return random legal plans of the job's whole space, runtime knobs included; cannot: knobs that are to stay idle."""
    job = job_of(framework, model)
    spec = SpaceSpec(axes={knob: [0, 1] for knob in RUNTIME if knob not in (cannot or ())})
    spec = spec if cannot is None else spellable(spec, job, cannot)
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
