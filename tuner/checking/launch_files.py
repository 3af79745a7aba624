"""Which files of the paths that a person names launch a training run, by which launcher, and which of them belong together.

Nothing that is read is executed. A folder is walked without following links to folders; what is too large, binary, unreadable or of no
launcher is left out and counted, while a file that is named itself is always answered for.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.checking.script_links import FOLDER, LARGEST, MODULE, NAMED, resolved, starters
from tuner.errors import Problem, SpecError, one_problem
from tuner.launch.launchers.launcher import launchers
from tuner.load import parse_yaml, path_of, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tuner.launch.launchers.launcher import Found, Launcher

REQUEST = "request"  # a job file of the tuner with a plan
MOST_FILES = 20_000
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".job")
CONFIGS = (".yaml", ".yml", ".json", ".toml", ".py")
_LEFT_OUT = {"node_modules", "__pycache__", "venv", "site-packages"}
# Where several know a file, the one that is more particular is asked first.
_ORDER = ("neutral", "primus", "megatron-bridge", "nemo", "megatron-lm", "nanotron", "maxtext", "torchtitan", "accelerate", "deepspeed")
_DEGREES = {"tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero", "shard_group"}
_REQUEST_KEYS = re.compile(r"^(?:plan|current):", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFiles:
    """Files of one launch: {path as the person gave it: text}, the first names it. format: a launcher's name or "request"; found: what its
    launcher reads in them (None for a request, or where it cannot); problems: why it cannot.
    """

    files: Mapping[str, str]
    format: str
    found: Found | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The file that names the launch."""
        return next(iter(self.files))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The launches of some paths, files that cannot be read or that nobody knows (each named itself), and how many files of folders were
    left out, by why.
    """

    launches: tuple[LaunchFiles, ...]
    unread: tuple[tuple[str, Problem], ...]
    skipped: Mapping[str, int]


@dataclass(slots=True)
class _Pile:
    """Files read so far. named: those that a person named themselves."""

    texts: dict[str, str] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    unread: list[tuple[str, Problem]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def skip(self, why: str) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + 1


def known_formats() -> dict[str, Launcher]:
    """Return the launchers that can read, in the order in which they are asked."""
    usable = {name: known.make() for name, known in launchers().items() if known.make is not None}
    return {name: usable[name] for name in sorted(usable, key=lambda n: (_ORDER.index(n) if n in _ORDER else len(_ORDER), n))}


def collect(paths: Sequence[str], form: str = "", progress: Callable[[str], None] | None = None) -> Collected:
    """Return the launches of files and folders. form: the format that every file is taken for ("": as recognised)."""
    pile = _Pile()
    for text in paths:
        _gather(path_of(text), pile, progress)
    starting_others = starters(pile.texts, pile.named, _is_launch_script)
    formats = known_formats()
    chosen = {form: formats[form]} if form in formats else {} if form == REQUEST else formats
    owners = {name: _owner(name, text, chosen, form, name in pile.named) for name, text in pile.texts.items()}
    judged: list[LaunchFiles] = []
    starting = {name for name, found in starting_others.items() if any(owners[script] for script in found)}
    grouped = _grouped(pile, {name: () if name in starting else owner for name, owner in owners.items()}, chosen)
    inside = {name for files, _ in grouped for name in files}
    for files, owner in grouped:
        if progress is not None:
            progress(files[0])
        made = _launch(files, owner, pile, chosen)
        if made is not None:
            judged.append(made)
    for name in owners:
        if name in starting:
            pile.skip("starting another script, which is checked")
        elif owners[name] or name in inside:
            continue
        elif name in pile.named:
            rule = "is of no format that is known"
            pile.unread.append((name, Problem(where=name, path="", value="", rule=rule, hint=f"--format, one of {', '.join(formats)}")))
        else:
            pile.skip("of no known format")
    return Collected(launches=tuple(judged), unread=tuple(pile.unread), skipped=pile.skipped)


# -- reading


def _gather(path: Path, pile: _Pile, progress: Callable[[str], None] | None) -> None:
    try:
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False
    if not folder:
        try:
            pile.texts[str(path)] = read_text(path)
            pile.named.add(str(path))
        except SpecError as error:
            pile.unread += [(str(path), problem) for problem in error.problems]
        return
    for file in _walk(path, pile):
        if progress is not None:
            progress(f"reading {file}")
        _read(file, pile)


def _walk(folder: Path, pile: _Pile) -> Iterable[Path]:
    """Yield the files under a folder in order; hidden folders, environments and links to folders are left out."""
    count = 0
    for at, folders, files in os.walk(folder, onerror=lambda _: pile.skip("in a folder that cannot be read")):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        for name in sorted(files):
            count += 1
            if count > MOST_FILES:
                pile.skip(f"beyond the first {MOST_FILES:,}")
                continue
            yield Path(at) / name


def _read(path: Path, pile: _Pile) -> None:
    """Read a file of a folder, or count why not."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        pile.skip("unreadable")
        return
    if not stat.S_ISREG(status.st_mode):
        pile.skip("no file")
        return
    if str(path) in pile.texts or (status.st_dev, status.st_ino) in pile.seen:
        return
    pile.seen.add((status.st_dev, status.st_ino))
    if path.suffix.lower() not in (*SCRIPTS, *CONFIGS) and (path.suffix or not _is_script(path)):
        pile.skip("of no known format")
        return
    if status.st_size > LARGEST:
        pile.skip("too large")
        return
    try:
        pile.texts[str(path)] = read_text(path)
    except SpecError as error:
        empty = any("is empty" in problem.rule for problem in error.problems)
        pile.skip("empty" if empty else "unreadable or binary")


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


# -- recognising


def _owner(name: str, text: str, formats: Mapping[str, Launcher], form: str, named: bool) -> tuple[str, ...]:
    """Return the formats that know a file, the most particular first."""
    if form:
        return (form,)
    if _is_request(name, text, named):  # keys that no launcher has
        return (REQUEST,)
    return tuple(key for key, launcher in formats.items() if _knows(launcher, name, text))


def _knows(launcher: Launcher, name: str, text: str) -> bool:
    try:
        return launcher.reads(name, text)
    except Exception:  # a plugin's; one that cannot tell does not know it
        return False


def _is_request(name: str, text: str, named: bool) -> bool:
    """Whether a YAML file is a question to the tuner: its keys are those of a job file, with a plan (or, if it is named, without)."""
    if not name.endswith((".yaml", ".yml")) or not (_REQUEST_KEYS.search(text) or named):
        return False
    from tuner.request import Request

    try:
        data = parse_yaml(text, name)
    except SpecError:
        return named and _REQUEST_KEYS.search(text) is not None and re.search(r"^(?:model|cluster):", text, re.MULTILINE) is not None
    known = {*Request.__dataclass_fields__, "description", "source"}
    if not isinstance(data, dict) or not {"plan", "current", "model"} & set(data):
        return False
    strange = [key for key in data if key not in known]
    return not strange or (named and len(strange) < len(data) / 2)


def _grouped(
    pile: _Pile, owners: Mapping[str, tuple[str, ...]], formats: Mapping[str, Launcher]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the files of each launch with the formats that know its first one: a script goes with the configurations that it names."""
    groups: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    joined: set[str] = set()
    for name in [name for name in owners if _is_launch_script(name) and owners[name]]:
        beside = _named_beside(name, pile.texts[name], pile, owners[name], formats)
        beside = beside or _only_config(name, pile, owners)
        groups.append(((name, *beside), owners[name]))
        joined |= {name, *beside}
    for name, owner in owners.items():
        if owner and name not in joined:
            model = _model_beside(name, pile) if owner != (REQUEST,) else ()
            groups.append(((name, *model), owner))
    order = {name: place for place, name in enumerate(pile.texts)}
    return sorted(groups, key=lambda group: order[group[0][0]])


def _is_launch_script(name: str) -> bool:
    return not name.lower().endswith(CONFIGS)


def _named_beside(script: str, text: str, pile: _Pile, owner: Sequence[str], formats: Mapping[str, Launcher]) -> tuple[str, ...]:
    """Return the configurations that a script names and that lie near it (or were given), reading those that were not yet."""
    found: dict[str, None] = {}
    tokens = [match[0] for match in NAMED.finditer(text[:LARGEST])]
    tokens += [match[1] + ".py" for match in MODULE.finditer(text[:LARGEST])] if "torchtitan" in owner else []
    tokens += [match[1].rstrip("/") + "/config.json" for match in FOLDER.finditer(text[:LARGEST])]
    for token in dict.fromkeys(tokens[:2000]):
        path = resolved(Path(script).parent, token)
        if path is None:
            continue
        name = str(path)
        if name not in pile.texts:
            if path.suffix == ".py" and "torchtitan" not in owner and "nemo" not in owner:
                continue
            try:
                pile.texts[name] = read_text(path, LARGEST)
            except SpecError:
                continue
        content = pile.texts[name]
        known = any(_knows(formats[key], name, content) for key in owner if key in formats)
        if known or (path.name == "config.json" and '"model_type"' in content):
            found[name] = None
        for other in _named_by_config(path, content, pile):
            found[other] = None
    return tuple(found)


def _named_by_config(path: Path, text: str, pile: _Pile) -> tuple[str, ...]:
    """Return the DeepSpeed configuration that a configuration of Accelerate names."""
    match = re.search(r"deepspeed_config_file:\s{0,9}[\"']?([\w./${}-]{1,300}\.json)", text)
    other = resolved(path.parent, match[1]) if match else None
    if other is None:
        return ()
    try:
        pile.texts.setdefault(str(other), read_text(other, LARGEST))
    except SpecError:
        return ()
    return (str(other),)


def _only_config(script: str, pile: _Pile, owners: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the one configuration of the script's launcher that was given with it, where script and configuration stand alone."""
    folder, mine = Path(script).parent, set(owners[script])
    there = [name for name in pile.texts if Path(name).parent == folder and name != script]
    configs = [name for name in there if not _is_launch_script(name) and mine & set(owners.get(name, ()))]
    scripts = [name for name in there if _is_launch_script(name) and mine & set(owners.get(name, ()))]
    return tuple(configs) if len(configs) == 1 and not scripts else ()


def _model_beside(name: str, pile: _Pile) -> tuple[str, ...]:
    """Return a config.json of transformers that lies beside a configuration which has no model of its own."""
    if not name.endswith((".json", ".yaml", ".yml")):
        return ()
    for path in (Path(name).parent / "config.json", Path(name).parent / "model" / "config.json"):
        text = pile.texts.get(str(path), "")
        if str(path) != name and '"model_type"' in text:
            return (str(path),)
    return ()


def _launch(files: Sequence[str], owner: Sequence[str], pile: _Pile, formats: Mapping[str, Launcher]) -> LaunchFiles | None:
    """Return the launch of these files as the format that understands most of it reads it. A file of a folder that launches nothing is
    none.
    """
    texts = {name: pile.texts[name] for name in files}
    if tuple(owner) == (REQUEST,):
        return LaunchFiles(files=texts, format=REQUEST)
    best: tuple[int, str, Found] | None = None
    wrong: dict[str, tuple[Problem, ...]] = {}
    for key in owner:
        try:
            found = formats[key].read(_readable(formats[key], texts))
        except SpecError as error:
            wrong[key] = error.problems
            continue
        except RecursionError:
            wrong[key] = one_problem(files[0], "", None, "is nested too deeply").problems
            continue
        except (ValueError, OverflowError) as error:  # a number past what Python turns into text, and the like
            wrong[key] = one_problem(files[0], "", None, f"holds a value that cannot be read: {str(error)[:80]}").problems
            continue
        score = len(found.plan) + len(found.model) + len(found.job) + 3 * bool(found.gpus)
        if best is None or score > best[0]:
            best = (score, key, found)
    named = any(name in pile.named for name in files)
    if best is not None and (named or _launches(best[2])):
        return LaunchFiles(files=texts, format=best[1], found=best[2])
    if best is not None:
        pile.skip("launching nothing")
        return None
    key, problems = next(iter(wrong.items()))
    precise = [problem for problem in problems if problem.path or re.search(r":\d+$", problem.where)]
    if not named and not precise:
        pile.skip("launching nothing")
        return None
    return LaunchFiles(files=texts, format=key, problems=problems)


def _launches(found: Found) -> bool:
    """Whether files say more than a word of a launcher in passing: a degree, a model, or GPUs with a batch or a length."""
    told = {name for name in found.plan if name not in found.assumed}
    numbers = {name for name in ("seq_len", "global_batch") if name in found.job and name not in found.assumed}
    return bool(told & _DEGREES or found.model or (found.gpus and numbers))


def _readable(launcher: Launcher, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the files that a launcher takes: those that it knows, its first one, and models of transformers."""
    first = next(iter(texts))
    takes_models = launcher.name in ("deepspeed", "accelerate")
    return {
        name: text
        for name, text in texts.items()
        if name == first or _knows(launcher, name, text) or (takes_models and Path(name).name == "config.json")
    }
