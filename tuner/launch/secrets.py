"""What stays out of files and logs: values of environment variables whose name, or whose value, says that they are secret."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH|COOKIE|SIGNATURE|WEBHOOK|(?:^|_)(?:PWD|PASS|KEY|PAT|DSN|SAS)$",
    re.IGNORECASE,
)
_SHELL = {"PWD", "OLDPWD"}
_LOGIN = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # a URL that holds a password
_SHORTEST = 6  # a shorter value stands in too many other words to be blotted out of a log
MASKED = "***"


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value must be written nowhere."""
    return name not in _SHELL and bool(_NAME.search(name) or _LOGIN.search(value))


def environment_record(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what environment.json holds: the variables, and the names of those withheld."""
    secret = sorted(name for name, value in environment.items() if is_secret(name, value))
    return {"variables": {name: environment[name] for name in sorted(environment) if name not in secret}, "withheld": secret}


def mask(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Return what replaces each secret value of an environment in a text."""
    words = _values(environment)
    if not words:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, words)))
    return lambda text: pattern.sub(MASKED, text)


def cut(environment: Mapping[str, str]) -> Callable[[bytes], int]:
    """Return what says after how many bytes the beginning of a line may be cut without parting a secret value of an environment."""
    words = [os.fsencode(word) for word in _values(environment)]
    if not words:
        return len
    pattern, held = re.compile(b"|".join(map(re.escape, sorted(words, key=len, reverse=True)))), max(map(len, words)) - 1

    def place(text: bytes) -> int:
        end = max(len(text) - held, 0)  # a value that begins before it stands in the text as a whole
        return next((found.end() for found in pattern.finditer(text) if found.start() < end < found.end()), end)

    return place


def _values(environment: Mapping[str, str]) -> list[str]:
    """Return the values that are blotted out, the longest first."""
    values = {part for name, value in environment.items() if is_secret(name, value) for part in [value, *value.splitlines()]}
    return sorted((v for v in values if len(v) >= _SHORTEST and v.lower() not in _WORDS and not v.isspace()), key=len, reverse=True)


_WORDS = {"enabled", "disabled", "default", "unknown"}
