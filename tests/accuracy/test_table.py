"""The accuracy table of the README is what the command makes of the runs in tests/published, and no worse than it was."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.published import unpack
from tests.terminal import ROOT

# Another machine's arithmetic may move a figure at the border of its rounding, never by more.
POINTS = 0.3

# What step times told without their series may be off at most (median, 90th percentile, in percent), and their mean regret: a change that
# is worse has to say why, here.
WORST = {"step time, without nanotron": (2.0, 12.0), "memory": (6.0, 25.0)}
LEAST_TAU = 0.75
LEAST_COVERED, MOST_COVERED = 86.0, 95.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The blocks that the command writes, made once."""
    return _made(tmp_path_factory.mktemp("published"))


@lru_cache(maxsize=1)
def _made(folder: Path) -> dict[str, list[str]]:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, list[str]] = module.blocks(unpack(folder))
    return found


def figures(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"-?\d[\d,]*\.?\d*", text)]


def block(path: Path, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*)\n<!-- /{name} -->", path.read_text(), re.DOTALL)
    assert found is not None, f"{path.name} has no block {name}"
    return found.group(1)


@pytest.mark.parametrize(("document", "name"), [("README.md", "accuracy"), ("docs/accuracy.md", "sources")])
def test_the_table_is_not_stale(made: dict[str, list[str]], document: str, name: str) -> None:
    """Else: python benchmarks/accuracy.py --write README.md, and again for docs/accuracy.md."""
    said, again = block(ROOT / document, name), "\n".join(made[name])
    assert re.sub(r"[\d.,-]+", "#", said) == re.sub(r"[\d.,-]+", "#", again)
    off = [(a, b) for a, b in zip(figures(said), figures(again), strict=True) if abs(a - b) > max(POINTS, 0.02 * abs(b))]
    assert not off


def row(made: dict[str, list[str]], start: str) -> list[float]:
    """The figures of the first column (series left out) of a row."""
    (line,) = [line for line in made["accuracy"] if line.startswith(f"| {start}")]
    return figures(line.split("|")[2])


def test_it_is_no_worse_than_it_was(made: dict[str, list[str]]) -> None:
    for name, start in (("step time, without nanotron", "without nanotron's sweep"), ("memory", "memory: median")):
        median, p90 = row(made, start)
        assert median <= WORST[name][0], name
        assert p90 <= WORST[name][1], name
    (tau,) = row(made, "order of layouts")
    assert tau >= LEAST_TAU
    (covered,) = row(made, "inside the 90 % range")
    assert LEAST_COVERED <= covered <= MOST_COVERED
