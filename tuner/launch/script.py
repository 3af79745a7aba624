"""The shell script that a node (or a rank) of a trial runs. Every value that comes from a file is quoted."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from tuner.launch.secrets import is_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.launch.site import Site

TASK = "task.sh"
HERE = '"$(dirname -- "${BASH_SOURCE[0]}")"'
_MODULES = "# shellcheck source=/dev/null\ntype module >/dev/null 2>&1 || . /etc/profile.d/modules.sh || . /etc/profile.d/lmod.sh"


_ASSIGNED = re.compile(r"(?:[A-Z_][A-Z0-9_]*=\S* +)*")
_NEEDED = re.compile(r"\$\{([A-Z_][A-Z0-9_]*):\?")


def command_of(start: str) -> str:
    """Return the command of a launch without the variables in front of it: those are a person's to set."""
    return _ASSIGNED.sub("", start, count=1)


def needed(scripts: Iterable[str]) -> tuple[str, ...]:
    """Return the variables without which these scripts end: ${NAME:?why}."""
    return tuple(dict.fromkeys(name for text in scripts for name in _NEEDED.findall(text)))


def task_script(
    site: Site, folder: str | None, body: Iterable[str], *, before: Iterable[str] = (), what: str = "what one task of a trial runs"
) -> str:
    """Return the script: modules, variables, the site's own lines (as they stand), `before`, the working folder (None: that of the
    script), `body`. what: a plain sentence of what it does.

    Secret variables are not in it: they reach it through its environment.
    """
    lines = ["#!/bin/bash", f"# Written by tuner: {what}.", "set -eo pipefail"]
    if site.modules:
        lines += [_MODULES, *(f"module load {shlex.quote(name)}" for name in site.modules)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.environment.items() if not is_secret(name, value)]
    lines += [*site.pre_commands, *before, f"cd -- {HERE if folder is None else shlex.quote(folder)}", *body]
    return "\n".join(lines) + "\n"


def secrets_of(site: Site) -> dict[str, str]:
    """Return the site's variables that must reach the trial without being written."""
    return {name: value for name, value in site.environment.items() if is_secret(name, value)}
