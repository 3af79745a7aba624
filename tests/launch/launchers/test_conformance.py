"""What every launcher must do: account for each field of a plan, read back what it wrote, and write only what it can spell."""

from __future__ import annotations

import dataclasses

import pytest

from tests.launch.launchers.plans import SIZES, job_of, legal_plans, spellable_plans
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


@by_name
@pytest.mark.parametrize("model", SIZES)
def test_a_plan_with_a_knob_that_has_no_spelling_is_refused_naming_it(launcher: Launcher, model: str) -> None:
    job = job_of(launcher.framework, model)
    for plan in legal_plans(launcher.framework, model):
        lost = set(used(plan)) & set(launcher.cannot)
        if lost:
            with pytest.raises(SpecError) as refused:
                launcher.write(job, plan)
            assert {problem.path for problem in refused.value.problems} >= lost


@by_name
@pytest.mark.parametrize("model", SIZES)
def test_what_was_written_reads_back_as_the_same_plan(launcher: Launcher, model: str) -> None:
    """Idle knobs apart. What has a spelling may be refused beside something else, naming a knob; many plans are not."""
    job = job_of(launcher.framework, model)
    written = 0
    for plan in spellable_plans(launcher, model):
        assert not set(used(plan)) & set(launcher.cannot)
        for version in launcher.versions or ("",):
            try:
                files = launcher.write(job, plan, version).files
            except SpecError as refused:
                assert {problem.path for problem in refused.problems} <= FIELDS, refused
                continue
            written += 1
            read = [name for name, text in files.items() if launcher.reads(name, text)]
            assert read, f"{launcher.name} does not know its own files: {list(files)}"
            found = launcher.read({name: files[name] for name in read})
            assert not found.problems and not found.unknown, (found.problems, found.unknown)
            knobs = {name: value for name, value in found.plan.items() if name not in ("edp",)}
            again, _ = read_plan(knobs, job, launcher.name)
            assert used(again) == used(plan), f"{launcher.name} {version}: {files}"
            assert found.gpus in (None, job.gpus)
            for name in ("seq_len", "global_batch", "precision"):
                if name in found.job:
                    assert str(found.job[name]) == str(getattr(job, name)), name
    assert written >= 5


@by_name
def test_each_spelled_field_changes_what_is_written(launcher: Launcher) -> None:
    """Of plans that differ in one field alone, the files differ (the neutral format aside, no launcher spells idle fields)."""
    job = job_of(launcher.framework)
    asked = [name for name in ("tp", "pp", "micro_batch") if name in launcher.says]
    compared = set()
    for base in spellable_plans(launcher):
        for name in asked:
            doubled = dataclasses.replace(base, **{name: getattr(base, name) * 2})
            if broken(job, doubled):
                continue
            try:
                told, other = launcher.write(job, base).files, launcher.write(job, doubled).files
            except SpecError:
                continue
            assert other != told, name
            compared.add(name)
    assert compared == set(asked)


def _written(launcher: Launcher, job: Job, plan: Plan) -> Written | None:
    try:
        return launcher.write(job, plan)
    except SpecError:
        return None


@by_name
def test_names_and_paths_are_plain(launcher: Launcher) -> None:
    job = job_of(launcher.framework)
    written = next(each for plan in spellable_plans(launcher) if (each := _written(launcher, job, plan)) is not None)
    assert written.files and set(written.programs) <= set(written.files)
    for name, text in written.files.items():
        assert not name.startswith(("/", "-")) and ".." not in name and text.endswith("\n"), name
