"""The tuner's own format: job and plan as one YAML file, of a version, that loses nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from tuner.errors import Problem, SpecError
from tuner.launch.launchers.launcher import DERIVED, Found, Launcher, Unknown, Written, refuse_unspelled
from tuner.load import parse_yaml
from tuner.plan import Plan
from tuner.plan_text import KNOBS, plan_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job

FILE = "plan.yaml"
KIND = "tuner/launch-plan"
VERSION = 1
JOB = ("seq_len", "global_batch", "precision", "attention", "task")


@dataclass(frozen=True, slots=True)
class Neutral:
    """plan.yaml."""

    name: str = "neutral"
    framework: str = "generic"
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """Every field of a plan that a person turns."""
        return MappingProxyType({f.name: f"plan.{f.name}" for f in dataclasses.fields(Plan) if f.name not in DERIVED})

    @property
    def cannot(self) -> Mapping[str, str]:
        """Nothing but what no launched plan has."""
        return MappingProxyType(dict.fromkeys(DERIVED, "a plan that is launched has no idle ranks"))

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return plan.yaml."""
        del version
        refuse_unspelled(self, plan)
        document = {
            "kind": KIND,
            "version": VERSION,
            "framework": job.framework.name,
            "release": job.release,
            "model": job.model.model_dump(mode="json", exclude_defaults=True, exclude={"source", "aliases"}),
            "gpus": job.gpus,
            "gpus_per_node": job.cluster.gpus_per_node,
            "gpu": job.cluster.gpu.name,
            "job": _job(job),
            "plan": plan_record(plan, job.gpus),
        }
        return Written(files={FILE: yaml.safe_dump(document, sort_keys=False, allow_unicode=True)})

    def reads(self, name: str, text: str) -> bool:
        """Whether the file names its kind."""
        return name.endswith((".yaml", ".yml")) and f"kind: {KIND}" in text[:4096]

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what plan.yaml says."""
        (name, text), *_ = files.items()
        data: Any = parse_yaml(text, name)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            told = data.get("version") if isinstance(data, dict) else None
            raise SpecError([Problem(where=name, path="version", value=repr(told), rule=f"must be {VERSION}", hint="of another release?")])
        sections = {key: data.get(key) or {} for key in ("model", "job", "plan")}
        wrong = [key for key, value in sections.items() if not isinstance(value, dict)]
        if wrong:
            raise SpecError([Problem(where=name, path=key, value=repr(data[key])[:80], rule="must be a mapping") for key in wrong])
        known = {"kind", "version", "framework", "release", "gpus", "gpus_per_node", "gpu", *sections}
        plan = {key: value for key, value in sections["plan"].items() if key in KNOBS}
        unknown = [Unknown(name=str(key), value=str(value), where=name) for key, value in data.items() if key not in known]
        unknown += [
            Unknown(name=f"plan.{key}", value=str(value), where=name)
            for key, value in sections["plan"].items()
            if key not in KNOBS and key != "edp"
        ]
        return Found(
            framework=str(data.get("framework", self.framework)),
            release=str(data.get("release") or ""),
            model=sections["model"],
            job=sections["job"],
            plan=plan,
            gpus=data.get("gpus"),
            gpus_per_node=data.get("gpus_per_node"),
            unknown=tuple(unknown),
        )


def _job(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(job, name) for name in JOB}
    if job.task == "lora":
        found["lora_rank"] = job.lora_rank
    if job.tokens is not None:
        found["tokens"] = job.tokens
    if job.ramp_up is not None:
        found["ramp_up"] = ",".join(str(getattr(job.ramp_up, name)) for name in ("start", "increment", "samples"))
    return found


def open_launcher() -> Launcher:
    """Return the launcher."""
    return Neutral()
