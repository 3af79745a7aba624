"""The answer of `tuner search`: the ranked plans of a job, or of the cheapest count of GPUs, and why there is none."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.answers import Run, basis_of, broken_by, calibration_record, job_record, plain, run_of
from tuner.cost_model.estimate import estimate, tokens_per_s_per_gpu
from tuner.cost_model.explain import does_not_fit
from tuner.cost_model.failures import down_share
from tuner.cost_model.goodput import down_of, lasting_of
from tuner.cost_model.rules import broken
from tuner.plan_text import plan_record
from tuner.search.lost_gpu import lost_gpus
from tuner.search.ranking import Ranking, Row, rank

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.exporting import ExportAnswer
    from tuner.failure import FailureData
    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.profiling.measured import Measured
    from tuner.search.counts import CountResult
    from tuner.search.exhaustive import Estimator, SweepResult
    from tuner.search.lost_gpu import LostGpu
    from tuner.search.ranking import Plainer
    from tuner.search.space import Space, SpaceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A ranked plan and, with a token budget, its whole run. like: how many near equals it stands for, where these are not listed;
    lost: what one lost GPU costs it.
    """

    row: Row
    basis: str
    run: Run | None
    low_tokens_per_s_per_gpu: float
    high_tokens_per_s_per_gpu: float
    microbatches: int
    lost: LostGpu
    like: int | None = None

    def record(self, gpus: int) -> dict[str, Any]:
        """Return the plan as JSON's types."""
        speeds = ("low_tokens_per_s_per_gpu", "high_tokens_per_s_per_gpu", "microbatches")
        figures = ("step_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes", "worst_stage", "p_oom")
        record = {"rank": self.row.rank, "plan": plan_record(self.row.plan, gpus)}
        record |= {name: getattr(self.row, name) for name in figures}
        record |= {name: getattr(self, name) for name in speeds}
        if self.row.goodput is not None:
            record |= {"goodput": self.row.goodput, "good_tokens_per_s_per_gpu": self.row.goodput * self.row.tokens_per_s_per_gpu}
        record |= {"basis": self.basis, "tied": self.row.tied, "like": self.like, "one_gpu_lost": dataclasses.asdict(self.lost)}
        return record | {"run": dataclasses.asdict(self.run) if self.run else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentPlan:
    """The person's own plan among the others. gain: how many times faster the best one is; assumed: knobs that took defaults;
    problems: what the framework's rules say against it; why_not_fit: why the search would not list it for its memory.
    """

    ranked: RankedPlan
    gain: float | None
    legal: bool
    problems: tuple[str, ...]
    why_not_fit: str
    assumed: tuple[str, ...]

    def record(self, gpus: int) -> dict[str, Any]:
        """Return the plan as JSON's types."""
        own = {name: getattr(self, name) for name in ("gain", "legal", "problems", "why_not_fit", "assumed")}
        return self.ranked.record(gpus) | {"fits": not self.why_not_fit} | own


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """The best plans of a job. counts: the best of each count of GPUs, where a range was asked about (job is on the chosen one);
    distinct: whether near equals are counted, not ranked; why_nothing: why no plan is ranked; measured: what ran, where plans were
    measured; failures: of GPUs, where goodput is the objective; exported: the best plan's files, where they were asked for.
    """

    job: Job
    calibration: Calibration
    objective: str
    strategy: str
    space: dict[str, Any]
    ranking: tuple[RankedPlan, ...]
    distinct: bool
    current: CurrentPlan | None
    pareto: tuple[RankedPlan, ...]
    tied: int
    plainer: Plainer | None = None
    counts: tuple[dict[str, Any], ...] = ()
    deadline_s: float | None = None
    why_nothing: str = ""
    measured: Measured | None = None
    failures: FailureData | None = None
    exported: ExportAnswer | None = None

    @property
    def feasible(self) -> bool:
        """Whether there is a plan that is legal, fits and meets the deadline."""
        return bool(self.ranking) and not self.why_nothing

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        gpus = self.job.gpus
        record: dict[str, Any] = {
            "job": job_record(self.job),
            "space": self.space,
            "calibration": calibration_record(self.calibration),
            "objective": self.objective,
            "strategy": self.strategy,
            "ranking": [plan.record(gpus) for plan in self.ranking],
            "distinct": self.distinct,
            "tied": self.tied,
            "plainer": self.plainer._asdict() if self.plainer else None,
            "current": self.current.record(gpus) if self.current else None,
            "pareto": [plan.record(gpus) for plan in self.pareto],
            "counts": self.counts,
            "deadline_s": self.deadline_s,
            "why_nothing": self.why_nothing,
            "failures": None if self.failures is None else failures_record(self.failures, self.job.gpus),
        }
        if self.measured is not None:
            record["measured"] = self.measured.record()
        if self.exported is not None:
            told = self.exported.record()
            record["export"] = {name: told[name] for name in ("formats", "refused")}
        return dict(plain(record))


def failures_record(data: FailureData, gpus: int) -> dict[str, Any]:
    """Return which failures were counted, and the share of time whose work lasts."""
    down = down_share(down_of(data))
    rates = {"name": data.name, "mtbf_s": data.mtbf.value, "repair_s": 3600.0 * data.mean_repair_hours}
    return rates | {"failed_fraction": down, "lasting": lasting_of(data, gpus)}


def ranked(
    job: Job, ranking: Ranking, calibration: Calibration, like: tuple[int | None, ...] = (), *, stated: bool = False
) -> tuple[RankedPlan, ...]:
    """Return the rows of a ranking with their whole runs and, where these were counted, their near equals; stated: as in lost_gpus."""
    counts = like or (None,) * len(ranking.rows)
    lost = lost_gpus(job, [row.plan for row in ranking.rows], calibration, stated=stated)
    return tuple(_ranked(job, row, calibration, one, count) for row, one, count in zip(ranking.rows, lost, counts, strict=True))


def _ranked(job: Job, row: Row, calibration: Calibration, lost: LostGpu, like: int | None = None) -> RankedPlan:
    return RankedPlan(
        row=row,
        basis=basis_of(calibration),
        run=run_of(job, row.plan, calibration),
        low_tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, row.high_s)),
        high_tokens_per_s_per_gpu=float(tokens_per_s_per_gpu(job, row.low_s)),
        microbatches=int(row.plan.microbatches(job.gpus, job.global_batch)),
        lost=lost,
        like=like,
    )


def own_plan(
    job: Job,
    ranking: Ranking,
    calibration: Calibration,
    assumed: tuple[str, ...],
    max_p_oom: float,
    max_memory: float | None,
    *,
    stated: bool = False,
) -> CurrentPlan | None:
    """Return the person's plan of a ranking, if there is one; stated: as in lost_gpus."""
    row = ranking.current
    if row is None:
        return None
    broken = broken_by(job, row.plan)
    return CurrentPlan(
        ranked=_ranked(job, row, calibration, lost_gpus(job, [row.plan], calibration, stated=stated)[0]),
        gain=ranking.gain,
        legal=all(item.severity != "error" for item in broken),
        problems=tuple(f"{item.severity}: {item.text} [{item.rule}]" for item in broken),
        why_not_fit=too_large(job, row.plan, calibration, max_p_oom, max_memory),
        assumed=assumed,
    )


def too_large(job: Job, plan: Plan, calibration: Calibration, max_p_oom: float, max_memory: float | None) -> str:
    """Return why a search does not list a plan for its memory, naming stage and term where it more likely fails; "" if it fits."""
    cost = estimate(job, plan, calibration)
    chance, need = float(cost.p_oom), float(cost.memory_bytes)
    words = does_not_fit(job, plan, calibration, cost)
    if chance >= max_p_oom:
        words += "; " if words else f"it needs {need / 1e9:.1f} of {job.cluster.gpu.memory.value / 1e9:.1f} GB, "
        return f"{words}P(OOM) {100 * chance:.1f} %, the limit is {100 * max_p_oom:g} %"
    if max_memory is not None and need > max_memory:
        return f"it needs {need / 1e9:.1f} GB, the limit is {max_memory / 1e9:.1f} GB"
    return ""


def space_record(found: SweepResult, spec: SpaceSpec, max_p_oom: float, max_memory: float | None) -> dict[str, Any]:
    """Return what was searched and how fast. combinations: the product of the axes; plans: those priced."""
    figures = ("combinations", "plans", "legal", "fit", "seconds", "plans_per_s")
    axes = {
        knob: list(dict.fromkeys(words[place] for words in axis.words))
        for axis in found.space.axes
        for place, knob in enumerate(axis.knobs)
    }
    return {name: getattr(found, name) for name in figures} | {
        "max_p_oom": max_p_oom,
        "max_memory_bytes": max_memory,
        "thinned": list(found.space.thinned),
        "fix": {knob: str(value) for knob, value in spec.fix.items()},
        "limits": list(spec.limit),
        "axes": axes,
    }


def answer_search(
    found: SweepResult,
    calibration: Calibration,
    *,
    spec: SpaceSpec,
    max_p_oom: float,
    max_memory: float | None,
    distinct: bool,
    current: tuple[Plan, tuple[str, ...]] | None,
    judge: Estimator | None = None,
    **more: Any,
) -> SearchAnswer:
    """Return the answer of a sweep."""
    job = found.space.job
    own, assumed = current or (None, ())
    best = rank(job, [found.plan(one) for one in found.best], calibration, objective=found.objective, current=own, judge=judge)
    front = rank(job, [found.plan(one) for one in found.pareto], calibration)
    stated = any("fallback_tp" in axis.knobs for axis in found.space.axes)
    return SearchAnswer(
        job=job,
        calibration=calibration,
        objective=found.objective,
        space=space_record(found, spec, max_p_oom, max_memory),
        ranking=ranked(job, best, calibration, found.like, stated=stated),
        distinct=distinct,
        current=own_plan(job, best, calibration, assumed, max_p_oom, max_memory, stated=stated),
        pareto=ranked(job, front, calibration, stated=stated),
        tied=best.tied,
        plainer=best.plainer,
        **({"why_nothing": why_nothing(found, calibration, max_p_oom, max_memory)} | more),
    )


def why_nothing(found: SweepResult, calibration: Calibration, max_p_oom: float, max_memory: float | None) -> str:
    """Return why a sweep ranks no plan, naming rules or the stage and term of the leanest plan; "" when it ranks one."""
    if found.best:
        return ""
    space, job = found.space, found.space.job
    if found.leanest is None:
        return f"none of {found.combinations:,} combinations is legal: {rules_against(space)}"
    plan = found.plan(found.leanest)
    words = too_large(job, plan, calibration, max_p_oom, max_memory)
    return f"none of {found.legal:,} legal plans fits; the leanest: {_short(plan, job)}: {words}"


def _short(plan: Plan, job: Job) -> str:
    record = plan_record(plan, job.gpus)
    return ", ".join(f"{name} {record[name]}" for name in ("tp", "pp", "dp", "cp", "ep", "micro_batch", "recompute", "zero"))


def rules_against(space: Space) -> str:
    """Return the rules that no combination of the axes keeps, or what is wrong with the first one."""
    import numpy as np

    from tuner.cost_model.rules import enforced
    from tuner.cost_model.rules.rule import sane

    grid = sane(space.grid())
    none = [rule for rule in enforced(space.job, "error") if not np.any(rule.holds(space.job, grid))]
    hopeless = [f"{rule.says(space.job, space.plan_at(0))} [{rule.id}]" for rule in none]
    hopeless += [f"limit {limit.text}" for limit in space.limits if not np.any(limit.holds(space.job, space.grid()))]
    if hopeless:
        return "; ".join(hopeless)
    first = broken(space.job, space.plan_at(0))
    return "no combination keeps every rule" + (f"; the first one breaks: {first[0][1]}" if first else "")


def count_record(result: CountResult, deadline_s: float | None) -> dict[str, Any]:
    """Return the best of one count of GPUs."""
    job, found = result.job, result.sweep
    best = found.best[0] if found.best else None
    return {
        "gpus": result.gpus,
        "legal": found.legal,
        "fit": found.fit,
        "seconds": found.seconds,
        "plan": plan_record(result.plan, job.gpus) if result.plan else None,
        "step_s": best.step_s if best else None,
        "days": result.run_s / 86400 if result.run_s is not None else None,
        "gpu_hours": result.gpu_hours,
        "cost": result.cost,
        "meets_deadline": result.meets(deadline_s) if deadline_s is not None else None,
    }
