"""The plan that a row ran: what it states, what its notes say, and the framework's default for the rest, each noted."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from tuner.accuracy.fields import Row, Unscorable
from tuner.accuracy.sources import fact_of
from tuner.plan import ALL_LAYERS, FULL, RECOMPUTE_MODULES, SCHEDULES, Plan
from tuner.plan_text import default_recompute, layout_text, parse_layout, recompute_text

if TYPE_CHECKING:
    from tuner.job import Framework
    from tuner.model import Model

_SCHEDULES = {**SCHEDULES, "1f1b-i": 0, "interleaved": 0, "interleaved-1f1b": 0, "afab": SCHEDULES["gpipe"]}
_MODES = {"none": "none", "selective": "selective", "full": "full"}
_OFFLOADS = {"optimizer": 1, "activation": 2}


def plan_of(row: Row, model: Model, framework: Framework, gpus: int) -> Plan:
    """Return the plan of a row. Raises Unscorable when a degree is not stated or more ranks are asked for than there are."""
    given = row.config
    fields: dict[str, int] = {key: given.need(key) for key in ("tp", "pp", "micro_batch")}
    fields["cp"] = _or_assumed(row, "cp", given.degree("cp"), 1)
    fields["vpp"] = _vpp(row, framework, fields["pp"])
    if (ranks := fields["tp"] * fields["pp"] * fields["cp"]) > gpus:
        raise Unscorable(f"tp x pp x cp = {ranks} exceeds cluster.gpus = {gpus}")
    data_parallel = gpus // ranks > 1
    fields |= _expert(row, model, framework, fields["tp"], gpus // fields["pp"])
    fields |= _recompute(row, model, framework, fields["pp"]) | _sharding(row, framework, data_parallel)
    fields["sequence_parallel"] = _sequence_parallel(row, framework, fields["tp"])
    fields["schedule"] = _schedule(row)
    fields |= _layout(row, model, framework, fields["pp"], fields["vpp"])
    fields |= _overlaps(row, model, framework, fields, data_parallel)
    return Plan(**fields)


def _or_assumed(row: Row, key: str, value: int | None, default: int) -> int:
    if value is None:
        row.assume(f"{key}={default}")
        return default
    return value


def _vpp(row: Row, framework: Framework, pp: int) -> int:
    stated = row.config.degree("vpp")
    if stated is None and (said := re.search(r"recipe prints vp (\d{1,3})", (row.top.text("notes") or "").lower())):
        row.assume(f"vpp={said[1]} (as a later release prints the same recipe)")
        return int(said[1])
    if stated is None and pp > 1:
        row.assume(f"vpp={framework.defaults.vpp.value}")
    return stated or framework.defaults.vpp.value


def _expert(row: Row, model: Model, framework: Framework, tp: int, stage_ranks: int) -> dict[str, int]:
    ep, etp = row.config.degree("ep"), row.config.degree("etp")
    if model.moe is None:
        return {"ep": 1, "etp": 1}
    if etp is None:
        # Megatron-LM: --expert-tensor-parallel-size defaults to tp; where ep leaves no room for it, the recipe set 1
        etp = tp if "megatron" in framework.rules and tp * (ep or 1) <= stage_ranks else 1
        if tp > 1:
            row.assume(f"etp={etp}")
    return {"ep": _or_assumed(row, "ep", ep, 1), "etp": etp}


def _recompute(row: Row, model: Model, framework: Framework, pp: int) -> dict[str, int]:
    mode, modules = row.config.word("recompute", _MODES), row.config.data.get("recompute_modules")
    layers = row.config.count("recompute_layers")
    if mode == "none":
        return {"recompute": 0}
    if mode == "full":
        return {"recompute": FULL, "recompute_layers": layers or ALL_LAYERS}
    if modules is not None:
        return {"recompute": _modules(row, modules)}
    if mode == "selective":
        return _selective(row, model, framework, pp)
    fields = default_recompute(framework.defaults.recompute.value, model)
    row.assume(f"recompute={recompute_text(fields['recompute'], fields['recompute_layers'])}{row.config.unknown('recompute')}")
    return fields


def _modules(row: Row, modules: Any) -> int:
    if not isinstance(modules, list) or not all(isinstance(m, str) for m in modules):
        raise Unscorable("config.recompute_modules must be a list of names")
    for unknown in sorted(set(modules) - set(RECOMPUTE_MODULES)):
        row.assume(f"recompute without {unknown[:40]} (not a module of the model)")
    return sum(RECOMPUTE_MODULES[m] for m in set(modules) & set(RECOMPUTE_MODULES))


def _selective(row: Row, model: Model, framework: Framework, pp: int) -> dict[str, int]:
    """Return what "selective" means: core_attn (Megatron-LM), or TorchTitan's every other layer or every other matrix product."""
    if "selective-layer" in row.notes:
        layers = math.ceil(model.layers / pp / 2)
        row.assume(f"recompute=full:{layers} (every other layer)")
        return {"recompute": FULL, "recompute_layers": layers}
    if "torchtitan" in framework.rules:
        fields = default_recompute(framework.defaults.recompute.value, model)
        row.assume(f"recompute={recompute_text(fields['recompute'])} (nearest to saving every other matrix product)")
        return fields
    return {"recompute": RECOMPUTE_MODULES["core_attn"]}


def _sharding(row: Row, framework: Framework, data_parallel: bool) -> dict[str, int]:
    given = row.config
    zero, sharded, fsdp = given.count("zero_stage", least=0), given.flag("distributed_optimizer"), given.flag("fsdp")
    group = given.count("fsdp_shard_group")
    if zero is not None and zero > 3:
        raise Unscorable(f"config.zero_stage = {zero}: must be 0 to 3")
    if fsdp or "megatron fsdp" in row.notes:
        zero = 2 if "shard_grad_op" in row.notes else 3
    elif zero is None and sharded is not None:
        zero = int(sharded)
    elif zero is None:
        default = framework.defaults.zero.value
        said = fact_of(row).zero
        zero = said if said is not None else default if fsdp is None else min(default, 1)
        if data_parallel:
            row.assume(f"zero={zero}")
    stated = re.search(r"zero1 (?:sharding )?group size (\d{1,6})", row.notes)
    shard = int(stated[1]) if stated else (group or 0)
    return {"zero": zero, "shard_group": shard if shard > 1 else 0}


def _sequence_parallel(row: Row, framework: Framework, tp: int) -> int:
    stated = row.config.flag("sequence_parallel")
    if stated is None and tp > 1:
        row.assume(f"sequence_parallel={str(framework.defaults.sequence_parallel.value).lower()}")
    value = framework.defaults.sequence_parallel.value if stated is None else stated
    return int(value and tp > 1)


def _schedule(row: Row) -> int:
    known = row.config.word("pipeline_schedule", _SCHEDULES)
    if known is None and (unknown := row.config.unknown("pipeline_schedule")):
        row.assume(f"schedule=1f1b{unknown}")
    return SCHEDULES["1f1b"] if known is None else known


def _layout(row: Row, model: Model, framework: Framework, pp: int, vpp: int) -> dict[str, int]:
    """Return how the layers were dealt: as a pp_layout note says, as the framework balances, or so that uneven counts come out even."""
    even = {"embedding_layers": 0, "loss_layers": 0}
    if pp == 1:
        return even
    if stated := re.search(r"pp_layout=(\S+)", row.config.text("notes") or ""):
        return _from_layout(stated[1])
    balance = framework.pipeline_balance.value if framework.pipeline_balance else "layers"
    layer = _layer_cost(model)
    logits = model.hidden * model.vocab / layer
    if balance == "cost":
        fields = {"embedding_layers": 0, "loss_layers": int(logits) + 1}  # the layer that crosses a share goes before it
    elif balance == "parameters":
        fields = {"embedding_layers": round(logits), "loss_layers": round(logits)}
    else:
        fields = parse_layout(framework.defaults.pipeline_layout.value)
        if fields == even and "megatron" in framework.rules:
            missing = -model.layers % (pp * vpp)
            fields = {"embedding_layers": missing // 2, "loss_layers": missing - missing // 2} if missing <= 4 else even
    if fields != even:
        row.assume(f"pipeline_layout={layout_text(**fields)}")
    return fields


def _layer_cost(model: Model) -> float:
    """Return the weights of a layer as nanotron counts its cost: 4 heads head_dim hidden + 3 ffn hidden (get_block_compute_costs)."""
    return 4.0 * model.heads * model.head_dim * model.hidden + (3.0 if model.gated_mlp else 2.0) * model.ffn_hidden * model.hidden


def _from_layout(text: str) -> dict[str, int]:
    """Return the embedding and loss layers of a Megatron-LM layout like Et*4|(t*4|)*14tmL (t a decoder layer, | between chunks)."""
    for pattern in (r"\(([^()]{1,40})\)\*(\d{1,3})", r"(t)\*(\d{1,3})"):
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text[:2000])
    counts = [chunk.count("t") for chunk in text.split("|")]
    if len(counts) < 2 or set(text) - set("EtmL|"):
        raise Unscorable(f"pp_layout {text[:60]!r} is not understood")
    most = max(counts)
    return {"embedding_layers": most - counts[0], "loss_layers": most - counts[-1]}


def _overlaps(row: Row, model: Model, framework: Framework, fields: dict[str, int], data_parallel: bool) -> dict[str, int]:
    notes, defaults = row.notes, framework.defaults
    tp = _said(notes, on=("tp comm overlap (userbuffers) on", "async tp", "tp comm overlap, pp"), off=("userbuffers) off", "vanilla tp"))
    dp = _said(notes, on=("dp overlap",), off=("not overlapped",))
    ep = _said(notes, on=("all-to-all overlap on", "ep overlap on"), off=("ep overlap off", "graphs off"))
    used = {"tp_overlap": fields["tp"] > 1, "dp_overlap": data_parallel, "ep_overlap": model.moe is not None and fields["ep"] > 1}
    default = {"tp_overlap": defaults.tp_overlap, "dp_overlap": defaults.dp_overlap, "ep_overlap": defaults.ep_overlap}
    found = {}
    for knob, said in (("tp_overlap", tp), ("dp_overlap", dp), ("ep_overlap", ep)):
        found[knob] = int(used[knob] and (default[knob].value if said is None else said))
        if said is None and used[knob]:
            row.assume(f"{knob}={str(bool(found[knob])).lower()}")
    found["cuda_graphs"] = _graphs(notes, int(defaults.cuda_graphs.value))
    found["offload"] = _offload(row)
    return found


def _said(notes: str, *, on: tuple[str, ...], off: tuple[str, ...]) -> bool | None:
    if any(words in notes for words in off):
        return False
    return True if any(words in notes for words in on) else None


def _graphs(notes: str, default: int) -> int:
    """Return 1 when CUDA graphs cover whole layers: full_iteration, or a scope that holds the attention."""
    kind = re.search(r"cuda_graph=(\w+)(?: scope=(\[[^\]]*\]|\w+))?", notes)
    if kind is None:
        return 1 if "te-scoped graphs attn" in notes or "cuda graphs for attention" in notes else default
    scope = kind[2] or "full"
    return int(kind[1] != "none" and ("full" in kind[1] + scope or "attn" in scope))


def _offload(row: Row) -> int:
    total = 0
    for what, code in _OFFLOADS.items():
        stated = re.search(rf"{what}(?: state)? cpu offload[^;]*?(\d+)", row.notes)
        if stated and int(stated[1]) > 0:
            row.assume(f"offload={what} (of {stated[0].strip()[:60]})")
            total += code
    return total
