"""What a rule is: one mask for the grid and one text for a person, from the same predicate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tuner.arrays import Bools, Ints, ceil_div
from tuner.job import RuleFamily
from tuner.plan import FULL, RECOMPUTE_MODULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.job import Job
    from tuner.plan import Plan

Severity = Literal["error", "duplicate", "warning"]
ALWAYS = "always"
MEGATRON, TORCHTITAN, DEEPSPEED, NANOTRON = "megatron", "torchtitan", "deepspeed", "nanotron"
FSDP, ZERO_BUBBLE, ACCELERATE = "fsdp", "zero-bubble", "accelerate"
FAMILIES: tuple[str, ...] = get_args(RuleFamily)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a plan.

    families: who enforces it ("always": every framework); severity: error (the framework refuses or cannot run the plan),
    duplicate (it runs, and costs what another spelling costs that the search counts already), warning (it runs, and is a
    mistake); source: where it was read; knobs: plan fields that a person would turn; holds: mask over columns, in the dialect;
    says: what is wrong with a single plan (`row`), with its numbers.
    """

    id: str
    families: tuple[str, ...]
    severity: Severity = "error"
    source: str
    knobs: tuple[str, ...] = ()
    holds: Callable[[Job, Plan], Bools]
    says: Callable[[Job, Plan], str]


def implies(if_: Bools, then: Bools) -> Bools:
    """Return the mask of `if_` implies `then`, for bools and bool arrays."""
    return if_ <= then


def divides(divisor: Ints, number: Ints) -> Bools:
    """Return the mask of number % divisor == 0."""
    return number % divisor == 0


def replicas(job: Job, plan: Plan) -> Ints:
    """Data-parallel degree, at least 1 (a mesh larger than the cluster breaks another rule)."""
    dp = plan.dp(job.gpus)
    return dp + (dp < 1)


def expert_replicas(job: Job, plan: Plan) -> Ints:
    """Data-parallel degree of the experts, at least 1."""
    return plan.edp(job.gpus)


def units(job: Job, plan: Plan) -> Ints:
    """What is dealt to stages: layers, and the embedding and the loss as the layers they count for."""
    return job.model.layers + plan.embedding_layers + plan.loss_layers


def stage_units(job: Job, plan: Plan) -> Ints:
    """Units of the largest stage."""
    return ceil_div(units(job, plan), plan.pp)


def chunk_units(job: Job, plan: Plan) -> Ints:
    """Units of the largest model chunk (a stage has vpp of them)."""
    return ceil_div(units(job, plan), plan.pp * plan.vpp)


def full(plan: Plan) -> Bools:
    """Where whole layers are recomputed."""
    return (plan.recompute & FULL) > 0


def module(plan: Plan, *names: str) -> Bools:
    """Where at least one of these modules is recomputed."""
    bits = sum(RECOMPUTE_MODULES[name] for name in names)
    return (plan.recompute & bits) > 0


def unit_text(job: Job, row: Plan) -> str:
    """Return "layers = 80" or "layers + embedding + loss = 80+1+1" of a single plan."""
    names = ["layers", *(name for name, n in (("embedding", row.embedding_layers), ("loss", row.loss_layers)) if n)]
    counts = [job.model.layers, *(n for n in (row.embedding_layers, row.loss_layers) if n)]
    return " + ".join(names) + " = " + "+".join(str(n) for n in counts)


def sane(plan: Plan) -> Plan:
    """Return the plan with degrees below 1 raised to 1, so that no rule divides by them."""
    degrees = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")

    def raised(value: Ints) -> Ints:
        return value * (value >= 1) + (value < 1)

    return dataclasses.replace(plan, **{name: raised(getattr(plan, name)) for name in degrees})
