"""From a question about one plan to the files that launch it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.answers import broken_by, job_record, plain
from tuner.errors import Problem, SpecError, one_problem
from tuner.launch.launchers.launcher import Written, chosen, launchers, open_launcher
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.answers import Broken
    from tuner.job import Job
    from tuner.plan import Plan

NONUNIFORM = "megatron-lm-ntp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAnswer:
    """The files of a plan by format; broken: rules of the job's framework that the plan breaks; assumed: knobs that took its defaults."""

    job: Job
    plan: Plan
    assumed: tuple[str, ...]
    broken: tuple[Broken, ...]
    written: Mapping[str, Written]

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types: texts of files are in `files`."""
        record = {
            "job": job_record(self.job),
            "plan": plan_record(self.plan, self.job.gpus),
            "assumed": self.assumed,
            "broken": [dataclasses.asdict(item) for item in self.broken],
            "formats": {
                name: {"files": dict(one.files), "programs": one.programs, "start": one.start, "notes": one.notes}
                for name, one in self.written.items()
            },
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


def export_plan(
    job: Job,
    plan: Plan,
    assumed: tuple[str, ...],
    formats: Sequence[str],
    *,
    version: str = "",
    failed: Mapping[int, tuple[int, ...]] | None = None,
    reduced: int | None = None,
) -> ExportAnswer:
    """Return the files of a plan in these formats. Raises SpecError listing every knob that one of them cannot spell."""
    unknown = [name for name in formats if name not in known_formats()]
    if unknown or not formats:
        raise one_problem("format", "", ",".join(unknown), "is no format", ", ".join(known_formats()))
    for option, given in (("failed", failed), ("reduced", reduced)):
        if given is not None and NONUNIFORM not in formats:
            raise one_problem(option, "", None, f"concerns {NONUNIFORM} alone", f"export {NONUNIFORM}")
    written: dict[str, Written] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(formats):
        try:
            written[name] = _nonuniform(job, plan, failed, reduced) if name == NONUNIFORM else _one(name, job, plan, version)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return ExportAnswer(job=job, plan=plan, assumed=assumed, broken=broken_by(job, plan), written=written)


def _one(name: str, job: Job, plan: Plan, version: str) -> Written:
    launcher = open_launcher(name)
    return launcher.write(job, plan, chosen(launcher, version))


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
