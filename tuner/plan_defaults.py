"""A whole plan from the knobs that somebody stated: the rest is what the framework does when nobody sets it, and is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import PlanError, Problem
from tuner.plan import Plan
from tuner.request import read_calibration, read_job
from tuner.search.space import RUNTIME
from tuner.search.space import complete as with_defaults
from tuner.values import Problems, knobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.request import Request


def read_plan(value: Any, job: Job, name: str) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of a text, a mapping or a Plan, completed with the framework's defaults, and what was assumed."""
    return (value, ()) if isinstance(value, Plan) else complete(job, knobs(value, name), name)


def asked_plan(request: Request) -> tuple[Job, Plan, tuple[str, ...], Calibration]:
    """Return the one plan that a request asks about: its job, the plan, what was assumed, the calibration. Raises SpecError."""
    problems = Problems()
    if request.plan is None:
        problems.add("plan", None, "is missing", "the layout that is asked about, like tp=8,pp=2")
    elif not isinstance(request.plan, Plan):
        problems.trying(lambda: knobs(request.plan, "plan"))
    job = problems.trying(lambda: read_job(request))
    problems.raise_any()
    assert job is not None  # noqa: S101 (raise_any has raised otherwise)
    plan, assumed = read_plan(request.plan, job, "plan")
    return job, plan, assumed, read_calibration(request, job)


def complete(job: Job, fields: Mapping[str, int], where: str = "plan") -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of these fields (as plan_text.parse_knobs gives them) and the knobs that took the framework's default.

    A default is named only where it matters: not interleaving without a pipeline, nor sequence parallelism without tensor
    parallelism. etp follows tp in Megatron-LM (--expert-tensor-parallel-size) and is 1 elsewhere. A stated dp must be the one
    that the other degrees leave.
    """
    _check_mesh(job, fields, where)
    return filled(job, fields)


def filled(job: Job, fields: Mapping[str, int]) -> tuple[Plan, tuple[str, ...]]:
    """Return what `complete` does, of degrees that may be those of no mesh."""
    stated = {name: value for name, value in fields.items() if name != "dp"}
    tp, pp = stated.get("tp", 1), stated.get("pp", 1)
    matters = {"recompute": True, "zero": job.gpus > tp * pp, "vpp": pp > 1, "pipeline_layout": pp > 1, "sequence_parallel": tp > 1}
    if job.model.moe and tp > 1 and "megatron" in job.framework.rules:
        matters["etp"] = True
        stated = {"etp": tp} | stated
    plan = with_defaults(job, stated)
    matters |= {knob: bool(getattr(plan, knob)) for knob in RUNTIME}
    spelled = {"pipeline_layout": "embedding_layers"}
    return plan, tuple(knob for knob, yes in matters.items() if yes and spelled.get(knob, knob) not in fields)


def _check_mesh(job: Job, fields: Mapping[str, int], where: str) -> None:
    """Refuse degrees that no mesh of the job's GPUs has: there is nothing to estimate then."""
    tp, pp, cp = (fields.get(name, 1) for name in ("tp", "pp", "cp"))
    ranks = tp * pp * cp
    mesh = f"tp {tp} x pp {pp} x cp {cp} = {ranks}"
    if ranks > job.gpus or job.gpus % ranks:
        rule = "exceeds" if ranks > job.gpus else "must divide"
        raise PlanError([Problem(where=where, path="", value="", rule=f"{mesh} {rule} the {job.gpus} GPUs")])
    dp = job.gpus // ranks
    if fields.get("dp", dp) != dp:
        raise PlanError([Problem(where=where, path="dp", value=str(fields["dp"]), rule=f"must be {dp}: {job.gpus} GPUs / ({mesh})")])
