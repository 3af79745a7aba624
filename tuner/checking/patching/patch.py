"""From a person's launch files to the same files with another plan: the smallest edit that reads back as that plan, as a unified diff.

The launcher itself says how the new plan is spelled: what it writes is compared with what stands in the files, the keys that differ are
changed where they stand, and the result is read back. An edit that does not read back as the plan is thrown away; then the launcher's own
files stand in the diff instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tuner.checking.launch_files import SCRIPTS
from tuner.checking.patching.diffs import diff_of
from tuner.checking.patching.documents import yaml_added, yaml_changed
from tuner.checking.patching.edits import edited as edits
from tuner.checking.patching.settings import normal, settings_of_all
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import used
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.load import parse_yaml, read_text
from tuner.plan_defaults import filled
from tuner.plan_text import KNOBS, parse_knobs, plan_record, split_knobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.checking.launch_files import LaunchFiles
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Found, Launcher
    from tuner.plan import Plan

_FAMILY = frozenset(key for aspect in megatron_plan.PLAN for key in aspect.keys) - {"global_batch_size", "rampup_batch_size"}


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
    target = settings_of_all(written.files)
    before = settings_of_all(present) if present else {}
    right = _Judge(launcher, launch, job, best)
    edited = edits(texts, target, before, right, _keys(launcher))
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
        normal(word) for text in launcher.says.values() for word in re.findall(r"[A-Za-z_][\w.-]{2,80}", text) if re.search(r"[_.-]", word)
    }
    words |= {word.rpartition(".")[2] for word in words}
    return frozenset(words | _FAMILY) if launcher.framework.startswith(("megatron", "nemo", "primus")) else frozenset(words)


def _request_patch(launch: LaunchFiles, job: Job, now: Plan, best: Plan) -> Patch:
    """Return the diff of a job file: its plan with the knobs that differ."""
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
            new = None if new is None else (yaml_changed if knob in own else yaml_added)(new, path, value)
        new = None if new is None else (yaml_changed(new, f"{key}.dp", after["dp"]) if "dp" in own else new)
    else:
        stated = split_knobs(str(own), name) if own is not None and not isinstance(own, list) else {}
        stated |= {knob: (str(value).lower() if isinstance(value, bool) else str(value)) for knob, value in changes.items()}
        stated |= {"dp": str(after["dp"])} if "dp" in stated else {}
        new = yaml_changed(text, key, ",".join(f"{knob}={value}" for knob, value in stated.items()))
    if new is None:
        whole = {**data, key: {**(own if isinstance(own, dict) else {}), **changes}}
        new = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)
    return Patch(diff=diff_of({name: text}, {name: new}), edited=True)


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
