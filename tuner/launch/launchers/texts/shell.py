"""Launch scripts read without running them: what their variables, arrays and arithmetic come to, and each command with its words.

Variables of the environment count as not set, so that ${NAME:-8} is 8. What a script does not say (a variable that is assigned nowhere, an
argument, the output of a command, a branch whose condition is not known) stays unresolved and is told with its line.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.launch.launchers.texts.shell_commands import PREFIXES, called, changes, plain
from tuner.launch.launchers.texts.shell_names import Names, Unresolved, Word
from tuner.launch.launchers.texts.shell_words import Part, tokens
from tuner.launch.launchers.texts.slurm_headers import count_of, gres_of, headers_of, slurm_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.launch.launchers.texts.shell_words import Token

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w{0,200})(\+?)=")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_CLOSES: Mapping[str, tuple[str, ...]] = {"fi": ("if",), "done": ("while", "until", "for"), "esac": ("case",)}
_TESTS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script says. commands: those that run (or may run) in order; variables: as they stand at the end, those
    that are set for a command alone too; arrays: likewise; headers:
    options of #SBATCH lines by their long name; unresolved: what is not known, each name once.
    """

    where: str
    commands: tuple[tuple[Word, ...], ...]
    variables: Mapping[str, Word]
    arrays: Mapping[str, tuple[Word, ...]]
    headers: Mapping[str, Word]
    unresolved: tuple[Unresolved, ...]

    @property
    def nodes(self) -> int | None:
        """Nodes that the #SBATCH lines ask for."""
        return count_of(self.headers.get("--nodes"))

    @property
    def gpus_per_node(self) -> int | None:
        """Accelerators of each node that the #SBATCH lines ask for."""
        return count_of(self.headers.get("--gpus-per-node")) or gres_of(self.headers.get("--gres"))


def read_script(text: str, where: str) -> Script:
    """Return what a shell script says. Raises SpecError (file, line) for text that cannot be taken apart."""
    headers = dict(headers_of(text))
    reader = _Reader(Names(where, slurm_variables(headers)))
    reader.run(list(tokens(text, where)))
    return Script(
        where=where,
        commands=tuple(reader.commands),
        variables={**reader.handed, **reader.names.variables},
        arrays={name: tuple(words) for name, words in reader.names.arrays.items()},
        headers=headers,
        unresolved=tuple(reader.names.unresolved.values()),
    )


@dataclass(slots=True)
class _Frame:
    """A block that is open. active: whether its commands run (None: not known); done: whether an earlier branch ran."""

    kind: str
    active: bool | None
    outer: bool | None
    done: bool | None = False
    testing: bool = False
    subject: Word | None = None
    pattern: bool = False
    before: tuple[dict[str, Word], dict[str, list[Word]], dict[str, Unresolved]] | None = None  # of a subshell: what holds behind it


@dataclass(slots=True)
class _Reader:
    """Goes through a script once. result: whether the last command succeeded, as far as known; negated: whether ! turns it; called: names
    that are called as commands; body: whether the body of a function that begins runs (None: none begins); within: whether a [[ is
    open; handed: variables that are set for a command alone. A function that is called runs where it stands.
    """

    names: Names
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    frames: list[_Frame] = field(default_factory=list)
    result: bool | None = True
    joiner: str = ""
    negated: bool = False
    called: set[str] = field(default_factory=set)
    body: bool | None = None
    within: bool = False
    handed: dict[str, Word] = field(default_factory=dict)

    def run(self, stream: Sequence[Token]) -> None:
        self.called = called(stream)
        command: list[Token] = []
        gate: bool | None = True  # whether && and || let the next command run
        for token in stream:
            if self.frames and self.frames[-1].pattern:
                if not (token.kind == "word" and plain(token) == "esac"):
                    self._pattern(token, command)
                    continue
                self.frames[-1].pattern = False
            if token.kind != "operator" or token.text == "((":
                command.append(token)
                if len(command) == 3 and plain(command[0]) == "case":
                    self._command(command, gate)
                    command = []
                continue
            if token.text == "(" and len(command) == 1 and (name := plain(command[0])):
                self.body, command = name in self.called, []
                continue
            if token.text == "(" and not command:
                self.frames.append(_Frame(kind="(", active=self.active, outer=self.active, before=self.names.held()))
            if token.text in ("(", "&") and not command:
                continue
            self._command(command, gate)
            command = []
            if token.text == ")" and self._top("("):
                self.names.hold(self.frames.pop().before)
            self.joiner = token.text if token.text in ("&&", "||") else ""
            gate = {"&&": self.result, "||": None if self.result is None else not self.result}.get(token.text, True)
            if token.text == ";;" and self.frames and self.frames[-1].kind == "case":
                self.frames[-1].pattern = True
        self._command(command, gate)

    @property
    def active(self) -> bool | None:
        return self.frames[-1].active if self.frames else True

    # -- commands

    def _command(self, parts: list[Token], gate: bool | None) -> None:
        self.negated = False
        parts = self._keywords(parts)
        if not parts:
            return
        runs = _both(self.active, gate)
        if self.frames and self.frames[-1].testing:
            self._condition(parts)
            return
        if runs is False:
            return
        if self.within or (plain(parts[0]) == "[[" and plain(parts[-1]) != "]]"):  # [[ a && b ]] comes in two: not taken together
            self.within, self.result = plain(parts[-1]) != "]]", None
            return
        before = self.result
        self.result = True
        while parts and parts[0].kind == "array":
            self._assign_array(parts.pop(0), runs)
        count = next((i for i, part in enumerate(parts) if not self._assignment(part)), len(parts))
        held = self.names.held() if 0 < count < len(parts) else None
        for part in parts[:count]:
            if found := self._assignment(part):
                self._assign(*found, runs, part.line)
        if count == len(parts):
            return
        parts = parts[count:]
        self._run(parts, runs, before)
        if held is not None:  # what stands before a command is set for it alone
            self.handed |= {name: word for name, word in self.names.variables.items() if held[0].get(name) is not word}
            self.names.hold(held)
        if self.negated:
            self.result = _not(self.result)

    def _run(self, parts: list[Token], runs: bool | None, before: bool | None) -> None:
        """Take a command into account. before: what the one before it came to."""
        first = parts[0].parts
        head = first[0].text if len(first) == 1 and first[0].kind == "text" else ""
        if head in _DECLARE:
            for part in parts[1:]:
                if part.kind == "array":
                    self._assign_array(part, runs)
                elif found := self._assignment(part):
                    self._assign(*found, runs, part.line)
            return
        changed = changes(parts, head)
        for name in changed:
            self._hide(name, parts[0].line, runs, gone=head == "unset")
        if head in ("[", "[[", "test") or parts[0].kind == "operator":
            self.result = None if changed else self._test(parts)
            return
        if changed:
            return
        words = tuple(word for part in parts if part.kind == "word" for word in self.names.expand(part))
        if words and words[0].text in ("true", "false"):
            self.result = words[0].text == "true" if runs else before
        elif words:
            self.commands.append(words)

    def _keywords(self, parts: list[Token]) -> list[Token]:
        """Open and close blocks; return the rest of the command."""
        while parts and parts[0].kind == "word":
            word = plain(parts[0])
            if word == "!":
                self.negated = not self.negated
            elif word == "{":
                runs = self.active if self.body is not False else False
                self.frames.append(_Frame(kind="{", active=runs, outer=self.active))
                self.body = None
            elif word == "}":
                if self._top("{"):
                    self.frames.pop()
            elif word in ("if", "while", "until"):
                self.frames.append(_Frame(kind=word, active=self.active, outer=self.active, testing=True))
            elif word == "elif" and self._top("if"):
                frame = self.frames[-1]
                frame.done = _either(frame.done, frame.active if frame.outer is not False else False)
                frame.active, frame.testing = frame.outer, True
            elif word in ("then", "do") and self.frames:
                self._enter(word)
            elif word == "else" and self._top("if"):
                frame = self.frames[-1]
                frame.done = _either(frame.done, frame.active)
                frame.active = _both(frame.outer, _not(frame.done))
            elif word in _CLOSES and self._top(*_CLOSES[word]):
                self.frames.pop()
            elif word in ("for", "select") and len(parts) > 1:
                self._loop(parts)
                return []
            elif word == "case" and len(parts) > 2:
                subject = (self.names.expand(parts[1]) or [Word(text="", line=parts[1].line)])[0]
                self.frames.append(_Frame(kind="case", active=self.active, outer=self.active, subject=subject, pattern=True))
                return []
            elif word == "function" and len(parts) > 1:
                self.body = plain(parts[1]) in self.called
                parts = parts[1:]
            elif word not in PREFIXES:
                return parts
            parts = parts[1:]
        return parts

    def _top(self, *kinds: str) -> bool:
        return bool(self.frames) and self.frames[-1].kind in kinds

    def _enter(self, word: str) -> None:
        frame = self.frames[-1]
        if not frame.testing:
            return
        frame.testing = False
        if word == "then":
            frame.active = _both(frame.outer, _both(self.result, _not(frame.done)))
        else:  # once, unless it is known that it is never
            never = {"while": False, "until": True}.get(frame.kind)
            frame.active = False if self.result is never and never is not None else frame.outer

    def _loop(self, parts: list[Token]) -> None:
        name, items = plain(parts[1]), [word for part in parts[3:] if part.kind == "word" for word in self.names.expand(part)]
        self.frames.append(_Frame(kind="for", active=self.active, outer=self.active, testing=False))
        if len(items) == 1:
            self.names.variables[name] = items[0]
        else:
            self.names.variables.pop(name, None)
            self.names.hidden[name] = Unresolved(name=name, line=parts[1].line, why="takes several values in a loop")

    def _pattern(self, token: Token, command: list[Token]) -> None:
        """Collect the patterns of a branch of `case`; a closing parenthesis opens the branch."""
        frame = self.frames[-1]
        if token.kind == "word":
            command.append(token)
        elif token.text == ")":
            patterns = [word for part in command for word in self.names.expand(part)]
            command.clear()
            frame.pattern = False
            matches: bool | None = None
            if frame.subject and not frame.subject.missing:
                matches = any(fnmatch.fnmatchcase(frame.subject.text, word.text[:200]) for word in patterns)
            frame.active = _both(frame.outer, _both(matches, _not(frame.done)))
            frame.done = _either(frame.done, matches)

    # -- conditions

    def _condition(self, parts: Sequence[Token]) -> None:
        """Take one command of a condition into account; && and || join it to what stands before it."""
        changed = changes(parts, plain(parts[0]))
        for name in changed:
            self._hide(name, parts[0].line, self.frames[-1].outer)
        value = None if changed else self._test(parts)
        value = _not(value) if self.negated else value
        join: Mapping[str, Callable[[bool | None, bool | None], bool | None]] = {"&&": _both, "||": _either}
        self.result = join[self.joiner](self.result, value) if self.joiner else value

    def _test(self, parts: Sequence[Token]) -> bool | None:
        """Return what [ ... ], [[ ... ]], test ... and (( ... )) come to; None where that is not known."""
        before = dict(self.names.unresolved)
        result = self._tested(parts)
        if result is not None:
            self.names.unresolved = before
        return result

    def _tested(self, parts: Sequence[Token]) -> bool | None:
        if parts[0].kind == "operator":
            value = self.names.arithmetic(parts[0].parts[0].text)
            return None if value is None else bool(value)
        words = [word for part in parts if part.kind == "word" for word in (self.names.expand(part, joined=True))]
        texts = [word.text for word in words]
        if texts in (["true"], ["false"]):
            return texts == ["true"]
        if not texts or texts[0] not in ("[", "[[", "test") or (texts[0] == "[[" and texts[-1] != "]]"):
            return None  # [[ a && b ]] is taken apart at &&
        inner = words[1:-1] if texts[-1] in ("]", "]]") else words[1:]
        negated = bool(inner) and inner[0].text == "!"
        quoted = any(part.quoted and re.search(r"[*?[]", part.text) for token in parts for part in token.parts)
        if texts[0] == "[[" and quoted:
            return None  # a pattern in quotes is none
        value = self._simple_test(inner[1:] if negated else inner, patterns=texts[0] == "[[")
        return _not(value) if negated else value

    def _simple_test(self, words: Sequence[Word], *, patterns: bool) -> bool | None:
        """Return what a test of one to three words comes to. patterns: whether the right side may be one."""
        if len(words) in (1, 2) and (len(words) == 1 or words[0].text in ("-n", "-z")):
            word = words[-1]
            unset = word.missing and word.text in (f"${word.missing[0]}",) and word.missing[0] not in self.names.hidden
            if word.missing and not (unset and _environment(word.missing[0])):
                return None
            empty = bool(unset) or not word.text
            return empty if len(words) == 2 and words[0].text == "-z" else not empty
        if len(words) != 3 or words[0].missing or words[2].missing:
            return None
        left, verb, right = (word.text for word in words)
        if verb in ("=", "==", "!="):
            same = fnmatch.fnmatchcase(left, right[:200]) if patterns else left == right
            return same == (verb != "!=")
        if verb in _TESTS and re.fullmatch(r"-?\d{1,15}", left) and re.fullmatch(r"-?\d{1,15}", right):
            return _TESTS[verb](int(left), int(right))
        return None

    # -- assignments

    def _assignment(self, token: Token) -> tuple[str, bool, tuple[Part, ...]] | None:
        """Return (name, whether it is appended, parts of the value) where a word assigns."""
        first = token.parts[0] if token.kind == "word" and token.parts else None
        if first is None or first.kind != "text" or first.quoted or not (found := _ASSIGNMENT.match(first.text)):
            return None
        rest = first.text[found.end() :]
        return found[1], bool(found[2]), tuple(p for p in (Part(kind="text", text=rest), *token.parts[1:]) if p.kind != "text" or p.text)

    def _assign(self, name: str, append: bool, parts: tuple[Part, ...], runs: bool | None, line: int) -> None:
        if self._conditional(name, runs, line):
            return
        value = self.names.value(parts, line)
        if append and name in self.names.variables:
            old = self.names.variables[name]
            value = Word(text=self.names.bounded(old.text + value.text, line), line=line, missing=old.missing + value.missing)
        self.names.variables[name] = value
        self.names.hidden.pop(name, None)

    def _hide(self, name: str, line: int, runs: bool | None, *, gone: bool = False) -> None:
        """Forget a name that a command sets to what is not read (gone: that it unsets)."""
        if runs is False:
            return
        self.names.variables.pop(name, None)
        self.names.arrays.pop(name, None)
        self.names.hidden.pop(name, None)
        if not gone or runs is None:
            self.names.hidden[name] = Unresolved(name=name, line=line, why="is set by a command that is not followed")

    def _assign_array(self, token: Token, runs: bool | None) -> None:
        if self._conditional(token.text, runs, token.line):
            return
        words = [word for part in token.words for word in self.names.expand(part)]
        old = self.names.arrays.get(token.text, []) if token.append else []
        self.names.words += len(old)
        self.names.check_count(token.line)
        self.names.arrays[token.text] = [*old, *words]

    def _conditional(self, name: str, runs: bool | None, line: int) -> bool:
        """Whether an assignment stands under a condition that is not known: then it is told and not followed."""
        if runs is None:
            why = "is set under a condition that the script does not settle"
            self.names.unresolved.setdefault(name, Unresolved(name=name, line=line, why=why))
            if name not in self.names.variables and name not in self.names.arrays:
                self.names.hidden.setdefault(name, self.names.unresolved[name])
        return runs is None


def _environment(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def _either(a: bool | None, b: bool | None) -> bool | None:
    if a or b:
        return True
    return None if a is None or b is None else False
