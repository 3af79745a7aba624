"""Plans as people write and read them: "tp=8,pp=2,recompute=full:12", JSON records, and back."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError, nearest
from tuner.plan import ALL_LAYERS, CP_KINDS, FULL, OFFLOADS, RECOMPUTE_MODULES, SCHEDULES, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.model import Model

LARGEST = 10_000_000
_LAYOUT = re.compile(r"(?:embedding=(\d{1,3}))?(?:\+?loss=(\d{1,3}))?")


def recompute_text(recompute: int, layers: int = ALL_LAYERS) -> str:
    """Return "none", "core_attn+mlp", "full" or "full:12" (12 layers of each stage)."""
    if recompute & FULL:
        return "full" if layers >= ALL_LAYERS else f"full:{layers}"
    return "+".join(name for name, bit in RECOMPUTE_MODULES.items() if recompute & bit) or "none"


def parse_recompute(text: str) -> dict[str, int]:
    """Return the plan fields of a recompute text; "selective" is core_attn. Raises ValueError."""
    name, _, count = text.partition(":")
    if name == "full":
        return {"recompute": FULL, "recompute_layers": _integer(count, at_least=1) if count else ALL_LAYERS}
    if count:
        raise ValueError("only full takes a layer count, like full:12")
    if name == "none":
        return {"recompute": 0, "recompute_layers": ALL_LAYERS}
    mask = 0
    for module in name.split("+"):
        module = "core_attn" if module == "selective" else module
        if module not in RECOMPUTE_MODULES:
            known = ["none", "full", "selective", *RECOMPUTE_MODULES]
            raise ValueError(f"must be none, selective, full or modules joined by + ({nearest(module[:40], known)})")
        mask |= RECOMPUTE_MODULES[module]
    return {"recompute": mask, "recompute_layers": ALL_LAYERS}


def default_recompute(text: str, model: Model) -> dict[str, int]:
    """Return the plan fields of a framework's default: what it does to an MLP it does to the experts that stand in its place.

    torchtitan activation_checkpoint.py (selective): of the matrix products a layer saves every other torch.mm, and recomputes grouped ones.
    """
    fields, moe = parse_recompute(text), model.moe
    mlp = RECOMPUTE_MODULES["mlp"]
    if moe is None or fields["recompute"] & FULL or not fields["recompute"] & mlp:
        return fields
    kept = fields["recompute"] if moe.first_dense_layers or moe.every > 1 else fields["recompute"] & ~mlp
    return fields | {"recompute": kept | RECOMPUTE_MODULES["moe"]}


def layout_text(embedding_layers: int, loss_layers: int) -> str:
    """Return "even" or, say, "embedding=1+loss=1": what counts as layers when layers are dealt to stages."""
    parts = [f"{name}={n}" for name, n in (("embedding", embedding_layers), ("loss", loss_layers)) if n]
    return "+".join(parts) or "even"


def parse_layout(text: str) -> dict[str, int]:
    """Return the plan fields of a pipeline layout text. Raises ValueError."""
    match = _LAYOUT.fullmatch(text)
    if text != "even" and (match is None or not text):
        raise ValueError('must be "even" or like "embedding=1+loss=1"')
    embedding, loss = (match[1], match[2]) if match and text != "even" else (None, None)
    return {"embedding_layers": int(embedding or 0), "loss_layers": int(loss or 0)}


def _integer(text: object, *, at_least: int) -> int:
    if isinstance(text, bool) or not re.fullmatch(r"\+?\d{1,12}", str(text).strip()):
        raise ValueError(f"must be a whole number of at least {at_least}")
    value = int(str(text))
    if not at_least <= value <= LARGEST:
        raise ValueError(f"must be from {at_least} to {LARGEST}")
    return value


def _flag(text: object) -> int:
    known = {"true": 1, "false": 0, "on": 1, "off": 0, "yes": 1, "no": 0, "1": 1, "0": 0}
    if str(text).lower() not in known:
        raise ValueError("must be true or false")
    return known[str(text).lower()]


def _choice(codes: Mapping[str, int]) -> Callable[[object], int]:
    def parse(text: object) -> int:
        if str(text) not in codes:
            raise ValueError(f"must be one of {', '.join(codes)}")
        return codes[str(text)]

    return parse


def _zero(text: object) -> int:
    value = _integer(text, at_least=0)
    if value > 3:
        raise ValueError("must be 0, 1, 2 or 3")
    return value


DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")
FLAGS = ("sequence_parallel", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")
SPELLINGS = {"mb": "micro_batch", "mbs": "micro_batch", "sp": "sequence_parallel", "zero_stage": "zero"}
_PARSERS: dict[str, Callable[[Any], dict[str, int]]] = (
    {name: (lambda v, name=name: {name: _integer(v, at_least=1)}) for name in DEGREES}
    | {name: (lambda v, name=name: {name: _flag(v)}) for name in FLAGS}
    | {
        "zero": lambda v: {"zero": _zero(v)},
        "shard_group": lambda v: {"shard_group": _integer(v, at_least=0)},
        "fallback_tp": lambda v: {"fallback_tp": _integer(v, at_least=0)},
        "schedule": lambda v: {"schedule": _choice(SCHEDULES)(v)},
        "offload": lambda v: {"offload": _choice(OFFLOADS)(v)},
        "cp_kind": lambda v: {"cp_kind": _choice(CP_KINDS)(v)},
        "recompute": lambda v: parse_recompute(str(v)),
        "pipeline_layout": lambda v: parse_layout(str(v)),
        "dp": lambda v: {"dp": _integer(v, at_least=1)},
    }
)
KNOBS = tuple(_PARSERS)


def parse_knobs(items: Mapping[str, object], where: str) -> dict[str, int]:
    """Return plan fields from {"tp": 8, "recompute": "full", ...}; "dp", being derived, is returned too when given.

    Raises SpecError listing every problem (`where` names the file or option).
    """
    fields: dict[str, int] = {}
    problems = []
    for key, value in items.items():
        name = SPELLINGS.get(str(key), str(key))
        if name not in _PARSERS:
            problems.append(Problem(where=where, path=str(key)[:80], value="", rule="is no knob of a plan", hint=nearest(name[:80], KNOBS)))
            continue
        try:
            fields |= _PARSERS[name](value)
        except ValueError as error:
            problems.append(Problem(where=where, path=name, value=repr(value)[:80], rule=str(error)))
    if problems:
        raise SpecError(problems)
    if len(fields) > 1 and fields.get("fallback_tp") == fields.get("tp", 1):  # tp itself: no fallback; alone it is an axis's value
        fields["fallback_tp"] = 0
    return fields


def split_knobs(text: str, where: str) -> dict[str, str]:
    """Return {"tp": "8", "pp": "2"} from "tp=8,pp=2", short names written out. A knob that stands twice raises SpecError."""
    pairs = [part for part in re.split(r"[,\s]+", text.strip()) if part]
    bad = [part for part in pairs if "=" not in part]
    if bad or not pairs:
        raise SpecError([Problem(where=where, path="", value=repr(p)[:80], rule="must be like tp=8,pp=2") for p in bad or [text]])
    found: dict[str, str] = {}
    problems = []
    for part in pairs:
        key, _, value = part.partition("=")
        name = SPELLINGS.get(key, key)
        if found.setdefault(name, value) != value:
            rule = f"stands twice, first as {found[name][:40]}"
            problems.append(Problem(where=where, path=name[:80], value=repr(value)[:80], rule=rule))
    if problems:
        raise SpecError(problems)
    return found


def idle_record(gpus: int) -> dict[str, Any]:
    """Return the knobs of a plan that uses none of them, each as it may be held for any plan (a fallback of none, not of tp = 1)."""
    return plan_record(Plan(), gpus) | {"fallback_tp": 0}


def plan_record(plan: Plan, gpus: int) -> dict[str, Any]:
    """Return a single plan as a JSON-ready record with words for codes and the derived dp and edp."""
    enums = (("schedule", SCHEDULES), ("offload", OFFLOADS), ("cp_kind", CP_KINDS))
    spelled = {name: {code: text for text, code in codes.items()} for name, codes in enums}
    record: dict[str, Any] = {}
    for field in dataclasses.fields(plan):
        value = plan.fallback if field.name == "fallback_tp" else getattr(plan, field.name)
        if field.name in spelled:
            record[field.name] = spelled[field.name][int(value)]
        elif field.name in FLAGS:
            record[field.name] = bool(value)
        elif field.name not in ("recompute", "recompute_layers", "embedding_layers", "loss_layers", "idle_tp"):
            record[field.name] = int(value)
    record["recompute"] = recompute_text(int(plan.recompute), int(plan.recompute_layers))
    record["pipeline_layout"] = layout_text(int(plan.embedding_layers), int(plan.loss_layers))
    record["dp"] = int(plan.dp(gpus))
    record["edp"] = int(plan.edp(gpus))
    if plan.idle_tp:
        record["idle_tp"] = int(plan.idle_tp)
    return record
