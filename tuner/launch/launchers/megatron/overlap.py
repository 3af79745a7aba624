"""Overlapped collectives and CUDA graphs, as settings of Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import SpecError
from tuner.launch.launchers.tables.settings import Aspect, Meaning, refusal
from tuner.plan import FULL, RECOMPUTE_MODULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.launch.launchers.tables.settings import Ask, Dialect, Kind, Values

KINDS: Mapping[str, Kind] = {
    "tp_comm_overlap": "flag",
    "overlap_moe_expert_parallel_comm": "flag",
    "cuda_graph_impl": "text",
    "cuda_graph_scope": "words",
    "cuda_graph_modules": "words",
    "enable_cuda_graph": "flag",
    "external_cuda_graph": "flag",
    "check_for_nan_in_loss_and_grad": "flag",
}


def _put_overlap(ask: Ask) -> dict[str, Any]:
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    found: dict[str, Any] = {"tp_comm_overlap": bool(plan.tp_overlap)}
    if job.model.moe:
        found["overlap_moe_expert_parallel_comm"] = bool(plan.ep_overlap)
    if plan.ep_overlap and job.precision == "fp32":
        raise refusal(dialect, "ep_overlap", 1, "it needs 16-bit weights, and the precision is fp32")
    return found


def _take_overlap(values: Values) -> Meaning:
    named = (("tp_overlap", "tp_comm_overlap"), ("ep_overlap", "overlap_moe_expert_parallel_comm"))
    plan = {knob: values.get(name) for knob, name in named if values.has(name) and values.get(name) is not None}
    problems = []
    tp = values.get("tensor_model_parallel_size") or 1
    if plan.get("tp_overlap") and not values.get("sequence_parallel"):
        problems.append(values.problem("tp_comm_overlap", "needs sequence_parallel"))
    if plan.get("tp_overlap") and tp == 1:
        plan["tp_overlap"] = False
    return Meaning(plan=plan, problems=tuple(problems))


def _put_graphs(ask: Ask) -> dict[str, Any]:
    """CUDA graphs of a whole iteration, or of what a mixture of experts allows: its dispatch waits for counts on the host."""
    job, plan, dialect = ask.job, ask.plan, ask.dialect
    if not plan.cuda_graphs:
        return {}
    full, moe = bool(int(plan.recompute) & FULL), job.model.moe is not None
    if moe and full:
        raise refusal(dialect, "cuda_graphs", 1, "full recompute needs a graph of the whole iteration, which dropless experts do not allow")
    if "graphs-flag" in dialect.traits:
        if plan.recompute:
            raise refusal(dialect, "cuda_graphs", 1, "its release captures no layer that is recomputed", "recompute = none")
        if moe:
            raise refusal(dialect, "cuda_graphs", 1, "what its release captures of a mixture of experts was not checked")
        return {"enable_cuda_graph": True}
    if moe:
        recomputed = bool(int(plan.recompute) & RECOMPUTE_MODULES["moe"])
        parts = ["attn"] if recomputed else ["attn", "moe_router", "moe_preprocess"]
        return {"cuda_graph_impl": "transformer_engine", _modules(dialect): parts}
    if "scope" in dialect.traits:
        return {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"], "check_for_nan_in_loss_and_grad": False}
    return {"cuda_graph_impl": "full_iteration", "check_for_nan_in_loss_and_grad": False}


def _modules(dialect: Dialect) -> str:
    return "cuda_graph_scope" if "scope" in dialect.traits else "cuda_graph_modules"


def _take_graphs(values: Values) -> Meaning:
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    if not values.has(*names):
        idle = [values.unknown(name) for name in ("cuda_graph_scope", "cuda_graph_modules") if values.has(name) and values.get(name)]
        return Meaning(unknown=tuple(idle))
    impl = values.get("cuda_graph_impl") or "none"
    if impl not in ("none", "local", "transformer_engine", "full_iteration"):
        raise SpecError([values.problem("cuda_graph_impl", "must be none, local, transformer_engine or full_iteration")])
    flags = [name for name in names[1:] if values.get(name)]
    problems = []
    if flags and impl != "none":
        problems.append(values.problem(flags[0], "cannot stand together with cuda_graph_impl"))
    scopes = values.get("cuda_graph_scope") or values.get("cuda_graph_modules") or []
    whole = impl == "full_iteration" or any("full_iteration" in scope for scope in scopes)
    if values.get("recompute_granularity") == "full" and (impl != "none" or flags) and not whole:
        problems.append(
            values.problem((["cuda_graph_impl"] if impl != "none" else flags)[0], "full recompute needs a full-iteration graph")
        )
    return Meaning(plan={"cuda_graphs": bool(flags) or impl != "none"}, problems=tuple(problems))


OVERLAP = Aspect(
    group="parallel",
    keys=("tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
    put=_put_overlap,
    take=_take_overlap,
)

GRAPHS = Aspect(
    group="memory",
    keys=(
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "enable_cuda_graph",
        "external_cuda_graph",
        "check_for_nan_in_loss_and_grad",
    ),
    put=_put_graphs,
    take=_take_graphs,
)
