"""What is wrong with a plan whatever the parts are that nobody told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.answers import Broken
from tuner.checking.alike import CORE, with_nodes_of
from tuner.cost_model.rules import broken as broken_rules
from tuner.errors import SpecError
from tuner.job import Job
from tuner.load import load_spec
from tuner.model import Model, Moe
from tuner.plan_defaults import filled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.cluster import Cluster
    from tuner.launch.launchers.launcher import Found

_ROOMY = 720_720  # a number that every degree up to 16 divides


def certain(
    found: Found, framework: Any, model: Model | None, cluster: Cluster | None, values: Mapping[str, int], knobs: Mapping[str, int]
) -> tuple[Broken, ...]:
    """Return the error rules that a plan breaks for any value of what is not told: those that it breaks where each missing dimension is one
    that everything divides, and the GPUs are as many as the degrees want.
    """
    try:
        job = _roomy(found, framework, model, cluster, values, knobs)
        plan, _ = filled(job, knobs)
    except (SpecError, ValueError):
        return ()
    told = {"dp"} & set(knobs)
    ours = [(rule, text) for rule, text in broken_rules(job, plan) if rule.severity == "error" and not (rule.id == "batch" and told)]
    return tuple(Broken(rule=rule.id, severity="error", text=text, source=rule.source) for rule, text in ours)


def _roomy(
    found: Found, framework: Any, model: Model | None, cluster: Cluster | None, values: Mapping[str, int], knobs: Mapping[str, int]
) -> Job:
    degree = {name: max(int(knobs.get(name, 1)), 1) for name in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch")}
    whole_of = math.lcm(degree["tp"] * degree["pp"] * degree["cp"] * degree["dp"], degree["etp"] * degree["ep"] * degree["pp"])
    told = dict(found.model) if model is None else {}
    told.pop("preset", None)
    every = math.lcm(_ROOMY, *degree.values())
    layers = degree["pp"] * degree["vpp"] * max(2520 // (degree["pp"] * degree["vpp"]), 1)
    moe_told = told.get("moe") or {}
    experts = {"experts": every, "top_k": 1, "expert_ffn_hidden": every, **{k: v for k, v in moe_told.items() if v is not None}}
    dense = bool(told) and not moe_told and any(name in told for name in CORE)
    fields: dict[str, Any] = {
        "name": "told-in-part", "layers": layers, "hidden": every * 128, "ffn_hidden": every, "heads": every, "kv_heads": every,
        "head_dim": 128, "vocab": every, **{name: value for name, value in told.items() if value is not None},
    }  # fmt: skip
    if "heads" in told and "kv_heads" not in told:
        fields["kv_heads"] = told["heads"]
    if "kv_heads" in told and "heads" not in told:
        fields["heads"] = math.lcm(every, told["kv_heads"])
    fields["moe"] = None if dense or (degree["ep"] == 1 and not moe_told) else Moe(**experts)
    architecture = model or load_spec(Model, fields, "model", units=False)
    gpus = found.gpus or (cluster.gpus if cluster else whole_of)
    base = presets.cluster("dgx-h100") if cluster is None else cluster
    node = next(n for n in (8, 4, 2, 1) if gpus % n == 0)
    if cluster is None:
        base = (with_nodes_of(base, node) or base) if node < 8 and gpus > 8 else base
        base = base if base.gpus == gpus else presets.with_gpus(base, gpus, "gpus")
    batch = values.get("global_batch") or degree["micro_batch"] * degree["pp"] * max(
        gpus // (degree["tp"] * degree["pp"] * degree["cp"]), 1
    )
    return Job(
        model=architecture,
        cluster=base,
        framework=framework,
        seq_len=values.get("seq_len") or min(2 * every, 100_000_000),
        global_batch=min(batch, 100_000_000),
        attention=framework.defaults.attention.value,
    )
