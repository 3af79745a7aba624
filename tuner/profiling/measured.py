"""From a search's question to measured plans: candidates from the sweep, a campaign over them, the ranking after it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tuner.errors import NothingFeasible, one_problem
from tuner.plan_text import plan_record
from tuner.profiling.ledger import INTERRUPTED, tells
from tuner.profiling.ranked import calibration_text, drift_of, ranked_after
from tuner.values import Problems, close, quantity, truth, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.found import SearchAnswer
    from tuner.job import Job
    from tuner.launch.command import Command
    from tuner.launch.runner import Runner
    from tuner.plan import Plan
    from tuner.profiling.campaign import Ended
    from tuner.profiling.limits import Limits
    from tuner.request import Request
    from tuner.search.exhaustive import SweepResult
    from tuner.search.sampler import Strategy

    Progress = Callable[..., None]

STRATEGIES = ("residual", "tpe", "gp", "random")
MOST_CANDIDATES, DISTINCT = 1_500, 400
SEPARATE = "none"  # in place of an allocation: each run a job of its own
WORKLOAD, SPACE = "tuner-workload", "measured"  # the framework and space of the built-in workload, where none is named
CANDIDATE_P_OOM = 0.98  # plans that surely run out are no candidates; the memory model may be off by more than `search` takes the risk for
_BUDGET = re.compile(r"([0-9.]+)\s*(?:gpu|accelerator)s?[- ]?(h|hours?|min|minutes?|s|seconds?)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How plans are measured: by which runner and strategy, within which limits, kept where; by whole steps throughout; by proxies."""

    runner: str
    strategy: Strategy
    seed: int
    limits: Limits
    storage: str
    site: Path | None
    command: Path | None
    shared: bool
    full_steps: bool
    proxy: bool
    parallel: int
    allocation: str


def wanted(request: Request) -> bool:
    """Whether a search is asked to measure."""
    return request.profile is not None or request.budget is not None


def completed(request: Request) -> Request:
    """Return a question about measuring with what it leaves open: the built-in workload's own framework and space
    where that is what runs.
    """
    if not wanted(request):
        return request
    workload = request.command is None and request.runner in (None, "local", "slurm")
    changes: dict[str, Any] = {}
    if workload and request.framework is None:
        changes["framework"] = WORKLOAD
    if workload and request.space is None:
        changes["space"] = SPACE
    return dataclasses.replace(request, **changes)


def read_measure(request: Request) -> Measure:
    """Return how a search is to measure. Raises SpecError listing every problem."""
    from tuner.profiling.cheap import limits_of
    from tuner.profiling.limits import Limits

    problems = Problems()

    def number(name: str, default: int, most: int) -> int:
        value = getattr(request, name)
        read = None if value is None else problems.trying(lambda: whole(value, name, most=most))
        return default if read is None else read

    def seconds(name: str, default: float) -> float:
        value = getattr(request, name)
        read = None if value is None else problems.trying(lambda: quantity(value, name, "seconds"))
        return default if read is None else read

    def flag(name: str) -> bool:
        value = getattr(request, name)
        return value is not None and bool(problems.trying(lambda: truth(value, name)))

    strategy = "residual" if request.strategy is None else str(request.strategy)
    if strategy not in STRATEGIES:
        problems.add("strategy", strategy, f"must be one of {', '.join(STRATEGIES)} where plans are measured", close(strategy, STRATEGIES))
    budget = None if request.budget is None else problems.trying(lambda: read_budget(request.budget))
    runs = None if request.profile is None else number("profile", 8, 10_000)
    steps = number("steps", 8, 100_000)
    limits = Limits(
        runs=runs,
        accelerator_s=budget,
        least_gain=0.005 if budget is not None else 0.0,
        steps=steps,
        warmup=max(1, min(3, steps // 3)),
        wall_s=seconds("trial_time", 1800.0),
    )
    for name, value in (("site", request.site), ("command", request.command)):
        if value is not None and not Path(str(value)).expanduser().is_file():
            problems.add(name, value, "no such file")
    shared, full_steps, proxy = not flag("no_cache"), flag("full_steps"), flag("proxy")
    seed = request.seed
    read_seed = 0 if seed is None else problems.trying(lambda: whole(seed, "seed", at_least=0, most=2**31))
    runner = str(request.runner or ("command" if request.command is not None else "local"))
    built_in = request.command is None and runner in ("local", "slurm")
    if proxy and not built_in:
        problems.add("proxy", proxy, "is of the built-in workload: a program of your own cannot be cropped", "leave it out")
    allocation = "" if request.allocation is None else str(request.allocation).strip()
    if allocation and (runner != "slurm" or not (allocation == SEPARATE or allocation.isdigit())):
        rule = "must be the number of a Slurm job, or none" if runner == "slurm" else "is of Slurm's"
        problems.add("allocation", allocation, rule, "--runner slurm")
    parallel = number("parallel", 1, 10_000)
    storage = "" if request.storage is None else str(request.storage)
    if "***" in storage:  # a job file keeps no password
        storage = os.environ.get("TUNER_STORAGE", "")
        if not storage:
            problems.add("storage", request.storage, "has no password", "give --storage again, or set TUNER_STORAGE")
    problems.raise_any()
    return Measure(
        runner=runner,
        strategy=cast("Strategy", strategy),
        seed=read_seed or 0,
        limits=limits_of(limits, short=built_in and not full_steps, proxy=proxy),
        storage=storage,
        site=None if request.site is None else Path(str(request.site)).expanduser(),
        command=None if request.command is None else Path(str(request.command)).expanduser(),
        shared=shared,
        full_steps=full_steps,
        proxy=proxy,
        parallel=parallel,
        allocation=allocation,
    )


def read_budget(value: Any) -> float:
    """Return accelerator-seconds of "12gpu-h", "30 gpu-min". Raises SpecError."""
    match = _BUDGET.fullmatch(str(value).strip().lower())
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is None or not 0 < number < 1e9:
        raise one_problem("budget", "", value, "must be accelerator-hours or -minutes, like 12gpu-h or 30gpu-min")
    return number * _SECONDS[match[2][0]]


def candidate_plans(found: Sequence[SweepResult], current: Plan | None, runnable: Callable[[Plan], bool]) -> list[Plan]:
    """Return the plans of sweeps that a runner can run, each once, the person's own first. Raises NothingFeasible."""
    plans = [current] if current is not None else []
    for sweep in found:
        plans += [sweep.plan(one) for one in sweep.best]
    kept = [plan for plan in dict.fromkeys(plans) if runnable(plan)][:MOST_CANDIDATES]
    if not kept:
        raise NothingFeasible("no legal plan of the space can be run by this runner: widen the space or fix less")
    return kept


def software_of(measure: Measure, job: Job, runner: Runner) -> str:
    """Return what else than job and plan a measurement depends on, in one line."""
    from tuner import __version__

    files = [path.read_bytes() for path in (measure.site, measure.command) if path is not None]
    digest = hashlib.sha256(b"\0".join(files)).hexdigest()[:12] if files else ""
    limits = measure.limits
    steps = f"steps {limits.steps} warmup {limits.warmup}{' whole' if measure.full_steps else ''}"
    return f"tuner {__version__} {runner.name} {digest} {job.framework.name} {job.release} {steps}"


def study_name(job: Job, software: str, words: Sequence[dict[str, Any]]) -> str:
    """Return the name of the study: the same question finds its trials again, another one does not meet them."""
    told = json.dumps([job.model_dump(mode="json"), software, list(words)], sort_keys=True)
    return f"{job.model.name}-{job.cluster.gpu.name}-x{job.gpus}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"


def shared_ledger() -> Path:
    """Return the file of measurements that searches share."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tuner" / "measurements.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a measured search adds to an answer: how it ended, what ran, where it is kept; calibration: the file of what it measured ("":
    it does not clearly help); together: by what share (one standard deviation) all times may be off alike because they are extrapolated.
    """

    ended: Ended
    runner: str
    strategy: str
    seed: int
    candidates: int
    folder: Path
    drift: float | None
    slow_nodes: tuple[str, ...]
    calibration: str = ""
    together: float = 0.0

    @property
    def exit_code(self) -> int:
        """0, 1 where no run gave a time, 4 where machines failed, 5 where the budget ended first, 130 where it was interrupted."""
        if self.ended.why.startswith(INTERRUPTED):
            return 130
        if "machine failed" not in self.ended.why and not any(entry.result.step_s for entry in self.ended.entries):
            return 1
        if self.ended.enough:
            return 0
        return 4 if "machine failed" in self.ended.why else 5

    def record(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        entries = [entry.record() for entry in self.ended.entries]
        counted = [entry for entry in self.ended.entries if entry.number >= 0 and not entry.reference and tells(entry.result)]
        return {
            "runner": self.runner,
            "strategy": self.strategy,
            "seed": self.seed,
            "candidates": self.candidates,
            "folder": str(self.folder),
            "runs": len(counted),
            "failed_runs": sum(entry.result.end in ("oom", "failed") or not entry.result.step_s for entry in counted),
            "known_before": self.ended.known,
            "why": self.ended.why,
            "enough": self.ended.enough,
            "faults": list(self.ended.faults),
            "drift": self.drift,
            "slow_nodes": list(self.slow_nodes),
            "together": self.together,
            "trials": entries,
        }


def measure_search(
    request: Request,
    answer: SearchAnswer,
    sweeps: Sequence[SweepResult],
    calibration: Calibration,
    *,
    current: Plan | None,
    top: int,
    max_p_oom: float,
    progress: Progress | None,
    started: Callable[[], None] | None = None,
) -> SearchAnswer:
    """Return a search's answer with its best plans measured. Raises SpecError, InfrastructureError and NothingFeasible."""
    from tuner.launch.runner import Setup, open_runner
    from tuner.profiling.campaign import run
    from tuner.profiling.cheap import cost_of
    from tuner.profiling.driver import Campaign
    from tuner.profiling.nodes import slow
    from tuner.profiling.proxies import ProxyRunner
    from tuner.profiling.standing import standings
    from tuner.profiling.storage import close_storage, open_storage
    from tuner.search.candidates import Candidates
    from tuner.search.sampler import PlanSampler

    measure, job = read_measure(request), answer.job
    _check_machine(measure, job)
    runner = open_runner(measure.runner, Setup(**_setup(measure)))
    plans = candidate_plans(sweeps, current, lambda plan: not _refused(measure, runner, job, plan))
    candidates = Candidates.of(job, plans, calibration)
    software, shared = software_of(measure, job, runner), shared_ledger() if measure.shared else None
    proxies = ProxyRunner(inner=runner, job=job, plans=candidates.plans, calibration=calibration, software=software, shared=shared)
    software = proxies.told if measure.proxy else software
    name = study_name(job, software, candidates.words)
    folder = Path(str(request.folder)) if request.folder is not None else Path(f"tuner-{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise one_problem("out", "", str(folder), f"cannot be a folder: {error.strerror or error}", "another one") from None
    alike = measure.limits.accelerator_s is None or measure.proxy  # all runs cost about the same
    cost_s = None if alike else cost_of(candidates, measure.limits)
    campaign = Campaign(
        candidates=candidates,
        runner=proxies.of_search(name, folder) if measure.proxy else runner,
        folder=folder,
        sampler=PlanSampler(candidates, measure.strategy, measure.seed, cost_s),
        storage=open_storage(measure.storage, folder),
        name=name,
        software=software,
        limits=measure.limits,
        first=() if current is None else (plans.index(current),) if current in plans else (),
        shared=None if measure.proxy else shared,
        run_gpus=min(job.gpus, job.cluster.gpus_per_node) if measure.proxy else 0,
    )
    if started is not None:
        started()
    try:
        ended = run(campaign, progress)
    finally:
        close_storage(campaign.storage)
    places = {tuple(sorted(plan_record(plan, job.gpus).items())): i for i, plan in enumerate(plans)}
    telling = [entry for entry in ended.entries if not entry.reference and tells(entry.result)]
    results = {places[tuple(sorted(entry.plan.items()))]: entry.result for entry in telling}
    standing = standings(candidates, ended.ran, results)
    measured = Measured(
        ended=ended,
        runner=campaign.runner.name,
        strategy=measure.strategy,
        seed=measure.seed,
        candidates=len(candidates),
        folder=folder,
        drift=drift_of(ended),
        slow_nodes=slow(ended.entries, job.gpus),
        calibration=calibration_text(job, plans, results),
        together=proxies.spreads[0] if measure.proxy else 0.0,
    )
    ranking = ranked_after(job, standing, plans, calibration, top, max_p_oom, measured.together)
    tied = next((i for i, one in enumerate(ranking) if not one.row.tied), len(ranking))
    return dataclasses.replace(answer, strategy=measure.strategy, ranking=tuple(ranking), tied=tied, plainer=None, measured=measured)


def _check_machine(measure: Measure, job: Job) -> None:
    """Refuse to start the workload of another cluster's size on this machine. Raises SpecError."""
    if measure.runner != "local" or measure.command is not None or job.cluster.name.startswith("localx"):
        return
    from tuner.launch.detection import local

    here = local("local").cluster
    ranks = min(job.gpus, job.cluster.gpus_per_node) if measure.proxy else job.gpus
    if here is None or here.gpu.name != job.cluster.gpu.name or here.gpus < ranks:
        seen = "nothing that was recognised" if here is None else f"{here.gpus} x {here.gpu.name}"
        rule = f"is not this machine ({seen}), where --runner local would start {ranks} processes"
        raise one_problem("cluster", "", job.cluster.name, rule, "--runner slurm, --command FILE, or --cluster local")


def _setup(measure: Measure) -> dict[str, Any]:
    from tuner.launch.command import read_command
    from tuner.launch.site import read_site

    files: dict[str, Any] = {} if measure.site is None else {"site": read_site(measure.site)}
    files |= {"parallel": measure.parallel, "separate_jobs": measure.allocation == SEPARATE}
    files |= {} if measure.allocation in ("", SEPARATE) else {"allocation": measure.allocation}
    return files | ({} if measure.command is None else {"command": read_command(measure.command)})


def _refused(measure: Measure, runner: Runner, job: Job, plan: Plan) -> bool:
    """Whether a plan cannot be run, or no proxy of it."""
    from tuner.launch.limits import refusals
    from tuner.profiling.proxy import cropped, why_none

    if measure.proxy:
        return bool(why_none(job, plan) or refusals(*cropped(job, plan)))
    command: Command | None = getattr(runner, "command", None)
    if command is not None:
        return not command.spells(job, plan)
    return runner.name in ("local", "slurm") and bool(refusals(job, plan))
