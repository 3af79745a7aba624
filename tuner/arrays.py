"""Columns, and the leaves of an estimate.

A formula of the cost model is written once and evaluated over columns: a column is a Python number or a NumPy array that
broadcasts with the other columns of the same plan (an open grid gives axis i the shape (1, .., n_i, .., 1)).
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, TypeAlias

# NumPy's typing has no name for "an int, or an int64 array broadcastable with its siblings"; these two say it to a reader.
Ints: TypeAlias = Any
Floats: TypeAlias = Any
Bools: TypeAlias = Any


def ceil_div(a: Ints, b: Ints) -> Ints:
    """Return a / b rounded up, for ints and int arrays alike."""
    return -(-a // b)


def term(unit: str, what: str, ref: str) -> Any:
    """Declare a leaf of an estimate: its unit ("s" or "B"), what it is in words, and where its formula comes from (0 unless set)."""
    return dataclasses.field(default=0.0, metadata={"unit": unit, "what": what, "ref": ref})


@cache
def leaf_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass that were declared with `term`, in order."""
    return tuple(f.name for f in dataclasses.fields(kind) if "ref" in f.metadata)


def leaves(of: Any) -> dict[str, Any]:
    """Return {name: value} of the leaves of `of`, in order."""
    kind: Any = type(of)
    return {name: getattr(of, name) for name in leaf_names(kind)}


def total(of: Any) -> Floats:
    """Return the sum of the leaves of `of`, left to right (the order is part of the result's last bit)."""
    kind: Any = type(of)
    result: Floats = 0.0
    for name in leaf_names(kind):
        result = result + getattr(of, name)
    return result
