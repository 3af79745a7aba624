"""Settings of a Python file, read from its syntax tree and never run: keywords of calls, and assignments to attributes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem
from tuner.launch.launchers.texts.python_values import MISSING, literal, parse_python, path_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MODULES = ("torch", "F", "nn")
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
    tree = parse_python(text, where)
    try:
        return tuple(_said(tree, _constants(tree), text))
    except RecursionError:
        raise one_problem(where, "", None, "is not Python that can be read: nested too deeply") from None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return names that are assigned a literal once, wherever it is."""
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            counts[name] = counts.get(name, 0) + 1
            value = literal(node.value, {}, _MODULES)
            if value is not MISSING:
                found[name] = value
    return {name: value for name, value in found.items() if counts[name] == 1}


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
    value = literal(node, constants, _MODULES)
    if value is not MISSING:
        return Said(owner=owner, name=name, value=value, line=node.lineno)
    if isinstance(node, ast.Call) and (called := path_of(node.func)):
        return Said(owner=owner, name=name, value=".".join(called), line=node.lineno, missing=True)
    segment = ast.get_source_segment(text, node) or ""
    return Said(owner=owner, name=name, value=" ".join(segment.split())[:120], line=node.lineno, missing=True)
