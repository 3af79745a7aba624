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

from tuner.launch.launchers.texts.shell_names import Names, Unresolved, Word
from tuner.launch.launchers.texts.shell_words import Part, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tuner.launch.launchers.texts.shell_words import Token

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w{0,200})(\+?)=")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_PREFIXES = ("!", "{", "}", "time", "exec", "nohup", "eval", "sudo", "command", "then", "do")
_CLOSES: Mapping[str, tuple[str, ...]] = {"fi": ("if",), "done": ("while", "until", "for"), "esac": ("case",)}
_HEADER = re.compile(r"#SBATCH\s{1,20}(--?[A-Za-z][\w-]{0,40})(?:[= ]\s{0,20}(\S{1,200}))?")
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task"}
_TESTS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script says. commands: those that run (or may run) in order; variables: as they stand at the end; arrays: likewise; headers:
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
        return _count(self.headers.get("--nodes"))

    @property
    def gpus_per_node(self) -> int | None:
        """Accelerators of each node that the #SBATCH lines ask for."""
        return _count(self.headers.get("--gpus-per-node")) or _gres(self.headers.get("--gres"))


def read_script(text: str, where: str) -> Script:
    """Return what a shell script says. Raises SpecError (file, line) for text that cannot be taken apart."""
    headers = dict(_headers(text))
    reader = _Reader(Names(where, _slurm_variables(headers)))
    reader.run(tokens(text, where))
    return Script(
        where=where,
        commands=tuple(reader.commands),
        variables=reader.names.variables,
        arrays={name: tuple(words) for name, words in reader.names.arrays.items()},
        headers=headers,
        unresolved=tuple(reader.names.unresolved.values()),
    )


def _headers(text: str) -> Iterator[tuple[str, Word]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#SBATCH") and (found := _HEADER.match(line)):
            yield _SHORT.get(found[1], found[1]), Word(text=found[2] or "", line=number)


def _count(word: Word | None) -> int | None:
    """Return the number of "8", "h100:8" or "2-2"; None where it is none or a range."""
    if word is None:
        return None
    number = word.text.rsplit(":", 1)[-1]
    low, _, high = number.partition("-")
    return int(low) if re.fullmatch(r"\d{1,6}", low) and high in ("", low) and int(low) else None


def _gres(word: Word | None) -> int | None:
    """Return the accelerators of "gpu:8" or "gpu:h100:8,tmpfs:1"."""
    parts = word.text.split(",") if word else []
    return next((_count(Word(text=part, line=0)) for part in parts if part.startswith("gpu:")), None)


def _slurm_variables(headers: Mapping[str, Word]) -> dict[str, Word]:
    """Return what Slurm sets in a job with these headers."""
    nodes, gpus = headers.get("--nodes"), _count(headers.get("--gpus-per-node")) or _gres(headers.get("--gres"))
    tasks = headers.get("--ntasks-per-node")
    told = {"SLURM_NNODES": _count(nodes), "SLURM_JOB_NUM_NODES": _count(nodes), "SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus}
    told |= {"SLURM_NTASKS_PER_NODE": _count(tasks), "SLURM_NTASKS": _count(headers.get("--ntasks"))}
    return {name: Word(text=str(value), line=0) for name, value in told.items() if value}


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


@dataclass(slots=True)
class _Reader:
    """Goes through a script once. result: whether the last command succeeded, as far as known."""

    names: Names
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    frames: list[_Frame] = field(default_factory=list)
    result: bool | None = True
    joiner: str = ""

    def run(self, stream: Iterable[Token]) -> None:
        command: list[Token] = []
        gate: bool | None = True  # whether && and || let the next command run
        for token in stream:
            if self.frames and self.frames[-1].pattern:
                if not (token.kind == "word" and _plain(token) == "esac"):
                    self._pattern(token, command)
                    continue
                self.frames[-1].pattern = False
            if token.kind != "operator" or token.text == "((":
                command.append(token)
                if len(command) == 3 and _plain(command[0]) == "case":
                    self._command(command, gate)
                    command = []
                continue
            if token.text in ("(", ")", "&") and not command:
                continue
            self._command(command, gate)
            command = []
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
        parts = self._keywords(parts)
        if not parts:
            return
        runs = _both(self.active, gate)
        if self.frames and self.frames[-1].testing:
            self._condition(parts)
            return
        if runs is False:
            return
        before = self.result
        self.result = True
        while parts and parts[0].kind == "array":
            self._assign_array(parts.pop(0), runs)
        while parts and (found := self._assignment(parts[0])):
            self._assign(*found, runs, parts.pop(0).line)
        if not parts:
            return
        first = parts[0].parts
        head = first[0].text if len(first) == 1 and first[0].kind == "text" else ""
        if head in _DECLARE:
            for part in parts[1:]:
                if part.kind == "array":
                    self._assign_array(part, runs)
                elif found := self._assignment(part):
                    self._assign(*found, runs, part.line)
            return
        if head in ("[", "[[", "test") or parts[0].kind == "operator":
            self.result = self._test(parts)
            return
        words = tuple(word for part in parts if part.kind == "word" for word in self.names.expand(part))
        if words and words[0].text in ("true", "false"):
            self.result = words[0].text == "true" if runs else before
        elif words:
            self.commands.append(words)

    def _keywords(self, parts: list[Token]) -> list[Token]:
        """Open and close blocks; return the rest of the command."""
        while parts and parts[0].kind == "word":
            word = _plain(parts[0])
            if word in ("if", "while", "until"):
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
            elif word == "function":
                return []
            elif word not in _PREFIXES:
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
        else:
            frame.active = frame.outer

    def _loop(self, parts: list[Token]) -> None:
        name, items = _plain(parts[1]), [word for part in parts[3:] if part.kind == "word" for word in self.names.expand(part)]
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
        value = self._test(parts)
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
        value = self._simple_test(inner[1:] if negated else inner)
        return _not(value) if negated else value

    def _simple_test(self, words: Sequence[Word]) -> bool | None:
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
            return fnmatch.fnmatchcase(left, right[:200]) == (verb != "!=")
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


def _plain(token: Token) -> str:
    return token.parts[0].text if len(token.parts) == 1 and token.parts[0].kind == "text" and not token.parts[0].quoted else ""


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
