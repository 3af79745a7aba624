"""Arithmetic of a shell over integers, without evaluating anything else."""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MATH: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def arithmetic(text: str, value_of: Callable[[str], str]) -> int | None:
    """Return the value of an expression of integers and variables, or None where it is none or a variable (value_of: its text) is not a
    whole number.
    """

    def value(found: re.Match[str]) -> str:
        known = value_of(found[1] or found[2] or found[3])
        return known if re.fullmatch(r"-?\d{1,15}", known) else "unknown"

    if len(text) > 300 or re.search(r"#|\+\+|--|\d_", text):  # 2#100, ++x: Python reads them as something else
        return None
    spelled = re.sub(r"\$\{(\w{1,100})\}|\$(\w{1,100})|\b([A-Za-z_]\w{0,100})\b", value, text.strip())
    try:
        return _integer(ast.parse(spelled, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None


def _integer(node: ast.expr) -> int:
    """Return the value of an expression as a shell computes it (division truncates). Raises ValueError for what it cannot hold."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _fits(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _MATH:
        return int(_MATH[type(node.ops[0])](_integer(node.left), _integer(node.comparators[0])))
    if isinstance(node, ast.BinOp):
        left, right = _integer(node.left), _integer(node.right)
        if type(node.op) in _MATH:
            return _fits(_MATH[type(node.op)](left, right))
        if isinstance(node.op, (ast.Div, ast.Mod)):
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if isinstance(node.op, ast.Div) else left - quotient * right
    raise ValueError


def _fits(value: int) -> int:
    if abs(value) >= 2**63:
        raise ValueError
    return value
