"""Parallel degrees, the batch, and which layers each pipeline stage holds, as settings of Megatron-Core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Unknown
from tuner.launch.launchers.megatron.layout import counted, layout_of, parse_layout
from tuner.launch.launchers.tables.settings import Aspect, Meaning
from tuner.plan import CP_KINDS
from tuner.plan_text import layout_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.errors import Problem
    from tuner.launch.launchers.tables.settings import Ask, Kind, Values

KINDS: Mapping[str, Kind] = {
    "tensor_model_parallel_size": "count",
    "pipeline_model_parallel_size": "count",
    "context_parallel_size": "count",
    "expert_model_parallel_size": "count",
    "expert_tensor_parallel_size": "count",
    "cp_comm_type": "words",
    "sequence_parallel": "flag",
    "micro_batch_size": "count",
    "global_batch_size": "count",
    "rampup_batch_size": "words",
    "num_virtual_stages_per_pipeline_rank": "count",
    "virtual_pipeline_model_parallel_size": "count",
    "num_layers_per_virtual_pipeline_stage": "count",
    "pipeline_model_parallel_layout": "text",
    "account_for_embedding_in_pipeline_split": "flag",
    "account_for_loss_in_pipeline_split": "flag",
    "decoder_first_pipeline_num_layers": "count",
    "decoder_last_pipeline_num_layers": "count",
}

DEGREES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
)

_KINDS_OF_CP = {**CP_KINDS, "allgather": CP_KINDS["all_gather"]}

_VPP = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")


def _put_degrees(ask: Ask) -> dict[str, Any]:
    job, plan = ask.job, ask.plan
    found: dict[str, Any] = {name: int(getattr(plan, knob)) for knob, name in DEGREES}
    found["sequence_parallel"] = bool(plan.sequence_parallel)
    if plan.cp > 1:
        found["cp_comm_type"] = [next(name for name, code in CP_KINDS.items() if code == plan.cp_kind)]
    if job.model.moe:
        found |= {"expert_model_parallel_size": int(plan.ep), "expert_tensor_parallel_size": int(plan.etp)}
    return found


def _take_degrees(values: Values) -> Meaning:
    named = (*DEGREES, ("ep", "expert_model_parallel_size"), ("etp", "expert_tensor_parallel_size"))
    plan: dict[str, Any] = {knob: values.get(name) for knob, name in named if values.get(name) is not None}
    problems = [values.problem(name, "must be at least 1") for knob, name in named if plan.get(knob) == 0]
    plan = {knob: value for knob, value in plan.items() if value}
    unknown: list[Unknown] = []
    tp = plan.get("tp", 1 if values.otherwise else 0)  # 0: what a recipe sets is not known
    if values.get("sequence_parallel") is not None:
        plan["sequence_parallel"] = values.get("sequence_parallel") and tp != 1
    if values.has("sequence_parallel") and values.get("sequence_parallel") and tp == 1 and "etp" not in plan:
        why = {"sequence_parallel": "off: at tensor_model_parallel_size 1 it is switched off with a warning"}
    else:
        why = {}
    kinds = set(values.get("cp_comm_type") or [])
    if len(kinds) == 1 and (kind := kinds.copy().pop()) in _KINDS_OF_CP:
        if plan.get("cp", 1) > 1:
            plan["cp_kind"] = next(name for name, code in CP_KINDS.items() if code == _KINDS_OF_CP[kind])
    elif kinds:
        unknown.append(values.unknown("cp_comm_type"))
    problems += _world(values, plan)
    return Meaning(plan=plan, problems=tuple(problems), unknown=tuple(unknown), assumed=why)


def _world(values: Values, plan: Mapping[str, Any]) -> list[Problem]:
    """Return what does not fit the number of GPUs (arguments.py, parallel_state.py)."""
    tp, pp, cp, ep = (plan.get(knob, 1) for knob in ("tp", "pp", "cp", "ep"))
    dense = {"tensor_model": tp, "pipeline_model": pp, "context": cp}
    experts = {"expert_tensor": plan.get("etp", tp), "expert_model": ep, "pipeline_model": pp}
    found = []
    for degrees in (dense, experts) if ep > 1 else (dense,):
        told = [name for kind in degrees if values.has(name := f"{kind}_parallel_size")]
        needed = math.prod(degrees.values())
        if values.gpus and told and values.gpus % needed:
            product = " x ".join(f"{kind}_parallel_size {degree}" for kind, degree in degrees.items())
            rule = f"{product} = {needed} must divide the {values.gpus} GPUs that are launched"
            found.append(values.problem(told[-1], rule, "where the number of nodes comes from the environment, say it"))
    return found


def _put_batch(ask: Ask) -> dict[str, Any]:
    job, plan = ask.job, ask.plan
    found: dict[str, Any] = {"micro_batch_size": int(plan.micro_batch), "global_batch_size": job.global_batch}
    if job.ramp_up:
        found["rampup_batch_size"] = [str(n) for n in (job.ramp_up.start, job.ramp_up.increment, job.ramp_up.samples)]
    return found


def _take_batch(values: Values) -> Meaning:
    plan, job, unknown = {}, {}, []
    if values.get("micro_batch_size"):
        plan["micro_batch"] = values.get("micro_batch_size")
    if values.get("global_batch_size"):
        job["global_batch"] = values.get("global_batch_size")
    elif values.get("micro_batch_size") and values.gpus:
        ranks = [values.get(name) or 1 for _, name in DEGREES]
        dp = values.gpus // (ranks[0] * ranks[1] * ranks[2])
        if dp:
            job["global_batch"] = values.get("micro_batch_size") * dp
            why = f"micro_batch_size x data-parallel degree {dp}, as nothing tells global_batch_size"
            return Meaning(plan=plan, job=job, assumed={"global_batch": why})
    words = values.get("rampup_batch_size")
    if words and len(words) == 1:
        words = words[0].strip("[]() ").replace(",", " ").split()
    if words and len(words) == 3 and all(word.isdigit() for word in words):
        job["ramp_up"] = dict(zip(("start", "increment", "samples"), map(int, words), strict=True))
    elif words:
        unknown.append(values.unknown("rampup_batch_size"))
    model = math.prod(values.get(name) or 1 for _, name in DEGREES)
    each = (values.get("micro_batch_size") or 1) * (values.gpus or 0) // model
    problems = []
    if values.gpus and values.gpus % model == 0 and values.has("global_batch_size") and (values.get("global_batch_size") or 0) % each:
        rule = f"must be a multiple of micro_batch_size x the data-parallel degree {values.gpus // model} = {each}"
        problems.append(values.problem("global_batch_size", rule))
    return Meaning(plan=plan, job=job, unknown=tuple(unknown), problems=tuple(problems))


# -- pipeline


def _put_pipeline(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    first, last, vpp = int(plan.embedding_layers), int(plan.loss_layers), int(plan.vpp)
    named = "virtual_pipeline_model_parallel_size" if "vpp" in dialect.traits else "num_virtual_stages_per_pipeline_rank"
    found: dict[str, Any] = {named: vpp if vpp > 1 else None}
    if int(plan.pp) == 1:
        return found
    if max(first, last) > 1:
        layout = layout_of(job.model.layers, job.model.mtp_layers, int(plan.pp) * vpp, first, last)
        kept = found if "vpp" in dialect.traits else {}  # the command line takes vpp from the layout, and refuses both
        return {**kept, "pipeline_model_parallel_layout": layout}
    flags = {"account_for_embedding_in_pipeline_split": bool(first), "account_for_loss_in_pipeline_split": bool(last)}
    return found | flags


def take_pipeline(values: Values) -> Meaning:
    """Return the chunks of each stage and for how many layers embedding and loss stand."""
    told = [name for name in _VPP if values.has(name) and values.get(name)]
    if len(told) > 1:
        return Meaning(problems=(values.problem(told[1], f"cannot stand together with {values.told[told[0]].spelled}"),))
    if told == ["pipeline_model_parallel_layout"]:
        return _take_layout(values)
    first, last = (bool(values.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    plan: dict[str, Any] = {}
    if values.has("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        plan["pipeline_layout"] = layout_text(int(first), int(last))
    vpp = values.get("num_virtual_stages_per_pipeline_rank") or values.get("virtual_pipeline_model_parallel_size")
    if vpp or values.has("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"):
        plan["vpp"] = vpp or 1
    pp, layers = values.get("pipeline_model_parallel_size") or 1, values.get("num_layers")
    meaning = Meaning(plan=plan)
    if told == ["num_layers_per_virtual_pipeline_stage"]:
        each, units = values.get(told[0]), (layers or 0) + first + last
        if not layers:
            return Meaning(plan=plan, unknown=(values.unknown(told[0]),))
        if units % (pp * each):
            rule = f"x pipeline_model_parallel_size {pp} must divide the {units} layers"
            return Meaning(plan=plan, problems=(values.problem(told[0], rule),))
        plan["vpp"] = units // pp // each
    uneven = values.get("decoder_first_pipeline_num_layers") or values.get("decoder_last_pipeline_num_layers")
    if layers and not uneven and pp > 1 and (layers + first + last) % (pp * plan.get("vpp", 1)):
        rule = f"x {plan.get('vpp', 1)} chunks of each stage must divide the {layers + first + last} layers"
        return Meaning(plan=plan, problems=(values.problem("pipeline_model_parallel_size", rule),))
    return _with_uneven(values, meaning, pp, layers)


def _with_uneven(values: Values, meaning: Meaning, pp: int, layers: int | None) -> Meaning:
    """Return the meaning with layers of the first and last stage that are told as counts."""
    names = [f"decoder_{which}_pipeline_num_layers" for which in ("first", "last")]
    if not any(values.get(name) for name in names) or pp == 1:
        return meaning
    first, last = (values.get(name) for name in names)
    middle = pp - sum(count is not None for count in (first, last))
    rest = (layers or 0) - (first or 0) - (last or 0)
    each = rest // middle if middle > 0 and rest > 0 and rest % middle == 0 else 0
    if layers and (rest < 0 or (rest % middle if middle else rest)):
        told = next(name for name in names if values.has(name))
        rule = f"leaves {rest} of {layers} layers, which {middle} other stages must hold in equal parts"
        return Meaning(plan=meaning.plan, problems=(values.problem(told, rule),))
    missing = [each - count if count is not None else 0 for count in (first, last)]
    if not layers or meaning.plan.get("vpp", 1) > 1 or not each or min(missing) < 0:
        return Meaning(plan=meaning.plan, unknown=tuple(values.unknown(name) for name in names if values.has(name)))
    return Meaning(plan={**meaning.plan, "pipeline_layout": layout_text(*missing)})


def _take_layout(values: Values) -> Meaning:
    name = "pipeline_model_parallel_layout"
    try:
        chunks = parse_layout(values.get(name))
    except ValueError as error:
        raise SpecError([values.problem(name, str(error))]) from None
    pp, layers, problems = values.get("pipeline_model_parallel_size") or 1, values.get("num_layers"), []
    if len(chunks) % pp:
        problems.append(values.problem(name, f"its {len(chunks)} stages must be a multiple of pipeline_model_parallel_size {pp}"))
    total = sum(chunk.count("t") for chunk in chunks)
    if layers and total != layers:
        problems.append(values.problem(name, f"deals {total} layers, and num_layers is {layers}"))
    if problems:
        return Meaning(problems=tuple(problems))
    vpp = len(chunks) // pp
    told = values.get("virtual_pipeline_model_parallel_size")
    if told and told != vpp:
        rule = f"deals {vpp} chunks to a stage, and virtual_pipeline_model_parallel_size is {told}"
        problems.append(values.problem(name, rule))
    counts = counted(chunks)
    if counts is None:
        return Meaning(plan={"vpp": vpp}, unknown=(values.unknown(name),), problems=tuple(problems))
    return Meaning(plan={"vpp": vpp, "pipeline_layout": layout_text(*counts)}, problems=tuple(problems))


RANKS = Aspect(
    group="parallel",
    keys=(
        *(name for _, name in DEGREES),
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "cp_comm_type",
    ),
    put=_put_degrees,
    take=_take_degrees,
)

PIPELINE = Aspect(
    group="parallel",
    keys=(
        *_VPP,
        "virtual_pipeline_model_parallel_size",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ),
    put=_put_pipeline,
    take=take_pipeline,
)

BATCH = Aspect(
    group="training",
    keys=("micro_batch_size", "global_batch_size", "rampup_batch_size"),
    put=_put_batch,
    take=_take_batch,
)
