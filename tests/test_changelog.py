"""The changelog and the package speak of the same version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import tuner

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^## \[(.+?)\]", re.MULTILINE)


def test_newest_version_of_the_changelog_is_the_packages() -> None:
    versions = HEADING.findall((ROOT / "CHANGELOG.md").read_text())
    assert versions[0] == "Unreleased"
    assert versions[1] == tuner.__version__
    assert len(versions) == len(set(versions))


def test_pyproject_takes_its_version_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "tuner/__init__.py"
