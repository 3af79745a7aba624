"""Files that a launch script names: configurations, modules, and other scripts that it starts."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import SpecError
from tuner.launch.launchers.texts.launch_line import launches
from tuner.launch.launchers.texts.shell import read_script
from tuner.load import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.launch.launchers.texts.shell import Script

LARGEST = 2**20  # bytes of a launch file in a folder; the largest known has a twentieth
NAMED = re.compile(r"[\w.${}/~+:@-]{1,300}\.(?:yaml|yml|json|toml|py)\b")
FOLDER = re.compile(r"--?(?:model[\w-]{0,40}|config[\w-]{0,40})[ =][\"']?([\w./${}-]{1,200})")
MODULE = re.compile(r"--module[ =][\"']?(?:[\w-]{1,80}\.){0,8}([\w-]{1,80})")
_SCRIPT = re.compile(r"[\w.${}/~+:@-]{1,300}\.(?:sh|bash)\b")


def resolved(folder: Path, token: str) -> Path | None:
    """Return the file that a token names: its longest tail that lies under the script's folder or one of the two above."""
    parts = [part for part in re.split(r"/+", token.split("=")[-1]) if part not in (".", "~") and "$" not in part]
    if ".." in parts:
        parts = parts[len(parts) - parts[::-1].index("..") :]
    for start in range(min(len(parts), 12)):
        tail = parts[start:]
        for base in (folder, folder.parent, folder.parent.parent) if len(tail) > 1 else (folder,):
            path = base.joinpath(*tail)
            try:
                if stat.S_ISREG(path.stat().st_mode):
                    return path
            except (OSError, ValueError):
                continue
    return None


def starters(texts: dict[str, str], named: set[str], is_script: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """Return the scripts that launch nothing themselves, with the scripts near them that they name and those these name. What is named
    is added to `texts`, and to the files that a person `named` where the script is one.
    """
    starters: dict[str, tuple[str, ...]] = {}
    waiting = [name for name in texts if is_script(name)]
    for name in waiting:
        script = _script(texts[name], name)
        if script is None or launches(script):
            continue
        beside: dict[str, None] = {}
        for token in dict.fromkeys(match[0] for match in _SCRIPT.finditer(texts[name][:LARGEST])):
            path = resolved(Path(name).parent, token)
            if path is None or str(path) == name:
                continue
            if str(path) not in texts:
                try:
                    texts[str(path)] = read_text(path, LARGEST)
                except SpecError:
                    continue
                waiting.append(str(path))
            named |= {str(path)} if name in named else set()
            beside[str(path)] = None
        starters[name] = tuple(beside)
    return {name: tuple(_reached(name, starters)) for name in starters}


def _reached(name: str, starters: Mapping[str, tuple[str, ...]]) -> dict[str, None]:
    """Return the scripts that a script starts, by way of others too."""
    found: dict[str, None] = {}
    waiting = [*starters.get(name, ())]
    for one in waiting:
        if one not in found and one != name:
            found[one] = None
            waiting += starters.get(one, ())
    return found


def _script(text: str, name: str) -> Script | None:
    try:
        return read_script(text, name)
    except (SpecError, RecursionError):
        return None
