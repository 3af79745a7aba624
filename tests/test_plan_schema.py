"""The schema of the neutral format: fresh, true of what is written, and refusing what the reader refuses."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

import tuner
from tests.launch.launchers.jobs import JOBS, exported
from tests.launch.launchers.plans import job_of, legal_plans
from tests.terminal import ROOT
from tuner.launch.launchers.launcher import open_launcher
from tuner.plan_schema import schema
from tuner.plan_text import KNOBS

KEPT = ROOT / "docs/plan.schema.json"
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
KEYWORDS = {
    "$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "additionalProperties", "items",
    "enum", "const", "pattern", "anyOf", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength",
}  # fmt: skip


def wrong(value: Any, rule: dict[str, Any], root: dict[str, Any], at: str = "") -> list[str]:
    """Return where a document breaks a schema of these keywords (draft 2020-12)."""
    assert set(rule) <= KEYWORDS, set(rule) - KEYWORDS
    if "$ref" in rule:
        return wrong(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in rule:
        each = [wrong(value, one, root, at) for one in rule["anyOf"]]
        return [] if [] in each else each[0]
    if "const" in rule and value != rule["const"]:
        return [at]
    if "enum" in rule and not any(value == one and type(value) is type(one) for one in rule["enum"]):
        return [at]
    if "type" in rule:
        kind = TYPES[rule["type"]]
        if not isinstance(value, kind) or (isinstance(value, bool) and rule["type"] != "boolean"):
            return [at]
    if isinstance(value, str):
        long = len(value) > rule.get("maxLength", len(value)) or len(value) < rule.get("minLength", 0)
        return [at] if long or ("pattern" in rule and not re.search(rule["pattern"], value)) else []
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = rule.get("minimum", value), rule.get("maximum", value)
        return [] if low <= value <= high and value > rule.get("exclusiveMinimum", value - 1) else [at]
    if isinstance(value, dict) and "properties" in rule:
        found = [f"{at}.{name}" for name in rule.get("required", []) if name not in value]
        if rule.get("additionalProperties") is False:
            found += [f"{at}.{name}" for name in value if name not in rule["properties"]]
        return found + [
            one
            for name, item in value.items()
            if name in rule["properties"]
            for one in wrong(item, rule["properties"][name], root, f"{at}.{name}")
        ]
    return []


def errors(document: Any) -> list[str]:
    return wrong(document, schema(), schema())


def test_the_file_is_fresh() -> None:
    made = subprocess.run([sys.executable, "-m", "tuner.plan_schema"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert KEPT.read_text() == made


def test_every_knob_is_in_it() -> None:
    assert set(schema()["properties"]["plan"]["properties"]) == {*KNOBS, "edp"}
    assert json.loads(KEPT.read_text())["properties"]["version"] == {"const": 1}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_keeps_it(name: str) -> None:
    written = exported(name, ("neutral",), tokens=1e12).formats["neutral"].written.files["plan.yaml"]
    document = yaml.safe_load(written)
    assert errors(document) == []
    assert set(document) == set(schema()["properties"])
    assert set(document["plan"]) == set(schema()["properties"]["plan"]["properties"])
    assert set(document["job"]) <= set(schema()["properties"]["job"]["properties"])


def test_random_plans_keep_it() -> None:
    launcher = open_launcher("neutral")
    for model in ("llama3-8b", "mixtral-8x7b"):
        for plan in legal_plans("generic", model):
            assert errors(yaml.safe_load(launcher.write(job_of("generic", model), plan).files["plan.yaml"])) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("kind", "other"),
        ("gpus", 0),
        ("plan.tp", "8"),
        ("plan.tp", 0),
        ("plan.zero", 4),
        ("plan.zero", True),
        ("plan.recompute", "everything"),
        ("plan.recompute", "full:0"),
        ("plan.pipeline_layout", "loss=1+embedding=1"),
        ("plan.schedule", "dualpipe"),
        ("plan.sequence_parallel", 1),
        ("job.precision", "int4"),
        ("job.seq_len", 0),
        ("model.layers", None),
        ("model.nonsense", 1),
    ],
)
def test_what_the_reader_refuses_breaks_it(path: str, value: object) -> None:
    document = yaml.safe_load(exported("llama3-8b-fsdp", ("neutral",)).formats["neutral"].written.files["plan.yaml"])
    changed = copy.deepcopy(document)
    *section, last = path.split(".")
    place = changed
    for name in section:
        place = place[name]
    place[last] = value
    assert errors(document) == []
    assert errors(changed) == [f".{path}"]


def test_nothing_of_a_job_is_lost() -> None:
    more = {"tokens": 1.5e12, "ramp_up": "16,16,1000", "task": "lora", "lora_rank": 8, "precision": "fp16"}
    answer = exported("llama3-8b-fsdp", ("neutral",), **more)
    found = open_launcher("neutral").read(answer.formats["neutral"].written.files)
    asked = {"seq_len": 8192, "global_batch": 64, "attention": "flash"} | more
    assert dict(found.job) == asked and not found.unknown
    question = {"model": "llama3-8b", "cluster": "h100x16", "plan": dict(found.plan), "calibration": "none", **found.job}
    again = tuner.export("neutral", framework=found.framework, **question)
    assert again.job == answer.job and again.plan == answer.plan
