"""Published rows as measurements: the schema is that of the published collections (docs/measured_step_time.md lists what is read)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tuner.accuracy.described import cluster_of, model_of
from tuner.accuracy.fields import Row, Skipped, Unscorable, first_problem, read_lines, row_id, row_of
from tuner.accuracy.knobs import plan_of
from tuner.accuracy.sources import fact_of, memory_kind
from tuner.accuracy.step_time import measured_step_s
from tuner.cluster import Sourced
from tuner.errors import SpecError
from tuner.job import PEAK_OF, PRECISIONS, Framework, Job
from tuner.load import load_spec
from tuner.measurement import Measurement
from tuner.presets import framework as framework_preset

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tuner.cluster import Gpu

_PRECISIONS = {name: name for name in PRECISIONS} | {
    "fp8-tensorwise": "fp8",
    "fp8-delayed": "fp8",
    "mxfp8-rceil": "mxfp8",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "tf32": "fp32",
}
_ATTENTION = {
    "unfused": "unfused",
    "unfused-fused-softmax": "unfused",
    "flash": "flash",
    "flash1": "flash",
    "flash2": "flash",
    "flash3": "flash",
}
_TASKS = {"pretrain": "pretrain", "sft": "sft", "lora": "lora", "pretraining": "pretrain", "finetune": "sft", "finetuning": "sft"}


@dataclass(slots=True)
class Reader:
    """Turns rows into measurements; rows of the same job share one Job object, so that they can be estimated together."""

    failures: bool = False  # whether rows that ended in another way than a time or no memory are read too
    jobs: dict[str, Job] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)

    def read(self, path: Path) -> tuple[list[Measurement], list[Skipped]]:
        """Return the measurements of a JSONL file and the rows that cannot be scored. Raises SpecError for an unreadable file."""
        measurements: list[Measurement] = []
        skipped: list[Skipped] = []
        for line, data in read_lines(path):
            found = data if isinstance(data, Skipped) else self.row(data, path.stem, line)
            if isinstance(found, Skipped):
                skipped.append(found)
            else:
                measurements.append(found)
        return measurements, skipped

    def row(self, data: dict[str, Any], stem: str, line: int = 0) -> Measurement | Skipped:
        """Return the measurement of one row, or why there is none."""
        try:
            return self._measurement(row_of(data, stem, line))
        except Unscorable as why:
            return Skipped(row_id(data, stem, line), str(why))
        except SpecError as error:
            return Skipped(row_id(data, stem, line), first_problem(error))
        except ValidationError as error:  # a number within the schema that no cluster has
            wrong = error.errors()[0]
            return Skipped(row_id(data, stem, line), f"{'.'.join(map(str, wrong['loc']))} = {str(wrong['input'])[:40]}: {wrong['msg']}")

    def _measurement(self, row: Row) -> Measurement:
        if row.top.data.get("suspect"):
            raise Unscorable(f"suspect: {str(row.top.data['suspect'])[:200]}")
        _stated(row)
        outcome = _outcome(row, self.failures)
        job = self._job(row)
        plan = plan_of(row, job.model, job.framework, job.gpus)
        memory, kind = _memory(row), memory_kind(row)
        if memory is not None and kind is None:
            row.assume("memory=device")
        fields = {
            "id": row.id,
            "framework": row.top.text("framework") or "unstated",
            "job": job,
            "plan": plan,
            "step_s": measured_step_s(row, job, plan),
            "memory_bytes": memory,
            "memory_kind": kind or "device",
            "outcome": outcome,
            "superseded": bool(row.top.data.get("superseded")),
            "source": row.stem,
            "series": series_key(row),
        }
        return load_spec(Measurement, fields | {"assumed": tuple(row.assumed)}, row.id, units=False)

    def _job(self, row: Row) -> Job:
        before = len(row.assumed)
        year = source_year(row)
        names = [_framework_name(row), row.top.text("release"), row.top.text("task"), year]
        config = {key: row.config.data.get(key) for key in ("precision", "attention", "fused_norm", "global_batch")} | {
            "pure": "mp mode pure" in row.notes
        }
        key = json.dumps([names, row.model.data, row.cluster.data, config], sort_keys=True, default=str)
        if key not in self.jobs:
            self.jobs[key] = job_of(row, year)
            self.parts[key] = row.assumed[before:]
        else:
            row.assumed.extend(self.parts[key])
        return self.jobs[key]


def read_files(paths: Iterable[Path], *, failures: bool = False) -> tuple[list[Measurement], list[Skipped]]:
    """Return the measurements and the skipped rows of several files; failures: runs that crashed are measurements too."""
    reader = Reader(failures=failures)
    measurements: list[Measurement] = []
    skipped: list[Skipped] = []
    for path in paths:
        found, left_out = reader.read(path)
        measurements += found
        skipped += left_out
    return measurements, skipped


def _stated(row: Row) -> None:
    """Raise Unscorable naming everything that a score needs and the row does not state."""
    missing = [f"model.{key}" for key in ("layers", "hidden", "heads", "seq_len") if row.model.count(key) is None]
    missing += ["cluster.gpus"] if row.cluster.count("gpus") is None else []
    missing += [f"config.{key}" for key in ("tp", "pp", "micro_batch", "global_batch") if row.config.count(key) is None]
    if missing:
        raise Unscorable(f"not stated: {', '.join(missing)}")


FAILURES = ("oom_or_crash", "kernel_not_available", "other_error", "failed")


def _outcome(row: Row, failures: bool) -> str:
    word = row.top.text("outcome")
    if word == "oom":
        return "oom"
    figures = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "memory_gb", "memory_gib")
    if any(row.measured.positive(key) is not None for key in figures):
        return "ok"
    if failures and word in FAILURES:
        return "failed"
    raise Unscorable(f"no time and no memory figure (outcome {word[:40]})" if word else "no time and no memory figure")


def _memory(row: Row) -> float | None:
    gigabytes, gibibytes = row.measured.positive("memory_gb"), row.measured.positive("memory_gib")
    if gigabytes is not None:
        return gigabytes * 1e9
    return None if gibibytes is None else gibibytes * 2.0**30


def job_of(row: Row, year: int) -> Job:
    """Return the job of a row: model, cluster, framework, lengths, precision and attention kernel."""
    framework = _framework(row)
    model, cluster = model_of(row, framework), cluster_of(row)
    fields = {
        "model": model,
        "cluster": cluster,
        "framework": framework,
        "release": row.top.text("release") or "",
        "seq_len": row.model.need("seq_len"),
        "global_batch": row.config.need("global_batch"),
        "precision": _precision(row, framework, cluster.gpu),
        "attention": _attention(row, framework, year),
        "task": _task(row),
    }
    return load_spec(Job, fields, "row", units=False)


@lru_cache(maxsize=256)
def _known_framework(name: str) -> Framework | None:
    try:
        return None if "/" in name or "\\" in name or name.endswith((".yaml", ".yml", ".json")) else framework_preset(name)
    except SpecError:
        return None


def _framework_name(row: Row) -> str:
    other = fact_of(row).zero_3
    return other if other and row.config.data.get("zero_stage") == 3 else row.top.text("framework") or "unstated"


def _framework(row: Row) -> Framework:
    name = _framework_name(row)
    framework = _known_framework(name)
    if framework is None:
        framework = framework_preset("unstated")
        row.assume(f"framework={framework.name} (no preset is called {name[:40]})")
    if (fused := row.config.flag("fused_norm")) is not None:
        framework = framework.replace(fused_norm=Sourced[bool](value=fused, source=row.id))
    if "mp mode pure" in row.notes and framework.reduce_bytes:  # Composer: PURE reduces gradients in 16 bits
        framework = framework.replace(reduce_bytes=framework.reduce_bytes.model_copy(update={"value": 2}))
    return framework


def _precision(row: Row, framework: Framework, gpu: Gpu) -> str:
    stated = row.config.word("precision", _PRECISIONS)
    if stated is not None and any(p in gpu.peak for p in PEAK_OF[stated]):
        return stated
    default = framework.defaults.precision
    found = default.value if default and any(p in gpu.peak for p in PEAK_OF[default.value]) else ("bf16" if "bf16" in gpu.peak else "fp16")
    why = row.config.unknown("precision") if stated is None else f" ({gpu.name} has no {stated})"
    row.assume(f"precision={found}{why}")
    return found


def _attention(row: Row, framework: Framework, year: int) -> str:
    stated = row.config.word("attention", _ATTENTION)
    if stated is not None:
        return stated
    kernel, since = framework.defaults.attention.value, framework.fused_attention_since
    if since is not None and year < since.value:
        kernel = "unfused"
    row.assume(f"attention={kernel}{row.config.unknown('attention')}")
    return kernel


def _task(row: Row) -> str:
    """Return the task; one that is not known costs what tuning all weights costs, and stands apart from pretraining."""
    task = row.top.word("task", _TASKS)
    if task is None and row.top.text("task") is None:
        return "pretrain"
    if task is None:
        row.assume(f"task=sft{row.top.unknown('task')}")
    return task or "sft"


def source_year(row: Row) -> int:
    """Return the first year that a row's source bears (in its id, title, arXiv number or release), or 9999."""
    source = row.top.section("source")
    text = " ".join(filter(None, (row.id, source.text("title"), source.text("where"), row.top.text("release"))))
    years = [int(y) for y in re.findall(r"(?<!\d)(20[12]\d)(?!\d)", text)]
    years += [2000 + int(y) for y in re.findall(r"(?<!\d)([12]\d)(?:0[1-9]|1[0-2])\.\d{4,5}(?!\d)", text)]
    return min(years, default=9999)


def series_key(row: Row) -> dict[str, Any]:
    """Return what rows must share for their layouts to be ranked against each other."""
    return {
        "source": row.stem,
        "model": row.model.text("name"),
        "gpu": row.cluster.text("gpu"),
        "gpus": row.cluster.count("gpus"),
        "seq_len": row.model.count("seq_len"),
        "global_batch": row.config.count("global_batch"),
        "precision": row.config.text("precision"),
        "release": row.top.text("release"),
        "task": row.top.text("task") or "pretrain",
    }
