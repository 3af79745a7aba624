"""Names that a launch script sets, and what words come to with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.errors import one_problem
from tuner.launch.launchers.texts.shell_arithmetic import arithmetic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.launch.launchers.texts.shell_words import Part, Token

LONGEST_VALUE = 200_000
_MOST_WORDS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a command, expanded. missing: names in it that the script does not say, which stand in the text as $NAME."""

    text: str
    line: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """A name that the script does not say; why: in words."""

    name: str
    line: int
    why: str


@dataclass(slots=True)
class Names:
    """What is set so far. unresolved: what the script does not say, each name once; hidden: names that are set, but to what is not known;
    words: how many words were expanded.
    """

    where: str
    variables: dict[str, Word]
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    unresolved: dict[str, Unresolved] = field(default_factory=dict)
    hidden: dict[str, Unresolved] = field(default_factory=dict)
    words: int = 0

    def held(self) -> tuple[dict[str, Word], dict[str, list[Word]], dict[str, Unresolved]]:
        """Return what is set, to be set again by `hold`."""
        return dict(self.variables), dict(self.arrays), dict(self.hidden)

    def hold(self, held: tuple[dict[str, Word], dict[str, list[Word]], dict[str, Unresolved]] | None) -> None:
        """Set again what was set."""
        if held is not None:
            self.variables, self.arrays, self.hidden = held

    def expand(self, token: Token, *, joined: bool = False) -> list[Word]:
        """Return the words that a word expands to: several where an array or a value with blanks stands unquoted (unless joined)."""
        fields: list[list[Word]] = [[]]
        started = False  # an empty word in quotes is a word
        for part in token.parts:
            if part.kind == "text":
                fields[-1].append(Word(text=part.text, line=token.line))
                started = started or part.quoted or bool(part.text)
                continue
            pieces = self._pieces(part, token.line)
            if part.quoted or joined:
                for i, piece in enumerate(pieces):
                    if i:
                        fields.append([])
                    fields[-1].append(piece)
                started = started or (part.quoted and part.index != "@" and part.text != "@") or any(p.text for p in pieces)
                continue
            split = [Word(text=text, line=p.line, missing=_named(p.missing, text)) for p in pieces for text in p.text.split()]
            if pieces and pieces[0].text[:1].isspace() and fields[-1]:
                fields.append([])
            for i, piece in enumerate(split):
                if i:
                    fields.append([])
                fields[-1].append(piece)
                started = True
            if split and pieces[-1].text[-1:].isspace():
                fields.append([])
        self.words += len(fields)
        self.check_count(token.line)
        if not started and not joined:
            return []
        words = [self._joined(pieces, token.line) for pieces in fields]
        return words if joined or len(words) == 1 else [word for i, word in enumerate(words) if word.text or fields[i]]

    def _pieces(self, part: Part, line: int) -> list[Word]:
        if part.kind == "command":
            return [self.missing(f"({part.text.strip()[:60]})", line, "is the output of a command")]
        if part.kind == "arithmetic":
            number = self.arithmetic(part.text)
            if number is None:
                return [self.missing(f"(({part.text.strip()[:60]}))", line, "is not known")]
            return [Word(text=str(number), line=line)]
        name = part.text
        if part.operator == "other":
            return [self.missing(name, line, "is changed by an expansion that is not read")]
        if name in self.arrays:
            words = self.arrays[name]
            if part.index == "@" or (part.index == "*" and not part.quoted):
                return list(words)
            if part.index == "*":
                return [self._joined([w for word in words for w in (word, Word(text=" ", line=line))][:-1], line)]
            at = int(part.index) if part.index.isdecimal() and part.index.isascii() and len(part.index) < 6 else 0
            return [words[at]] if at < len(words) else [Word(text="", line=line)]
        if name in ("@", "*"):
            return []  # further arguments of the caller
        known = self.variables.get(name)
        if known is None and name in self.hidden:
            return [self.missing(name, line, self.hidden[name].why)]
        if known is not None and not (known.text == "" and part.operator.startswith(":")):
            return [self.value(part.argument, line)] if part.operator in (":+", "+") else [known]
        if part.operator in (":-", "-", ":=", "="):
            value = self.value(part.argument, line)
            if "=" in part.operator:
                self.variables[name] = value
            return [value]
        if part.operator in (":+", "+"):
            return [Word(text="", line=line)]
        if known is not None:
            return [known]
        why = "is an argument of the script" if name.isdigit() else "is not assigned in this file"
        return [self.missing(name, line, why)]

    def missing(self, name: str, line: int, why: str) -> Word:
        """Note a name that the script does not say; return what stands in its place."""
        self.unresolved.setdefault(name, Unresolved(name=name, line=line, why=why))
        return Word(text=_stand_in(name), line=line, missing=(name,))

    def value(self, parts: Sequence[Part], line: int) -> Word:
        """Return the one word that the parts of an assigned value come to."""
        pieces: list[Word] = []
        for part in parts:
            found = [Word(text=part.text, line=line)] if part.kind == "text" else self._pieces(part, line)
            pieces += [w for word in found for w in (word, Word(text=" ", line=line))][:-1]
        return self._joined(pieces, line)

    def _joined(self, pieces: Sequence[Word], line: int) -> Word:
        text = self.bounded("".join(piece.text for piece in pieces), line)
        at = pieces[0].line if len(pieces) == 1 else line
        return Word(text=text, line=at, missing=tuple(dict.fromkeys(name for piece in pieces for name in piece.missing)))

    def bounded(self, text: str, line: int) -> str:
        """Return the text. Raises SpecError for one that is too long."""
        if len(text) > LONGEST_VALUE:
            raise one_problem(f"{self.where}:{line}", "", None, f"a value has more than {LONGEST_VALUE} characters")
        return text

    def check_count(self, line: int) -> None:
        """Raise SpecError where the script has come to too many words."""
        if self.words > _MOST_WORDS:
            raise one_problem(f"{self.where}:{line}", "", None, f"expands to more than {_MOST_WORDS} words")

    def arithmetic(self, text: str) -> int | None:
        """Return the value of an expression, or None where it has none that is known."""
        return arithmetic(text, lambda name: self.variables[name].text if name in self.variables else "")


def _named(missing: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Return those of the missing names that stand in a part of a value."""
    return tuple(name for name in missing if re.search(re.escape(_stand_in(name)) + r"(?![A-Za-z0-9_])", text))


def _stand_in(name: str) -> str:
    """Return what stands for a value that the script does not say: one word, also for a command."""
    return "$" + "".join(name.split())
