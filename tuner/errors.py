"""What can go wrong, as one tree.

TunerError                    exit code
|-- SpecError                 2   a specification is wrong: every problem of it at once
|   `-- PlanError             2   a plan breaks a rule of its framework or does not exist
|-- NothingFeasible           1   no plan of the space is legal and fits
`-- InfrastructureError       4   a launcher, a scheduler or the machine failed
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class TunerError(Exception):
    """A failure that a person can act on; the command line prints it without a traceback."""

    exit_code = 4


class InfrastructureError(TunerError):
    """A launcher, a scheduler or the machine failed."""

    exit_code = 4


class NothingFeasible(TunerError):
    """The search ended without a plan that is legal and fits."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a specification.

    where: file (or "--option"); path: dotted path inside it; value: what stood there; rule: what must
    hold; hint: a way out (nearest name, nearest legal value).
    """

    where: str
    path: str
    value: str
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: {self.path}" if self.path else self.where
        got = f" = {self.value}" if self.value else ""
        hint = f" ({self.hint})" if self.hint else ""
        return printable(f"{place}{got}: {self.rule}{hint}")


class SpecError(TunerError):
    """A specification is wrong. Lists every problem found, not the first one."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PlanError(SpecError):
    """A plan breaks a rule of its framework."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return 'did you mean X?' for the known name closest to `name`, or the known names when none is close."""
    names = sorted(known)
    close = get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
    if close:
        return f"did you mean {next(n for n in names if n.lower() == close[0])}?"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"known: {shown}" if names else ""


UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]")


def printable(text: str) -> str:
    """Return the text with characters that steer a terminal (escapes, other directions of writing, lone surrogates) spelled out."""
    return UNSEEN.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def one_problem(where: str, path: str, value: object, rule: str, hint: str = "") -> SpecError:
    """Return a SpecError with a single problem; value None: there is none to show."""
    text = "" if value is None else repr(value) if isinstance(value, str) else str(value)
    return SpecError([Problem(where=where, path=path, value=text[:80], rule=rule, hint=hint)])
