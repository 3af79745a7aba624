"""Trainers' logs as measurements: which files are logs, whose they are, and what was run.

A log says how long a step took; what was run, on what, with which layout, a person says once for all logs (as options, or at the top of a
runs file) or for each (in the runs file). What the log says itself is held against it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.accuracy.fields import Skipped
from tuner.errors import Problem, SpecError, one_problem
from tuner.launch.logs import FORMATS, launcher_of, read_log, timed
from tuner.launch.logs.reader import lines_of
from tuner.launch.logs.timing import WARMUP
from tuner.load import load_yaml, path_of
from tuner.measurement import LONGEST_ID, Measurement
from tuner.plan_defaults import read_plan
from tuner.request import JOB_KEYS, Request, job_values, read_job, read_request
from tuner.values import Problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from tuner.job import Job
    from tuner.launch.logs import Parsed, Timing
    from tuner.plan import Plan

OF_WHOLE_RUNS = ("calibration", "price", "tokens", "ramp_up")  # of no use to a step time
RUN_KEYS = tuple(key for key in JOB_KEYS if key not in OF_WHOLE_RUNS)
PLAN_KEYS = ("plan", "current")
MOST_RUNS = 1_000
SNIFFED = 65_536
# Whose logs the runs of a framework have; those that are not named here have any (generic, a file of one's own) or none that is read.
LOGS_OF = {
    "megatron-lm": ("megatron-lm",),
    "megatron-lm-zero-bubble": ("megatron-lm",),
    "mindspeed": ("megatron-lm",),
    "megatron-bridge": ("megatron-bridge", "megatron-lm"),
    "nemo": ("nemo", "megatron-bridge"),
    "nemo-launcher": ("nemo",),
    "torchtitan": ("torchtitan",),
    "maxtext": ("maxtext",),
    "deepspeed": ("deepspeed",),
    "megatron-deepspeed": ("deepspeed", "megatron-lm"),
    "nanotron": ("nanotron",),
    "primus": ("primus", "megatron-lm", "torchtitan", "maxtext"),
}
FRAMEWORK_OF = {"workload": "generic"}  # each other launcher is a framework of its name
WITHOUT_LOGS = ("colossalai", "internevo", "llm-foundry", "paxml")  # their formats are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A log and what a person says of its run. where: what messages call its plan; values: the parts of a request that are given; plan:
    as given.
    """

    log: Path
    where: str
    values: Mapping[str, Any]
    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What one log gave: the launcher that wrote it ("" unknown), the job's framework, the layout, its time and memory. note: what a
    person should know of it; why: why it is left out ("" where it counts).
    """

    log: str
    launcher: str = ""
    framework: str = ""
    plan: str = ""
    timing: Timing | None = None
    memory_bytes: float | None = None
    memory_kind: str = ""
    note: str = ""
    why: str = ""

    def record(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        timing = self.timing
        return {
            "log": self.log,
            "launcher": self.launcher,
            "framework": self.framework,
            "plan": self.plan,
            "step_s": timing.step_s if timing else None,
            "spread_s": timing.spread_s if timing else None,
            "steps": timing.steps if timing else 0,
            "memory_bytes": self.memory_bytes,
            "memory_kind": self.memory_kind,
            "note": self.note,
            "why": self.why,
        }


def kind_of(path: Path) -> str:
    """Return what a file of measured runs is: "rows" (JSONL), "runs" (YAML that names logs), "log", or "unread" where it cannot be read."""
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return "runs"
    if suffix in (".jsonl", ".json"):
        return "rows"
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED).strip()
    except (OSError, ValueError):
        return "unread"
    return "rows" if not start or start.startswith(b"{") else "log"


def read_logs(paths: Iterable[Path], given: Mapping[str, Any]) -> tuple[list[Measurement], list[Logged]]:
    """Return the measurements of these logs and runs files, and what each log gave. Raises SpecError with all that is wrong."""
    problems = Problems()
    base, options = said(given)
    runs: list[Run] = []
    for path in paths:
        if kind_of(path) == "runs":
            runs += problems.trying(lambda path=path: runs_of(path, base, options)) or []  # type: ignore[misc]
        else:
            plan = options.get("plan", base.get("plan"))
            runs.append(Run(log=path, where="plan", values=base | options, plan=plan))
    reader = LogsReader()
    found = [problems.trying(lambda run=run: reader.read(run)) for run in runs]  # type: ignore[misc]
    problems.raise_any()
    read = [item for item in found if item is not None]
    return [row for row, _ in read if row is not None], [logged for _, logged in read]


def said(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the job file says, and what the command line does; the plan of either is under "plan"."""
    keys = (*RUN_KEYS, *PLAN_KEYS)
    options = read_request({name: value for name, value in given.items() if name != "job"}, keys=keys)
    base = read_request({"job": given["job"]} if given.get("job") is not None else {}, keys=keys)
    return stated(base), stated(options)


def stated(request: Request) -> dict[str, Any]:
    """Return the parts of a request that are given, without the job file's name."""
    values = {f.name: value for f in dataclasses.fields(request) if f.name != "job" and (value := getattr(request, f.name)) is not None}
    return with_plan(values, "")


def with_plan(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return values with their plan under "plan", whichever of its two names it has."""
    plans = [values.pop(key) for key in ("current", "plan") if key in values]
    if len(plans) > 1:
        raise one_problem(where or "plan", "", None, "stands twice, as plan and as current", "one of them")
    return values | {"plan": plans[0]} if plans else values


def runs_of(path: Path, base: Mapping[str, Any], options: Mapping[str, Any]) -> list[Run]:
    """Return the runs of a runs file: job keys at its top hold for all, those of a run for it alone, and the command line wins."""
    data = load_yaml(path)
    where = str(path)
    if not isinstance(data, dict) or not isinstance(data.get("runs"), list) or not data["runs"]:
        raise one_problem(where, "runs", None, "must be a list of {log: FILE, current: {tp: 8, ...}}", "job keys stand above it")
    if len(data["runs"]) > MOST_RUNS:
        raise one_problem(where, "runs", f"{len(data['runs'])} runs", f"must be at most {MOST_RUNS}")
    problems = Problems()
    top = {key: value for key, value in data.items() if key != "runs"}
    shared = problems.trying(lambda: with_plan(job_values(top, path, (*RUN_KEYS, *PLAN_KEYS)), where)) or {}
    runs = [problems.trying(lambda i=i, entry=entry: run_of(path, i, entry, shared, base, options)) for i, entry in enumerate(data["runs"])]  # type: ignore[misc]
    problems.raise_any()
    return [run for run in runs if run is not None]


def run_of(path: Path, index: int, entry: Any, shared: Mapping[str, Any], base: Mapping[str, Any], options: Mapping[str, Any]) -> Run:
    """Return a run of a runs file; its log is looked for beside the file."""
    place = f"runs[{index}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("log"), str) or not entry["log"].strip():
        raise one_problem(str(path), place, None, "must be like {log: FILE, current: {tp: 8, ...}}")
    log = path.parent / path_of(entry["log"], str(path))
    rest = {key: value for key, value in entry.items() if key != "log"}
    own = under(place, lambda: with_plan(job_values(rest, path, (*RUN_KEYS, *PLAN_KEYS)), str(path)))
    if "plan" in own and "plan" in options:
        raise one_problem("plan", "", options["plan"], f"contradicts {path}, whose runs have their own", "leave one out")
    values = {**base, **shared, **own, **options}
    return Run(log=log, where=f"{path}: {place}", values=values, plan=values.get("plan"))


def under(place: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `read` returns; its problems are named by their place in the file."""
    try:
        return read()
    except SpecError as error:
        raise SpecError([dataclasses.replace(p, path=f"{place}.{p.path}" if p.path else place) for p in error.problems]) from None


@dataclass(slots=True)
class LogsReader:
    """Reads runs into measurements. Runs of equal jobs share one Job object, so that they are estimated together."""

    jobs: dict[str, Job] = field(default_factory=dict)

    def read(self, run: Run) -> tuple[Measurement | None, Logged]:
        """Return a run's measurement, None where its log tells no step time, and what the log gave. Raises SpecError."""
        name = str(run.log)
        parsed = parsed_of(run.log)
        if parsed is None:
            return None, Logged(log=name, why=f"has no line of a log of {', '.join(FORMATS)}")
        job, plan = self._question(run, parsed.launcher)
        contradictions(run, parsed, job, plan)
        memory = max(parsed.memory_bytes.values(), default=None)
        logged = Logged(
            log=name,
            launcher=parsed.launcher,
            framework=job.framework.name,
            plan=plan_words(run.plan),
            timing=timed(parsed, job),
            memory_bytes=memory,
            memory_kind=parsed.memory_kind if memory else "",
            note=note_of(parsed),
            why=why_not(parsed, job),
        )
        return (None if logged.why else measurement(run, job, plan, logged)), logged

    def _question(self, run: Run, launcher: str) -> tuple[Job, Plan]:
        """Return job and plan of a run; a framework that nobody names is that of the log."""
        problems = Problems()
        if run.plan is None:
            problems.add("plan", None, "is missing", f"the layout of {run.log.name}, like tp=8,pp=2")
        values = {key: value for key, value in run.values.items() if key in RUN_KEYS}
        if "framework" not in values:
            values["framework"] = FRAMEWORK_OF.get(launcher, launcher)
        job = problems.trying(lambda: self._job(values))
        problems.raise_any()
        assert job is not None  # noqa: S101 (raise_any has raised otherwise)
        return job, read_plan(run.plan, job, run.where)[0]

    def _job(self, values: Mapping[str, Any]) -> Job:
        key = repr(sorted(values.items()))
        if key not in self.jobs:
            job = read_job(Request(**values))
            if job.task != "pretrain":
                raise one_problem("task", "", job.task, "must be pretrain: other step times are not calibrated")
            self.jobs[key] = job
        return self.jobs[key]


def parsed_of(path: Path) -> Parsed | None:
    """Return what a log says, None where no launcher's lines are in it. Raises SpecError for a file that cannot be read."""
    try:
        launcher = launcher_of(lines_of(path))
        return None if launcher is None else read_log(path, launcher)
    except (OSError, ValueError) as error:
        raise one_problem(str(path), "", None, f"cannot be read: {getattr(error, 'strerror', None) or error}", "a log file") from None


def contradictions(run: Run, parsed: Parsed, job: Job, plan: Plan) -> None:
    """Raise SpecError where a log says something else of its run than the person does."""
    name, framework = str(run.log), job.framework.name
    problems = []
    if framework in WITHOUT_LOGS or parsed.launcher not in ("workload", *LOGS_OF.get(framework, (parsed.launcher,))):
        problems.append(Problem(where=name, path="", value="", rule=f"is a log of {parsed.launcher}; the run's framework is {framework}"))
    ours = {"gpus": job.gpus, "seq_len": job.seq_len, "global_batch": job.global_batch}
    ours |= {knob: int(getattr(plan, knob)) for knob in ("tp", "pp", "cp", "ep", "micro_batch")}
    for key, value in parsed.stated.items():
        if key in ours and value != ours[key]:
            problems.append(
                Problem(where=name, path=key, value=str(value), rule=f"is what the log says; the run is described with {ours[key]}")
            )
    if problems:
        raise SpecError(problems)


def why_not(parsed: Parsed, job: Job) -> str:
    """Return why a log says nothing of the step time, "" where it does."""
    if parsed.oom:
        return f"ran out of memory, which a fit of step times has no use for: {parsed.error}"
    if timed(parsed, job) is not None:
        return ""
    ended = f"; it ended with: {parsed.error}" if parsed.error else ""
    if not parsed.steps:
        return f"no step is logged{ended}"
    return f"no step time is left behind {WARMUP} warm-up steps ({len(parsed.steps)} logged){ended}"


def note_of(parsed: Parsed) -> str:
    """Return what a person should know of a log beside its figures."""
    notes = [f"the loss is no number from step {parsed.bad_losses[0]} on"] if parsed.bad_losses else []
    notes += [f"{max(step.launch for step in parsed.steps) + 1} launches, the last counts"] if any(s.launch for s in parsed.steps) else []
    notes += [f"ended with: {parsed.error}"] if parsed.error and not parsed.oom else []
    return "; ".join(notes)


def measurement(run: Run, job: Job, plan: Plan, logged: Logged) -> Measurement:
    """Return a run's measurement."""
    cluster = job.cluster
    series = {"model": job.model.name, "gpu": cluster.gpu.name, "gpus": job.gpus, "seq_len": job.seq_len, "global_batch": job.global_batch}
    return Measurement(
        id=str(run.log).encode("utf-8", "replace").decode()[:LONGEST_ID],
        framework=job.framework.name,
        job=job,
        plan=plan,
        step_s=logged.timing.step_s if logged.timing else None,
        memory_bytes=logged.memory_bytes,
        memory_kind=logged.memory_kind or "device",
        source=run.log.stem,
        series=series | {"precision": job.precision, "release": job.release},
    )


def plan_words(plan: Any) -> str:
    """Return a plan as it was given, in one line."""
    if isinstance(plan, dict):
        return ",".join(f"{key}={value}" for key, value in plan.items())
    return "" if plan is None else str(plan)[:200]


def left_out(logs: Iterable[Logged]) -> list[Skipped]:
    """Return the logs that do not count, as skipped rows."""
    return [Skipped(logged.log, logged.why) for logged in logs if logged.why]
