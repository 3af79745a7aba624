"""The keys that files give, with their lines: YAML, TOML, command lines in scripts, and Python configurations (by `ast` alone).

Nothing that is read is executed. Each reader returns {dotted key: Told}; of a key that stands twice, the last counts.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.errors import one_problem
from tuner.launch.launchers.tables.vocabulary import Told
from tuner.load import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KEY = re.compile(r"( *)(?:- )?([\"']?)([A-Za-z_][\w.-]{0,120})\2\s{0,9}:(?:\s|$)")
_TABLE = re.compile(r"\s{0,40}\[\s{0,9}([A-Za-z_][\w.\s\"'-]{0,160})\]")
_ENTRY = re.compile(r"\s{0,40}([A-Za-z_][\w.-]{0,120})\s{0,40}=")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w{0,80})=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w{0,80})|\{([A-Za-z_]\w{0,80})(?::?-([^{}$]{0,200}))?\})")
LONGEST_LINE = 20_000  # of a script; the longest command line known has a tenth of it
LONGEST_SCRIPT = 400_000
VERSION_LINE = "# framework-version:"
_MOST_DEPTH = 50


def flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; lists are values."""
    if isinstance(value, dict) and (value or not above):
        for key, inner in value.items():
            yield from flat(inner, f"{above}.{key}" if above else str(key))
    else:
        yield above, value


def from_yaml(text: str, name: str) -> dict[str, Told]:
    """Return the keys of a YAML text. Raises SpecError."""
    data = parse_yaml(text, name)
    if not isinstance(data, dict):
        raise one_problem(name, "", None, "must be a mapping")
    lines = _yaml_lines(text)
    return {key: Told(value=value, where=f"{name}:{lines.get(key, 1)}") for key, value in flat(data)}


def _yaml_lines(text: str) -> dict[str, int]:
    """Return the line of each key of block style, by its dotted path."""
    found: dict[str, int] = {}
    above: list[tuple[int, str]] = []
    for count, line in enumerate(text.splitlines(), 1):
        match = _KEY.match(line[:400])
        if match is None:
            continue
        indent = len(match[1])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match[3]))
        found[".".join(key for _, key in above)] = count
    return found


def from_toml(text: str, name: str) -> dict[str, Told]:
    """Return the keys of a TOML text. Raises SpecError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        raise one_problem(f"{name}:{at[1]}" if at else name, "", None, f"is not TOML: {str(error)[:200]}") from None
    except RecursionError:
        raise one_problem(name, "", None, "is nested too deep") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise one_problem(name, "", None, f"is not TOML: {str(error)[:200]}") from None
    lines: dict[str, int] = {}
    section = ""
    for count, line in enumerate(text.splitlines(), 1):
        if table := _TABLE.match(line[:400]):
            section = table[1].strip() + "."
        elif entry := _ENTRY.match(line[:400]):
            lines[section + entry[1]] = count
    try:
        return {key: Told(value=value, where=f"{name}:{lines.get(key, 1)}") for key, value in flat(data)}
    except RecursionError:
        raise one_problem(name, "", None, "is nested too deep") from None


def toml_text(document: Mapping[str, Any]) -> str:
    """Return {dotted key: value} as TOML, a table a section. Strings are TOML basic strings, whose escapes are JSON's."""
    sections: dict[str, list[str]] = {}
    for path, value in document.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {_toml(value)}")
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(slots=True, kw_only=True)
class Script:
    """A launch script's command lines. words: (word, "file:line"), variables filled in where the script gives them a value; variables:
    what it assigns, {name: (value, where)}; a default as in ${NNODES:-2} counts as the value; version: of a written script's comment.
    """

    words: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)
    version: str = ""

    def flags(self, known: frozenset[str] = frozenset()) -> dict[str, Told]:
        """Return the long options: --name value, --name=value, or --name alone (True). known: options of one dash or without a section
        that are to be returned as well; others are those with a point in their name, as configurations are overridden.
        """
        found: dict[str, Told] = {}
        for index, (word, where) in enumerate(self.words):
            if not word.startswith("--"):
                continue
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if "." not in name and name not in known:
                continue
            following = self.words[index + 1][0] if index + 1 < len(self.words) else "--"
            if equals:
                found[name] = Told(value=value, where=where)
            elif following.startswith("--") or (following.startswith("-") and not re.fullmatch(r"-\d+", following)):
                found[name] = Told(value=True, where=where)
            else:
                found[name] = Told(value=following, where=where)
        return found

    def pairs(self) -> dict[str, Told]:
        """Return the words of the form key=value that follow a command, as Hydra's and MaxText's overrides."""
        found: dict[str, Told] = {}
        for word, where in self.words:
            key, equals, value = word.partition("=")
            if equals and re.fullmatch(r"[a-z][a-z0-9_]{0,120}", key):
                found[key] = Told(value=value, where=where)
        return found

    def integer(self, names: tuple[str, ...], known: frozenset[str]) -> int | None:
        """Return the first of these options (or variables) that is a whole number, else None."""
        flags = self.flags(known)
        for name in names:
            value = flags[name].value if name in flags else self.variables.get(name, ("", ""))[0]
            if re.fullmatch(r"[1-9]\d{0,7}", str(value)):
                return int(str(value))
        return None


def from_script(text: str, name: str) -> Script:
    """Return the command lines of a shell script. Comments and here-documents are skipped; a line that cannot be split into words is
    taken apart at spaces. Raises SpecError for a line that is too long to be one.
    """
    if len(text) > LONGEST_SCRIPT:
        raise one_problem(name, "", None, f"has {len(text)} characters; a launch script has at most {LONGEST_SCRIPT}")
    script = Script()
    end = ""
    joined, first = "", 0
    for count, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE:
            raise one_problem(f"{name}:{count}", "", None, f"has {len(line)} characters; a line of a script has at most {LONGEST_LINE}")
        if end:
            end = "" if line.strip() == end else end
            continue
        if not joined and line.lstrip().startswith("#"):
            if line.startswith(VERSION_LINE):
                script.version = line.removeprefix(VERSION_LINE).strip()[:20]
            continue
        first = first if joined else count
        joined += line
        if line.rstrip().endswith("\\") and len(joined) <= LONGEST_LINE:
            joined = joined.rstrip()[:-1] + f"\n\0{count + 1}\0"
            continue
        if match := re.search(r"<<-?\s*[\"']?(\w{1,40})[\"']?", line):
            end = match[1]
        _add(script, joined, name, first)
        joined = ""
    if joined:
        _add(script, joined, name, first)
    return script


_BEFORE = frozenset({"export", "env", "exec", "time", "declare", "local", "readonly"})
_BREAKS = frozenset("();&|<>")


def _add(script: Script, line: str, name: str, first: int) -> None:
    """Add a logical line's words; a physical line inside it begins with its number between two NULs. NAME=value before a command is a
    variable, behind it a word.
    """
    at, running = first, False
    for piece in line.split("\n"):
        if piece.startswith("\0"):
            _, digits, piece = piece.split("\0", 2)
            at = int(digits)
        where = f"{name}:{at}"
        for word in _words(piece):
            match = _ASSIGNED.fullmatch(word)
            if match and not running:
                script.variables[match[1]] = (_filled(match[2], script), where)
                continue
            running = (running or word not in _BEFORE) and not set(word) <= _BREAKS
            filled = _filled(word, script)
            if "$" in word and re.search(r"\s", filled):
                script.words.extend((part, where) for part in filled.split())
            else:
                script.words.append((filled, where))


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();&|<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return list(lexer)
    except ValueError:
        return line.split()


def _filled(word: str, script: Script) -> str:
    """Return the word with the variables that the script assigned, or their defaults."""

    def value(match: re.Match[str]) -> str:
        known = script.variables.get(match[1] or match[2])
        return known[0] if known else match[3] if match[3] is not None else match[0]

    return _VARIABLE.sub(value, word)[:LONGEST_LINE]


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


def parse_python(text: str, name: str) -> ast.Module:
    """Return the tree of a Python text. Raises SpecError."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise one_problem(f"{name}:{error.lineno or 1}", "", None, f"is not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise one_problem(name, "", None, f"is not Python: {str(error)[:100] or 'nested too deep'}") from None


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
    called = _called(value.func)
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


def _called(function: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    return ".".join([function.id if isinstance(function, ast.Name) else "?", *reversed(parts)])


def _constant(node: ast.expr, names: Mapping[str, Any], depth: int = 0) -> Any:
    """Return the value of a literal, of a name known to be one, or of products, sums and differences of whole numbers; else Opaque."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if depth < _MOST_DEPTH and isinstance(node, (ast.List, ast.Tuple)):
        items = [_constant(item, names, depth + 1) for item in node.elts]
        if not any(isinstance(item, Opaque) for item in items):
            return items
    if depth < _MOST_DEPTH and isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        pairs = [(_constant(k, names, depth + 1), _constant(v, names, depth + 1)) for k, v in zip(node.keys, node.values, strict=True) if k]
        if all(isinstance(k, str) and not isinstance(v, Opaque) for k, v in pairs):
            return dict(pairs)
    if depth < _MOST_DEPTH and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand, names, depth + 1)
        if isinstance(value, (int, float)):
            return -value
    if depth < _MOST_DEPTH and isinstance(node, ast.BinOp):
        return _arithmetic(node, names, depth)
    try:
        return Opaque(ast.unparse(node)[:200])
    except RecursionError:
        return Opaque("...")


def _arithmetic(node: ast.BinOp, names: Mapping[str, Any], depth: int) -> Any:
    left, right = _constant(node.left, names, depth + 1), _constant(node.right, names, depth + 1)
    plain = all(isinstance(side, int) and not isinstance(side, bool) and abs(side) < 10**18 for side in (left, right))
    if plain and isinstance(node.op, ast.Mult):
        return left * right
    if plain and isinstance(node.op, ast.Add):
        return left + right
    if plain and isinstance(node.op, ast.Sub):
        return left - right
    if plain and isinstance(node.op, ast.FloorDiv) and right:
        return left // right
    return Opaque(f"{left} ? {right}"[:200])
