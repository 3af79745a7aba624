"""Settings of a Python file, read from its syntax tree and never run: keywords of calls, and assignments to attributes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_CHARACTERS = 1_000_000
_LONGEST_LINE = 100_000
_WRAPPERS = ("Config", "Partial", "partial")  # nemo_run's, functools': the first argument is what is called


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One setting. owner: the class or function that is called, or the path that is assigned to without its last name; missing: the value
    is not a literal (then it is the source text).
    """

    owner: tuple[str, ...]
    name: str
    value: Any
    line: int
    missing: bool = False


def read_python(text: str, where: str) -> tuple[Said, ...]:
    """Return what a Python file sets, in order. Raises SpecError (file, line) for text that is no Python."""
    if len(text) > _MOST_CHARACTERS or any(len(line) > _LONGEST_LINE for line in text.splitlines()):
        raise one_problem(where, "", None, f"is longer than {_MOST_CHARACTERS} characters, or has a line of {_LONGEST_LINE}")
    try:
        tree = ast.parse(text)
        constants = _constants(tree)
        return tuple(_said(tree, constants, text))
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


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return names that are assigned a literal once, wherever it is."""
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            counts[name] = counts.get(name, 0) + 1
            value = _literal(node.value, {})
            if value is not _MISSING:
                found[name] = value
    return {name: value for name, value in found.items() if counts[name] == 1}


_MISSING = object()


def _literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of a literal, a name of one, a dotted name (as its text) or a sum or product of whole numbers."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (bool, int, float, str))):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id, _MISSING)
    if isinstance(node, ast.Attribute):
        path = path_of(node)
        return ".".join(path) if path and path[0] in ("torch", "F", "nn") else _MISSING
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_literal(item, constants) for item in node.elts]
        return _MISSING if _MISSING in items else items
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand, constants)
        return -value if isinstance(value, (int, float)) and not isinstance(value, bool) else _MISSING
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add, ast.Sub, ast.FloorDiv)):
        return _operation(node, _literal(node.left, constants), _literal(node.right, constants))
    return _MISSING


def _operation(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, (ast.Mult, ast.Add)) and isinstance(left, list):
        if isinstance(node.op, ast.Add) and isinstance(right, list):
            return left + right if len(left) + len(right) < 100_000 else _MISSING
        if isinstance(node.op, ast.Mult) and type(right) is int and len(left) * right < 100_000:
            return left * right
        return _MISSING
    if type(left) is not int or type(right) is not int or max(abs(left), abs(right)) > 10**12:
        return _MISSING
    if isinstance(node.op, ast.FloorDiv):
        return left // right if right else _MISSING
    return left * right if isinstance(node.op, ast.Mult) else left + right if isinstance(node.op, ast.Add) else left - right


def _said(tree: ast.Module, constants: Mapping[str, Any], text: str) -> Iterator[Said]:
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, (ast.Call, ast.Assign))), key=lambda n: (n.lineno, n.col_offset)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                path = path_of(target)
                if isinstance(target, ast.Attribute) and len(path) > 1:
                    yield _one(path[:-1], path[-1], node.value, constants, text)
            continue
        owner = path_of(node.func)
        if owner and owner[-1] in _WRAPPERS and node.args:
            owner = path_of(node.args[0])
        if not owner:
            continue
        yield Said(owner=owner, name="", value=None, line=node.lineno)
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield _one(owner, keyword.arg, keyword.value, constants, text)


def _one(owner: tuple[str, ...], name: str, node: ast.expr, constants: Mapping[str, Any], text: str) -> Said:
    value = _literal(node, constants)
    if value is not _MISSING:
        return Said(owner=owner, name=name, value=value, line=node.lineno)
    if isinstance(node, ast.Call) and (called := path_of(node.func)):
        return Said(owner=owner, name=name, value=".".join(called), line=node.lineno, missing=True)
    segment = ast.get_source_segment(text, node) or ""
    return Said(owner=owner, name=name, value=" ".join(segment.split())[:120], line=node.lineno, missing=True)
