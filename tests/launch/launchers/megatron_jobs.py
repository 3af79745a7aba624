"""Plans that show what the ten jobs of all formats do not: experts beside interleaving with an uneven layout and fp8, and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.launchers.plans import job_of
from tuner.errors import SpecError
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Launcher, Written
    from tuner.plan import Plan

# 32 layers + 2 + 2 over 4 x 3 chunks are 3 each, so that the first and the last hold 1.
EXPERTS = "tp=2,pp=4,vpp=3,ep=8,etp=1,sp=true,zero=1,recompute=layernorm+moe_act,pipeline_layout=embedding=2+loss=2,dp_overlap=true"
GRAPHS = "tp=8,pp=4,cp=2,cp_kind=all_gather,sp=true,zero=1,tp_overlap=true,dp_overlap=true,cuda_graphs=true,recompute=none"


def asked(launcher: Launcher, knobs: str, model: str = "llama3-8b", **changes: Any) -> tuple[Job, Plan]:
    job = job_of(launcher.framework, model).model_copy(update=changes)
    return job, read_plan(knobs, job, "plan")[0]


def written(launcher: Launcher, knobs: str, model: str = "llama3-8b", version: str = "", **changes: Any) -> Written:
    return launcher.write(*asked(launcher, knobs, model, **changes), version)


def refused(launcher: Launcher, knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        written(launcher, knobs, model, **changes)
    return {problem.path: problem.rule for problem in error.value.problems}
