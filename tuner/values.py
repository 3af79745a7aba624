"""Single values of a question as people write them: counts, quantities, shares, prices, knobs; and what is wrong with several at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.plan_text import parse_knobs, split_knobs
from tuner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    T = TypeVar("T")

MOST_COUNTS = 64
LARGEST = 10_000_000
_COUNT = re.compile(r"(\d{1,3}(?:[,_]\d{3})+|\d{1,12})\s*([kKmM]?)")
_RANGE = re.compile(r"(\d{1,9})\s*\.\.\s*(\d{1,9})(?:\s*:\s*(\d{1,9}))?")


class Problems:
    """Collects what is wrong, so that a question's problems are reported together."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def trying(self, read: Callable[[], T]) -> T | None:
        """Return what `read` returns, or note its SpecError and return None."""
        try:
            return read()
        except SpecError as error:
            self.found.extend(error.problems)
        return None

    def add(self, name: str, value: object, rule: str, hint: str = "") -> None:
        """Note one problem with the part of the question called `name`."""
        self.found.extend(one_problem(name, "", value, rule, hint).problems)

    def raise_any(self) -> None:
        """Raise a SpecError when anything was noted."""
        if self.found:
            raise SpecError(self.found)


def close(word: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" when X is close to the word, else "": the known words stand in the rule."""
    hint = nearest(word[:40], known)
    return hint if hint.startswith("did you mean") else ""


def whole(value: Any, name: str, *, at_least: int = 1, most: int = 100_000_000, thousand: int = 0) -> int:
    """Return a whole number from 8192, "8192", "8,192" or, where `thousand` is given, "8k" (k times `thousand`)."""
    rule = f"must be a whole number from {at_least} to {most}" + (" (or like 8k)" if thousand else "")
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise one_problem(name, "", value, rule)
    match = _COUNT.fullmatch(str(int(value) if isinstance(value, float) else value).strip()[:40])
    if match is None or (match[2] and not thousand):
        raise one_problem(name, "", value, rule)
    number = int(re.sub("[,_]", "", match[1])) * (thousand ** {"": 0, "k": 1, "m": 2}[match[2].lower()] if match[2] else 1)
    if not at_least <= number <= most:
        raise one_problem(name, "", value, rule)
    return number


def quantity(value: Any, name: str, dimension: str) -> float:
    """Return a positive quantity in SI units from text with its unit; a Python number is SI already."""
    try:
        number = parse_quantity(value, dimension=dimension)
    except ValueError as error:
        raise one_problem(name, "", value, str(error)) from None
    if not 0 < number <= 1e30:
        raise one_problem(name, "", value, "must be positive and at most 1e30")
    return number


def fraction(value: Any, name: str) -> float:
    """Return a share above 0, at most 1, from "20%", "20 %", "0.2" or 0.2."""
    text = str(value).strip()
    percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%")) / (100.0 if percent else 1.0)
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 < number <= 1:
        hint = f"did you mean {number:g}%?" if not percent and 1 < number <= 100 else ""
        raise one_problem(name, "", value, "must be a probability above 0 and at most 1, like 20% or 0.2", hint)
    return number


def truth(value: Any, name: str) -> bool:
    """Return yes or no from true, false, or these words."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if str(value).strip().lower() not in words:
        raise one_problem(name, "", value, "must be true or false")
    return words[str(value).strip().lower()]


def money(value: Any, name: str) -> float:
    """Return a price from 2.5, "2.5" or "$2.50"."""
    try:
        number = float(str(value).strip().removeprefix("$").strip())
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 < number <= 1e6:
        raise one_problem(name, "", value, "must be a price of a GPU-hour, like 2.5")
    return number


def read_ramp_up(value: Any) -> dict[str, int]:
    """Return Megatron-LM's batch ramp-up from "32,32,48828125" (start, increment, samples) or a mapping of these."""
    names = ("start", "increment", "samples")
    if isinstance(value, dict):
        parts = [value.get(name) for name in names] if set(value) == set(names) else []
    else:
        parts = [part for part in re.split(r"[,\s]+", str(value).strip()) if part]
    if len(parts) != 3:
        raise one_problem(
            "ramp_up", "", value, "must be START,BY,SAMPLES: sequences at first, sequences added, sequences until the full batch"
        )
    return {name: whole(part, "ramp_up", most=2**31) for name, part in zip(names, parts, strict=True)}


def knobs(value: Any, name: str) -> dict[str, int]:
    """Return plan fields from "tp=8,pp=2", a list of such texts, or a mapping. A knob named twice is an error."""
    if isinstance(value, dict):
        return parse_knobs(value, name)
    pairs: dict[str, str] = {}
    for text in value if isinstance(value, (list, tuple)) else [value]:
        for key, part in split_knobs(str(text), name).items():
            if pairs.get(key, part) != part:
                raise one_problem(name, key, part, f"stands twice, first as {pairs[key]}")
            pairs[key] = part
    return parse_knobs(pairs, name)


def gpu_counts(value: Any, node: int = 8) -> tuple[int, ...]:
    """Return the counts of "1024", "256..1024" or "256..1024:64", whole nodes of `node` GPUs (or parts of one).

    Without a step: all whole nodes where these are at most MOST_COUNTS, else those of 1, 1.25, 1.5 and 1.75 times a power of two
    of nodes, and both ends.
    """
    match = _RANGE.fullmatch(str(value).strip()) if isinstance(value, str) else None
    if match is None:
        return (whole(value, "gpus", most=LARGEST),)
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 0)
    if not 1 <= first <= last <= LARGEST or (match[3] and step < 1):
        raise one_problem("gpus", "", value, "must be like 256..1024 or 256..1024:64, the smaller count first")
    if step:
        counts = list(range(first, last + 1, step)[: 10 * MOST_COUNTS + 1])
        if len(counts) > 10 * MOST_COUNTS:
            raise one_problem("gpus", "", value, f"gives more than {10 * MOST_COUNTS} counts", "take a larger step")
    elif last <= node:
        counts = [n for n in range(first, last + 1) if node % n == 0]
    else:
        counts = [node * n for n in _node_counts(-(-first // node), last // node)]
    if not counts or any(n > node and n % node for n in counts):
        low = max(first // node, 1) * node
        hint = f"like {low}..{max(last // node * node, low)}:{node}"
        raise one_problem("gpus", "", value, f"must give whole nodes of {node} GPUs", hint)
    return tuple(counts)


def _node_counts(first: int, last: int) -> list[int]:
    if last - first < MOST_COUNTS:
        return list(range(first, last + 1))
    scale = range(last.bit_length() - 2)
    shapes = {quarter * 2**i // 4 for i in scale for quarter in (16, 20, 24, 28)} | {1, 2, 3}
    return sorted({first, last} | {n for n in shapes if first <= n <= last})
