"""Names, paths and values that would run, break out of quotes or confuse a parser, through every format and every wrapper."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.launchers.plans import job_of, spellable_plans
from tests.launch.launchers.test_conformance import dealt, versions_of
from tests.services import missing
from tuner.errors import SpecError
from tuner.exporting import export_one, wrapped
from tuner.formats import Formats
from tuner.job import Job
from tuner.launch.launchers.launcher import BUILT_IN, open_launcher
from tuner.launch.site import Container, Site
from tuner.launch.wrappers.wrapper import BUILT_IN as WRAPPERS
from tuner.plan import Plan
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

# one line each: a Name is refused otherwise
HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "-rf",
    "--help",
    "a b\tc".replace("\t", " "),
    "\\",
    "x\\",
    "{{ .Values.x }}",
    "${HOME}",
    "!!python/object:os.system",
    "&anchor *alias",
    "key: value # comment",
    "]]>",
    "'''",
    '"""',
    "%s%n{0}",
    "modèle-ünïcødé-模型-🚀",
    "null",
    "1e3",
    "[x]",
    "a=b,c=d",
    "EOF",
)


def hostile(job: Job, name: str) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update={"name": name}), "release": name})


def first_plan(name: str) -> tuple[Job, Plan]:
    """Return a job and a plan that the launcher can write."""
    launcher = open_launcher(name)
    job = job_of(launcher.framework, "llama3-8b")
    for plan in spellable_plans(launcher, "llama3-8b"):
        try:
            launcher.write(job, plan, versions_of(launcher)[-1])
            return job, plan
        except SpecError:
            continue
    raise AssertionError(name)


def parsed(files: Mapping[str, str]) -> int:
    """Parse every file whose language has a parser here; return how many."""
    for name, text in files.items():
        kind = Path(name).suffix
        if kind in (".yaml", ".yml"):
            list(yaml.safe_load_all(text))
        elif kind == ".json":
            json.loads(text)
        elif kind == ".toml":
            tomllib.loads(text)
        elif kind == ".py":
            ast.parse(text)
        else:
            assert kind in (".sh", ".sbatch"), name
            subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)
    return len(files)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.text(min_size=1, max_size=60, alphabet=st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"])))
def test_any_name_is_written_and_read_back(text: str) -> None:
    for name in BUILT_IN:
        check(name, text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_data(text: str) -> None:
    for name in BUILT_IN:
        check(name, text)


def check(name: str, text: str) -> None:
    launcher = open_launcher(name)
    job, plan = first_plan(name)
    job = hostile(job, text)
    files = launcher.write(job, plan, versions_of(launcher)[-1]).files
    own = {file: content for file, content in files.items() if launcher.reads(file, content)}
    found = launcher.read(own)
    assert not found.unknown and not found.problems, (name, found.unknown, found.problems)
    again, _ = read_plan({knob: value for knob, value in found.plan.items() if knob != "edp"}, job, name)
    assert dealt(again, job) == dealt(plan, job), name


@pytest.mark.parametrize("name", BUILT_IN)
def test_files_with_hostile_values_parse_and_scripts_are_clean(name: str, tmp_path: Path) -> None:
    """Every file parses, and shellcheck finds nothing."""
    from tuner.cost_model.calibration import load_calibration

    job, plan = first_plan(name)
    wraps = () if name == "neutral" else tuple(WRAPPERS)
    scripts = []
    for number, text in enumerate(HOSTILE):
        site = Site(environment={"A_VALUE": text}, container=Container(image=text))
        mean = hostile(job, text)
        one = export_one(name, mean, plan, load_calibration("none", mean))
        files = wrapped({name: one}, Formats((name,), wraps), site)[name].written.files
        assert parsed(files)
        for file, content in files.items():
            if file.endswith((".sh", ".sbatch")):
                path = tmp_path / f"{number}-{file.replace('/', '-')}"
                path.write_text(content)
                scripts.append(str(path))
    if scripts:
        shellcheck(scripts)


def shellcheck(scripts: list[str]) -> None:
    if shutil.which("shellcheck") is None:
        missing("shellcheck", "shellcheck")
    # SC2016, SC1003: a $ or a backslash of a value stays as it is, on purpose
    done = subprocess.run(["shellcheck", "--shell=bash", "--exclude=SC2016,SC1003", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
