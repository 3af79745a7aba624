"""What a person says about failures, read: the data, what differs from it, and how the job goes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.cost_model.failures import at_least, down_share
from tuner.errors import SpecError, one_problem
from tuner.failure import FailureData
from tuner.plan_text import split_knobs
from tuner.values import Problems, quantity, truth, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.job import Job
    from tuner.plan import Plan
    from tuner.request import Request

DEFAULT_DATA = "llama3-herd"
DOMAINS = (8, 16, 32, 64, 72)
LEAST_DOWN = 1e-9  # share of GPUs: one of 32,768 for a second a year and a half
PEAK_DAYS = 15.0  # of the traces whose peaks are reported, as in arXiv 2504.06095, figure 4
MOST_HIT = 0.9  # of the groups: with more, no number of spares is any use
_FIGURES: dict[str, str] = {  # argument: field of FailureData
    "mtbf": "mtbf",
    "hardware_share": "hardware_share",
    "repair": "repair",
    "software_repair": "software_repair",
    "detection": "detection",
    "restart": "restart",
    "checkpoint_write": "checkpoint_write",
    "power_cap": "power_cap",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """data: with what the question states in place of the preset's; rate_scale: events are so many times as frequent; failed_fraction:
    share of GPUs that are down, in place of what the rates give; fallback: degrees that replicas may fall back to, None: those near the
    healthy one, (): none; spares: units that stand by, None: as many as each policy needs; interval_h: hours between checkpoints, None: the
    best; peak_days: of the traces whose peaks are reported.
    """

    data: FailureData
    rate_scale: float
    failed_fraction: float | None
    fallback: tuple[int, ...] | None
    spares: int | None
    fixed_batch: bool
    packed: bool
    in_place: bool
    quantile: float
    interval_h: float | None
    domains: tuple[int, ...] | None
    simulate: bool
    days: float
    peak_days: float
    traces: int
    seed: int


def open_share(value: Any, name: str, why: str) -> float:
    """Return a share above 0 and below 1 from "0.1%", "0.001" or 0.001; `why` says what 0 and 1 would mean."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0.0 < number < 1.0:
        raise one_problem(name, "", value, "must be a share above 0 and below 1, like 0.1% or 0.001", why)
    return number


def _share(value: Any, name: str) -> float:
    """Return a share from 0 to 1."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0.0 <= number <= 1.0:
        raise one_problem(name, "", value, "must be a share from 0 to 1, like 78% or 0.78")
    return number


def _factor(value: Any, name: str, low: float, high: float, hint: str = "") -> float:
    try:
        number = float(str(value).strip().lower().removesuffix("x"))
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not low <= number <= high:
        raise one_problem(name, "", value, f"must be a number from {low:g} to {high:g}", hint)
    return number


def _seconds(value: Any, name: str) -> float:
    """Return seconds, 0 too."""
    return 0.0 if str(value).strip() in ("0", "0.0", "0 s", "0s") else quantity(value, name, "seconds")


def refuse_where_hardly_a_group_is_whole(
    name: str, fractions: Mapping[int, float], unit: int, events_per_hour: float, repair_h: float
) -> None:
    """Raise SpecError, at `name`, where more than MOST_HIT of the groups of `unit` GPUs have one down. fractions: {B: share down}."""
    hit, down = float(at_least(1, unit, fractions)), down_share(fractions)
    if hit > MOST_HIT:
        share = f"leaves {100 * down:.1f} % of the GPUs down and {100 * hit:.1f} % of the groups of {unit} hit"
        rule = f"{share}: no job is planned with more than {100 * MOST_HIT:.0f} %"
        raise one_problem(name, "", None, rule, f"a GPU fails every {1 / events_per_hour:,.4g} h and is repaired in {repair_h:.4g} h")


def counts(value: Any, name: str) -> tuple[int, ...]:
    """Return whole numbers from 30, "30,28" or [30, 28], the largest first."""
    parts = [part for part in str(value).replace(",", " ").split() if part] if isinstance(value, (str, int)) else list(value)
    if not parts:
        raise one_problem(name, "", value, "must be whole numbers, like 30,28")
    return tuple(sorted({whole(part, name, most=100_000) for part in parts}, reverse=True))


def read_blast(value: Any) -> list[dict[str, Any]]:
    """Return the blasts of "4" (every event takes 4 GPUs) or "1:0.95,4:0.05" (GPUs: share of events)."""
    found = []
    for part in str(value).replace(" ", "").split(","):
        gpus, _, share = part.partition(":")
        shown = {"value": _share(share, "blast") if share else 1.0, "source": "--blast"}
        found.append({"gpus": whole(gpus, "blast", most=100_000), "share": shown})
    return found


def read_data(request: Request, problems: Problems) -> FailureData | None:
    """Return the failure data that a request names, with what it states itself."""
    given = request.failure_data
    data = given if isinstance(given, FailureData) else problems.trying(lambda: presets.failure(str(given or DEFAULT_DATA)))
    readers: dict[str, Callable[[Any, str], float]] = {
        "mtbf": lambda v, n: quantity(v, n, "seconds"),
        "repair": lambda v, n: quantity(v, n, "seconds"),
        "checkpoint_write": lambda v, n: quantity(v, n, "seconds"),
        "software_repair": _seconds,
        "detection": _seconds,
        "restart": _seconds,
        "hardware_share": _share,
        "power_cap": lambda v, n: _factor(v, n, 1.0, 3.0, "1.3: 30 % above a GPU's normal power; 1: no boost"),
    }
    changes: dict[str, Any] = {}
    for name, field in _FIGURES.items():
        value = getattr(request, name)
        if value is not None:
            number = problems.trying(lambda name=name, value=value: readers[name](value, name))  # type: ignore[misc]
            changes[field] = {"value": number, "source": f"--{name.replace('_', '-')}"}
    if request.blast is not None:
        changes["blast"] = problems.trying(lambda: read_blast(request.blast))
    if data is None or problems.found:
        return None
    return problems.trying(lambda: _changed(data, changes))


def _changed(data: FailureData, changes: dict[str, Any]) -> FailureData:
    try:
        changed: FailureData = data.replace(**changes)
    except SpecError as error:
        raise SpecError([dataclasses.replace(p, where=(p.path.partition(".")[0] or "blast"), path="") for p in error.problems]) from None
    return changed


def read_question(request: Request) -> Question:
    """Return what a request says about failures. Raises SpecError listing every problem."""
    problems = Problems()
    data = read_data(request, problems)

    def read(name: str, reader: Callable[[Any], Any], otherwise: Any) -> Any:
        value = getattr(request, name)
        return otherwise if value is None else problems.trying(lambda: reader(value))

    nothing = "at 0 no GPU is ever down and every policy keeps all samples; at 1 nothing runs"
    found = {
        "rate_scale": read(
            "rate_scale",
            lambda v: _factor(v, "rate_scale", 1e-6, 1e6, "3: three times as many failures; to see a job without any: tuner estimate"),
            1.0,
        ),
        "failed_fraction": read("failed_fraction", lambda v: _down(v, nothing), None),
        "quantile": read("quantile", lambda v: open_share(v, "quantile", "0.99: spares suffice for 99 % of the time"), 0.99),
        "spares": read("spares", lambda v: whole(v, "spares", at_least=0, most=1_000_000), None),
        "interval_h": read("checkpoint_every", lambda v: quantity(v, "checkpoint_every", "seconds") / 3600.0, None),
        "domains": read("domains", lambda v: counts(v, "domains"), None),
        "days": read("days", _days, 60.0),
        "traces": read("traces", lambda v: whole(v, "traces", at_least=2, most=10_000), 48),
        "seed": read("seed", lambda v: whole(v, "seed", at_least=0, most=2**31), 0),
    }
    found["peak_days"] = PEAK_DAYS if request.days is None else found["days"]
    flags = {name: read(name, partial(truth, name=name), False) for name in ("fixed_batch", "no_packing", "in_place", "simulate")}
    fallback = None
    for name in ("fallback_tp", "fallback_ep"):
        fallback = read(name, partial(counts, name=name), fallback)
    if request.fallback_tp is not None and request.fallback_ep is not None:
        problems.add("fallback_ep", request.fallback_ep, "contradicts --fallback-tp: one kind of group falls back")
    if request.failed_fraction is not None:
        for name in ("mtbf", "rate_scale"):
            if getattr(request, name) is not None:
                rule = "means nothing beside --failed-fraction, which says what is down whatever the rates are"
                problems.add(name, getattr(request, name), rule, "state one of them")
    for name in ("days", "traces", "seed"):
        if getattr(request, name) is not None and not flags["simulate"] and name not in {each.where for each in problems.found}:
            problems.add(name, getattr(request, name), "means nothing without a simulation", "add --simulate")
    problems.raise_any()
    assert data is not None  # noqa: S101 (raise_any has raised otherwise)
    return Question(data=data, fallback=fallback, packed=not flags.pop("no_packing"), **found, **flags)


def with_fallback(question: Question, plan: Plan, request: Request) -> tuple[Question, str | None]:
    """Return the question with the plan's own fallback_tp where it names no degree, and the axis whose degrees are stated, if any."""
    for axis in ("tp", "ep"):
        if getattr(request, f"fallback_{axis}") is not None:
            return question, axis
    if 0 < plan.fallback_tp < plan.tp:
        return dataclasses.replace(question, fallback=(int(plan.fallback_tp),)), "tp"
    if _drops(request.plan, plan):
        return dataclasses.replace(question, fallback=()), None
    return question, None


def _drops(given: Any, plan: Plan) -> bool:
    """Whether a plan, as it was given, says that a replica is dropped: fallback_tp is 0 or tp."""
    stated = split_knobs(given, "plan") if isinstance(given, str) and "=" in given else given
    return isinstance(stated, dict) and str(stated.get("fallback_tp")) in ("0", str(plan.tp))


def _days(value: Any) -> float:
    """Return days from 60, "60" or "60 d"."""
    rule = 'must be days from 0.01 to 36500, like 60 or "60 d"'
    try:
        days = float(str(value))
    except ValueError:
        try:
            days = quantity(value, "days", "seconds") / 86400.0
        except SpecError:
            days = -1.0
    if isinstance(value, bool) or not 0.01 <= days <= 36500.0:
        raise one_problem("days", "", value, rule)
    return days


def _down(value: Any, why: str) -> float:
    """Return the share of GPUs that are down."""
    share = open_share(value, "failed_fraction", why)
    if share < LEAST_DOWN:
        rule = f"must be at least {LEAST_DOWN:g}"
        raise one_problem(
            "failed_fraction", "", value, rule, "with less hardly a GPU of any job is ever down; tuner estimate counts no failures"
        )
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What falls together: `axis` "tp" (tensor-parallel groups) or "ep" (expert-parallel groups), of `size` GPUs, `per_replica` of them in
    what is dropped together: `spanned` data-parallel replicas of the plan, `samples` a step. degree: of the group on its axis, each rank
    of which is `rank_gpus` GPUs.
    """

    axis: str
    size: int
    degree: int
    rank_gpus: int
    per_replica: int
    spanned: int
    units: int
    samples: int


def units_of(job: Job, plan: Plan) -> Units:
    """Return the units of a plan: an expert-parallel group ties together the replicas that it spans."""
    experts = job.model.moe is not None and plan.ep > 1
    spanned = max(plan.ep * plan.etp // (plan.tp * plan.cp), 1) if experts else 1
    size = max(plan.ep * plan.etp, plan.tp) if experts else plan.tp
    dropped = spanned * plan.tp * plan.cp * plan.pp
    return Units(
        axis="ep" if experts else "tp",
        size=size,
        degree=plan.ep if experts else plan.tp,
        rank_gpus=plan.etp if experts else 1,
        per_replica=dropped // size,
        spanned=spanned,
        units=job.gpus // dropped * (dropped // size),
        samples=spanned * int(plan.microbatches(job.gpus, job.global_batch)) * plan.micro_batch,
    )


def degrees_of(units: Units, question: Question) -> tuple[int, ...]:
    """Return the degrees that a group may fall back to, the highest first: those asked for, or down to 7/8 of the healthy one."""
    if question.fallback is not None:
        return question.fallback
    healthy = units.degree
    return tuple(range(healthy - 1, healthy - max(1, healthy // 8) - 1, -1)) if healthy > 1 else ()


def check_units(job: Job, plan: Plan, units: Units, question: Question, stated: str | None) -> None:
    """Raise SpecError for what no job can be planned with: degrees that are none, events and domains that do not line up.

    stated: "tp" or "ep", the axis whose degrees the question states, None: neither.
    """
    problems = Problems()
    data, name = question.data, f"fallback_{stated or units.axis}"
    if stated is not None and stated != units.axis:
        whose = "has experts in groups of their own, which fall back" if units.axis == "ep" else "has no expert-parallel groups"
        problems.add(name, None, f"{job.model.name} {whose}", f"--fallback-{units.axis}")
    elif question.fallback:
        for degree in question.fallback:
            if degree >= units.degree:
                problems.add(name, degree, f"must be below the healthy degree, {units.axis} = {units.degree}", f"like {units.degree - 1}")
        floor = min(question.fallback) * units.rank_gpus
        least = min(blast.gpus for blast in data.blast)
        if least > units.size - floor and not problems.found:
            left = max(units.size - least, 0)
            problems.add(
                name,
                min(question.fallback),
                f"is passed by every failure: an event takes at least {least} GPUs and leaves {left} of a group's {units.size}",
                f"at most {left // units.rank_gpus}" if left >= units.rank_gpus else "no degree is left: drop the replica or keep spares",
            )
    for blast in data.blast:
        if units.size % blast.gpus and blast.gpus % units.size:
            problems.add("blast", blast.gpus, f"GPUs of an event must divide a group of {units.size} or be a multiple of it")
        if blast.gpus > job.gpus:
            problems.add("blast", blast.gpus, f"must be at most the job's {job.gpus} GPUs")
    domain = job.cluster.sizes[0]
    if units.size % domain and domain % units.size:
        problems.add(
            "plan",
            f"{units.axis}={units.degree}",
            f"groups of {units.size} GPUs must divide the NVLink domain of {domain}, or span whole ones",
        )
    for size in question.domains or ():
        if size > job.gpus:
            problems.add("domains", size, f"must be at most the job's {job.gpus} GPUs")
    if question.in_place and plan.zero > 0:
        rule = f"needs zero 0: at zero {plan.zero} a dead rank's optimizer state is on no peer"
        problems.add("in_place", None, rule, "zero=0 in --plan, or restart from checkpoints")
    problems.raise_any()
