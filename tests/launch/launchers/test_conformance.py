"""What every launcher must do: account for each field of a plan, read back what it wrote, and write only what it can spell."""

from __future__ import annotations

import dataclasses

import pytest

from tests.launch.launchers.plans import SIZES, job_of, legal_plans
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import BUILT_IN, Launcher, launchers, open_launcher, used
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
def test_what_was_written_reads_back_as_the_same_plan(launcher: Launcher, model: str) -> None:
    """Idle knobs apart. A plan of which a knob cannot be spelled is refused, naming it; so is one whose knobs the framework does not run
    together.
    """
    job = job_of(launcher.framework, model)
    written = 0
    for plan in legal_plans(launcher.framework, model):
        lost = sorted(set(used(plan)) & set(launcher.cannot))
        if lost:
            with pytest.raises(SpecError) as refused:
                launcher.write(job, plan)
            assert {problem.path for problem in refused.value.problems} >= set(lost)
            continue
        for version in launcher.versions or ("",):
            try:
                files = launcher.write(job, plan, version).files
            except SpecError as refused_too:
                assert {problem.path for problem in refused_too.problems} <= set(used(plan))
                continue
            written += 1
            read = [name for name, text in files.items() if launcher.reads(name, text)]
            assert read, f"{launcher.name} does not know its own files: {list(files)}"
            found = launcher.read({name: files[name] for name in read})
            assert not found.problems and not found.unknown, (found.problems, found.unknown)
            knobs = {name: value for name, value in found.plan.items() if name not in ("edp",)}
            again, _ = read_plan(knobs, job, launcher.name)
            assert dealt(again) == dealt(plan), f"{launcher.name} {version}: {files}"
            assert found.gpus in (None, job.gpus)
            for name in ("seq_len", "global_batch", "precision"):
                if name in found.job:
                    assert str(found.job[name]) == str(getattr(job, name)), name
    assert written >= 10


def dealt(plan: Plan) -> dict[str, int]:
    """Return the used fields. Of two chunks, embedding and loss that count as as many layers each deal as if neither counted."""
    found = used(plan)
    if plan.pp * plan.vpp == 2:
        first, last = (found.pop(name, 0) for name in ("embedding_layers", "loss_layers"))
        found["loss_layers"] = last - first
    return found


def is_written(launcher: Launcher, plan: Plan) -> bool:
    """Whether the launcher spells this plan."""
    try:
        launcher.write(job_of(launcher.framework), plan)
    except SpecError:
        return False
    return True


@by_name
def test_each_spelled_field_changes_what_is_written(launcher: Launcher) -> None:
    """Of plans that differ in one field alone, the files differ (the neutral format aside, no launcher spells idle fields)."""
    job = job_of(launcher.framework)
    base = next(p for p in legal_plans(launcher.framework) if p.pp > 1 and p.tp > 1 and is_written(launcher, p))
    told = launcher.write(job, base).files
    other = {"tp": base.tp * 2, "pp": base.pp * 2, "micro_batch": base.micro_batch * 2}
    for name, value in other.items():
        if name in launcher.says:
            assert launcher.write(job, dataclasses.replace(base, **{name: value})).files != told, name


@by_name
def test_names_and_paths_are_plain(launcher: Launcher) -> None:
    job = job_of(launcher.framework)
    plan = next(p for p in legal_plans(launcher.framework) if is_written(launcher, p))
    written = launcher.write(job, plan)
    assert written.files and set(written.programs) <= set(written.files)
    for name, text in written.files.items():
        assert not name.startswith(("/", "-")) and ".." not in name and text.endswith("\n"), name
