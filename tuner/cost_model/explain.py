"""Why: an estimate taken apart by term, what breaks or does not fit, what would, and what one step in each knob changes.

No formula lives here: every figure is one that `estimate` summed, or an estimate of a neighbouring plan.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.arrays import leaves
from tuner.cost_model.estimate import Estimate, estimate, peak_memory
from tuner.cost_model.memory import Memory
from tuner.cost_model.pipeline import StageTime, in_flight, pieces, stage_layers, stage_time
from tuner.cost_model.rules import legal
from tuner.cost_model.work import Work
from tuner.plan import ALL_LAYERS, FULL, RECOMPUTE_MODULES, Plan
from tuner.plan_text import layout_text, recompute_text

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One leaf of an estimate: its value in `unit` ("s" a step or "B" of a rank), what it is and where its formula comes from."""

    name: str
    value: float
    unit: str
    what: str
    ref: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: its layers, the seconds of one micro batch on it, the micro batches in flight, and its memory by term."""

    index: int
    layers: int
    forward_s: float
    backward_s: float
    recompute_s: float
    sends_s: float
    in_flight: float
    memory_bytes: float
    memory: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobStep:
    """A neighbour of a plan, one knob away: the change, whether it is legal and fits, and what it does to time and memory."""

    knob: str
    before: str
    after: str
    plan: Plan
    step_s: float
    memory_bytes: float
    p_oom: float


def _terms(of: Any, skip: tuple[str, ...] = ()) -> tuple[Term, ...]:
    meta = {f.name: f.metadata for f in dataclasses.fields(of)}
    return tuple(
        Term(name=name, value=float(value), unit=meta[name]["unit"], what=meta[name]["what"], ref=meta[name]["ref"])
        for name, value in leaves(of).items()
        if name not in skip
    )


def time_terms(job: Job, plan: Plan, calibration: Calibration, result: Estimate) -> tuple[Term, ...]:
    """Return the seconds of a step by term; they sum to result.step_s (the steady phase is split by what limits it)."""
    parts = pieces(job, plan, calibration)
    microbatches = float(plan.microbatches(job.gpus, job.global_batch))
    terms: list[Term] = []
    recompute = 0.0
    for field in dataclasses.fields(Work):
        one = stage_time(job, plan, parts, calibration, result.slowest_stage, field.name)
        recompute += float(one.recompute)
        seconds = microbatches * float(one.forward + one.backward)
        terms.append(Term(name=field.name, value=seconds, unit="s", what=field.metadata["what"], ref=field.metadata["ref"]))
    whole = stage_time(job, plan, parts, calibration, result.slowest_stage)
    steady = [
        Term(name="recompute", value=microbatches * recompute, unit="s", what="forward work done again in the backward", ref="layer.py"),
        Term(
            name="pp_comm",
            value=microbatches * float(whole.sends),
            unit="s",
            what="exposed pipeline sends",
            ref="Narayanan 2021, section 4.1",
        ),
        Term(
            name="microbatch_host", value=microbatches * float(whole.host), unit="s", what="host time of a micro batch", ref="calibration"
        ),
    ]
    return (*terms, *steady, *_terms(result.step, skip=("steady",)))


def stages(job: Job, plan: Plan, calibration: Calibration) -> tuple[Stage, ...]:
    """Return every stage of a single plan with its time and memory."""
    parts = pieces(job, plan, calibration)
    microbatches = plan.microbatches(job.gpus, job.global_batch)
    made = []
    for index in range(int(plan.pp)):
        time: StageTime = stage_time(job, plan, parts, calibration, index)
        memory: Memory = peak_memory(job, plan, calibration, index)
        made.append(
            Stage(
                index=index,
                layers=int(stage_layers(job, plan, index).total),
                forward_s=float(time.forward),
                backward_s=float(time.backward),
                recompute_s=float(time.recompute),
                sends_s=float(time.sends),
                in_flight=float(in_flight(job, plan, microbatches, index)),
                memory_bytes=float(memory.device),
                memory=_terms(memory),
            )
        )
    return tuple(made)


def does_not_fit(job: Job, plan: Plan, calibration: Calibration, result: Estimate) -> str:
    """Return why a plan runs out of memory, naming stage and largest term, or "" when it more likely fits."""
    if float(result.p_oom) < 0.5:
        return ""
    worst = int(result.worst_stage)
    memory = peak_memory(job, plan, calibration, worst)
    host, has = float(memory.host), calibration["host_bytes_per_gpu"]
    if host > has:
        return f"stage {worst} offloads {host / 1e9:.1f} GB to the host, where {has / 1e9:.0f} GB are counted for each accelerator"
    terms = _terms(memory)
    largest = max(terms, key=lambda t: t.value)
    flights = float(in_flight(job, plan, plan.microbatches(job.gpus, job.global_batch), worst))
    detail = f" = {flights:.3g} in flight" if largest.name == "activations" else ""
    capacity = job.cluster.gpu.memory.value
    return (
        f"stage {worst} needs {float(result.memory_bytes) / 1e9:.1f} of {capacity / 1e9:.1f} GB "
        f"({largest.name.replace('_', ' ')} {largest.value / 1e9:.1f}{detail})"
    )


def _divisors(n: int, limit: int) -> list[int]:
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def _recompute_choices(job: Job) -> list[dict[str, int]]:
    modules = ["core_attn", "layernorm"]
    modules += ["moe_act", "moe"] if job.model.moe else ["mlp"]
    modules += ["mla_up_proj"] if job.model.mla else []
    single = [{"recompute": RECOMPUTE_MODULES[name], "recompute_layers": ALL_LAYERS} for name in modules]
    return [{"recompute": 0, "recompute_layers": ALL_LAYERS}, *single, {"recompute": FULL, "recompute_layers": ALL_LAYERS}]


def neighbours(job: Job, plan: Plan) -> list[tuple[str, Plan]]:
    """Return (knob, plan) for the nearest legal value of each knob in both directions, and for every other choice of a listed knob.

    Degrees are divisors of the GPUs (up to 4,096), vpp and micro_batch whole numbers up to the layers and the batch's divisors.
    """
    values: dict[str, list[int]] = {name: _divisors(job.gpus, 4096) for name in ("tp", "pp", "cp")}
    values["vpp"] = list(range(1, job.model.layers + 1))
    values["micro_batch"] = _divisors(job.global_batch, 64)
    if job.model.moe:
        values["ep"] = _divisors(job.model.moe.experts, job.gpus)
        values["etp"] = _divisors(job.gpus, 64)
    found: list[tuple[str, Plan]] = []
    for knob, candidates in values.items():
        column = np.array(candidates, dtype=np.int64)
        table = dataclasses.replace(plan, **{knob: column})
        ok = np.broadcast_to(legal(job, table), column.shape)
        now = int(getattr(plan, knob))
        below, above = column[ok & (column < now)], column[ok & (column > now)]
        for value in [*below[-1:], *above[:1]]:
            found.append((knob, dataclasses.replace(plan, **{knob: int(value)})))
    listed: list[tuple[str, dict[str, int]]] = [("recompute", choice) for choice in _recompute_choices(job)]
    listed += [("zero", {"zero": stage}) for stage in range(4)]
    listed += [("sequence_parallel", {"sequence_parallel": flag}) for flag in (0, 1)]
    listed += [("pipeline_layout", {"embedding_layers": e, "loss_layers": n}) for e, n in ((0, 0), (0, 1), (1, 0), (1, 1))]
    listed += [("offload", {"offload": code}) for code in (0, 1)]
    others = [(knob, dataclasses.replace(plan, **change)) for knob, change in listed]
    ok = np.broadcast_to(legal(job, Plan.table([other for _, other in others])), len(others))
    return found + [item for item, good in zip(others, ok, strict=True) if good and item[1] != plan]


def _spelled(knob: str, plan: Plan) -> str:
    if knob == "recompute":
        return recompute_text(plan.recompute, plan.recompute_layers)
    if knob == "pipeline_layout":
        return layout_text(plan.embedding_layers, plan.loss_layers)
    return str(getattr(plan, knob))


def knob_steps(job: Job, plan: Plan, calibration: Calibration) -> tuple[KnobStep, ...]:
    """Return what one step in each knob does to time and memory (legal neighbours only)."""
    return tuple(_step(job, plan, knob, other, calibration) for knob, other in neighbours(job, plan))


def _step(job: Job, plan: Plan, knob: str, other: Plan, calibration: Calibration) -> KnobStep:
    result = estimate(job, other, calibration)
    return KnobStep(
        knob=knob,
        before=_spelled(knob, plan),
        after=_spelled(knob, other),
        plan=other,
        step_s=float(result.step_s),
        memory_bytes=float(result.memory_bytes),
        p_oom=float(result.p_oom),
    )


def nearest_that_fits(job: Job, plan: Plan, calibration: Calibration, *, max_p_oom: float = 0.05, depth: int = 3) -> Plan | None:
    """Return the legal plan that fits with the fewest knobs changed, the fastest of those; None within `depth` changes.

    An illegal start is allowed: its neighbours are legal. At each depth the 40 plans nearest to fitting are taken further.
    """
    if bool(legal(job, plan)) and float(estimate(job, plan, calibration).p_oom) < max_p_oom:
        return plan
    frontier, seen = [plan], {plan}
    for _ in range(depth):
        reached = list(dict.fromkeys(other for start in frontier for _, other in neighbours(job, start) if other not in seen))
        if not reached:
            return None
        seen.update(reached)
        results = estimate(job, Plan.table(reached), calibration)
        step_s, memory, p_oom = (np.broadcast_to(column, len(reached)) for column in (results.step_s, results.memory_bytes, results.p_oom))
        fitting = np.flatnonzero(p_oom < max_p_oom)
        if len(fitting):
            return reached[int(fitting[np.argmin(step_s[fitting])])]
        frontier = [reached[i] for i in np.argsort(memory, kind="stable")[:40]]
    return None
