"""Environments of the parsers, in .oracles/ beside the sources: made when a requirements file has changed, and kept."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".oracles"
REQUIREMENTS = Path(__file__).parent / "requirements"
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
# What is installed one after the other, with pip's options; torch first and alone, so that nothing brings in a CUDA build of it.
STEPS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "torch": (
        ("torch", ()),
        ("frameworks", ("-c", str(REQUIREMENTS / "torch.txt"))),
        ("megatron", ("--no-deps", "--ignore-requires-python")),
    ),
    "maxtext": (("maxtext-needs", ()), ("maxtext", ("--no-deps",))),
    "sky": (("sky", ()),),
}
PYTHONS = {"torch": "3.11", "maxtext": "3.12", "sky": "3.11"}


class Missing(Exception):
    """An environment cannot be made here: why."""


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, making it first where it is missing or stale. Raises Missing."""
    place = FOLDER / name
    steps = STEPS[name]
    wanted = hashlib.sha256(repr([(files, (REQUIREMENTS / f"{files}.txt").read_text()) for files, _ in steps]).encode()).hexdigest()
    stamp = place / "stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return place / "bin" / "python"
    start = time.monotonic()
    print(f"oracles: installing {name} into {place} ...", file=sys.stderr)
    shutil.rmtree(place, ignore_errors=True)
    _run([_interpreter(PYTHONS[name]), "-m", "venv", str(place)])
    python = place / "bin" / "python"
    for files, options in steps:
        _run([str(python), *_PIP, *options, "-r", str(REQUIREMENTS / f"{files}.txt")])
    stamp.write_text(wanted)
    size = sum(path.lstat().st_size for path in place.rglob("*") if path.is_file()) / 1e6
    print(f"oracles: {name}: {size:,.0f} MB, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return python


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=1500)
    if done.returncode:
        raise Missing(f"{' '.join(words[:6])} ...: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")


def _interpreter(version: str) -> str:
    """Return a Python of this version: this one, one on the path, or one of pyenv's."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    places = [shutil.which(f"python{version}"), *sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))]
    for place in filter(None, places):
        if subprocess.run([str(place), "-c", "import venv"], capture_output=True).returncode == 0:
            return str(place)
    raise Missing(f"no Python {version} is installed")
