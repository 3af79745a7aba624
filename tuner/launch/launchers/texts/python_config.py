"""What one function of a Python configuration sets, read from its syntax tree and never run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem
from tuner.launch.launchers.tables.vocabulary import Told
from tuner.launch.launchers.texts.python_values import MISSING, literal, path_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def docstring(text: str) -> str:
    """Return a line of text as a Python docstring, whatever quotes and backslashes stand in it."""
    return '"""' + text.replace("\\", r"\\").replace('"', r"\"") + '"""'


@dataclass(slots=True, kw_only=True)
class Code:
    """What one function of a Python configuration sets. keys: {dotted attribute: Told}, the variable's own name left out, calls by their
    keywords; calls: {dotted attribute: name of what is called there}; bases: functions without arguments that the configuration starts
    from; registries: (module, first argument) of calls of model_registry; constants: names of literals; names: what other names stand for;
    returned: names that the function returns.
    """

    keys: dict[str, Told] = field(default_factory=dict)
    calls: dict[str, Told] = field(default_factory=dict)
    bases: list[Told] = field(default_factory=list)
    registries: list[tuple[str, Told]] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    names: dict[str, ast.expr] = field(default_factory=dict)
    returned: frozenset[str] = frozenset()


class Opaque:
    """An expression that is not a constant. text: its source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return the module's public functions that set something up: those with a return of a value."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {node.name: node for node in found if any(isinstance(line, ast.Return) and line.value for line in node.body)}


def from_function(tree: ast.Module, function: ast.FunctionDef, name: str) -> Code:
    """Return what the function sets, without running it. Raises SpecError for expressions that are nested too deep."""
    returned = (line.value for line in ast.walk(function) if isinstance(line, ast.Return))
    code = Code(constants=constants_of(tree), returned=frozenset(node.id for node in returned if isinstance(node, ast.Name)))
    modules = {
        alias.asname or alias.name: node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    try:
        for node in function.body:
            _statement(node, code, modules, name)
    except RecursionError:
        raise one_problem(f"{name}:{function.lineno}", function.name, None, "is nested too deep") from None
    return code


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """Return the literals that the module gives names to."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _constant(node.value, found)
            if not isinstance(value, Opaque):
                found[node.targets[0].id] = value
    return found


def _statement(node: ast.stmt, code: Code, modules: Mapping[str, str], name: str) -> None:
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        _expression(node.value, "", code, modules, name)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        _assigned(node.target, node.value, code, modules, name)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            _assigned(target, node.value, code, modules, name)


def _assigned(target: ast.expr, value: ast.expr, code: Code, modules: Mapping[str, str], name: str) -> None:
    path = _attributes(target)
    if path or (isinstance(target, ast.Name) and target.id in code.returned):
        _expression(value, path or "", code, modules, name)
    elif isinstance(target, ast.Name):
        constant = _constant(value, code.constants)
        if isinstance(constant, Opaque):
            code.names[target.id] = value
        else:
            code.constants[target.id] = constant


def _attributes(target: ast.expr) -> str | None:
    """Return "parallelism.tp" of config.parallelism.tp, "" of a plain name, None of anything else."""
    parts: list[str] = []
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join(reversed(parts)) if isinstance(target, ast.Name) else None


def _expression(value: ast.expr, path: str, code: Code, modules: Mapping[str, str], name: str) -> None:
    where = f"{name}:{value.lineno}"
    if isinstance(value, ast.Name) and isinstance(code.names.get(value.id), ast.expr):
        value = code.names[value.id]
    if not isinstance(value, ast.Call):
        if path:
            code.keys[path] = Told(value=_constant(value, code.constants), where=where)
        return
    called = ".".join(path_of(value.func)) or "?"
    if called == "model_registry":
        first = _constant(value.args[0], code.constants) if value.args else None
        code.registries.append((modules.get(called, ""), Told(value=first, where=where)))
    elif not path and not value.args and not value.keywords and "." not in called:
        code.bases.append(Told(value=called, where=where))
    elif path:
        code.calls[path] = Told(value=called, where=where)
    for keyword in value.keywords:
        if keyword.arg is not None:
            above = "model_registry" if called == "model_registry" else path
            _expression(keyword.value, f"{above}.{keyword.arg}" if above else keyword.arg, code, modules, name)


def _constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a literal, else its source."""
    value = literal(node, names)
    if value is not MISSING:
        return value
    try:
        return Opaque(ast.unparse(node)[:200])
    except RecursionError:
        return Opaque("...")
