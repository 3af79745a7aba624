"""The judgement on launch files that people have: legal, fitting, how fast, how far from the best, and how to get there."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tuner.answers import EstimateAnswer, answer_estimate, job_record, plain
from tuner.checking.better import Better, better_than
from tuner.checking.forks import MEGATRON_DEEPSPEED, forked
from tuner.checking.importing import Imported, imported
from tuner.checking.launch_files import REQUEST, collect, known_formats
from tuner.checking.launch_rules import flags_told, with_flags, with_gpu
from tuner.checking.patching import patch_of
from tuner.checking.request_files import request_found
from tuner.cost_model.estimate import estimate as evaluate
from tuner.cost_model.explain import does_not_fit
from tuner.cost_model.rules import RULES
from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.plan_text import plan_record
from tuner.request import JOB_KEYS, read_calibration, read_request
from tuner.values import Problems

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.answers import Broken
    from tuner.checking.launch_files import LaunchFiles
    from tuner.checking.patching import Patch
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Found, Launcher, Unknown
    from tuner.plan import Plan
    from tuner.request import Request

    Progress = Callable[..., None]

Status = Literal["ok", "slower", "does not fit", "illegal", "unclear"]
GAP = 0.10
LARGEST_GAP = 1000.0
EXIT_CODES: Mapping[Status, int] = {"ok": 0, "unclear": 2, "slower": 3, "does not fit": 3, "illegal": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One launch. files: the first names it; problems: what is missing or cannot be read; broken: rules that it breaks; assumed:
    {what: why}; contradictions: between its files and the options; estimate: None where there is nothing to estimate (a mesh that no
    such number of GPUs has); largest: the largest term of its fullest stage, in words.
    """

    files: tuple[str, ...]
    format: str
    framework: str
    status: Status
    problems: tuple[Problem, ...] = ()
    broken: tuple[Broken, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()
    job: Job | None = None
    plan: Plan | None = None
    estimate: EstimateAnswer | None = None
    why_not_fit: str = ""
    largest: str = ""
    better: Better | None = None
    no_better: str = ""
    patch: Patch | None = None
    no_patch: str = ""

    @property
    def exit_code(self) -> int:
        """0 where it runs and is near the best, 2 where it is not clear what it is, 3 where it does not run or is far from the best."""
        return EXIT_CODES[self.status]

    @property
    def legal(self) -> bool | None:
        """Whether the framework runs it; None where that is not known."""
        if any(item.severity == "error" for item in self.broken):
            return False
        return None if self.job is None else True

    def record(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        estimate = self.estimate
        figures: dict[str, Any] = dict.fromkeys(("fits", "searched", "cost"))
        if estimate is not None:
            record = estimate.record()
            figures = {"fits": record["fits"], "searched": record["searched"], "cost": dataclasses.asdict(estimate.cost)}
        better = self.better
        return {
            "files": list(self.files),
            "format": self.format,
            "framework": self.framework,
            "status": self.status,
            "exit_code": self.exit_code,
            "job": None if self.job is None else job_record(self.job),
            "plan": None if self.plan is None or self.job is None else plan_record(self.plan, self.job.gpus),
            "legal": self.legal,
            **figures,
            "why_not_fit": self.why_not_fit,
            "largest": self.largest,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "broken": [dataclasses.asdict(item) for item in self.broken],
            "unknown": [dataclasses.asdict(item) for item in self.unknown],
            "assumed": dict(self.assumed),
            "contradictions": list(self.contradictions),
            "best": None
            if better is None
            else {
                "plan": better.record,
                "gain": better.gain,
                "changes": [{"knob": knob, "from": old, "to": new} for knob, old, new in better.changes],
                **dataclasses.asdict(better.cost),
            },
            "no_best": self.no_better,
            "patch": None
            if self.patch is None
            else {"diff": self.patch.diff, "edited": self.patch.edited, "notes": list(self.patch.notes)},
            "no_patch": self.no_patch,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAnswer:
    """What was found in the paths. skipped: files of folders that were left out, by why."""

    gap: float
    checked: tuple[Checked, ...]
    skipped: Mapping[str, int]

    @property
    def exit_code(self) -> int:
        """The worst of all launches: 3 over 2 over 0."""
        return max(item.exit_code for item in self.checked)

    @property
    def diff(self) -> str:
        """All patches as one diff."""
        return "".join(item.patch.diff for item in self.checked if item.patch is not None)

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        counts: dict[str, int] = {}
        for item in self.checked:
            counts[item.status] = counts.get(item.status, 0) + 1
        record = {
            "gap": self.gap,
            "exit_code": self.exit_code,
            "counts": counts,
            "skipped": dict(self.skipped),
            "checked": [item.record() for item in self.checked],
        }
        return dict(plain(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """How launches are judged. searched: best plans found so far, so that launches of one job and launcher share a search."""

    defaults: Request
    gap: float
    search: bool
    fix: bool
    progress: Progress | None
    searched: dict[Any, Plan | None] = field(default_factory=dict)


def read_gap(value: Any) -> float:
    """Return a share from "10%", 0.1 or "0": how much slower than the best a launch may be. Raises SpecError."""
    text = str(value).strip()
    percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%")) / (100.0 if percent else 1.0)
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= LARGEST_GAP:
        raise one_problem("gap", "", value, "must be a share from 0, like 10% or 0.1")
    if number > 1 and not percent:
        raise one_problem("gap", "", value, "must be a share, like 10% or 0.1", f"did you mean {number:g}%?")
    return number


def answer_check(
    paths: Sequence[str],
    given: Mapping[str, Any],
    *,
    form: str = "",
    gap: Any = None,
    search: bool = True,
    fix: bool = False,
    progress: Progress | None = None,
) -> CheckAnswer:
    """Return the judgement on the launch files of these paths. given: options that hold where the files say nothing. Raises SpecError."""
    problems = Problems()
    limit = GAP if gap is None else problems.trying(lambda: read_gap(gap))
    if not paths:
        problems.add("paths", None, "are missing", "launch scripts, configurations, or folders of them")
    formats = (*known_formats(), REQUEST)
    if form and form not in formats:
        problems.add("format", form, "is no format that can be read", nearest(form[:60], formats))
    if fix and not search:
        problems.add("fix", None, "needs the search that --no-search leaves out")
    defaults = problems.trying(lambda: _defaults(given))
    problems.raise_any()
    assert limit is not None  # noqa: S101 (raise_any has raised otherwise)
    assert defaults is not None  # noqa: S101
    asked = _Asked(defaults=defaults, gap=limit, search=search, fix=fix, progress=progress)
    found = collect(paths, form, None if progress is None else lambda name: progress(name))
    checked = []
    for done, launch in enumerate(found.launches):
        if progress is not None:
            progress(f"checking {launch.name}: launch", done + 1, len(found.launches))
        checked.append(_checked(launch, asked))
    unread: dict[str, list[Problem]] = {}
    for name, problem in found.unread:
        unread.setdefault(name, []).append(problem)
    checked += [Checked(files=(name,), format="", framework="", status="unclear", problems=tuple(each)) for name, each in unread.items()]
    if not checked:
        left = ", ".join(f"{count} {why}" for why, count in found.skipped.items()) or "no file at all"
        raise one_problem("paths", "", ", ".join(map(str, paths)), f"hold no launch file that is known ({left})", "--format names one")
    return CheckAnswer(gap=limit, checked=tuple(checked), skipped=found.skipped)


def _defaults(given: Mapping[str, Any]) -> Request:
    """Return the options, each read once so that a wrong one is told by itself and not once a file."""
    from tuner import presets
    from tuner.checking.alike import counted
    from tuner.launch.detection import named_cluster
    from tuner.values import whole

    request = read_request(given, keys=JOB_KEYS)
    problems = Problems()
    if request.model is not None:
        problems.trying(lambda: presets.model(str(request.model)))
    if isinstance(request.cluster, str):
        problems.trying(lambda: named_cluster(counted(str(request.cluster))[0]))
    if request.framework is not None:
        problems.trying(lambda: presets.framework(str(request.framework)))
    for name, thousand in (("gpus", 0), ("seq_len", 1024), ("global_batch", 0)):
        if getattr(request, name) is not None:
            problems.trying(lambda name=name, thousand=thousand: whole(getattr(request, name), name, thousand=thousand))  # type: ignore[misc]
    problems.raise_any()
    return request


def _checked(launch: LaunchFiles, asked: _Asked) -> Checked:
    """Return the judgement on one launch."""
    base: dict[str, Any] = {"files": tuple(launch.files), "format": launch.format}
    if launch.problems:
        return Checked(**base, framework="", status="unclear", problems=launch.problems)
    try:
        found, defaults = _found(launch, asked.defaults)
        words = "\n".join((*launch.files, *launch.files.values()))
        what = imported(found, defaults, launch.name, words=words, needs_plan=launch.format == REQUEST)
        if what.job is not None and what.plan is not None:
            what = dataclasses.replace(what, broken=with_flags(what.broken, found, what.job, what.plan))
    except SpecError as error:
        return Checked(**base, framework="", status="unclear", problems=error.problems)
    base |= {
        "framework": what.framework,
        "broken": tuple(_placed(item, launch) for item in what.broken),
        "unknown": found.unknown,
        "assumed": what.assumed,
        "contradictions": what.contradictions,
    }
    if what.job is None or what.plan is None:
        status: Status = "illegal" if not what.legal else "unclear"
        return Checked(**base, status=status, problems=what.missing)
    return _judged(launch, found, what, what.job, what.plan, asked, defaults, base)


def _placed(item: Broken, launch: LaunchFiles) -> Broken:
    """Return a broken rule with the places in the files where its knobs stand."""
    knobs = next((rule.knobs for rule in RULES if rule.id == item.rule), ())
    launcher = known_formats().get(launch.format)
    said = {knob: re.findall(r"[A-Za-z_-][\w.-]{2,80}", launcher.says.get(knob, "")) if launcher else [knob] for knob in knobs}
    keys = [word.rpartition(".")[2] for words in said.values() for word in words if re.search(r"[_.-]", word) or word in knobs]
    places = []
    for key in dict.fromkeys(keys):
        pattern = re.compile(rf"(?<![\w-]){re.sub('[_-]', '[-_]', re.escape(key.lstrip('-')).replace(chr(92) + '-', '-'))}(?![\w-])")
        for name, text in launch.files.items():
            lines = (n for n, line in enumerate(text.split("\n"), 1) if not line.lstrip().startswith("#") and _says(pattern, line))
            if (number := next(lines, None)) is not None:
                places.append(f"{key} at {name}:{number}")
                break
    return (
        item
        if not places or re.match(r"\S+:\d+: ", item.text)
        else dataclasses.replace(item, text=f"{item.text} ({', '.join(places[:3])})")
    )


def _says(pattern: re.Pattern[str], line: str) -> bool:
    return pattern.search(line[:5000].replace("--", " ")) is not None


def _found(launch: LaunchFiles, defaults: Request) -> tuple[Found, Request]:
    if launch.found is not None:
        found = flags_told(forked(launch.found))
        return (found if defaults.cluster is not None else with_gpu(found, launch.files.values())), defaults
    ((name, text),) = launch.files.items()
    return request_found(name, text, defaults)


def _judged(
    launch: LaunchFiles, found: Found, what: Imported, job: Job, plan: Plan, asked: _Asked, defaults: Request, base: dict[str, Any]
) -> Checked:
    calibration = read_calibration(defaults, job)
    estimate, why_not, largest = None, "", ""
    if _has_mesh(job, plan):
        estimate = answer_estimate(job, plan, (), calibration)
        why_not = does_not_fit(job, plan, calibration, evaluate(job, plan, calibration))
        stage = estimate.stages[estimate.cost.worst_stage]
        term = max(stage.memory, key=lambda t: t.value)
        largest = f"{term.name.replace('_', ' ')} {term.value / 1e9:.1f} GB on stage {stage.index}"
    runs = what.legal and estimate is not None and estimate.cost.fits
    fork = found.framework == MEGATRON_DEEPSPEED
    launcher = None if launch.format == REQUEST or fork else known_formats()[launch.format]
    better, no_better = None, "not searched (--no-search)"
    if asked.search:
        better, no_better = better_than(
            job, plan, calibration, launcher, found.release, estimate if runs else None, asked.searched, asked.progress
        )
    status: Status = "illegal" if not what.legal else "does not fit" if not runs else "ok"
    if status == "ok" and better is not None and better.gain is not None and better.gain - 1.0 > asked.gap:
        status = "slower"
    patch, no_patch = None, ""
    if asked.fix and fork:
        no_patch = f"{launch.format}'s words are written, and {found.framework} has others"
    elif asked.fix and better is not None and status in ("illegal", "does not fit", "slower"):
        patch, no_patch = _patch(launch, launcher, job, plan, better.plan, found.release)
        kept = [item for item in what.broken if item.rule in ("ramp-up", "contradiction") and item.severity == "error"]
        left = [f"still broken, mend it by hand: {item.text} [{item.rule}]" for item in (*kept, *with_flags((), found, job, better.plan))]
        patch = patch and dataclasses.replace(patch, notes=(*patch.notes, *left))
    return Checked(
        **base,
        status=status,
        problems=what.missing,
        job=job,
        plan=plan,
        estimate=estimate,
        why_not_fit=why_not,
        largest=largest,
        better=better,
        no_better=no_better,
        patch=patch,
        no_patch=no_patch,
    )


def _has_mesh(job: Job, plan: Plan) -> bool:
    ranks = int(plan.tp) * int(plan.pp) * int(plan.cp)
    return ranks <= job.gpus and job.gpus % ranks == 0


def _patch(launch: LaunchFiles, launcher: Launcher | None, job: Job, plan: Plan, best: Plan, release: str) -> tuple[Patch | None, str]:
    try:
        return patch_of(launch, launcher, job, plan, best, release), ""
    except SpecError as error:
        return None, "; ".join(map(str, error.problems))
