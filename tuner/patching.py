"""From a person's launch files to the same files with another plan: the smallest edit that reads back as that plan, as a unified diff.

The launcher itself says how the new plan is spelled: what it writes is compared with what stands in the files, the keys that differ are
changed where they stand, and the result is read back. An edit that does not read back as the plan is thrown away; then the launcher's own
files stand in the diff instead.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tuner.errors import SpecError
from tuner.launch.launchers import megatron_plan
from tuner.launch.launchers.launch_line import launches
from tuner.launch.launchers.launcher import used
from tuner.launch.launchers.megatron_lm import flags_of
from tuner.launch.launchers.shell import read_script
from tuner.launch_files import CONFIGS, SCRIPTS
from tuner.load import read_text
from tuner.plan_defaults import filled
from tuner.plan_text import KNOBS, parse_knobs, plan_record, split_knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.job import Job
    from tuner.launch.launchers.launcher import Found, Launcher
    from tuner.launch_files import LaunchFiles
    from tuner.plan import Plan

Setting = Any  # a scalar, or a list of words; True for a flag that stands alone
_REMOVED = object()
_FAMILY = frozenset(key for aspect in megatron_plan.PLAN for key in aspect.keys) - {"global_batch_size", "rampup_batch_size"}
_WORD = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\\()\"';|&<>]+)"
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]{0,160})=(.*)", re.DOTALL)
_YAML_KEY = re.compile(r"^(?P<indent> *)(?P<quote>[\"']?)(?P<key>[A-Za-z_][\w.-]{0,120})(?P=quote)(?P<colon>\s*:)(?P<rest>.*)$")
_VARIABLE = re.compile(r"^(export|unset)[ \t]+([A-Z][A-Z0-9_]{2,60})\b.*$", re.MULTILINE)  # of the environment, under $NAME
_PYTHON = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*)\s*=\s*([\w.+-]+|\"[^\"\n]*\"|'[^'\n]*')(?=\s*(?:,|\)|#|$))", re.MULTILINE)
_SECTION = re.compile(r"^\s*\[([A-Za-z_][\w.-]{0,120})\]\s*(?:#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A unified diff. edited: whether it changes lines of the files as they are (else the launcher's own files replace or join them);
    notes: what a person must do beside it.
    """

    diff: str
    edited: bool
    notes: tuple[str, ...] = ()


def patch_of(launch: LaunchFiles, launcher: Launcher | None, job: Job, now: Plan, best: Plan, release: str = "") -> Patch:
    """Return the diff that turns the files of `now` into those of `best`. launcher: None for a request. Raises SpecError where the launcher
    cannot spell the best plan.
    """
    if launcher is None:
        return _request_patch(launch, job, now, best)
    version = version_of(launcher, release)
    written = launcher.write(job, best, version)
    notes = written.notes
    try:
        present = dict(launcher.write(job, now, version).files)
    except SpecError:
        present = {}
    texts = dict(launch.files)
    target = _settings_of_all(written.files)
    before = _settings_of_all(present) if present else {}
    right = _Judge(launcher, launch, job, best)
    edited = _edited(texts, target, before, right, _keys(launcher))
    if edited is not None:
        lasting = tuple(note for note in notes if note.lower().startswith("checkpoint"))
        return Patch(diff=diff_of(texts, edited), edited=True, notes=lasting)
    anew = _anew(launch, written.files)
    texts |= {name: text for name in anew if name not in texts and (text := _on_disk(name)) is not None}
    told = f"written anew by {launcher.name}'s exporter: lines could not be changed one by one. Fill in data, checkpoints and learning"
    return Patch(diff=diff_of(texts, anew), edited=False, notes=(told, *notes))


def version_of(launcher: Launcher, release: str) -> str:
    """Return the version of a launcher's spellings that files are of: the one that they show, else the last."""
    return release if release in launcher.versions else launcher.versions[-1] if launcher.versions else ""


@dataclass(frozen=True, slots=True)
class _Judge:
    """Whether changed files say what they said, with the best plan."""

    launcher: Launcher
    launch: LaunchFiles
    job: Job
    best: Plan

    def __call__(self, files: Mapping[str, str]) -> bool:
        before: Found | None = self.launch.found
        try:
            after = self.launcher.read({name: text for name, text in files.items() if self._read_before(name)})
            knobs = {name: value for name, value in after.plan.items() if name in KNOBS}
            plan, _ = filled(self.job, parse_knobs(knobs, "patch"))
        except SpecError:
            return False
        same = before is None or (after.model == before.model and after.gpus in (None, before.gpus) and _lasting(after) == _lasting(before))
        return same and not after.problems and used(plan) == used(self.best) and after.unknown_names() == _unknown(before)

    def _read_before(self, name: str) -> bool:
        first = self.launch.name
        try:
            known = self.launcher.reads(name, self.launch.files.get(name, ""))
        except Exception:  # a plugin's
            known = False
        return name == first or known or (Path(name).name == "config.json" and self.launcher.name in ("deepspeed", "accelerate"))


def _lasting(found: Found) -> dict[str, Any]:
    return {name: value for name, value in found.job.items() if name in ("seq_len", "global_batch", "precision")}


def _unknown(found: Found | None) -> frozenset[str]:
    return frozenset() if found is None else found.unknown_names()


def _keys(launcher: Launcher) -> frozenset[str]:
    """Return the keys that spell a plan in a launcher's words."""
    words = {
        _normal(word) for text in launcher.says.values() for word in re.findall(r"[A-Za-z_][\w.-]{2,80}", text) if re.search(r"[_.-]", word)
    }
    words |= {word.rpartition(".")[2] for word in words}
    return frozenset(words | _FAMILY) if launcher.framework.startswith(("megatron", "nemo", "primus")) else frozenset(words)


def _normal(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _of_plan(key: str, keys: frozenset[str]) -> bool:
    return key in keys or key.rpartition(".")[2] in keys


# -- what files say, key by key


def _settings_of_all(files: Mapping[str, str]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, text in files.items():
        if Path(name).name != "config.json" and Path(name).name != "train.py":
            found |= settings_of(name, text)
    return found


def settings_of(name: str, text: str) -> dict[str, Setting]:
    """Return {key: value} of a launch file: flags without their dashes, overrides and dotted keys; {} for what cannot be read."""
    try:
        if name.endswith((".yaml", ".yml")):
            return dict(_flat(yaml.safe_load(text)))
        if name.endswith(".json"):
            return dict(_flat(json.loads(text)))
        if name.endswith(".toml"):
            return dict(_flat(tomllib.loads(text)))
        if name.endswith(".py"):
            return {match[1]: match[2] for match in _PYTHON.finditer(text)}
        return _of_script(name, text)
    except (ValueError, yaml.YAMLError, RecursionError, SpecError):
        return {}


def _flat(value: Any, above: str = "") -> list[tuple[str, Setting]]:
    if not isinstance(value, dict):
        return [(above, value)] if above else []
    return [pair for key, inner in value.items() for pair in _flat(inner, f"{above}.{key}" if above else str(key))]


def _of_script(name: str, text: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {f"${match[2]}": match[0].split("  #")[0] for match in _VARIABLE.finditer(text)}
    for launch in launches(read_script(text, name)):
        plain = []
        for word in launch.arguments:
            override = _OVERRIDE.fullmatch(word.text)
            if override and not word.text.startswith("-"):
                found[override[1]] = override[2]
            else:
                plain.append(word)
        for flag, values in flags_of(plain):
            texts = [value.text for value in values]
            found[_normal(flag.text)] = True if not texts else texts[0] if len(texts) == 1 else texts
    return found


def _alike(one: Setting, other: Setting) -> bool:
    def text(value: Setting) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return text(one).lower() == text(other).lower()


# -- edits


def _edited(
    texts: Mapping[str, str],
    target: Mapping[str, Setting],
    before: Mapping[str, Setting],
    right: Callable[[Mapping[str, str]], bool],
    keys: frozenset[str],
) -> dict[str, str] | None:
    """Return the files with the keys that differ changed, or None where that does not read back as the plan."""
    now = {key: (name, value) for name, text in texts.items() for key, value in settings_of(name, text).items()}

    def wanted(names: set[str], drop: bool) -> dict[str, Setting]:
        apart = (key for key in target if key in names and (key not in now or not _alike(now[key][1], target[key])))
        changes: dict[str, Setting] = {key: target[key] for key in apart}
        stale = {key for key in now if key not in target and (key in names or (drop and _of_plan(key, keys)))}
        return changes | dict.fromkeys(stale, _REMOVED)

    if before:
        apart = {key for key in {*target, *before} if key not in before or key not in target or not _alike(before[key], target[key])}
        for drop in (False, True):
            for variables in (True, False):
                if (files := _applied(texts, wanted(apart, drop), variables)) is not None and right(files):
                    return files
    spelled = {key for key in target if _of_plan(key, keys)}
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
        if holders or value is _REMOVED:
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
        return _yaml_changed(text, key, value)
    if name.endswith(".json"):
        return _json_changed(text, key, value)
    if name.endswith(".toml"):
        return _toml_changed(text, key, value)
    if name.endswith(".py"):
        return _python_changed(text, key, value)
    return _script_changed(text, key, value, old, variables)


def _added(name: str, text: str, key: str, value: Setting) -> str | None:
    if key.startswith("$") and name.lower().endswith(CONFIGS):
        return text  # a variable of the environment: a script's, where there is one
    if name.endswith((".yaml", ".yml")):
        return _yaml_added(text, key, value)
    if name.endswith(".json"):
        return _json_changed(text, key, value)
    if name.endswith(".toml"):
        return _toml_added(text, key, value)
    return _python_added(text, key, value) if name.endswith(".py") else _script_added(text, key, value)


# scripts


def _spot(text: str, key: str, count: int) -> tuple[int, int, int, bool] | None:
    """Return (start of the flag, start of its values, end, whether = joins them) of the last place where a flag or override stands."""
    spelled = re.sub(r"[_-]", "[-_]", re.escape(key).replace("\\-", "-"))
    pattern = re.compile(rf"(?<![\w$./-])(?:--?{spelled}(?![\w.-])|\+{{0,2}}{re.escape(key)}(?==))")
    found = None
    for match in pattern.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not line.lstrip().startswith("#") and " #" not in line:
            found = match
    if found is None:
        return None
    end = found.end()
    quote = text[found.start() - 1 : found.start()]
    if text[end : end + 1] == "=" and quote and quote in "\"'" and not _inside(text, found.start() - 1, quote):
        return found.start() - 1, end + 1, _word_end(text, found.start() - 1), True
    if text[end : end + 1] == "=":
        word = re.compile(_WORD).match(text, end + 1)
        return found.start(), end + 1, word.end() if word else end + 1, True
    start = stop = end
    for index in range(count):
        word = re.compile(rf"[ \t]+(?:\\\r?\n[ \t]*)?({_WORD})").match(text, stop)
        if word is None:
            return None
        start = word.start(1) if index == 0 else start
        stop = word.end()
    return found.start(), start, stop, False


def _word_end(text: str, start: int) -> int:
    """Return where a word of a shell ends that begins here, quotes and all."""
    quote, at = "", start
    while at < len(text) and (quote or text[at] not in " \t\r\n);|&"):
        if quote:
            quote = "" if text[at] == quote else quote
        elif text[at] in "\"'":
            quote = text[at]
        at += 1
    return at


def _inside(text: str, at: int, quote: str) -> bool:
    """Whether a quote at this place closes one that was opened on its line (the word behind it is then not quoted by it)."""
    return text[text.rfind("\n", 0, at) + 1 : at].count(quote) % 2 == 1


def _words(value: Setting) -> list[str]:
    return [] if value is True else [shlex.quote(str(item)) for item in (value if isinstance(value, list) else [value])]


def _script_changed(text: str, key: str, value: Setting, old: Setting, variables: bool) -> str | None:
    if key.startswith("$"):
        line = next(match for match in _VARIABLE.finditer(text) if match[2] == key[1:])
        return text[: line.start()] + (text[line.end() + 1 :] if value is _REMOVED else str(value) + text[line.end() :])
    count = 0 if old is True else len(old) if isinstance(old, list) else 1
    spot = _spot(text, key, count)
    if spot is None:
        return None
    start, first, end, joined = spot
    if value is _REMOVED or (value is False and not joined):
        return _cut(text, start, end)
    words = " ".join(_words(value))
    if joined and text[start] in "\"'":
        return text[:start] + shlex.quote(f"{key}={value}") + text[end:]
    if not joined and count == 0:
        return text[:end] + (f" {words}" if words else "") + text[end:]
    through = _through_variable(text, text[first:end], words) if variables else None
    return text[:first] + words + text[end:] if through is None else through


def _through_variable(text: str, raw: str, words: str) -> str | None:
    """Return the text with the variable set to the new value that the value is, where it is assigned once as a plain word."""
    name = re.fullmatch(r"[\"']?\$\{?([A-Za-z_]\w{0,80})\}?[\"']?", raw)
    if name is None:
        return None
    assigned = re.compile(rf"^([ \t]*(?:export[ \t]+)?{name[1]}=)(.*?)([ \t]*(?:#.*)?\r?)$", re.MULTILINE)
    places = list(assigned.finditer(text))
    if len(places) != 1:
        return None
    (place,) = places
    default = re.fullmatch(r"([\"']?\$\{\w{1,80}:?-)([^{}$]*)(\}[\"']?)", place[2])
    if default is not None:
        new = default[1] + words + default[3]
    elif re.fullmatch(r"[\"']?[\w.,-]*[\"']?", place[2]):
        new = words
    else:
        return None
    return text[: place.start(2)] + new + text[place.end(2) :]


def _cut(text: str, start: int, end: int) -> str:
    """Return the text without a flag and its values; a line that held nothing else goes with it."""
    line = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    rest = text[line:start] + text[end:stop]
    if rest.strip() not in ("", "\\"):
        start -= len(text[line:start]) - len(text[line:start].rstrip(" \t")) if text[line:start].strip() else 0
        return text[:start] + text[end:]
    head = text[:line]
    if not rest.strip() and re.search(r"\\\r?\n\Z", head):  # the last of continued lines: the one before it ends the command now
        head = re.sub(r"[ \t]*\\(\r?\n)\Z", r"\1", head)
    return head + text[stop + 1 :]


def _script_added(text: str, key: str, value: Setting) -> str | None:
    if value is False:
        return text
    if key.startswith("$"):
        lines = text.split("\n")
        heads = [i for i, line in enumerate(lines) if line.startswith(("#!", "#SBATCH"))]
        lines.insert(heads[-1] + 1 if heads else 0, str(value))
        return "\n".join(lines)
    for near in _ANCHORS:
        for count in (1, 0):
            spot = _spot(text, near, count)
            if spot is not None:
                return _inserted(text, spot, key, value)
    return None


_ANCHORS = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.tensor_model_parallel_size",
    "micro_batch_size", "train.micro_batch_size", "global_batch_size", "ici_tensor_parallelism", "ici_fsdp_parallelism",
    "per_device_batch_size", "parallelism.tensor_parallel_degree", "training.local_batch_size", "per_device_train_batch_size", "num_layers",
)  # fmt: skip


_GROUPS = dict.fromkeys(  # arguments of DistributedDataParallelConfig
    ("use_distributed_optimizer", "overlap_param_gather", "use_megatron_fsdp", "data_parallel_sharding_strategy"), ("overlap_grad_reduce",)
)


def _inserted(text: str, spot: tuple[int, int, int, bool], key: str, value: Setting) -> str:
    start, _, end, joined = spot
    dashed = text[start] == "-"
    if dashed:
        style = "_" if "_" in text[start:end].split("=")[0].split()[0] and "." not in key else "-"
        flag = "--" + (key if "." in key else key.replace("_", style))
        new = flag + ("=" if joined else " ") + " ".join(_words(value)) if _words(value) else flag
    else:
        new = f"{key}={' '.join(_words(value)) or 'true'}"
    line = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    tail = text[end:stop]
    indent = text[line : line + len(text[line:start]) - len(text[line:start].lstrip())]
    before = text[:line].rstrip(" \t\r\n")
    alone = not text[line:start].strip()
    if alone and re.fullmatch(r"[ \t]*\\\r?", tail):
        return text[: stop + 1] + f"{indent}{new}{tail}\n" + text[stop + 1 :]
    if alone and not tail.strip() and not before.endswith("\\"):
        return text[:stop] + f"\n{indent}{new}" + text[stop:]
    return text[:end] + f" {new}" + text[end:]


# documents


def _scalar(value: Setting) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...").strip()


def _yaml_places(text: str) -> tuple[list[str], dict[str, tuple[int, re.Match[str]]]]:
    """Return the lines, and of each key by its dotted path its line and how that is made."""
    lines = text.split("\n")
    found: dict[str, tuple[int, re.Match[str]]] = {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        match = _YAML_KEY.match(line.rstrip("\r"))
        if match is None or len(line) > 2000:
            continue
        indent = len(match["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match["key"]))
        found.setdefault(".".join(name for _, name in above), (number, match))
    return lines, found


def _yaml_changed(text: str, key: str, value: Setting) -> str | None:
    lines, places = _yaml_places(text)
    if key not in places:
        return None
    number, match = places[key]
    rest = re.match(r"^(\s+)(.*?)(\s+#.*|\s*)$", match["rest"])
    if rest is None or not rest[2] or rest[2][0] in "&*|>{!" or (rest[2][0] == "[" and not rest[2].endswith("]")):
        return None
    if value is _REMOVED:
        return "\n".join(lines[:number] + lines[number + 1 :])
    ending = "\r" if lines[number].endswith("\r") else ""
    lines[number] = (
        f"{match['indent']}{match['quote']}{match['key']}{match['quote']}{match['colon']}{rest[1]}{_scalar(value)}{rest[3]}{ending}"
    )
    return "\n".join(lines)


def _yaml_added(text: str, key: str, value: Setting) -> str | None:
    lines, places = _yaml_places(text)
    parent, _, last = key.rpartition(".")
    siblings = [place for path, place in places.items() if path.rpartition(".")[0] == parent]
    if not siblings:
        if parent and parent not in places and "." not in parent:
            body = text if text.endswith("\n") else text + "\n"
            return f"{body}{parent}:\n  {last}: {_scalar(value)}\n"
        return None
    simple = [place for place in siblings if place[1]["rest"].strip() and place[1]["rest"].strip()[0] not in "&|>{["]
    if not simple:
        return None
    number, match = max(simple, key=lambda place: place[0])
    lines.insert(number + 1, f"{match['indent']}{last}: {_scalar(value)}" + ("\r" if lines[number].endswith("\r") else ""))
    return "\n".join(lines)


def _json_changed(text: str, key: str, value: Setting) -> str | None:
    document = json.loads(text)
    *parents, last = key.split(".")
    inner = document
    for parent in parents:
        inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        return None
    if value is _REMOVED:
        inner.pop(last, None)
    else:
        inner[last] = value
    indent = re.search(r"\n([ \t]+)\"", text)
    shape: Any = indent[1] if indent else None
    return json.dumps(document, indent=shape, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def _toml_text(value: Setting) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False)


def _toml_places(text: str) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Return the lines, the line of each key by its dotted path, and the last line of each section that says something."""
    lines, keys, ends = text.split("\n"), {}, {"": 0}
    section = ""
    for number, line in enumerate(lines):
        if (title := _SECTION.match(line.rstrip("\r"))) is not None:
            section = title[1]
            ends[section] = number
        elif (entry := re.match(r"^\s*([A-Za-z_][\w.-]*)\s*=", line)) is not None:
            keys[f"{section}.{entry[1]}" if section else entry[1]] = number
            ends[section] = number
    return lines, keys, ends


def _toml_changed(text: str, key: str, value: Setting) -> str | None:
    lines, keys, _ = _toml_places(text)
    if key not in keys:
        return None
    number = keys[key]
    match = re.match(r"^(\s*[\w.-]+\s*=\s*)(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[^#\s]+)(.*)$", lines[number])
    if match is None:
        return None
    if value is _REMOVED:
        return "\n".join(lines[:number] + lines[number + 1 :])
    lines[number] = match[1] + _toml_text(value) + match[3]
    return "\n".join(lines)


def _toml_added(text: str, key: str, value: Setting) -> str | None:
    lines, _, ends = _toml_places(text)
    section, _, last = key.rpartition(".")
    if section not in ends:
        return text + ("" if text.endswith("\n") else "\n") + f"\n[{section}]\n{last} = {_toml_text(value)}\n"
    lines.insert(ends[section] + 1, f"{last} = {_toml_text(value)}")
    return "\n".join(lines)


def _python_places(text: str, key: str) -> list[re.Match[str]]:
    """Return where a key is given a plain value: as an argument or by an assignment."""
    value = r"[\w.+-]+|\"[^\"\n]*\"|'[^'\n]*'"
    return list(re.finditer(rf"(?m)^(?!\s*#)(.*?(?<![\w.]){re.escape(key)}\s*=\s*)({value})(?=\s*(?:,|\)|#|$))", text))


def _python_changed(text: str, key: str, value: Setting) -> str | None:
    places = _python_places(text, key)
    if len(places) != 1:
        return None
    (place,) = places
    if value is not _REMOVED:
        return text[: place.start(2)] + str(value) + text[place.end(2) :]
    start, end = place.start(), text.find("\n", place.end())
    alone = text[start:end].strip().removesuffix(",") == place[0].strip()
    if end >= 0 and alone and place[1].strip().startswith(key):
        return text[:start] + text[end + 1 :]
    first = place.end(1) - len(place[1]) + place[1].rfind(key)
    if (behind := re.compile(r"\s*,\s*").match(text, place.end())) is not None:
        return text[:first] + text[behind.end() :]
    ahead = re.search(r",\s*\Z", text[:first])
    return text[: ahead.start()] + text[place.end() :] if ahead else text[:first] + text[place.end() :] if text[first - 1] == "(" else None


def _python_added(text: str, key: str, value: Setting) -> str | None:
    """Return the text with a statement behind the last one about the same object, or an argument behind one that stands for a plan."""
    parent = key.rpartition(".")[0]
    if parent:
        near = list(re.finditer(rf"(?m)^([ \t]*){re.escape(parent)}\.\w+\s*=[^\n]*$", text))
        if not near:
            return None
        return text[: near[-1].end()] + f"\n{near[-1][1]}{key} = {value}" + text[near[-1].end() :]
    for anchor in (*_GROUPS.get(key, ()), *_ANCHORS):
        places = _python_places(text, anchor)
        if len(places) == 1:
            end = places[0].end(2)
            alone = places[0][1].strip() == f"{anchor}=" and text[end : end + 2] == ",\n"
            indent = places[0][1][: len(places[0][1]) - len(places[0][1].lstrip())]
            new = f",\n{indent}{key}={value}" if alone else f", {key}={value}"
            return text[:end] + new + text[end:]
    return None


# requests


def _request_patch(launch: LaunchFiles, job: Job, now: Plan, best: Plan) -> Patch:
    """Return the diff of a job file: its plan with the knobs that differ."""
    from tuner.load import parse_yaml

    ((name, text),) = launch.files.items()
    data: Any = parse_yaml(text, name)
    key = "plan" if isinstance(data, dict) and data.get("plan") is not None else "current"
    own = data.get(key) if isinstance(data, dict) else None
    before, after = plan_record(now, job.gpus), plan_record(best, job.gpus)
    changes = {knob: after[knob] for knob in after if after[knob] != before[knob] and knob not in ("dp", "edp", "idle_tp", "fallback_tp")}
    if isinstance(own, dict):
        new: str | None = text
        for knob, value in changes.items():
            path = f"{key}.{next((word for word in own if word == knob), knob)}"
            new = None if new is None else (_yaml_changed if knob in own else _yaml_added)(new, path, value)
        new = None if new is None else (_yaml_changed(new, f"{key}.dp", after["dp"]) if "dp" in own else new)
    else:
        stated = split_knobs(str(own), name) if own is not None and not isinstance(own, list) else {}
        stated |= {knob: (str(value).lower() if isinstance(value, bool) else str(value)) for knob, value in changes.items()}
        stated |= {"dp": str(after["dp"])} if "dp" in stated else {}
        new = _yaml_changed(text, key, ",".join(f"{knob}={value}" for knob, value in stated.items()))
    if new is None:
        whole = {**data, key: {**(own if isinstance(own, dict) else {}), **changes}}
        new = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)
    return Patch(diff=diff_of({name: text}, {name: new}), edited=True)


# -- diffs


def _anew(launch: LaunchFiles, written: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's files in the place of the person's: of one kind each, others beside them."""
    files = dict(launch.files)
    folder = Path(launch.name).parent

    def kind(name: str) -> str:
        suffix = Path(name).suffix.lower()
        return "script" if suffix in SCRIPTS or not suffix else ".yaml" if suffix == ".yml" else suffix

    taken: set[str] = set()
    for name, text in written.items():
        same = [own for own in files if kind(own) == kind(name) and own not in taken and Path(own).name != "config.json"]
        place = same[0] if same and Path(name).name != "config.json" else str(folder / name)
        taken.add(place)
        files[place] = text
    return files


def _on_disk(name: str) -> str | None:
    try:
        return read_text(Path(name)) if Path(name).exists() else None
    except (OSError, SpecError):
        return None


def diff_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a unified diff that `git apply` takes, in the folder where the command was given (absolute paths: without their root)."""
    parts = []
    for name, text in after.items():
        old = before.get(name)
        if old == text:
            continue
        shown = _shown(name)
        left = [] if old is None else _lines(old)
        heads = ("/dev/null" if old is None else f"a/{shown}", f"b/{shown}")
        new_file = "new file mode 100644\n" if old is None else ""
        body = "".join(_ended(line) for line in difflib.unified_diff(left, _lines(text), *heads))
        parts.append(f"diff --git a/{shown} b/{shown}\n{new_file}{body}")
    return "".join(parts)


def _shown(name: str) -> str:
    path = Path(name)
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return str(path).lstrip("/")
    parts: Sequence[str] = [part for part in path.parts if part != "."]
    return "/".join(parts)


def _lines(text: str) -> list[str]:
    return [line + "\n" for line in text.split("\n")[:-1]] + ([text.split("\n")[-1]] if text.split("\n")[-1] else [])


def _ended(line: str) -> str:
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
