"""Commands of a script by their words alone: which are called, and which variables they set in a way that is not followed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tuner.launch.launchers.texts.shell_words import Token

_OPENING = ("!", "{", "if", "elif", "else", "while", "until")
PREFIXES = ("time", "exec", "nohup", "eval", "sudo", "command", "then", "do")
_SET = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--)")


def plain(token: Token) -> str:
    """Return the text of a word that is one piece without quotes, "" for others."""
    return token.parts[0].text if len(token.parts) == 1 and token.parts[0].kind == "text" and not token.parts[0].quoted else ""


def called(stream: Sequence[Token]) -> set[str]:
    """Return the words that stand where commands do, heads of functions left out."""
    found, starts = set(), True
    for at, token in enumerate(stream):
        word = plain(token) if token.kind == "word" else ""
        follower = stream[at + 1] if at + 1 < len(stream) else None
        if word and starts and not (follower is not None and follower.kind == "operator" and follower.text == "("):
            found.add(word)
        starts = token.kind == "operator" or (starts and word in (*PREFIXES, *_OPENING))
    return found


def changes(parts: Sequence[Token], head: str) -> tuple[str, ...]:
    """Return the variables that a command sets in a way that is not followed."""
    if parts[0].kind == "operator":
        return tuple(_set_in(parts[0].parts[0].text))
    words = [plain(part) for part in parts[1:]]
    if head in ("read", "unset", "mapfile", "readarray", "getopts"):
        return tuple(word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word))
    if head == "let":
        return tuple(name for part in parts[1:] for piece in part.parts for name in _set_in(piece.text))
    if head == "printf" and len(words) > 1 and words[0] == "-v":
        return (words[1],)
    element = re.match(r"([A-Za-z_]\w*)\[[^]]*\]\+?=", parts[0].parts[0].text if parts[0].parts else "")
    return (element[1],) if element else ()


def _set_in(expression: str) -> Iterator[str]:
    """Yield the variables that an arithmetic expression sets."""
    for found in _SET.findall(expression[:2000]):
        yield next(name for name in found if name)
