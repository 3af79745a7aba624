"""Which keys of which files are changed: as few as give files that read back as the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.checking.launch_files import CONFIGS, SCRIPTS
from tuner.checking.patching.documents import json_changed, python_added, python_changed, toml_added, toml_changed, yaml_added, yaml_changed
from tuner.checking.patching.scripts import script_added, script_changed
from tuner.checking.patching.settings import REMOVED, alike, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.checking.patching.settings import Setting


def of_plan(key: str, keys: frozenset[str]) -> bool:
    """Whether a key is one that spells a plan."""
    return key in keys or key.rpartition(".")[2] in keys


def edited(
    texts: Mapping[str, str],
    target: Mapping[str, Setting],
    before: Mapping[str, Setting],
    right: Callable[[Mapping[str, str]], bool],
    keys: frozenset[str],
) -> dict[str, str] | None:
    """Return the files with the keys that differ changed, or None where that does not read back as the plan."""
    now = {key: (name, value) for name, text in texts.items() for key, value in settings_of(name, text).items()}

    def wanted(names: set[str], drop: bool) -> dict[str, Setting]:
        apart = (key for key in target if key in names and (key not in now or not alike(now[key][1], target[key])))
        changes: dict[str, Setting] = {key: target[key] for key in apart}
        stale = {key for key in now if key not in target and (key in names or (drop and of_plan(key, keys)))}
        return changes | dict.fromkeys(stale, REMOVED)

    if before:
        apart = {key for key in {*target, *before} if key not in before or key not in target or not alike(before[key], target[key])}
        for drop in (False, True):
            for variables in (True, False):
                if (files := _applied(texts, wanted(apart, drop), variables)) is not None and right(files):
                    return files
    spelled = {key for key in target if of_plan(key, keys)}
    for variables in (True, False):
        changes = wanted(spelled, drop=True)
        files = _applied(texts, changes, variables)
        if files is not None and right(files):
            return _smallest(texts, changes, variables, right)
    return None


def _smallest(
    texts: Mapping[str, str], changes: Mapping[str, Setting], variables: bool, right: Callable[[Mapping[str, str]], bool]
) -> dict[str, str]:
    """Return the files with as few of the changes as read back as the plan: each is left out that can be."""
    kept = dict(changes)
    for key in sorted(changes):
        fewer = {name: value for name, value in kept.items() if name != key}
        files = _applied(texts, fewer, variables)
        if files is not None and right(files):
            kept = fewer
    files = _applied(texts, kept, variables)
    assert files is not None  # noqa: S101 (the last that was right)
    return files


def _applied(texts: Mapping[str, str], changes: Mapping[str, Setting], variables: bool) -> dict[str, str] | None:
    """Return the files with these keys set or removed, each in the file that has it, new ones in the first that takes them."""
    files = dict(texts)
    there = {name: settings_of(name, text) for name, text in texts.items()}
    for key, value in reversed(list(changes.items())):  # each is added right behind the anchor: the last first
        holders = [name for name in files if key in there[name]]
        for name in holders:
            changed = _changed(name, files[name], key, value, there[name][key], variables)
            if changed is None:
                return None
            files[name] = changed
        if holders or value is REMOVED:
            continue
        for name in sorted(files, key=lambda n: _late(n, key)):
            added = _added(name, files[name], key, value)
            if added is not None:
                files[name] = added
                break
        else:
            return None
    return files


def _late(name: str, key: str) -> bool:
    """Whether a new key is rather put into another file: variables of the environment go to scripts, dotted keys to documents."""
    return name.lower().endswith(CONFIGS) if key.startswith("$") else name.lower().endswith(SCRIPTS) and "." in key


def _changed(name: str, text: str, key: str, value: Setting, old: Setting, variables: bool) -> str | None:
    if name.endswith((".yaml", ".yml")):
        return yaml_changed(text, key, value)
    if name.endswith(".json"):
        return json_changed(text, key, value)
    if name.endswith(".toml"):
        return toml_changed(text, key, value)
    if name.endswith(".py"):
        return python_changed(text, key, value)
    return script_changed(text, key, value, old, variables)


def _added(name: str, text: str, key: str, value: Setting) -> str | None:
    if key.startswith("$") and name.lower().endswith(CONFIGS):
        return text  # a variable of the environment: a script's, where there is one
    if name.endswith((".yaml", ".yml")):
        return yaml_added(text, key, value)
    if name.endswith(".json"):
        return json_changed(text, key, value)
    if name.endswith(".toml"):
        return toml_added(text, key, value)
    return python_added(text, key, value) if name.endswith(".py") else script_added(text, key, value)
