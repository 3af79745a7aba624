"""Python texts as syntax trees, and the values of their literals. Nothing is run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_CHARACTERS = 1_000_000
_LONGEST_LINE = 100_000
_LONGEST_LIST = 100_000
_LARGEST = 10**15
_MOST_DEPTH = 50
MISSING = object()


def parse_python(text: str, where: str) -> ast.Module:
    """Return the tree of a Python text. Raises SpecError (file, line) for one that is too long, or no Python."""
    if len(text) > _MOST_CHARACTERS or any(len(line) > _LONGEST_LINE for line in text.splitlines()):
        raise one_problem(where, "", None, f"is longer than {_MOST_CHARACTERS} characters, or has a line of {_LONGEST_LINE}")
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise one_problem(f"{where}:{error.lineno or 1}", "", None, f"is not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise one_problem(where, "", None, "is not Python that can be read: nested too deeply, or binary") from None


def path_of(node: ast.expr) -> tuple[str, ...]:
    """Return the names of a.b.c, without subscripts and calls; () for anything else."""
    names: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif isinstance(node, (ast.Subscript, ast.Call)):
            node = node.value if isinstance(node, ast.Subscript) else node.func
        elif isinstance(node, ast.Name):
            return tuple(reversed([*names, node.id]))
        else:
            return tuple(reversed(names))


def literal(node: ast.expr, names: Mapping[str, Any], modules: tuple[str, ...] = (), depth: int = 0) -> Any:
    """Return the value of a literal, of a name known to be one, of a sum, product, ... of whole numbers, or of lists; else MISSING. A name
    under one of the modules is its text ("torch.bfloat16").
    """
    if depth > _MOST_DEPTH:
        return MISSING

    def value(inner: ast.expr) -> Any:
        return literal(inner, names, modules, depth + 1)

    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (bool, int, float, str))):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, MISSING)
    if isinstance(node, ast.Attribute):
        path = path_of(node)
        return ".".join(path) if path and path[0] in modules else MISSING
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [value(item) for item in node.elts]
        return MISSING if any(item is MISSING for item in items) else items
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
        found = {key.value: value(item) for key, item in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}
        return MISSING if any(item is MISSING for item in found.values()) else found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = value(node.operand)
        return -number if isinstance(number, (int, float)) and not isinstance(number, bool) else MISSING
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add, ast.Sub, ast.FloorDiv)):
        return _operation(node.op, value(node.left), value(node.right))
    return MISSING


def _operation(operator: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(left, list):
        if isinstance(operator, ast.Add) and isinstance(right, list):
            return left + right if len(left) + len(right) < _LONGEST_LIST else MISSING
        if isinstance(operator, ast.Mult) and type(right) is int and len(left) * right < _LONGEST_LIST:
            return left * right
        return MISSING
    if type(left) is not int or type(right) is not int or max(abs(left), abs(right)) > _LARGEST:
        return MISSING
    if isinstance(operator, ast.FloorDiv):
        return left // right if right else MISSING
    return left * right if isinstance(operator, ast.Mult) else left + right if isinstance(operator, ast.Add) else left - right
