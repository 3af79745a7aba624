"""Plans for the parsers: random ones that the rules of a framework pass, and ones a random change of knobs has made them refuse."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner import presets
from tuner.cost_model.rules import broken
from tuner.job import Job
from tuner.plan import CP_KINDS, FULL, Plan
from tuner.search.space import RUNTIME, SpaceSpec, build_space
from tuner.spelling import spellable

if TYPE_CHECKING:
    from tuner.launch.launchers.launcher import Launcher, Written

# model: cluster, sequence, batch. Small worlds, so that the parser's own process groups can be built for each plan.
SIZES = {
    "llama3-8b": ("h100x16", 8192, 64),
    "llama3-70b": ("h100x64", 8192, 128),
    "mixtral-8x7b": ("h100x64", 4096, 256),
    "qwen3-30b-a3b": ("h100x32", 4096, 256),
}
_DEGREES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32]
_FLAG = [0, 1]
# What a knob may be changed to.
CHANGES: dict[str, list[int]] = {
    "tp": _DEGREES,
    "pp": _DEGREES,
    "vpp": [1, 2, 3, 4, 5, 8],
    "cp": _DEGREES,
    "ep": _DEGREES,
    "etp": [1, 2, 3, 4, 8],
    "micro_batch": [1, 2, 3, 4, 5, 8, 16, 96],
    "sequence_parallel": _FLAG,
    "recompute": [0, 1, 2, 4, 8, 16, 32, FULL],
    "recompute_layers": [1, 2, 3, 5, 7, 40, 100],
    "zero": [0, 1, 2, 3],
    "shard_group": [0, 2, 3, 4, 8],
    "embedding_layers": [0, 1, 2],
    "loss_layers": [0, 1, 2, 3],
    "offload": [0, 1, 2, 3],
    "tp_overlap": _FLAG,
    "dp_overlap": _FLAG,
    "ep_overlap": _FLAG,
    "cuda_graphs": _FLAG,
    "cp_kind": sorted(CP_KINDS.values()),
}


class Spelling:
    """A launcher that writes one of its versions."""

    def __init__(self, launcher: Launcher, version: str) -> None:
        self._launcher, self._version = launcher, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return the files of this version."""
        return self._launcher.write(job, plan, version or self._version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan of a job, and the error rules that it breaks (none: the rules pass it)."""

    name: str
    job: Job
    plan: Plan
    rules: tuple[str, ...]


def job_of(framework: str, model: str) -> Job:
    """Return the job of a model."""
    cluster, seq_len, batch = SIZES[model]
    return Job(
        model=presets.model(model),
        cluster=presets.cluster(cluster),
        framework=presets.framework(framework),
        seq_len=seq_len,
        global_batch=batch,
    )


def cases(launcher: Launcher, each: int, seed: int) -> list[Case]:
    """Return for each model `each` plans that the rules pass and as many that they refuse, of the knobs that the launcher spells."""
    found: list[Case] = []
    for model in SIZES:
        job = job_of(launcher.framework, model)
        random = np.random.default_rng([seed, len(found)])
        passed = _passed(job, launcher, each, random)
        found += [Case(name=f"{model}-legal-{i}", job=job, plan=plan, rules=()) for i, plan in enumerate(passed)]
        refused = _refused(job, launcher, passed, each, random)
        found += [Case(name=f"{model}-illegal-{i}", job=job, plan=plan, rules=rules) for i, (plan, rules) in enumerate(refused)]
    return found


def _passed(job: Job, launcher: Launcher, count: int, random: np.random.Generator) -> list[Plan]:
    spec = SpaceSpec(axes={knob: [0, 1] for knob in RUNTIME if knob not in launcher.cannot})
    space = build_space(job, spellable(spec, job, launcher.cannot), most_plans=10**9)
    found: list[Plan] = []
    while len(found) < count:
        indices = random.integers(0, space.size, 4000)
        good = np.flatnonzero(np.broadcast_to(space.allows(space.plans_at(indices.tolist())), len(indices)))
        found += [plan for plan in (space.plan_at(int(indices[i])) for i in good) if _written(launcher, job, plan)][: count - len(found)]
    return found


def _written(launcher: Launcher, job: Job, plan: Plan) -> bool:
    """Whether there is a file to parse: a plan may be legal and yet have no spelling."""
    from tuner.errors import SpecError

    try:
        launcher.write(job, plan)
    except (SpecError, ArithmeticError, ValueError, IndexError, AssertionError):
        return False
    return True


def _refused(
    job: Job, launcher: Launcher, seeds: list[Plan], count: int, random: np.random.Generator
) -> list[tuple[Plan, tuple[str, ...]]]:
    """Return plans with one to three knobs changed that break an error rule (of a knob's own range: never)."""
    knobs = [knob for knob in CHANGES if knob not in launcher.cannot]
    found: list[tuple[Plan, tuple[str, ...]]] = []
    while len(found) < count:
        changed = random.choice(knobs, size=int(random.integers(1, 4)), replace=False)
        new = {str(knob): int(random.choice(CHANGES[knob])) for knob in changed}
        plan = dataclasses.replace(seeds[int(random.integers(len(seeds)))], **new)
        rules = tuple(sorted({rule.id for rule, _ in broken(job, plan) if rule.severity == "error"}))
        if rules and plan.dp(job.gpus) >= 1 and _written(launcher, job, plan):
            found.append((plan, rules))
    return found
