"""JSON schema of the neutral format, made from the tables that write and read it: python -m tuner.plan_schema > docs/plan.schema.json."""

from __future__ import annotations

import json
import sys
from typing import Any

from tuner.job import PRECISIONS, Job
from tuner.launch.launchers.neutral import JOB, KIND, VERSION
from tuner.model import Model
from tuner.plan import CP_KINDS, OFFLOADS, RECOMPUTE_MODULES, SCHEDULES
from tuner.plan_text import DEGREES, FLAGS, KNOBS, LARGEST

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NAME = {"type": "string", "maxLength": 120}
COUNT = {"type": "integer", "minimum": 1}
_MODULES = "|".join(RECOMPUTE_MODULES)
_TEXTS: dict[str, dict[str, Any]] = {
    "recompute": {"type": "string", "pattern": rf"^(none|full(:[1-9]\d{{0,11}})?|({_MODULES})(\+({_MODULES}))*)$"},
    "pipeline_layout": {"type": "string", "pattern": r"^(even|embedding=\d{1,3}(\+loss=\d{1,3})?|loss=\d{1,3})$"},
    "schedule": {"enum": list(SCHEDULES)},
    "offload": {"enum": list(OFFLOADS)},
    "cp_kind": {"enum": list(CP_KINDS)},
    "zero": {"enum": [0, 1, 2, 3]},
}


def knob_schema(knob: str) -> dict[str, Any]:
    """Return the schema of one knob's value."""
    if knob in FLAGS:
        return {"type": "boolean"}
    if knob in _TEXTS:
        return _TEXTS[knob]
    return {"type": "integer", "minimum": 1 if knob in (*DEGREES, "dp") else 0, "maximum": LARGEST}


def schema() -> dict[str, Any]:
    """Return the schema of plan.yaml. Keys that it does not know are allowed, and kept as unknown when read."""
    model = _plain(Model.model_json_schema())
    definitions = model.pop("$defs")
    fields = _plain(Job.model_json_schema())["properties"]
    whole_run = {"lora_rank": fields["lora_rank"], "tokens": {"type": "number", "exclusiveMinimum": 0}, "ramp_up": {"type": "string"}}
    job = {name: fields[name] for name in JOB} | {"precision": {"enum": list(PRECISIONS)}} | whole_run
    plan = {knob: knob_schema(knob) for knob in KNOBS} | {"edp": COUNT}
    return {
        "$schema": DIALECT,
        "title": f"{KIND} {VERSION}",
        "description": "A training job and its parallelism plan, as `tuner export neutral` writes them (YAML or JSON).",
        "type": "object",
        "required": ["kind", "version"],
        "properties": {
            "kind": {"const": KIND},
            "version": {"const": VERSION},
            "framework": NAME,
            "release": NAME,
            "model": model,
            "gpus": COUNT,
            "gpus_per_node": COUNT,
            "gpu": NAME,
            "job": {"type": "object", "properties": job},
            "plan": {"type": "object", "properties": plan},
        },
        "$defs": definitions,
    }


def _plain(value: Any) -> Any:
    """Return a schema of pydantic's without the titles that it makes of names."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if not (name == "title" and isinstance(item, str))}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def text() -> str:
    """Return the schema's file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
