"""From a question about one plan to the files that launch it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.answers import FITS_BELOW, broken_by, job_record, plain
from tuner.cost_model.degraded import degraded
from tuner.cost_model.estimate import estimate, tokens_per_s_per_gpu
from tuner.cost_model.explain import does_not_fit
from tuner.errors import SpecError, one_problem
from tuner.formats import NONUNIFORM, as_knobs, as_under, framework_of, grouped, read_failed, read_formats, refuse_accelerator
from tuner.launch.launchers.launcher import Written, chosen, open_launcher
from tuner.launch.site import Site, read_site
from tuner.launch.wrappers import wrapper
from tuner.load import path_of
from tuner.plan import Plan
from tuner.plan_defaults import asked_plan, read_plan
from tuner.plan_text import plan_record
from tuner.predicted import VERIFY, verification
from tuner.request import read_calibration
from tuner.values import Problems, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.answers import Broken
    from tuner.cost_model.calibration import Calibration
    from tuner.errors import Problem
    from tuner.formats import Formats
    from tuner.job import Job
    from tuner.request import Request

    Calibrate = Callable[[Job], Calibration]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plan stands that a search wrote for a format: its rank among those listed (None: not listed), how many plans of the search
    are ahead of it (None: not counted), and why the best one was not written (empty: it is the best one).
    """

    rank: int | None
    ahead: int | None = None
    why: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One format of a plan. job: under the framework that it launches; plan: with that framework's defaults (assumed) where none was
    stated; broken: rules of the framework that the plan breaks; step_s, low_s, high_s, memory_bytes: as foretold under it; too_large: why
    it runs out of memory ("": it does not); place: in the search that chose the plan.
    """

    written: Written
    job: Job
    plan: Plan
    assumed: tuple[str, ...]
    broken: tuple[Broken, ...]
    step_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    too_large: str
    place: Place | None = None

    @property
    def legal(self) -> bool:
        """Whether its framework runs the plan."""
        return all(item.severity != "error" for item in self.broken)

    def record(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        one = self.written
        figures = {name: getattr(self, name) for name in ("step_s", "low_s", "high_s", "memory_bytes")}
        record = {
            "framework": self.job.framework.name,
            "plan": plan_record(self.plan, self.job.gpus),
            "assumed": self.assumed,
            "files": dict(one.files),
            "programs": one.programs,
            "start": one.start,
            "notes": one.notes,
            "legal": self.legal,
            "broken": [dataclasses.asdict(item) for item in self.broken],
            "fits": not self.too_large,
            "too_large": self.too_large,
            **figures,
            "tokens_per_s_per_gpu": float(tokens_per_s_per_gpu(self.job, self.step_s)),
        }
        return record | ({} if self.place is None else {"place": dataclasses.asdict(self.place)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAnswer:
    """The files of a plan by format; refused: formats that cannot spell it, and why; plan: what was asked for, with what the job's
    framework does where nothing was stated (assumed).
    """

    job: Job
    plan: Plan
    assumed: tuple[str, ...]
    formats: Mapping[str, Exported]
    refused: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)

    @property
    def written(self) -> dict[str, Written]:
        """Files by format."""
        return {name: one.written for name, one in self.formats.items()}

    @property
    def exit_code(self) -> int:
        """2 where a format cannot spell the plan, 3 where its framework refuses it or it does not fit, else 0."""
        if self.refused:
            return 2
        return 0 if all(one.legal and not one.too_large for one in self.formats.values()) else 3

    def files(self) -> dict[str, tuple[str, bool]]:
        """Return {path under a folder for all formats: (text, whether it is a program)}."""
        return {f"{name}/{file}": (text, file in one.programs) for name, one in self.written.items() for file, text in one.files.items()}

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types: texts of files are in `files`."""
        record = {
            "job": job_record(self.job),
            "plan": plan_record(self.plan, self.job.gpus),
            "assumed": self.assumed,
            "formats": {name: one.record() for name, one in self.formats.items()},
            "refused": {name: [dataclasses.asdict(item) for item in found] for name, found in self.refused.items()},
        }
        return dict(plain(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """GPUs that an export to NONUNIFORM goes on without: slots of replicas, or a count of reduced replicas."""

    slots: Mapping[int, tuple[int, ...]] | None = None
    reduced: int | None = None


def answer_export(
    request: Request, formats: Any, *, wrap: Any = None, site: Any = None, failed: Any = None, reduced: Any = None, version: str = ""
) -> ExportAnswer:
    """Return the answer to an export's question. The framework is that of the first format that launches one, where none is named. Raises
    SpecError with all that is wrong with the question, and where no format can spell the plan.
    """
    problems = Problems()
    asked_formats = problems.trying(lambda: read_formats(formats, wrap))
    named = request.framework is not None
    where = None if site is None else problems.trying(lambda: read_settings(site))
    gone = None if failed is None else problems.trying(lambda: read_failed(failed))
    few = None if reduced is None else problems.trying(lambda: whole(reduced, "reduced"))
    if asked_formats is not None and request.framework is None:
        own = [found for name in asked_formats.names if (found := framework_of(name, ""))]
        request = dataclasses.replace(request, framework=own[0] if own else None)
    asked = problems.trying(lambda: asked_plan(request))
    problems.raise_any()
    assert asked is not None and asked_formats is not None  # noqa: S101 (raise_any has raised otherwise)
    _concerned(asked_formats, where, gone, few)
    job, plan, assumed, _ = asked
    return export_plan(
        job,
        plan,
        assumed,
        asked_formats,
        stated=request.plan,
        named=named,
        calibrate=lambda of: read_calibration(request, of),
        version=version,
        site=where,
        failed=Failed(slots=gone, reduced=few),
    )


def read_settings(value: Any) -> Site:
    """Return the settings of a site in a file (or as they are)."""
    return value if isinstance(value, Site) else read_site(path_of(str(value), "site"))


def _concerned(formats: Formats, site: Site | None, failed: object, reduced: object) -> None:
    """Refuse options that concern none of the formats."""
    problems = Problems()
    for option, given in (("failed", failed), ("reduced", reduced)):
        if given is not None and NONUNIFORM not in formats.names:
            problems.add(option, None, f"concerns {NONUNIFORM} alone", f"export {NONUNIFORM}")
    if site is not None and not formats.wraps:
        problems.add("site", None, "is about what starts the launch", "--wrap slurm, kubernetes, skypilot or torchrun")
    if formats.wraps and all(name in UNWRAPPED for name in formats.names):
        problems.add("wrap", ",".join(formats.wraps), f"has nothing to start in {', '.join(formats.names)}", "name a format that launches")
    problems.raise_any()


UNWRAPPED = ("neutral", NONUNIFORM)


def export_plan(
    job: Job,
    plan: Plan,
    assumed: tuple[str, ...],
    formats: Formats,
    *,
    stated: Any = None,
    named: bool = False,
    calibrate: Calibrate,
    version: str = "",
    site: Site | None = None,
    failed: Failed | None = None,
) -> ExportAnswer:
    """Return the files of a plan in these formats, each under the framework that it launches: what is not `stated` (knobs as a person
    writes them; a Plan states all) takes that framework's defaults; named: whether the person named the job's framework, so that a format
    of another one is to say so. A format that cannot spell it is told beside those that can;
    calibrate: of a job, for what is foretold. Raises SpecError where no format can spell it.
    """
    found: dict[str, Exported] = {}
    refused: dict[str, tuple[Problem, ...]] = {}
    for name in formats.names:
        target = as_under(job, framework_of(name, job.framework.name))
        try:
            same = target is job or stated is None
            own, taken = (plan, assumed) if same else read_plan(stated, target, "plan")
            if name == NONUNIFORM:
                found[name] = _nonuniform(target, own, taken, calibrate(target), failed or Failed())
            else:
                found[name] = export_one(name, target, own, calibrate(target), assumed=taken, version=version)
        except SpecError as error:
            refused[name] = as_knobs(error.problems)
            continue
        if named and target is not job:
            notes = (*found[name].written.notes, f"the job is about {job.framework.name}; this launches {target.framework.name}")
            found[name] = dataclasses.replace(found[name], written=dataclasses.replace(found[name].written, notes=notes))
    if not found:
        raise SpecError(grouped(problem for problems in refused.values() for problem in problems))
    return ExportAnswer(job=job, plan=plan, assumed=assumed, formats=wrapped(found, formats, site), refused=refused)


def wrapped(found: Mapping[str, Exported], formats: Formats, site: Site | None) -> dict[str, Exported]:
    """Return the formats with the wrappers around those that are launched. Raises SpecError where a wrapper refuses."""
    around = {
        name: wrapper.wrapped_all(formats.wraps, one.job, {name: one.written}, site)[name]
        for name, one in found.items()
        if formats.wraps and name not in UNWRAPPED
    }
    return {name: dataclasses.replace(one, written=around.get(name, one.written)) for name, one in found.items()}


def export_one(
    name: str,
    job: Job,
    plan: Plan,
    calibration: Calibration,
    *,
    assumed: tuple[str, ...] = (),
    version: str = "",
    place: Place | None = None,
) -> Exported:
    """Return the plan in one format; the job is under the framework that it launches. Raises SpecError where it cannot be spelled."""
    refuse_accelerator(name, job)
    launcher = open_launcher(name)
    written = launcher.write(job, plan, chosen(launcher, version))
    if written.start:
        files = {**written.files, **verification(job, plan, calibration, written)}
        written = dataclasses.replace(written, files=files, programs=(*written.programs, VERIFY))
    return _exported(written, job, plan, calibration, assumed, place=place)


def _exported(
    written: Written,
    job: Job,
    plan: Plan,
    calibration: Calibration,
    assumed: tuple[str, ...],
    *,
    reduced: str = "",
    place: Place | None = None,
) -> Exported:
    cost = estimate(job, plan, calibration)
    return Exported(
        written=written,
        job=job,
        plan=plan,
        assumed=assumed,
        broken=broken_by(job, plan),
        step_s=float(cost.step_s),
        low_s=float(cost.low_s),
        high_s=float(cost.high_s),
        memory_bytes=float(cost.memory_bytes),
        too_large=does_not_fit(job, plan, calibration, cost) or reduced,
        place=place,
    )


def _nonuniform(job: Job, plan: Plan, assumed: tuple[str, ...], calibration: Calibration, failed: Failed) -> Exported:
    from tuner.launch.megatron_ntp import layout_of
    from tuner.launch.megatron_ntp_files import write

    refuse_accelerator(NONUNIFORM, job)
    slots = _slots(job, plan, failed)
    falls = 0 < plan.fallback_tp < plan.tp
    layout = layout_of(job, plan, int(plan.fallback_tp) if falls else None, slots)
    written = write(job, plan, layout, sum(len(set(each)) for each in slots.values()))
    lower = dataclasses.replace(plan, fallback_tp=layout.degree)
    cost = degraded(job, lower, calibration, estimate(job, lower, calibration))
    reduced = ""
    if float(cost.p_oom) >= FITS_BELOW:
        need, has = float(cost.memory_bytes) / 1e9, job.cluster.gpu.memory.value / 1e9
        reduced = f"a replica at tp {layout.degree} needs {need:.1f} of {has:.1f} GB"
    return _exported(written, job, plan, calibration, assumed, reduced=reduced)


def _slots(job: Job, plan: Plan, failed: Failed) -> Mapping[int, tuple[int, ...]]:
    """Return the slots that each replica goes on without."""
    reduced, falls = failed.reduced, 0 < plan.fallback_tp < plan.tp
    if (failed.slots is None) == (reduced is None):
        what = "is missing: which GPUs" if reduced is None else "and --reduced both say which GPUs"
        hint = "REPLICA:SLOT, like --failed 0:3, or --reduced 2 for the first two replicas"
        raise one_problem("failed", "", None, f"{what} {NONUNIFORM} goes on without", hint)
    if failed.slots is not None:
        return failed.slots
    replicas = int(plan.dp(job.gpus))
    if not 1 <= (reduced or 0) < replicas:
        raise one_problem("reduced", "", reduced, f"must be from 1 to {replicas - 1}, of {replicas} replicas")
    if not falls:
        raise one_problem(
            "reduced", "", reduced, "needs the degree that these replicas fall to", "fallback_tp in the plan: -p tp=8,fallback_tp=6"
        )
    return {replica: tuple(range(int(plan.fallback_tp), int(plan.tp))) for replica in range(reduced or 0)}
