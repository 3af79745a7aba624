"""Job files with a plan, read as launch files are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tuner.checking.alike import counted
from tuner.errors import SpecError
from tuner.launch.detection import named_cluster
from tuner.launch.launchers.launcher import Found
from tuner.load import parse_yaml
from tuner.plan_text import split_knobs
from tuner.request import DEFAULT_FRAMEWORK, Request, job_values
from tuner.values import Problems, whole

JOB = ("precision", "attention", "task", "release", "lora_rank", "tokens")  # what a job file says that launch files may say too


def request_found(path: str, text: str, defaults: Request) -> tuple[Found, Request]:
    """Return what a job file with a plan says, and the options below it. Raises SpecError."""
    keys = tuple(name for name in Request.__dataclass_fields__ if name != "job")
    data: Any = parse_yaml(text, path)
    values = job_values(data, Path(path), keys)
    plan = values.pop("plan", None)
    plan = values.pop("current", None) if plan is None else plan
    knobs: Any = plan
    if plan is not None and not isinstance(plan, dict):
        texts = plan if isinstance(plan, list) else [plan]
        knobs = {key: value for item in texts for key, value in split_knobs(str(item), f"{path}: plan").items()}
    cluster = values.get("cluster")
    kind, count = counted(str(cluster)) if cluster is not None else ("", None)
    named = values.get("gpus")
    problems = Problems()
    gpus = problems.trying(lambda: whole(named, "gpus")) if named is not None else count
    if cluster is not None and gpus is None and (own := problems.trying(lambda: named_cluster(kind))) is not None:
        gpus = own.gpus  # as the other verbs take a cluster whose count nobody names
    job = {name: values[name] for name in ("seq_len", "global_batch", "ramp_up", *JOB) if name in values}
    for name in ("seq_len", "global_batch"):
        if name in job:
            job[name] = problems.trying(lambda name=name: whole(job[name], name, thousand=1024 if name == "seq_len" else 0))  # type: ignore[misc]
    if problems.found:
        raise SpecError([dataclasses.replace(p, where=path, path=p.where) for p in problems.found])
    found = Found(
        framework=str(values.get("framework", defaults.framework or DEFAULT_FRAMEWORK)),
        release=str(values.get("release", "")),
        model={"preset": values["model"]} if "model" in values else {},
        job=job,
        plan=knobs or {},
        gpus=gpus,
        gpu=kind,
    )
    kept = {name: values[name] for name in ("calibration", "price", "tokens") if name in values}
    return found, dataclasses.replace(defaults, **kept)
