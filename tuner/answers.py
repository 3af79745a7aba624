"""Answers: what each verb returns, as frozen values whose record() is the JSON of that verb. All arithmetic on results is here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cost_model.estimate import Estimate, mfu, tokens_per_s_per_gpu, training_seconds
from tuner.cost_model.estimate import estimate as evaluate
from tuner.cost_model.explain import Stage, Term, stages, time_terms
from tuner.cost_model.params import active_parameters, parameters
from tuner.cost_model.rules import broken as broken_rules
from tuner.fallback_cost import fallback_record
from tuner.job import peak_flops
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan

FITS_BELOW = 0.5  # p_oom from which a plan is predicted to run out of memory
SEARCHED_BELOW = 0.05  # p_oom below which a search lists a plan by default
PRIOR_LAYERS = 2  # prior.yaml and pooled.yaml: nothing measured on this GPU or framework


def plain(value: Any) -> Any:
    """Return a value of JSON's types: NumPy scalars and whole tuples become Python's, NaN and infinities None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value


def job_record(job: Job) -> dict[str, Any]:
    """Return the job's names and numbers, as every answer states them."""
    model, cluster = job.model, job.cluster
    return {
        "model": model.name,
        "parameters": int(parameters(model)),
        "active_parameters": int(active_parameters(model)),
        "cluster": cluster.name,
        "gpu": cluster.gpu.name,
        "gpus": job.gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "domain": cluster.sizes[0],
        "gpu_memory_bytes": cluster.gpu.memory.value,
        "peak_flops": peak_flops(job),
        "framework": job.framework.name,
        "release": job.release,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "precision": job.precision,
        "attention": job.attention,
        "task": job.task,
        "lora_rank": job.lora_rank if job.task == "lora" else None,
        "tokens": job.tokens,
        "ramp_up": job.ramp_up.model_dump() if job.ramp_up else None,
        "price_per_gpu_hour": cluster.price_per_gpu_hour,
    }


def calibration_record(calibration: Calibration) -> dict[str, Any]:
    """Return which figures the numbers were made with."""
    names = ("name", "hash", "gpu", "framework", "release", "based_on")
    return {name: getattr(calibration, name) for name in names} | {"layers": list(calibration.layers)}


def basis_of(calibration: Calibration) -> str:
    """Return "calibrated" when measurements of this GPU or framework stand behind the figures, else "analytic"."""
    return "calibrated" if len(calibration.layers) > PRIOR_LAYERS else "analytic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a single plan costs. mfu: model FLOPs over dense peak, recompute not counted; worst_stage: the fullest one."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: float
    worst_stage: int
    slowest_stage: int
    p_oom: float
    basis: str

    @property
    def fits(self) -> bool:
        """Whether the plan is predicted to run in the GPU's memory."""
        return self.p_oom < FITS_BELOW


def cost_of(job: Job, estimate: Estimate, basis: str) -> Cost:
    """Return the cost of a single plan from its estimate."""
    step_s = float(estimate.step_s)
    return Cost(
        step_s=step_s,
        low_s=float(estimate.low_s),
        high_s=float(estimate.high_s),
        tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, step_s)),
        mfu=float(mfu(job, step_s)),
        memory_bytes=float(estimate.memory_bytes),
        worst_stage=int(estimate.worst_stage),
        slowest_stage=int(estimate.slowest_stage),
        p_oom=float(estimate.p_oom),
        basis=basis,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole run: of `tokens`, in `days`, for gpu_hours and, where a price is known, `cost`."""

    tokens: float
    days: float
    gpu_hours: float
    cost: float | None


def run_of(job: Job, plan: Plan, calibration: Calibration) -> Run | None:
    """Return the whole run under a single plan, or None without a token budget. Restarts and evaluation are not counted."""
    if job.tokens is None:
        return None
    seconds = training_seconds(job, plan, calibration)
    gpu_hours = seconds * job.gpus / 3600
    price = job.cluster.price_per_gpu_hour
    return Run(tokens=job.tokens, days=seconds / 86400, gpu_hours=gpu_hours, cost=gpu_hours * price if price else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A rule that the plan breaks: severity error (the framework refuses it), duplicate or warning."""

    rule: str
    severity: str
    text: str
    source: str


def broken_by(job: Job, plan: Plan) -> tuple[Broken, ...]:
    """Return the rules that a single plan breaks. Another spelling of an equal plan is no concern of a person's own plan."""
    found = broken_rules(job, plan)
    return tuple(Broken(rule=r.id, severity=r.severity, text=text, source=r.source) for r, text in found if r.severity != "duplicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """What one plan costs, and what is wrong with it. `assumed`: knobs that took the framework's default; fallback: what a replica costs
    that goes on at the plan's fallback_tp.
    """

    job: Job
    plan: Plan
    assumed: tuple[str, ...]
    calibration: Calibration
    cost: Cost
    run: Run | None
    broken: tuple[Broken, ...]
    step: tuple[Term, ...]
    stages: tuple[Stage, ...]
    fallback: dict[str, Any] | None = None

    @property
    def legal(self) -> bool:
        """Whether the framework runs the plan."""
        return all(item.severity != "error" for item in self.broken)

    @property
    def runs(self) -> bool:
        """Whether the plan is legal and more likely fits than not, and so does a replica at its fallback_tp."""
        return self.legal and self.cost.fits and not (self.fallback and self.fallback["why_not_fit"])

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        record: dict[str, Any] = {
            "job": job_record(self.job),
            "calibration": calibration_record(self.calibration),
            "plan": plan_record(self.plan, self.job.gpus),
            "assumed": self.assumed,
            "legal": self.legal,
            "fits": self.cost.fits,
            "searched": self.cost.p_oom < SEARCHED_BELOW,
            "broken": [dataclasses.asdict(item) for item in self.broken],
            **dataclasses.asdict(self.cost),
            "microbatches": self.plan.microbatches(self.job.gpus, self.job.global_batch),
            "run": dataclasses.asdict(self.run) if self.run else None,
            "step": [dataclasses.asdict(term) | {"share": term.value / self.cost.step_s} for term in self.step],
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "fallback": self.fallback,
        }
        return dict(plain(record))


def answer_estimate(job: Job, plan: Plan, assumed: tuple[str, ...], calibration: Calibration) -> EstimateAnswer:
    """Return the answer for a single plan."""
    estimate = evaluate(job, plan, calibration)
    return EstimateAnswer(
        job=job,
        plan=plan,
        assumed=assumed,
        calibration=calibration,
        cost=cost_of(job, estimate, basis_of(calibration)),
        run=run_of(job, plan, calibration),
        broken=broken_by(job, plan),
        step=time_terms(job, plan, calibration, estimate),
        stages=stages(job, plan, calibration),
        fallback=fallback_record(job, plan, calibration, estimate),
    )
