"""Limits that a person sets on a space: "pp<=16", "tp*cp<=8", "recompute!=full". Parsed, never evaluated as code."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.errors import Problem, SpecError, nearest
from tuner.plan_text import SPELLINGS, parse_knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tuner.arrays import Bools, Ints
    from tuner.job import Job
    from tuner.plan import Plan

# Knobs that count something, and what is derived from a plan and a job.
NUMBERS = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch", "zero", "shard_group", "fallback_tp", "sequence_parallel")
DERIVED = ("dp", "edp", "microbatches", "gpus")
WORDS = ("recompute", "schedule", "offload", "cp_kind", "pipeline_layout", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")

_COMPARE: Mapping[str, Callable[[Ints, Ints], Bools]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_LIMIT = re.compile(r"\s*([A-Za-z_0-9*\s]{1,200}?)\s*(<=|>=|==|!=|<|>|=)\s*([A-Za-z_0-9*+:=\s]{1,200}?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A comparison of two products of knobs and numbers, or of one knob with a word (`fields`: the plan fields it sets)."""

    text: str
    left: tuple[str | int, ...]
    compare: str
    right: tuple[str | int, ...] = ()
    fields: tuple[tuple[str, int], ...] = ()

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knobs it depends on, derived ones too: a fallback that is none is tp."""
        named = tuple(factor for factor in (*self.left, *self.right) if isinstance(factor, str))
        return (*named, "tp") if "fallback_tp" in named else named

    def holds(self, job: Job, plan: Plan) -> Bools:
        """Return the mask of the plans inside the limit."""
        if self.fields:
            same: Bools = True
            for name, value in self.fields:
                same = same & (getattr(plan, name) == value)
            return same if self.compare in ("==", "=") else same == 0
        return _COMPARE[self.compare](_product(job, plan, self.left), _product(job, plan, self.right))


def _product(job: Job, plan: Plan, factors: tuple[str | int, ...]) -> Ints:
    product: Ints = 1
    for factor in factors:
        product = product * (factor if isinstance(factor, int) else _value(job, plan, factor))
    return product


def _value(job: Job, plan: Plan, name: str) -> Ints:
    derived: dict[str, Callable[[], Ints]] = {
        "dp": lambda: plan.dp(job.gpus),
        "edp": lambda: plan.edp(job.gpus),
        "microbatches": lambda: plan.microbatches(job.gpus, job.global_batch),
        "gpus": lambda: job.gpus,
        "fallback_tp": lambda: plan.fallback,
    }
    return derived[name]() if name in derived else getattr(plan, name)


def parse_limit(text: str, where: str = "--limit") -> Limit:
    """Return the limit that `text` spells. Raises SpecError."""
    match = _LIMIT.fullmatch(text) if len(text) <= 400 else None
    if match is None:
        raise _problem(where, text, "must compare knobs and numbers, like pp<=16, tp*cp<=8 or recompute!=full")
    left, compare, right = match[1], match[2], match[3]
    name = SPELLINGS.get(left, left)
    if name in WORDS:
        if compare not in ("==", "=", "!="):
            raise _problem(where, text, f"{name} is a word: compare it with == or !=")
        return Limit(text=text, left=(name,), compare=compare, fields=tuple(parse_knobs({name: right}, where).items()))
    return Limit(text=text, left=_factors(left, text, where), compare=compare, right=_factors(right, text, where))


def _factors(text: str, limit: str, where: str) -> tuple[str | int, ...]:
    factors: list[str | int] = []
    for part in text.split("*"):
        word = part.strip()
        name = SPELLINGS.get(word, word)
        if re.fullmatch(r"\d{1,12}", word):
            factors.append(int(word))
        elif name in (*NUMBERS, *DERIVED):
            factors.append(name)
        else:
            raise _problem(where, limit, f"{word or 'nothing'!r} is no number and no knob that counts", nearest(name, (*NUMBERS, *DERIVED)))
    return tuple(factors)


def parse_limits(texts: Iterable[str], where: str = "--limit") -> tuple[Limit, ...]:
    """Return all limits. Raises SpecError listing every problem."""
    limits: list[Limit] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            limits.append(parse_limit(text, where))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return tuple(limits)


def _problem(where: str, text: str, rule: str, hint: str = "") -> SpecError:
    return SpecError([Problem(where=where, path="", value=repr(text)[:80], rule=rule, hint=hint)])
