"""Texts and names that nobody means well with, and the check of scripts that are written."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.services import missing
from tuner.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tuner.launch.launchers.launcher import Launcher, Written

# What a model may be called: one line of text that can be seen.
NAMES = ('a"""b', "it's", "$(touch pwned)", "`touch pwned`", "-rf", "a; touch pwned #", 'back\\slash "', "é\u4e2d", "%s {x} ${HOME}", "# x")
_BOMB = "\n".join([f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'] * 9)}]" for i in range(30)])
TEXTS: Mapping[str, Mapping[str, str]] = {
    ".yaml": {
        "aliases": _BOMB,
        "deep": "a: " + "[" * 5000,
        "deep mappings": "\n".join(" " * i + "a:" for i in range(3000)),
        "long line": "parallelism: " + "x" * 1_000_000,
        "binary": "\x00\x01\x02",
        "digits": "parallelism:\n  tp: " + "9" * 5000,
        "no mapping": "- a\n- b",
        "empty": "",
        "tag": "parallelism: !!python/object/apply:os.system ['true']",
    },
    ".toml": {
        "deep": "a = " + "[" * 5000,
        "deep tables": "a = " + "{a = " * 3000 + "1" + "}" * 3000,
        "long key": "[" + ".".join(["a"] * 3000) + "]\nb = [",
        "binary": "\x00\x01\x02",
        "digits": "[parallelism]\ntensor_parallel_degree = " + "9" * 5000,
        "words": "this is no TOML",
    },
    ".py": {
        "deep": "def run():\n    return " + "(" * 5000 + ")" * 5000,
        "deep calls": "def run():\n    return " + "f(" * 3000 + ")" * 3000,
        "binary": "\x00\x01\x02",
        "words": "this is no Python",
        "power": "def run():\n    config = f()\n    config.parallelism.tensor_parallel_degree = 9**9**9**9\n    return config\n)",
    },
    ".sh": {
        "long line": "torchrun train.py " + "x" * 1_000_000,
        "long script": "true\n" * 400_000,
    },
}


def shellchecked(written: Written, folder: Path) -> None:
    """Every script that is written is free of shellcheck's complaints."""
    if shutil.which("shellcheck") is None:
        missing("shellcheck", "shellcheck")
    for name, text in written.files.items():
        if name.endswith(".sh"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            done = subprocess.run(["shellcheck", str(folder / name)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


def refuses(launcher: Launcher, name: str, text: str) -> None:
    """The launcher refuses the text soon, and says in which file."""
    start = time.monotonic()
    launcher.reads(name, text)
    with pytest.raises(SpecError) as error:
        launcher.read({name: text})
    assert time.monotonic() - start < 10
    assert all(problem.where.startswith(name) for problem in error.value.problems), error.value
    assert len(str(error.value)) < 2000
