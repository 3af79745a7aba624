"""A shell script taken apart into words, operators and arrays, without expanding anything: one pass, nothing is run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tuner.errors import one_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_LINE = 100_000
MOST_TOKENS = 200_000
_DEEPEST = 20
_NAME = re.compile(r"[A-Za-z_]\w{0,200}|\d{1,3}|[@*#?$!-]")
_ARRAY = re.compile(r"([A-Za-z_]\w{0,200})(\+?)=")
_OPERATORS = (";;", "&&", "||", "\n", ";", "|", "&", "(", ")")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w{0,100})\2")
_REDIRECT = re.compile(r"(?:\d{0,3}|&)(?:<<<|>>|>\||[<>]&?|&>)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a word. kind: literal text, a variable (text: its name), arithmetic or a command whose output stands there; operator
    and argument: as in ${NAME:-argument}; index: as in ${NAME[index]}; quoted: in double quotes, so that it is not split.
    """

    kind: Literal["text", "variable", "arithmetic", "command"]
    text: str
    quoted: bool = False
    operator: str = ""
    argument: tuple[Part, ...] = ()
    index: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A word (parts), an operator (text; "((" is an arithmetic command, with its expression as the part) or an array that is assigned
    (text: its name, append: +=, words: its elements).
    """

    kind: Literal["word", "operator", "array"]
    line: int
    text: str = ""
    parts: tuple[Part, ...] = ()
    words: tuple[Token, ...] = ()
    append: bool = False


def tokens(text: str, where: str) -> tuple[Token, ...]:
    """Return what a script consists of; comments and the text of here-documents are left out. Raises SpecError with file and line."""
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LONGEST_LINE:
            raise one_problem(f"{where}:{number}", "", None, f"has {len(line)} characters; at most {LONGEST_LINE} are read")
    return tuple(_Lexer(text.replace("\r\n", "\n"), where).tokens())


class _Lexer:
    """Reads a script from left to right. at: position; line: that of the position."""

    def __init__(self, text: str, where: str, line: int = 1) -> None:
        self.text, self.where, self.at, self.line = text, where, 0, line
        self.heredocs: list[tuple[str, bool]] = []

    def fail(self, rule: str, line: int | None = None) -> Exception:
        return one_problem(f"{self.where}:{line or self.line}", "", None, rule)

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens of the whole text."""
        dropped = False  # the next word is the target of a redirection
        test = False  # within [[ ... ]], where < and > compare
        for count, token in enumerate(self._all()):
            if count > MOST_TOKENS:
                raise self.fail(f"has more than {MOST_TOKENS} words")
            if token.kind == "word" and len(token.parts) == 1 and token.parts[0].text in ("[[", "]]"):
                test = token.parts[0].text == "[["
            elif token.kind == "operator" and token.text in ("\n", ";"):
                test = False
            if token.kind == "operator" and token.text == "redirect":
                if test:
                    yield Token(kind="word", line=token.line, parts=(Part(kind="text", text="<>"),))
                dropped = not test
            elif dropped and token.kind == "word":
                dropped = False
            else:
                dropped = False
                yield token

    def _all(self) -> Iterator[Token]:
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self._skip(2)
            elif c == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif heredoc := _HEREDOC.match(self.text, self.at):
                self.heredocs.append((heredoc[3], bool(heredoc[1])))
                self.at = heredoc.end()
            elif redirect := _REDIRECT.match(self.text, self.at):
                self.at = redirect.end()
                yield Token(kind="operator", line=self.line, text="redirect")
            elif self.text.startswith("((", self.at):
                yield self._arithmetic_command()
            elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
                token = Token(kind="operator", line=self.line, text=operator)
                self._skip(len(operator))
                if operator == "\n":
                    self._pass_heredocs()
                yield token
            else:
                yield self._word()

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _pass_heredocs(self) -> None:
        for word, tabs in self.heredocs:
            start = self.line
            while True:
                if self.at >= len(self.text):
                    raise self.fail(f"the text up to {word} does not end", start)
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self._skip(end + 1 - self.at)
                if (line.lstrip("\t") if tabs else line) == word:
                    break
        self.heredocs = []

    def _arithmetic_command(self) -> Token:
        line = self.line
        inner = self._enclosed("((", "))")
        return Token(kind="operator", line=line, text="((", parts=(Part(kind="arithmetic", text=inner),))

    def _enclosed(self, opening: str, closing: str) -> str:
        """Return what stands between an opening at the position and its closing, past which the position moves."""
        start, line, depth, at = self.at + len(opening), self.line, 0, self.at + len(opening)
        bracket, end = opening[-1], closing[-1]
        quote = ""
        while at < len(self.text):
            c = self.text[at]
            if c == "\\":
                at += 2
                continue
            if quote:
                quote = "" if c == quote else quote
            elif c in "'\"" and bracket != "{":
                quote = c
            elif c == bracket:
                depth += 1
            elif c == end:
                if depth == 0 and self.text.startswith(closing, at):
                    inner = self.text[start:at]
                    self._skip(at + len(closing) - self.at)
                    return inner
                depth -= 1
            at += 1
        raise self.fail(f"{opening} is not closed", line)

    def _word(self) -> Token:
        line = self.line
        parts: list[Part] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t\n;&|<>()":
                if c == "(" and len(parts) == 1 and (array := _ARRAY.fullmatch(parts[0].text)) and parts[0].kind == "text":
                    return self._array(array[1], bool(array[2]), line)
                break
            if c == "\\":
                if not self.text.startswith("\\\n", self.at):
                    parts.append(Part(kind="text", text=self.text[self.at + 1 : self.at + 2], quoted=True))
                self._skip(2)
            elif c == "'":
                parts.append(self._single(1))
            elif self.text.startswith("$'", self.at):
                parts.append(self._single(2))
            elif c == '"':
                parts += self._double()
            elif c in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                end = self.at + 1
                while end < len(self.text) and self.text[end] not in " \t\n;&|<>()\\'\"$`":
                    end += 1
                parts.append(Part(kind="text", text=self.text[self.at : end]))
                self.at = end
        return Token(kind="word", line=line, parts=tuple(parts))

    def _array(self, name: str, append: bool, line: int) -> Token:
        self._skip(1)
        words: list[Token] = []
        for token in self._all():
            if token.kind == "word":
                words.append(token)
            elif token.text == ")":
                return Token(kind="array", line=line, text=name, append=append, words=tuple(words))
            elif token.text != "\n":
                raise self.fail(f"{token.text} cannot stand in an array", token.line)
        raise self.fail(f"the array {name} is not closed", line)

    def _single(self, opening: int) -> Part:
        end = self.text.find("'", self.at + opening)
        if end < 0:
            raise self.fail("a quote is not closed")
        part = Part(kind="text", text=self.text[self.at + opening : end], quoted=True)
        self._skip(end + 1 - self.at)
        return part

    def _double(self) -> list[Part]:
        line, literal = self.line, ""
        parts: list[Part] = []
        self._skip(1)
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == '"':
                self._skip(1)
                return [*parts, Part(kind="text", text=literal, quoted=True)] if literal or not parts else parts
            if c == "\\" and self.at + 1 < len(self.text) and self.text[self.at + 1] in '\\"$`\n':
                literal += "" if self.text[self.at + 1] == "\n" else self.text[self.at + 1]
                self._skip(2)
            elif c in "$`":
                if literal:
                    parts.append(Part(kind="text", text=literal, quoted=True))
                literal = ""
                parts.append(self._expansion(quoted=True))
            else:
                end = self.at + 1
                while end < len(self.text) and self.text[end] not in '\\"$`':
                    end += 1
                literal += self.text[self.at : end]
                self._skip(end - self.at)
        raise self.fail("a quote is not closed", line)

    def _expansion(self, *, quoted: bool, depth: int = 0) -> Part:
        if self.text.startswith("$((", self.at):
            self._skip(1)
            return Part(kind="arithmetic", text=self._enclosed("((", "))"), quoted=quoted)
        if self.text.startswith("$(", self.at):
            self._skip(1)
            return Part(kind="command", text=self._enclosed("(", ")"), quoted=quoted)
        if self.text.startswith("${", self.at):
            self._skip(1)
            return self._braced(self._enclosed("{", "}"), quoted, depth)
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            if end < 0:
                raise self.fail("a backquote is not closed")
            part = Part(kind="command", text=self.text[self.at + 1 : end], quoted=quoted)
            self._skip(end + 1 - self.at)
            return part
        name = _NAME.match(self.text, self.at + 1)
        if name is None or (name[0].isdigit() and len(name[0]) > 1):
            name = re.compile(r"\d").match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return Part(kind="text", text="$", quoted=quoted)
        self.at = name.end()
        return Part(kind="variable", text=name[0], quoted=quoted)

    def _braced(self, inner: str, quoted: bool, depth: int) -> Part:
        """Return the part of what stands in ${...}; of forms that are not understood the operator is "?"."""
        length = inner.startswith("#") and len(inner) > 1
        name = _NAME.match(inner, 1 if length else 0)
        if name is None or length or depth > _DEEPEST:
            return Part(kind="variable", text=inner.lstrip("#!")[:200], quoted=quoted, operator="other")
        rest, index = inner[name.end() :], ""
        if rest.startswith("["):
            index, _, rest = rest[1:].partition("]")
        operator = next((o for o in (":-", ":=", ":?", ":+", "-", "=", "?", "+") if rest.startswith(o)), "")
        if rest and not operator:
            return Part(kind="variable", text=name[0], quoted=quoted, operator="other", index=index)
        argument = self._argument(rest[len(operator) :], depth) if operator else ()
        return Part(kind="variable", text=name[0], quoted=quoted, operator=operator, argument=argument, index=index)

    def _argument(self, text: str, depth: int) -> tuple[Part, ...]:
        """Return the parts of the text behind an operator in ${...}, quotes taken off."""
        inner, literal = _Lexer(text, self.where, self.line), ""
        parts: list[Part] = []
        while inner.at < len(text):
            c = text[inner.at]
            if c in "$`":
                parts += [Part(kind="text", text=literal), inner._expansion(quoted=False, depth=depth + 1)]
                literal = ""
            else:
                literal += "" if c in "'\"" else c
                inner._skip(1)
        return (*parts, Part(kind="text", text=literal))
