"""From a question to plans: the space with what the person fixed and limited, the sweep or study over it, the ranked answer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tuner.errors import SpecError, one_problem
from tuner.exporting import read_settings
from tuner.formats import read_formats
from tuner.plan import Plan
from tuner.request import read_calibration, read_range, sized
from tuner.values import Problems, close, fraction, knobs, quantity, truth, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cost_model.calibration import Calibration
    from tuner.errors import Problem
    from tuner.failure import FailureData
    from tuner.formats import Formats
    from tuner.found import SearchAnswer
    from tuner.job import Job
    from tuner.launch.site import Site
    from tuner.request import Request
    from tuner.search.exhaustive import Objective, SweepResult
    from tuner.search.space import Space, SpaceSpec
    from tuner.search.study import Strategy

    Progress = Callable[..., None]

DEFAULT_TRIALS = 200
DEFAULT_FAILURES = "llama3-herd"
STRATEGIES = ("exhaustive", "grid", "tpe", "gp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What is asked of a search: which plans count, and which of them is best."""

    spec: SpaceSpec
    objective: Objective
    strategy: str
    top: int
    trials: int | None
    seed: int
    max_memory: float | None
    max_p_oom: float
    distinct: bool
    deadline_s: float | None
    failures: FailureData | None


def read_aim(request: Request) -> Aim:
    """Return the search's own options. Raises SpecError listing every problem."""
    from tuner.profiling.measured import wanted
    from tuner.search.exhaustive import MAX_P_OOM, OBJECTIVES
    from tuner.search.limits import parse_limits

    problems = Problems()

    def number(name: str, default: int, least: int, most: int) -> int:
        value = getattr(request, name)
        read = None if value is None else problems.trying(lambda: whole(value, name, at_least=least, most=most))
        return default if read is None else read

    def size(name: str, dimension: str) -> float | None:
        value = getattr(request, name)
        return None if value is None else problems.trying(lambda: quantity(value, name, dimension))

    def choice(name: str, known: tuple[str, ...]) -> str:
        given = getattr(request, name)
        value = known[0] if given is None else str(given)
        if value not in known:
            problems.add(name, value, f"must be one of {', '.join(known)}", close(value, known))
        return value

    def share(name: str, default: float) -> float:
        value = getattr(request, name)
        read = None if value is None else problems.trying(lambda: fraction(value, name))
        return default if read is None else read

    def flag(name: str) -> bool:
        value = getattr(request, name)
        return value is not None and bool(problems.trying(lambda: truth(value, name)))

    spec = problems.trying(lambda: read_space_spec(request))
    measuring = wanted(request)
    strategy = "exhaustive" if measuring else choice("strategy", STRATEGIES)  # which plans to measure is read with how to
    for name in ("trials", "seed"):
        if getattr(request, name) is not None and strategy == "exhaustive" and not measuring:
            problems.add(name, getattr(request, name), f"means nothing to strategy {strategy}", "it looks at every plan")
    objective = cast("Objective", choice("objective", OBJECTIVES))
    if objective == "goodput" and (measuring or strategy != "exhaustive"):
        problems.add("objective", objective, "ranks predictions of every plan", "leave out --profile, --budget and --strategy")
    if objective != "goodput" and request.failure_data is not None:
        problems.add("failure_data", request.failure_data, f"means nothing to objective {objective}", "--objective goodput counts failures")
    aim = Aim(
        spec=cast("SpaceSpec", spec),
        objective=objective,
        failures=problems.trying(lambda: read_failures(request.failure_data)) if objective == "goodput" else None,
        strategy=strategy,
        top=number("top", 10, 1, 1000),
        trials=number("trials", 0, 1, 100_000) or None,
        seed=number("seed", 0, 0, 2**31),
        max_memory=size("max_memory", "bytes"),
        max_p_oom=share("max_p_oom", MAX_P_OOM),
        distinct=not flag("all"),
        deadline_s=size("deadline", "seconds"),
    )
    if request.fix is not None:
        problems.trying(lambda: knobs(request.fix, "fix"))
    if request.limit is not None:
        problems.trying(lambda: parse_limits([str(text) for text in _listed(request.limit)], "limit"))
    if request.current is not None and not isinstance(request.current, Plan):
        problems.trying(lambda: knobs(request.current, "current"))
    if request.deadline is not None and request.tokens is None:
        problems.add("deadline", request.deadline, "needs the run's tokens", "like --tokens 15T")
    problems.raise_any()
    return aim


def read_failures(given: Any) -> FailureData:
    """Return the failure data of a preset's name or a file."""
    from tuner import presets
    from tuner.failure import FailureData

    return given if isinstance(given, FailureData) else presets.failure(str(given or DEFAULT_FAILURES))


def _space_of(aim: Aim, job: Job) -> Space:
    """Return the space as asked for; for goodput with degrees to fall back to beside it, where nobody named any."""
    from tuner.search.axes import fallback_degrees
    from tuner.search.space import build_space

    named = aim.failures is None or "fallback_tp" in aim.spec.axes or "fallback_tp" in aim.spec.fix
    return build_space(job, aim.spec, "space", beside=None if named else {"fallback_tp": fallback_degrees(job)})


def read_space_spec(request: Request) -> SpaceSpec:
    """Return the space of the request's file with its own fix and limit on top."""
    from tuner import presets
    from tuner.load import load_file
    from tuner.plan_text import split_knobs
    from tuner.search.space import SpaceSpec

    given = request.space
    spec = given if isinstance(given, SpaceSpec) else SpaceSpec()
    if given is not None and not isinstance(given, SpaceSpec):
        spec = load_file(SpaceSpec, presets.find("spaces", str(given)))
    fixed: dict[str, Any] = {}
    for text in _listed(request.fix):
        pairs = dict(text) if isinstance(text, dict) else split_knobs(str(text), "fix")
        for knob, value in pairs.items():
            if fixed.setdefault(knob, value) != value:
                raise one_problem("fix", knob, value, f"stands twice, first as {fixed[knob]}")
    axes = {name: values for name, values in spec.axes.items() if name not in fixed}
    limits = [*spec.limit, *(str(text) for text in _listed(request.limit))]
    return SpaceSpec(axes=axes, fix={**spec.fix, **fixed}, limit=limits)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def run_search(request: Request, progress: Progress | None, started: Callable[[], None] | None = None) -> SearchAnswer:
    """Return the answer to a search's question."""
    from tuner.profiling import measured

    request = measured.completed(request)
    problems = Problems()
    aim = problems.trying(lambda: read_aim(request))
    formats = None if request.export is None else problems.trying(lambda: read_formats(request.export))
    site = None
    if formats is not None and formats.wraps and request.site is not None:
        site = problems.trying(lambda: read_settings(request.site))
    if measured.wanted(request):
        problems.trying(lambda: measured.read_measure(request))
    base = problems.trying(lambda: read_range(request))
    problems.raise_any()
    assert aim is not None  # noqa: S101 (raise_any has raised otherwise)
    assert base is not None  # noqa: S101
    job, counts = base
    if len(counts) > 1 or aim.deadline_s is not None:
        answer = _search_counts(request, aim, job, counts, progress)
    else:
        job = sized(job, counts[0])
        answer = _search_one(request, aim, job, read_calibration(request, job), progress, started)
    return answer if formats is None or not answer.feasible else _exported(request, aim, answer, formats, site, progress)


def _exported(
    request: Request, aim: Aim, answer: SearchAnswer, formats: Formats, site: Site | None, progress: Progress | None
) -> SearchAnswer:
    """Return the answer with the files of its best plan in these formats, or of the best that a format can write."""
    from tuner.found import why_nothing
    from tuner.search.space import build_space
    from tuner.spelling import MOST_TRIED
    from tuner.translation import Question, translate

    most = math.inf if aim.max_memory is None else aim.max_memory
    wide = dataclasses.replace(aim, strategy="exhaustive", top=MOST_TRIED, distinct=False)
    simple = aim.strategy == "exhaustive" and aim.objective in ("throughput", "cost")

    def sweep_of(job: Job, spec: SpaceSpec, calibration: Calibration, than: Sequence[float] = ()) -> SweepResult:
        return _sweep(wide, job, build_space(job, spec, "space"), calibration, progress, than)

    def ahead(than: Sequence[float]) -> Sequence[int | None]:
        return sweep_of(answer.job, aim.spec, answer.calibration, than).ahead if simple else [None] * len(than)

    asked = Question(
        job=answer.job,
        plans=[one.row.plan for one in answer.ranking],
        by="memory_bytes" if aim.objective == "memory" else "step_s",
        spec=aim.spec,
        fits=lambda memory, p_oom: memory <= most and p_oom < aim.max_p_oom,
        calibrate=lambda job: read_calibration(request, job),
        sweep=sweep_of,
        nothing=lambda found, calibration: why_nothing(found, calibration, aim.max_p_oom, aim.max_memory),
        ahead=ahead,
    )
    return dataclasses.replace(answer, exported=translate(asked, formats, site))


def _search_one(
    request: Request, aim: Aim, job: Job, calibration: Calibration, progress: Progress | None, started: Callable[[], None] | None
) -> SearchAnswer:
    from tuner.profiling import measured

    _current(request, job)  # a plan that no mesh has is refused before the sweep
    try:
        space = _space_of(aim, job)
    except SpecError as error:
        raise SpecError([_attributed(problem, request, aim.spec) for problem in error.problems]) from None
    found = _sweep(aim, job, space, calibration, progress)
    answer = _answer(request, aim, found, calibration)
    return _measured(request, aim, answer, progress, started) if measured.wanted(request) else answer


def _measured(
    request: Request, aim: Aim, answer: SearchAnswer, progress: Progress | None, started: Callable[[], None] | None
) -> SearchAnswer:
    """Return the answer with its plans measured. Candidates: the fastest plans, and the best of each kind."""
    from tuner.profiling.measured import CANDIDATE_P_OOM, DISTINCT, MOST_CANDIDATES, measure_search
    from tuner.search.space import build_space

    job, calibration = answer.job, answer.calibration
    space = build_space(job, aim.spec, "space")
    wide = dataclasses.replace(aim, max_p_oom=CANDIDATE_P_OOM, strategy="exhaustive", objective="throughput")
    sweeps = [
        _sweep(dataclasses.replace(wide, top=top, distinct=distinct), job, space, calibration, progress)
        for top, distinct in ((DISTINCT, True), (MOST_CANDIDATES, False))
    ]
    own = _current(request, job)
    return measure_search(
        request,
        answer,
        sweeps,
        calibration,
        current=own[0] if own else None,
        top=aim.top,
        max_p_oom=aim.max_p_oom,
        progress=progress,
        started=started,
    )


def _attributed(problem: Problem, request: Request, spec: SpaceSpec) -> Problem:
    """Return a problem of the space as one of --fix or --limit where these are to blame."""
    part, _, knob = problem.path.partition(".")
    if part == "fix" or (not knob and part in spec.fix):
        return dataclasses.replace(problem, where="fix", path=knob or part)
    if request.limit is not None and (part == "limit" or problem.value in {repr(str(text))[:80] for text in _listed(request.limit)}):
        return dataclasses.replace(problem, where="limit", path="")
    return problem


def _current(request: Request, job: Job) -> tuple[Plan, tuple[str, ...]] | None:
    from tuner.plan_defaults import read_plan

    return None if request.current is None else read_plan(request.current, job, "current")


def _answer(request: Request, aim: Aim, found: SweepResult, calibration: Calibration, **more: Any) -> SearchAnswer:
    from tuner.found import answer_search
    from tuner.search.exhaustive import judge

    if aim.failures is not None and found.best:
        _check_rates(aim.failures, found.plan(found.best[0]))
    return answer_search(
        found,
        calibration,
        spec=aim.spec,
        max_p_oom=aim.max_p_oom,
        max_memory=aim.max_memory,
        distinct=aim.distinct,
        current=_current(request, found.space.job),
        judge=None if aim.failures is None else judge(found.space, aim.failures),
        failures=aim.failures,
        strategy=aim.strategy,
        **more,
    )


def _check_rates(data: FailureData, plan: Plan) -> None:
    """Raise SpecError where hardly a group of the best plan would be whole: what `tuner failures` refuses, by the same rule."""
    from tuner.cost_model.goodput import down_of, unit_gpus
    from tuner.failing import refuse_where_hardly_a_group_is_whole

    refuse_where_hardly_a_group_is_whole("failure_data", down_of(data), int(unit_gpus(plan)), data.events_per_hour, data.mean_repair_hours)


def _sweep(
    aim: Aim, job: Job, space: Space, calibration: Calibration, progress: Progress | None, than: Sequence[float] = ()
) -> SweepResult:
    from tuner.search.exhaustive import judge, sweep

    options: dict[str, Any] = {
        "objective": aim.objective,
        "top_k": aim.top,
        "max_p_oom": aim.max_p_oom,
        "distinct": aim.distinct,
        "max_memory": math.inf if aim.max_memory is None else aim.max_memory,
        "progress": None if progress is None else lambda done, of: progress("plans", done, of),
    }
    if aim.strategy == "exhaustive":
        if aim.failures is not None:
            options["estimator"] = judge(space, aim.failures)
        return sweep(job, space, calibration, than=than, **options)
    from tuner.search.study import LARGEST_GRID, study

    trials = aim.trials or (LARGEST_GRID if aim.strategy == "grid" else DEFAULT_TRIALS)
    return study(job, space, calibration, strategy=cast("Strategy", aim.strategy), trials=trials, seed=aim.seed, **options)


def _search_counts(
    request: Request,
    aim: Aim,
    job: Job,
    counts: tuple[int, ...],
    progress: Progress | None,
) -> SearchAnswer:
    """Return the answer for the count with the fewest GPU-hours (so the least money) that meets the deadline."""
    from tuner.found import count_record
    from tuner.search.counts import cheapest, sweep_counts

    if aim.strategy != "exhaustive":
        raise one_problem("strategy", "", aim.strategy, "cannot compare counts of GPUs", "leave it out: exhaustive does")
    calibration = read_calibration(request, job)
    results = sweep_counts(
        job,
        counts,
        calibration,
        spec=aim.spec,
        progress=None if progress is None else lambda done, of: progress("counts of GPUs", done, of),
        max_p_oom=aim.max_p_oom,
        distinct=aim.distinct,
        max_memory=math.inf if aim.max_memory is None else aim.max_memory,
        top_k=aim.top,
    )
    chosen = cheapest(results, math.inf if aim.deadline_s is None else aim.deadline_s)
    records = tuple(count_record(result, aim.deadline_s) for result in results)
    more: dict[str, Any] = {"counts": records, "deadline_s": aim.deadline_s}
    runs = [result for result in results if result.run_s is not None]
    fastest = min(runs, key=lambda result: result.run_s or math.inf, default=None)
    if chosen is None and fastest is not None:
        days = (fastest.run_s or 0.0) / 86400
        more["why_nothing"] = f"no count meets the deadline; the fastest, {fastest.gpus:,} GPUs, takes {days:,.1f} days"
    shown = chosen or fastest or results[-1]
    found = shown.sweep
    if aim.objective != "throughput":  # the run of a count is that of its fastest plan; the ranking follows the objective
        found = _sweep(aim, shown.job, _space_of(aim, shown.job), calibration, progress)
    return _answer(request, aim, found, calibration, **more)
