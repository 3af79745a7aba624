"""Runners from other packages: found by entry point, and never the end of the tool."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from tuner.errors import SpecError
from tuner.launch.runner import BUILT_IN, GROUP, Setup, open_runner, runners

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = """\
class Mine:
    name = "mine"
    parallel = 3
def make(setup):
    return Mine()
def broken(setup):
    raise KeyError("no such thing")
number = 7
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_runners.py").write_text(PLUGIN)
    (tmp_path / "exits.py").write_text("raise SystemExit('bye')\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = {"mine": "other_runners:make", "broken": "other_runners:broken", "number": "other_runners:number", "exits": "exits:make"}
    values |= {"missing": "no_such_module:make", "local": "other_runners:make"}
    points = [metadata.EntryPoint(name, value, GROUP) for name, value in values.items()]
    found = metadata.entry_points

    def entry_points(**given: Any) -> Any:
        return points if given == {"group": GROUP} else found(**given)

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_broken_plugins_are_listed_with_their_error(plugins: None) -> None:
    known = runners()
    assert list(known)[: len(BUILT_IN)] == list(BUILT_IN)
    errors = {name: entry.error for name, entry in known.items() if entry.error}
    assert errors["missing"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert errors["exits"] == "SystemExit: bye" and "is not callable" in errors["number"]
    assert errors["local of other_runners:make"] == "there is a runner of this name already (built in)"


def test_a_plugin_is_opened_by_name_and_a_built_in_one_cannot_be_replaced(plugins: None) -> None:
    assert open_runner("mine", Setup()).parallel == 3
    assert type(open_runner("local", Setup())).__name__ == "LocalRunner"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot be loaded: ModuleNotFoundError"),
        ("broken", "cannot be made: KeyError: 'no such thing'"),
        ("lokal", "did you mean local?"),
    ],
)
def test_what_cannot_be_opened_says_why(plugins: None, name: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        open_runner(name, Setup())
    assert message in str(raised.value)


@pytest.mark.parametrize(("name", "message"), [("command", "there is no launch command"), ("replay", "there are no measured rows")])
def test_what_a_runner_needs_is_said(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        open_runner(name, Setup())
