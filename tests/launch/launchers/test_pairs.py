"""From one launcher's files to a plan, to another's files, and back: nothing that both can say is lost on the way."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.launch.launchers.plans import job_of, spellable_plans
from tests.launch.launchers.test_conformance import dealt, versions_of
from tuner.cost_model.rules import broken
from tuner.errors import SpecError
from tuner.job import Job
from tuner.launch.launchers.launcher import BUILT_IN, IDLE, Launcher, open_launcher
from tuner.plan import FULL, Plan
from tuner.plan_defaults import read_plan

MODELS = ("llama3-8b", "mixtral-8x7b")
PAIRS = list(permutations(BUILT_IN, 2))
# nanotron reduces gradients behind the last micro batch and shards the optimizer alone; the others overlap and shard gradients too.
NOTHING_IN_COMMON = ({"accelerate", "nanotron"}, {"torchtitan", "nanotron"})
PLAIN = {name: IDLE[name] for name in ("pp", "vpp", "cp", "schedule", "embedding_layers", "loss_layers", "offload", "cuda_graphs")}
SHARDED = PLAIN | {"zero": 3, "dp_overlap": 1, "shard_group": 0}  # as PyTorch's frameworks do


def through(launcher: Launcher, job: Job, plan: Plan) -> Plan | None:
    """Write a plan and read it back; None where the launcher refuses it, or its framework does."""
    if any(rule.severity == "error" for rule, _ in broken(job, plan)):
        return None
    try:
        files = launcher.write(job, plan, versions_of(launcher)[-1]).files
    except SpecError:
        return None
    found = launcher.read({name: text for name, text in files.items() if launcher.reads(name, text)})
    assert not found.unknown and not found.problems, (found.unknown, found.problems)
    return read_plan({name: value for name, value in found.plan.items() if name != "edp"}, job, launcher.name)[0]


def without(plan: Plan, launcher: Launcher) -> Plan:
    """Return the plan without what a launcher cannot say."""
    idle = {name: IDLE[name] for name in launcher.cannot}
    if "schedule" in idle and plan.schedule and plan.vpp > 1:
        idle["vpp"] = 1
    return dataclasses.replace(plan, **idle)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_plan_survives_the_way_from_one_launcher_to_another(first: str, second: str) -> None:
    one, other = open_launcher(first), open_launcher(second)
    survived = []

    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(
        st.sampled_from(MODELS).flatmap(lambda model: st.tuples(st.just(model), st.sampled_from(spellable_plans(one, model)))),
        st.sampled_from([{}, PLAIN, SHARDED, SHARDED | {"recompute": FULL}, PLAIN | {"zero": 1}, PLAIN | {"dp_overlap": 1}]),
    )
    def survives(drawn: tuple[str, Plan], changed: dict[str, int]) -> None:
        """changed: what frameworks differ in most, so that more plans are legal under both."""
        model, plan = drawn
        plan = dataclasses.replace(without(plan, other), **changed)
        mine = through(one, job_of(one.framework, model), plan)
        if mine is None:
            return
        theirs = through(other, job_of(other.framework, model), mine)
        if theirs is not None:
            kept = [shared(each, model, one, other) for each in (plan, mine, theirs)]
            assert kept[2] == kept[1] == kept[0]
            survived.append(plan)

    survives()
    assert survived or {first, second} in NOTHING_IN_COMMON


def shared(plan: Plan, model: str, one: Launcher, other: Launcher) -> dict[str, int]:
    """Return the used fields that both can say."""
    return {name: value for name, value in dealt(plan, job_of(one.framework, model)).items() if name in one.says and name in other.says}
