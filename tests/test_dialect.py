"""A formula is written once for a plan and for columns of plans: no Python branch or cast on a plan's fields, and no function whose
last bit differs between a scalar and an array.

What counts as a column: a parameter called `plan` or annotated as Plan, Ints, Floats, Bools or another columnar type below, and
whatever is computed from one. A parameter called `row` is a single plan, for texts, and a function that says it returns a plain
float, int, bool or str is about a single plan.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.terminal import ROOT

COLUMNAR = {"Ints", "Floats", "Bools", "Plan", "Group", "Shard", "StageLayers", "StageTime", "Weights", "Traffic"}
CASTS = {"int", "float", "bool", "min", "max", "abs", "round", "sum", "any", "all", "sorted"}
INEXACT = {"exp", "log", "log2", "log10", "log1p", "expm1", "pow", "power", "float_power", "sqrt", "sin", "cos", "tanh"}
# These answer about single plans, for a person, or fit coefficients from measurements: no column passes through them.
SINGLE = {"explain.py", "effects.py"}
FOLDERS = {"fit"}
FILES = sorted(
    path for path in (ROOT / "tuner" / "cost_model").rglob("*.py") if path.name not in SINGLE and not FOLDERS & {*path.parts, path.stem}
)


def names_in(annotation: ast.expr | None) -> set[str]:
    if annotation is None:
        return set()
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def parameters(function: ast.FunctionDef | ast.Lambda) -> list[ast.arg]:
    of = function.args
    return [*of.posonlyargs, *of.args, *of.kwonlyargs]


class Checker(ast.NodeVisitor):
    """Follows columns through one function and lists what the dialect forbids."""

    def __init__(self, columns: set[str]) -> None:
        self.columns = set(columns)
        self.wrong: list[str] = []

    def is_column(self, node: ast.AST) -> bool:
        """Whether an expression holds a column: it reads one, other than by asking whether it is None or how long it is."""
        if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return False
        if isinstance(node, ast.Name):
            return node.id in self.columns
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "isinstance"):
            return False
        return any(self.is_column(child) for child in ast.iter_child_nodes(node))

    def say(self, node: ast.AST, what: str) -> None:
        self.wrong.append(f"line {getattr(node, 'lineno', '?')}: {what}")

    def learn(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self.learn(one, its)
            return
        if value is not None and self.is_column(value):
            self.columns |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.learn(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if names_in(node.annotation) & COLUMNAR and isinstance(node.target, ast.Name) and names_in(node.annotation) <= COLUMNAR:
            self.columns.add(node.target.id)
        self.learn(node.target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.is_column(node.value) or self.is_column(node.target):
            self.say(node, "augmented assignment may change an array in place")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if self.is_column(node.test):
            self.say(node, "if on a column")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if self.is_column(node.test):
            self.say(node, "while on a column")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if self.is_column(node.test):
            self.say(node, "conditional expression on a column")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if any(self.is_column(value) for value in node.values):
            self.say(node, "and/or on a column")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.Invert)) and self.is_column(node.operand):
            self.say(node, "not or ~ on a column")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Pow) and (self.is_column(node.left) or self.is_column(node.right)):
            self.say(node, "** on a column")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) > 1 and self.is_column(node):
            self.say(node, "chained comparison of columns")
        if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops) and self.is_column(node.left):
            self.say(node, "membership of a column")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if any(self.is_column(argument) for argument in arguments):
            if isinstance(node.func, ast.Name) and name in CASTS and not self._over_a_list(node):
                self.say(node, f"{name}() on a column")
            if name in INEXACT:
                self.say(node, f"{name} on a column")
        self.generic_visit(node)

    def _over_a_list(self, node: ast.Call) -> bool:
        """sum() of a Python list of columns adds them left to right, which is exact in the same way for both."""
        return isinstance(node.func, ast.Name) and node.func.id == "sum" and len(node.args) == 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.nested(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.nested(node)

    def nested(self, node: ast.FunctionDef | ast.Lambda) -> None:
        self.wrong += check(node, self.columns)


def check(function: ast.FunctionDef | ast.Lambda, outer: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    if isinstance(function, ast.FunctionDef) and names_in(function.returns) in ({"float"}, {"int"}, {"bool"}, {"str"}):
        return []
    given = parameters(function)
    single = {a.arg for a in given if a.arg == "row"}
    columns = {a.arg for a in given if a.arg == "plan" or names_in(a.annotation) & COLUMNAR}
    checker = Checker((set(outer) | columns) - single)
    body = function.body if isinstance(function.body, list) else [function.body]
    for statement in body:
        checker.visit(statement)
    return checker.wrong


def top_functions(tree: ast.AST) -> list[ast.FunctionDef | ast.Lambda]:
    """Return the functions and lambdas that are in no other function."""
    found: list[ast.FunctionDef | ast.Lambda] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            found.append(node)
        else:
            found += top_functions(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem if path.stem != "__init__" else path.parent.name)
def test_formulas_are_in_the_dialect(path: Path) -> None:
    wrong = [text for function in top_functions(ast.parse(path.read_text())) for text in check(function)]
    assert not wrong, f"{path.name}: " + "; ".join(wrong)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def f(job, plan):\n    if plan.tp > 1:\n        return 1", "if on a column"),
        ("def f(job, plan):\n    x = plan.tp * 2\n    return 1 if x else 0", "conditional expression"),
        ("def f(plan):\n    return plan.tp > 1 and plan.pp > 1", "and/or"),
        ("def f(plan):\n    return not plan.zero", "not or ~"),
        ("def f(n: Ints):\n    return max(n, 1)", "max()"),
        ("def f(n: Ints):\n    y = n + 1\n    return int(y)", "int()"),
        ("def f(n: Ints):\n    return np.sqrt(n)", "sqrt"),
        ("def f(n: Floats):\n    return n**2", "**"),
        ("def f(n: Floats):\n    n += 1\n    return n", "augmented"),
        ("def f(n: Ints):\n    return 1 < n < 3", "chained"),
        ("def f(n: Ints):\n    return n in (1, 2)", "membership"),
        ("r = Rule(holds=lambda job, plan: bool(plan.tp))", "bool()"),
        ("def f(plan):\n    def g():\n        while plan.tp:\n            pass", "while"),
    ],
)
def test_the_check_finds_what_it_is_for(code: str, what: str) -> None:
    wrong = [text for function in top_functions(ast.parse(code)) for text in check(function)]
    assert any(what in text for text in wrong), wrong


@pytest.mark.parametrize(
    "code",
    [
        "def f(job, plan):\n    return plan.tp if job.model.moe else 0",
        "def f(job, row):\n    return 'x' if row.tp > 1 else ''",
        "def f(plan, moe):\n    if moe is None:\n        return plan.tp\n    return 0",
        "def f(n: Ints):\n    return np.maximum(n, 1) * (n > 0)",
        "def f(n: Ints | None):\n    return 0 if n is None else n",
    ],
)
def test_the_check_lets_the_dialect_through(code: str) -> None:
    assert not [text for function in top_functions(ast.parse(code)) for text in check(function)]
