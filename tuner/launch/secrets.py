"""What stays out of files and logs: values of environment variables whose name, or whose value, says that they are secret."""

from __future__ import annotations

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
    values = {part for name, value in environment.items() if is_secret(name, value) for part in [value, *value.splitlines()]}
    words = sorted((v for v in values if len(v) >= _SHORTEST and v.lower() not in _WORDS and not v.isspace()), key=len, reverse=True)
    if not words:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, words)))
    return lambda text: pattern.sub(MASKED, text)


_WORDS = {"enabled", "disabled", "default", "unknown"}
