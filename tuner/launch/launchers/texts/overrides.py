"""Command lines that override a configuration: the words of a launch script's commands, as options and as key=value pairs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tuner.launch.launchers.tables.vocabulary import Told
from tuner.launch.launchers.texts.shell import read_script

VERSION_LINE = "# framework-version:"


@dataclass(slots=True, kw_only=True)
class Script:
    """A launch script's command lines. words: (word, "file:line"), variables filled in where the script gives them a value; variables:
    what it assigns, {name: (value, where)}; a default as in ${NNODES:-2} counts as the value; version: of a written script's comment.
    """

    words: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)
    version: str = ""

    def flags(self, known: frozenset[str] = frozenset()) -> dict[str, Told]:
        """Return the long options: --name value, --name=value, or --name alone (True). known: options of one dash or without a section
        that are to be returned as well; others are those with a point in their name, as configurations are overridden.
        """
        found: dict[str, Told] = {}
        for index, (word, where) in enumerate(self.words):
            if not word.startswith("--"):
                continue
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if "." not in name and name not in known:
                continue
            following = self.words[index + 1][0] if index + 1 < len(self.words) else "--"
            if equals:
                found[name] = Told(value=value, where=where)
            elif following.startswith("--") or (following.startswith("-") and not re.fullmatch(r"-\d+", following)):
                found[name] = Told(value=True, where=where)
            else:
                found[name] = Told(value=following, where=where)
        return found

    def pairs(self) -> dict[str, Told]:
        """Return the words of the form key=value that follow a command, as Hydra's and MaxText's overrides."""
        found: dict[str, Told] = {}
        for word, where in self.words:
            key, equals, value = word.partition("=")
            if equals and re.fullmatch(r"[a-z][a-z0-9_]{0,120}", key):
                found[key] = Told(value=value, where=where)
        return found

    def integer(self, names: tuple[str, ...], known: frozenset[str]) -> int | None:
        """Return the first of these options (or variables) that is a whole number, else None."""
        flags = self.flags(known)
        for name in names:
            value = flags[name].value if name in flags else self.variables.get(name, ("", ""))[0]
            if re.fullmatch(r"[1-9]\d{0,7}", str(value)):
                return int(str(value))
        return None


def from_script(text: str, name: str) -> Script:
    """Return the command lines of a shell script, variables filled in where it gives them a value. Raises SpecError (file, line) for a
    text that cannot be taken apart.
    """
    script = read_script(text, name)
    versions = [line.removeprefix(VERSION_LINE).strip()[:20] for line in text.split("\n") if line.startswith(VERSION_LINE)]
    return Script(
        words=[(word.text, f"{name}:{word.line}") for command in script.commands for word in command],
        variables={variable: (word.text, f"{name}:{word.line}") for variable, word in script.variables.items()},
        version=versions[-1] if versions else "",
    )
