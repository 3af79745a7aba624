"""What every launcher must do: account for each field of a plan, read back what it wrote, and write only what it can spell."""

from __future__ import annotations

import dataclasses

import pytest

from tests.launch.launchers.plans import SIZES, job_of, plans_of
from tuner.cost_model.rules import broken
from tuner.errors import SpecError
from tuner.job import Job
from tuner.launch.launchers.launcher import BUILT_IN, Launcher, Written, launchers, open_launcher, used
from tuner.plan import Plan
from tuner.plan_defaults import read_plan

FIELDS = {field.name for field in dataclasses.fields(Plan)}
LAUNCHERS = [open_launcher(name) for name in BUILT_IN]
by_name = pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)


def test_the_built_in_ones_load() -> None:
    assert {name: known.error for name, known in launchers().items() if known.source == "built in"} == dict.fromkeys(BUILT_IN, "")


@by_name
def test_every_field_of_a_plan_is_spelled_or_said_not_to_be(launcher: Launcher) -> None:
    assert set(launcher.says) | set(launcher.cannot) == FIELDS
    assert not set(launcher.says) & set(launcher.cannot)
    assert all(launcher.says.values()) and all(launcher.cannot.values())


def versions_of(launcher: Launcher) -> tuple[str, ...]:
    return launcher.versions or ("",)


def written(launcher: Launcher, job: Job, plan: Plan, version: str) -> Written | None:
    """Return the files, or None where the launcher refuses, naming knobs of the plan or the model."""
    try:
        return launcher.write(job, plan, version)
    except SpecError as refused:
        assert refused.problems and {problem.path for problem in refused.problems} <= {*FIELDS, "model"}, refused
        return None


@by_name
@pytest.mark.parametrize("model", SIZES)
def test_what_was_written_reads_back_as_the_same_plan(launcher: Launcher, model: str) -> None:
    """Idle knobs apart. A plan of which a knob cannot be spelled, or not with this value or in this version, is refused, naming it."""
    job = job_of(launcher.framework, model)
    passed = dict.fromkeys(versions_of(launcher), 0)
    for plan in plans_of(launcher, model):
        lost = sorted(set(used(plan)) & set(launcher.cannot))
        if lost:
            with pytest.raises(SpecError) as refused:
                launcher.write(job, plan)
            assert {problem.path for problem in refused.value.problems} >= set(lost)
            continue
        for version in versions_of(launcher):
            done = written(launcher, job, plan, version)
            if done is None:
                continue
            passed[version] += 1
            files = done.files
            read = [name for name, text in files.items() if launcher.reads(name, text)]
            assert read, f"{launcher.name} does not know its own files: {list(files)}"
            found = launcher.read({name: files[name] for name in read})
            assert not found.problems and not found.unknown, (found.problems, found.unknown)
            knobs = {name: value for name, value in found.plan.items() if name not in ("edp",)}
            again, _ = read_plan(knobs, job, launcher.name)
            assert dealt(again, job) == dealt(plan, job), f"{launcher.name} {version}: {files}"
            assert found.gpus in (None, job.gpus)
            for name in ("seq_len", "global_batch", "precision"):
                if name in found.job:
                    assert str(found.job[name]) == str(getattr(job, name)), name
    assert sum(passed.values()) >= 5, passed


def dealt(plan: Plan, job: Job) -> dict[str, int]:
    """Return the used fields. Of two chunks, embedding and loss that count as as many layers each deal as if neither counted; and layers
    to recompute that are all of the fuller stage are those of full recompute.
    """
    found = used(plan)
    if plan.pp * plan.vpp == 2:
        first, last = (int(found.pop(name, 0)) for name in ("embedding_layers", "loss_layers"))
        found["loss_layers"] = last - first
        fuller = (job.model.layers + abs(last - first)) // 2 if plan.pp == 2 else job.model.layers
        if found.get("recompute_layers", 0) >= fuller:
            found.pop("recompute_layers")
    return found


@by_name
def test_each_spelled_field_changes_what_is_written(launcher: Launcher) -> None:
    """Of plans that differ in one field alone, the files differ (the neutral format aside, no launcher spells idle fields)."""
    job = job_of(launcher.framework)
    version = versions_of(launcher)[-1]
    asked = {name for name in ("tp", "pp", "micro_batch") if name in launcher.says}
    compared = set()
    for base in plans_of(launcher):
        told = None if set(used(base)) & set(launcher.cannot) else written(launcher, job, base, version)
        for name in asked if told else ():
            doubled = dataclasses.replace(base, **{name: getattr(base, name) * 2})
            changed = None if broken(job, doubled) else written(launcher, job, doubled, version)
            if told and changed:
                assert changed.files != told.files, name
                compared.add(name)
    assert compared == asked


@by_name
def test_names_and_paths_are_plain(launcher: Launcher) -> None:
    job = job_of(launcher.framework)
    plans = [plan for plan in plans_of(launcher) if not set(used(plan)) & set(launcher.cannot)]
    for version in versions_of(launcher):
        done = next(found for plan in plans if (found := written(launcher, job, plan, version)))
        assert done.files and set(done.programs) <= set(done.files)
        for name, text in done.files.items():
            assert not name.startswith(("/", "-")) and ".." not in name and text.endswith("\n"), name
