"""The wheel holds the whole package and all of configs/, and nothing else; it works from where it is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import tuner
from tests.terminal import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def tree(folder: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"}


def test_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        expected = tree("tuner") | {f"tuner/{name}" for name in tree("configs")}
        assert packed == expected
        for name in sorted(tree("configs")):
            assert archive.read(f"tuner/{name}") == (ROOT / name).read_bytes()


def test_wheel_is_named_after_the_version_and_ships_the_licence(wheel: Path) -> None:
    assert wheel.name == f"meshtuner-{tuner.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "tuner = tuner.cli:main" in archive.read(entry).decode()
        assert any(name.endswith("licenses/LICENSE") for name in names)


def test_presets_are_found_in_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from tuner import presets; print(presets.configs_dir()); print(presets.model('llama3-70b').layers)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, check=True
    )
    where, layers = done.stdout.split()
    assert Path(where) == (tmp_path / "site/tuner/configs").resolve()
    assert layers == "80"
