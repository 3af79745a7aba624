"""From a question about one plan to the files that launch it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.answers import broken_by, job_record, plain
from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.launch.launchers.launcher import Written, chosen, launchers, open_launcher
from tuner.launch.site import Site, read_site
from tuner.launch.wrappers import wrapper
from tuner.load import path_of
from tuner.plan_defaults import asked_plan
from tuner.plan_text import plan_record
from tuner.predicted import VERIFY, verification
from tuner.request import read_calibration
from tuner.values import Problems, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tuner.answers import Broken
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Launcher
    from tuner.plan import Plan
    from tuner.request import Request

NONUNIFORM = "megatron-lm-ntp"
ANY = "generic"  # framework of a format that launches none of its own
UNWRAPPED = ("neutral", NONUNIFORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One format of a plan. framework: what it launches; broken: rules of that framework that the plan breaks (where it is not the job's
    own, whose are in the answer).
    """

    written: Written
    framework: str
    broken: tuple[Broken, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        one = self.written
        return {
            "framework": self.framework,
            "files": dict(one.files),
            "programs": one.programs,
            "start": one.start,
            "notes": one.notes,
            "broken": [dataclasses.asdict(item) for item in self.broken],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAnswer:
    """The files of a plan by format; refused: formats that cannot spell it, and why; broken: rules of the job's framework that the plan
    breaks; assumed: knobs that took its defaults.
    """

    job: Job
    plan: Plan
    assumed: tuple[str, ...]
    broken: tuple[Broken, ...]
    formats: Mapping[str, Exported]
    refused: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)

    @property
    def written(self) -> dict[str, Written]:
        """Files by format."""
        return {name: one.written for name, one in self.formats.items()}

    @property
    def exit_code(self) -> int:
        """2 where a format cannot spell the plan, 3 where a framework refuses it, else 0."""
        if self.refused:
            return 2
        broken = [*self.broken, *(item for one in self.formats.values() for item in one.broken)]
        return 3 if any(item.severity == "error" for item in broken) else 0

    def files(self) -> dict[str, tuple[str, bool]]:
        """Return {path under a folder for all formats: (text, whether it is a program)}."""
        return {f"{name}/{file}": (text, file in one.programs) for name, one in self.written.items() for file, text in one.files.items()}

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types: texts of files are in `files`."""
        record = {
            "job": job_record(self.job),
            "plan": plan_record(self.plan, self.job.gpus),
            "assumed": self.assumed,
            "broken": [dataclasses.asdict(item) for item in self.broken],
            "formats": {name: one.record() for name, one in self.formats.items()},
            "refused": {name: [dataclasses.asdict(item) for item in found] for name, found in self.refused.items()},
        }
        return dict(plain(record))


def known_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return (*sorted(name for name, known in launchers().items() if known.make is not None), NONUNIFORM)


def read_failed(value: Any) -> dict[int, tuple[int, ...]]:
    """Return {replica: tensor-parallel slots} of a text like "0:3,1:5" or of such texts. Raises SpecError."""
    texts = [part for item in (value if isinstance(value, (list, tuple)) else [value]) for part in str(item).split(",")]
    found: dict[int, tuple[int, ...]] = {}
    problems = []
    for text in texts:
        match = re.fullmatch(r"\s*(\d{1,6}):(\d{1,6})\s*", text)
        if match is None:
            problems.append(Problem(where="failed", path="", value=repr(text)[:60], rule="must be REPLICA:SLOT", hint="like 0:3,1:5"))
        else:
            found[int(match[1])] = (*found.get(int(match[1]), ()), int(match[2]))
    if problems:
        raise SpecError(problems)
    return found


def read_formats(value: Any) -> tuple[str, ...]:
    """Return the formats of a text like "neutral,deepspeed" or of such texts. Raises SpecError for one that is unknown."""
    return _named(value, known_formats(), "format", "is no format")


def read_wraps(value: Any) -> tuple[str, ...]:
    """Return the wrappers of a text like "slurm,kubernetes" or of such texts. Raises SpecError for one that is unknown."""
    return () if value is None else _named(value, wrapper.BUILT_IN, "wrap", "is no wrapper")


def _named(value: Any, known: Iterable[str], where: str, rule: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else list(value or ())
    names = [name.strip() for text in texts for name in str(text).split(",") if name.strip()]
    wrong = [name for name in names if name not in known]
    problems = [Problem(where=where, path="", value=repr(name)[:60], rule=rule, hint=nearest(name[:60], known)) for name in wrong]
    if problems or not names:
        raise SpecError(problems or [Problem(where=where, path="", value="", rule="is missing", hint=", ".join(known))])
    return tuple(dict.fromkeys(names))


def answer_export(
    request: Request, formats: Any, *, wrap: Any = None, site: Any = None, failed: Any = None, reduced: Any = None, version: str = ""
) -> ExportAnswer:
    """Return the answer to an export's question. Raises SpecError with all that is wrong with it."""
    problems = Problems()
    names = problems.trying(lambda: read_formats(formats))
    wraps = problems.trying(lambda: read_wraps(wrap))
    where = None if site is None else problems.trying(lambda: _site(site))
    gone = None if failed is None else problems.trying(lambda: read_failed(failed))
    few = None if reduced is None else problems.trying(lambda: whole(reduced, "reduced"))
    asked = problems.trying(lambda: asked_plan(request))
    problems.raise_any()
    assert asked is not None  # noqa: S101 (raise_any has raised otherwise)
    job, plan, assumed, _ = asked
    return export_plan(
        job,
        plan,
        assumed,
        names or (),
        calibrate=lambda of: read_calibration(request, of),
        version=version,
        wraps=wraps or (),
        site=where,
        failed=gone,
        reduced=few,
    )


def _site(value: Any) -> Site:
    return value if isinstance(value, Site) else read_site(path_of(str(value), "site"))


def export_plan(
    job: Job,
    plan: Plan,
    assumed: tuple[str, ...],
    formats: Sequence[str],
    *,
    calibrate: Callable[[Job], Calibration],
    version: str = "",
    wraps: Sequence[str] = (),
    site: Site | None = None,
    failed: Mapping[int, tuple[int, ...]] | None = None,
    reduced: int | None = None,
) -> ExportAnswer:
    """Return the files of a plan in these formats. A format that cannot spell it is told beside those that can; calibrate: of a job, for
    what is foretold. Raises SpecError where no format can spell it, and for what is wrong with the question.
    """
    for option, given in (("failed", failed), ("reduced", reduced)):
        if given is not None and NONUNIFORM not in formats:
            raise one_problem(option, "", None, f"concerns {NONUNIFORM} alone", f"export {NONUNIFORM}")
    unwrapped = [name for name in formats if name in UNWRAPPED] if wraps else []
    if unwrapped:
        raise one_problem("wrap", "", ",".join(wraps), f"has nothing to start in {', '.join(unwrapped)}", "leave one of them out")
    found: dict[str, Exported] = {}
    refused: dict[str, tuple[Problem, ...]] = {}
    for name in formats:
        try:
            if name == NONUNIFORM:
                found[name] = Exported(written=_nonuniform(job, plan, failed, reduced), framework=job.framework.name)
            else:
                found[name] = _one(open_launcher(name), job, plan, version, calibrate)
        except SpecError as error:
            refused[name] = error.problems
    if not found:
        raise SpecError([problem for problems in refused.values() for problem in problems])
    around = wrapper.wrapped_all(wraps, job, {name: one.written for name, one in found.items()}, site)
    found = {name: dataclasses.replace(one, written=around[name]) for name, one in found.items()}
    return ExportAnswer(job=job, plan=plan, assumed=assumed, broken=broken_by(job, plan), formats=found, refused=refused)


def export_or_refuse(job: Job, plan: Plan, formats: Sequence[str], *, calibrate: Callable[[Job], Calibration]) -> ExportAnswer:
    """Return the files of a plan that a search chose, in these formats: also where none can spell it, which is then told."""
    refused: dict[str, tuple[Problem, ...]] = {}
    formed: dict[str, Exported] = {}
    for name in formats:
        try:
            formed |= export_plan(job, plan, (), [name], calibrate=calibrate).formats
        except SpecError as error:
            refused[name] = error.problems
    return ExportAnswer(job=job, plan=plan, assumed=(), broken=(), formats=formed, refused=refused)


def _one(launcher: Launcher, job: Job, plan: Plan, version: str, calibrate: Callable[[Job], Calibration]) -> Exported:
    """Return one format. It launches its own framework, whatever the job is asked about under: rules and prediction are of that one."""
    release = chosen(launcher, version)
    target = job
    broken: tuple[Broken, ...] = ()
    notes: tuple[str, ...] = ()
    if launcher.framework not in (ANY, job.framework.name):
        target = job.model_copy(update={"framework": presets.framework(launcher.framework)})
        broken = broken_by(target, plan)
        notes = (
            f"The job is asked about under {job.framework.name}; this launches {launcher.framework}, whose rules are checked and whose "
            "time and memory are foretold.",
        )
    written = launcher.write(target, plan, release)
    files = {**written.files, **(verification(target, plan, calibrate(target), written) if written.start else {})}
    programs = (*written.programs, VERIFY) if written.start else written.programs
    return Exported(
        written=dataclasses.replace(written, files=files, programs=programs, notes=(*written.notes, *notes)),
        framework=target.framework.name,
        broken=broken,
    )


def _nonuniform(job: Job, plan: Plan, failed: Mapping[int, tuple[int, ...]] | None, reduced: int | None) -> Written:
    from tuner.launch.megatron_ntp import layout_of
    from tuner.launch.megatron_ntp_files import write

    falls = 0 < plan.fallback_tp < plan.tp
    degree = int(plan.fallback_tp) if falls else None
    if (failed is None) == (reduced is None):
        what = "is missing: which GPUs" if failed is None else "and --reduced both say which GPUs"
        hint = "REPLICA:SLOT, like --failed 0:3, or --reduced 2 for the first two replicas"
        raise one_problem("failed", "", None, f"{what} {NONUNIFORM} goes on without", hint)
    if failed is not None:
        return write(job, plan, layout_of(job, plan, degree, failed), sum(len(set(slots)) for slots in failed.values()))
    replicas = int(plan.dp(job.gpus))
    if not 1 <= (reduced or 0) < replicas:
        raise one_problem("reduced", "", reduced, f"must be from 1 to {replicas - 1}, of {replicas} replicas")
    if degree is None:
        raise one_problem(
            "reduced", "", reduced, "needs the degree that these replicas fall to", "fallback_tp in the plan: -p tp=8,fallback_tp=6"
        )
    failed = {replica: tuple(range(degree, int(plan.tp))) for replica in range(reduced or 0)}
    return write(job, plan, layout_of(job, plan, degree, failed), sum(map(len, failed.values())))
