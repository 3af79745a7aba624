"""What public reports of people's configurations say, against the model: does it fit, how much memory, which variant is faster, how fast.

    python benchmarks/reports.py reports.yaml [--kind fit|rank|perf] [--calibration none|auto|NAME|FILE] [--only PART] [--json]

A report is {id, kind, model, cluster, config, observed, order, variants: [{name, model, cluster, config, observed}], confidence}; a variant
inherits what it does not say. What nobody says is the framework's default, and is listed. Reports of confidence `partial`, and models whose
dimensions the report does not give (arch_from), are shown and not scored.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tuner import presets
from tuner.accuracy.fields import Unscorable, row_of
from tuner.accuracy.knobs import plan_of
from tuner.accuracy.rows import job_of, source_year
from tuner.accuracy.step_time import measured_step_s
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.estimate import estimate, peak_memory, tokens_per_s_per_gpu
from tuner.cost_model.rules import broken
from tuner.errors import SpecError, TunerError
from tuner.load import load_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KINDS = ("fit", "rank", "perf")
# Words of a framework's name in a report or in its address, the most particular first.
FRAMEWORKS = (
    ("megatron-bridge", "megatron-bridge"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("torchtitan", "torchtitan"),
    ("nanotron", "nanotron"),
    ("nemo", "nemo"),
    ("internevo", "internevo"),
    ("internlm", "internevo"),
    ("colossal", "colossalai"),
    ("llm-foundry", "llm-foundry"),
    ("megatron", "megatron-lm"),
    ("flagscale", "megatron-lm"),
    ("gpt-neox", "megatron-deepspeed"),
    ("axolotl", "transformers"),
    ("deepspeed", "deepspeed"),
)
# What a repository's launch scripts set, and its reports do not repeat: (part of the address, knobs, where it was read).
SET = (
    (
        "FlagPerf/blob/main/training/nvidia/llama2_70B-megatron",
        {"sequence_parallel": True, "distributed_optimizer": True},
        "FlagOpen/FlagPerf training/benchmarks/llama2_70B/megatron/megatron_main.sh",
    ),
    (
        "FlagPerf/blob/main/training/nvidia/llama3_70B-megatron",
        {"sequence_parallel": True, "distributed_optimizer": True},
        "FlagOpen/FlagPerf training/benchmarks/llama3_70B/megatron/pretrain_llama3.sh",
    ),
    (
        "FlagPerf/pull/299",
        {"distributed_optimizer": True, "micro_batch": 1, "global_batch": 16},
        "FlagOpen/FlagPerf training/benchmarks/aquila2_7B_container/in_container/singlenode_run.sh, config.py",
    ),
    (
        "FlagPerf/blob/main/training/nvidia/llama1_7B-paddle",
        {"sequence_parallel": False},
        "FlagOpen/FlagPerf training/benchmarks/llama1_7B/paddle/config/_base.py: PaddleNLP's tensor parallelism, no such option",
    ),
)
# What a GPU is called in reports, by its marketing memory.
CARDS = {"h100-96gb": "h100-sxm-96gb-hbm2e-500w", "b200-192gb": "b200-sxm-180gb", "b300-288gb": "b300-sxm-288gb", "gb300-288gb": "gb300"}
# Keys of an observed memory figure: (words of the key, what it counts); a key that says neither is the allocator's peak.
COUNTS = (("nvidia_smi", "device"), ("fraction", "device"), ("reserved", "reserved"))
PRINTED = {"torchtitan": "reserved", "megatron-deepspeed": "device"}  # what memory figures of these frameworks' reports count
UNITS = {"gb": 1e9, "gib": 2.0**30, "mb": 2.0**20, "mib": 2.0**20}
MEMORY = re.compile(r"(peak|max|memory|nvidia_smi)\w*_(gib|gb|mib|mb)(_|$)")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A variant of a report: what was observed, and what the model says (bytes, tokens a second and GPU); why it cannot be said."""

    report: str
    variant: str
    kind: str
    scored: bool
    why_not: str = ""
    plan: str = ""
    fits: bool | None = None
    p_oom: float = 0.0
    counts: str = "device"
    memory: float | None = None
    said_memory: float = 0.0
    device_memory: float = 0.0
    speed: float | None = None
    said_speed: float = 0.0
    refused: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def merged(case: Mapping[str, Any], variant: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a section of a report with what the variant says of it on top."""
    return {**(case.get(key) or {}), **(variant.get(key) or {})}


def whole(value: Any) -> int | None:
    """Return the last whole number that a figure or a text like "lowered (4)" states; None for others."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    found = re.findall(r"\d+", value) if isinstance(value, str) else [str(int(value))]
    return int(found[-1]) if found else None


def framework_of(case: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the framework that a report names, else the one whose repository it is about."""
    for text in (str(config.get("framework", "")), str(case.get("url", "")), str(case["id"])):
        for words, name in FRAMEWORKS:
            if words in text.lower().replace("_", "-"):
                return name
    return "unstated"


def precision_of(text: str) -> str | None:
    """Return the precision that a text like "bf16-amp" or "bf16 with fp32 grads" names first."""
    found = re.search(r"nvfp4|mxfp8|fp8|float8|bf16|bfloat16|fp16|fp32", text.lower())
    return None if found is None else {"float8": "fp8", "bfloat16": "bf16"}.get(found[0], found[0])


def recompute_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recompute keys of a row: a text like "full uniform 5" counts layers."""
    text = str(config.get("recompute", "")).lower()
    kind = next((word for word in ("full", "selective") if text.startswith(word)), "none" if text == "none" else None)
    layers = whole(text) if kind == "full" else None
    return {k: v for k, v in (("recompute", kind), ("recompute_layers", layers)) if v}


def batch_of(config: Mapping[str, Any], dp: int, pp: int) -> tuple[dict[str, int], list[str]]:
    """Return micro and global batch, and what had to be assumed: one sequence at a time, 4 pp micro batches (pp > 1) or one."""
    assumed = []
    local = whole(config.get("local_batch"))
    micro = whole(config.get("micro_batch")) or (local if local and pp == 1 else None)
    if micro is None:
        micro = 1
        assumed.append("micro_batch=1")
    size = whole(config.get("global_batch")) or (local * dp if local else None)
    if size is None and (steps := whole(config.get("grad_accum"))):
        size = micro * dp * steps
    if size is None:
        size = micro * dp * (4 * pp if pp > 1 else 1)
        assumed.append(f"global_batch={size}")
    return {"micro_batch": micro, "global_batch": size}, assumed


def row_like(case: Mapping[str, Any], variant: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a variant as a published row (docs/measured_step_time.md), and what had to be assumed."""
    model, cluster, config = (merged(case, variant, key) for key in ("model", "cluster", "config"))
    config = {k: v for part, knobs, _ in SET if part in str(case.get("url", "")) for k, v in knobs.items()} | config
    known = preset_of(str(model.get("name", "")))
    assumed = [f"model from preset {known['name']}"] if known and not model.get("layers") else []
    model = {**(known if assumed else {}), **{k: v for k, v in model.items() if v is not None}}
    tp, pp, cp = (whole(config.get(key)) or 1 for key in ("tp", "pp", "cp"))
    fsdp = whole(config.get("fsdp"))
    dp = whole(config.get("dp")) or fsdp or 1
    gpus = whole(config.get("gpus")) or whole(cluster.get("gpus")) or tp * pp * cp * dp
    if gpus < tp * pp * cp:
        raise Unscorable(f"tp x pp x cp = {tp * pp * cp} exceeds {gpus} GPUs")
    batch, filled = batch_of(config, gpus // (tp * pp * cp), pp)
    row = {"tp": tp, "pp": pp, "cp": cp, **batch, **recompute_of(config)}
    row |= {k: n for k in ("vpp", "ep", "etp") if (n := whole(config.get(k)))}
    named = str(variant.get("name", "")).lower()
    if pp > 1 and "vpp" not in row and "interleaved" in named:
        row["vpp"] = 2
        assumed.append("vpp=2 (interleaved)")
    if pp > 1 and "zero-bubble" in named:
        row |= {"pipeline_schedule": "zb-1p", "vpp": 1}
    if (stage := config.get("zero_stage")) is not None:
        row["zero_stage"] = whole(stage)
    elif sharding := str(config.get("sharding", "")).lower():
        row["zero_stage"] = 0 if "replicate" in sharding else 3
    elif fsdp:
        row["zero_stage"] = 3
    flags = ("sequence_parallel", "distributed_optimizer")
    row |= {key: config[key] for key in flags if isinstance(config.get(key), bool)}
    if precision := precision_of(str(config.get("precision", ""))):
        row["precision"] = precision
    if isinstance(attention := config.get("attention"), str):
        row["attention"] = "unfused" if "unfused" in attention else "flash"
    row["notes"] = str(config.get("notes", "")) + (" async tp" if config.get("async_tp") else "")
    model["seq_len"] = whole(config.get("seq_len")) or whole(model.get("seq_len"))
    cluster["gpu"], cluster["gpus"] = gpu_of(str(cluster.get("gpu", ""))), gpus
    task = next((t for t in ("lora", "sft") if config.get(t) or t in str(config.get("task", "")).lower()), "pretrain")
    top = {"id": case["id"], "framework": framework_of(case, config), "task": task, "flops_convention": "model"}
    top |= {"source": {"title": case["id"], "where": str(case.get("url", ""))}}
    measured = speeds(merged(case, variant, "observed"), gpus)
    return {**top, "model": model, "cluster": cluster, "config": row, "measured": measured}, assumed + filled


def preset_of(name: str) -> dict[str, Any] | None:
    """Return the row keys of the model preset that a name starts with."""
    try:
        found = presets.model(re.split(r"[ (]", name)[0] or "-")
    except (SpecError, ValueError):
        return None
    keys = [
        "name",
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "gated_mlp",
        "tied_embeddings",
        "mtp_layers",
    ]
    parts = {key: value.model_dump() for key in ("moe", "mla") if (value := getattr(found, key))}
    return {key: getattr(found, key) for key in keys} | parts


def gpu_of(name: str) -> str:
    """Return the GPU's preset for a name like "h100-80gb" or "h100-96gb-class"."""
    card = next((preset for words, preset in CARDS.items() if name.startswith(words)), name)
    for text in (card, re.sub(r"-class$", "", name), re.sub(r"-\d+gb.*$", "", name)):
        try:
            return presets.gpu(text).name if text else "unstated"
        except SpecError:
            continue
    return name or "unstated"


def speeds(observed: Mapping[str, Any], gpus: int) -> dict[str, float]:
    """Return the figures of speed that a row has; tokens a second of all GPUs become those of one."""
    keys = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
    found = {key: float(observed[key]) for key in keys if isinstance(observed.get(key), (int, float))}
    if isinstance(observed.get("tokens_per_s"), (int, float)):
        found.setdefault("tokens_per_s_per_gpu", observed["tokens_per_s"] / gpus)
    return found


def memory_of(observed: Mapping[str, Any], framework: str, capacity: float) -> tuple[float, str] | None:
    """Return the largest observed memory figure in bytes and what it counts (allocated, reserved, device)."""
    if isinstance(share := observed.get("memory_fraction"), float):
        return share * capacity, "device"
    found = []
    for key, value in observed.items():
        unit, size = MEMORY.match(key), max((v for v in _numbers(value)), default=None)
        if unit and size:
            said = next((counts for words, counts in COUNTS if words in key), PRINTED.get(framework, "allocated"))
            found.append((("allocated", "reserved", "device").index(said), size * UNITS[unit[2]], said))
    return min(found)[1:] if found else None  # the innermost count: nothing but the model's own terms lies between


def _numbers(value: Any) -> Iterator[float]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            yield float(item)


def seen(case: Mapping[str, Any], variant: Mapping[str, Any], calibration: str) -> Seen:
    """Return what was observed of a variant and what the model says of it."""
    observed = merged(case if not case.get("variants") else {}, variant, "observed")
    trusted = merged(case, variant, "model").get("arch_from") in ("public", "report", "published") and case.get("confidence") != "partial"
    head = {"report": case["id"], "variant": str(variant.get("name", "")), "kind": case["kind"], "scored": trusted}
    try:
        data, assumed = row_like(case, variant)
        row = row_of(data, "reports", 0)
        job = job_of(row, source_year(row))
        plan = plan_of(row, job.model, job.framework, job.gpus)
        step_s = measured_step_s(row, job, plan)
    except (Unscorable, TunerError) as why:
        return Seen(**head, why_not=str(why).splitlines()[0][:160])
    fitted = load_calibration(calibration, job)
    found = estimate(job, plan, fitted)
    peak = peak_memory(job, plan, fitted, found.worst_stage)
    memory = memory_of(observed, job.framework.name, job.cluster.gpu.memory.value)
    counts = memory[1] if memory else "device"
    layout = f"tp{plan.tp} pp{plan.pp} cp{plan.cp} dp{plan.dp(job.gpus)} ep{plan.ep} vpp{plan.vpp} mb{plan.micro_batch} z{plan.zero}"
    return Seen(
        **head,
        plan=f"{job.gpus} x {job.cluster.gpu.name} {job.framework.name} {layout} gbs{job.global_batch} s{job.seq_len} rc{plan.recompute}",
        fits=observed.get("fits", True if memory or step_s else None),
        p_oom=float(found.p_oom),
        counts=counts,
        memory=memory[0] if memory else None,
        said_memory=float(getattr(peak, counts)),
        device_memory=float(found.memory_bytes),
        speed=float(tokens_per_s_per_gpu(job, step_s)) if step_s else None,
        said_speed=float(tokens_per_s_per_gpu(job, found.step_s)),
        refused=tuple(f"{rule.id}: {text}" for rule, text in broken(job, plan) if rule.severity == "error"),
        assumed=(*assumed, *row.assumed),
    )


def pairs(case: Mapping[str, Any], variants: list[Seen]) -> list[tuple[str, str, float, float]]:
    """Return the pairs (better, worse, observed ratio or 1, predicted ratio) of a ranked report whose variants could all be said."""
    said = {item.variant: item for item in variants if not item.why_not}
    order = [said[name] for name in case.get("order") or [] if name in said]
    found = []
    for better, worse in combinations(order, 2):
        ratio = better.speed / worse.speed if better.speed and worse.speed else 0.0
        found.append((better.variant, worse.variant, ratio, better.said_speed / worse.said_speed))
    return found


def gb(value: float | None) -> str:
    """Return bytes as GB, or a dash."""
    return "-" if value is None else f"{value / 1e9:.1f}"


def show(item: Seen) -> None:
    """Print a variant in two lines."""
    name = f"  {item.variant or '(one)'}{'' if item.scored else ' [not scored]'}"
    if item.why_not:
        print(f"{name}: cannot be said: {item.why_not}")
        return
    fits = {True: "fits", False: "OOM", None: "?"}[item.fits]
    right = "" if item.fits is None else " ok" if item.fits == (item.p_oom < 0.5) else " WRONG"
    memory = f"{item.counts} {gb(item.said_memory)} of {gb(item.memory)} GB, device {gb(item.device_memory)}"
    speed = f"{item.said_speed:.0f} of {'-' if item.speed is None else f'{item.speed:.0f}'} tokens/s/GPU"
    off = "" if item.speed is None else f" ({item.said_speed / item.speed - 1:+.0%})"
    more = "" if item.memory is None else f" ({item.said_memory / item.memory - 1:+.0%})"
    print(f"{name}: {fits}, p_oom {item.p_oom:.2f}{right} | {memory}{more} | {speed}{off}")
    print(f"      {item.plan}; assumed {', '.join(item.assumed) or 'nothing'}")
    for text in item.refused:
        print(f"      refused: {text}")


def summary(every: list[Seen], ranked: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the scores over the variants that count: confusion of fits, errors of memory and speed, share of pairs in order."""
    scored = [item for item in every if item.scored and not item.why_not]
    words = {(True, True): "true_fit", (True, False): "false_oom", (False, True): "false_fit", (False, False): "true_oom"}
    memory = [item.said_memory / item.memory - 1 for item in scored if item.memory]
    speed = [item.said_speed / item.speed - 1 for item in scored if item.speed]
    clear = [pair for pair in ranked if pair[0] == 0 or pair[0] > 1.03]
    return {
        "variants": len(every),
        "said": len([item for item in every if not item.why_not]),
        "scored": len(scored),
        "fit": dict(Counter(words[item.fits, item.p_oom < 0.5] for item in scored if item.fits is not None)),
        "memory": {"n": len(memory), "median_abs_err": median(map(abs, memory)) if memory else None},
        "speed": {"n": len(speed), "median_abs_err": median(map(abs, speed)) if speed else None},
        "pairs": {"n": len(ranked), "in_order": sum(said > 1 for _, said in ranked)},
        "pairs_apart_by_3_percent": {"n": len(clear), "in_order": sum(said > 1 for _, said in clear)},
        "refused": sum(bool(item.refused) for item in scored),
    }


def main() -> None:
    """Read, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--calibration", default="auto")
    parser.add_argument("--only", default="", metavar="PART", help="reports whose id holds this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        cases = [case for case in load_yaml(args.file) if case.get("kind") in ([args.kind] if args.kind else KINDS)]
    except TunerError as error:
        sys.exit(str(error))
    every: list[Seen] = []
    ranked: list[tuple[float, float]] = []
    for case in cases:
        if args.only not in case["id"]:
            continue
        variants = [seen(case, variant, args.calibration) for variant in case.get("variants") or [{}]]
        order = pairs(case, variants)
        every += variants
        if case.get("confidence") != "partial":
            ranked += [pair[2:] for pair in order]
        if args.json:
            continue
        print(f"{case['id']} [{case['kind']}, {case.get('confidence')}]")
        for item in variants:
            show(item)
        for better, worse, ratio, said in order:
            print(f"      {'ok   ' if said > 1 else 'WRONG'} {better} > {worse}: x{ratio:.2f} observed, x{said:.2f} predicted")
    scores = summary(every, ranked)
    print(json.dumps({"summary": scores, "variants": [asdict(item) for item in every]} if args.json else scores, indent=1))


if __name__ == "__main__":
    main()
