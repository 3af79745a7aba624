"""Slurm's topology.conf as nested domains."""

from __future__ import annotations

import pytest

from tuner.errors import SpecError
from tuner.launch.switches import hosts, nested, read_switches

TREE = """
# eight nodes under four leaves
SwitchName=leaf1 Nodes=dgx[001-002]
SwitchName=leaf2 Nodes=dgx[003-004]
SwitchName=leaf3 Nodes=dgx[005-006]
SwitchName=leaf4 Nodes=dgx[007,008]
SwitchName=spine1 Switches=leaf[1-2]
switchname=spine2 switches=leaf[3-4] LinkSpeed=400
SwitchName=core \\
  Switches=spine[1-2]
"""


def test_a_tree_of_switches() -> None:
    levels = read_switches(TREE)
    assert [(level.name, level.nodes, level.switches) for level in levels] == [
        ("leaf switch", 2, 4),
        ("switch level 2", 4, 2),
        ("switch level 3", 8, 1),
    ]
    assert [level.nodes for level in nested(levels, 8)] == [2, 4]
    assert [level.nodes for level in nested(levels, 4)] == [2]
    assert nested(levels, 7) == []


def test_uneven_leaves_say_nothing() -> None:
    levels = read_switches("SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[4-8]\nSwitchName=s Switches=a,b\n")
    assert [level.nodes for level in levels] == [0, 8]
    assert nested(levels, 16)[0].nodes == 8


def test_blocks() -> None:
    levels = read_switches("BlockName=b1 Nodes=t[01-18]\nBlockName=b2 Nodes=t[19-36]\nBlockSizes=18,36\n")
    assert [level.nodes for level in levels] == [18, 36]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a,b", ["a", "b"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1,3],login", ["r1n1", "r1n3", "r2n1", "r2n3", "login"]),
        ("", []),
    ],
)
def test_host_lists(text: str, found: list[str]) -> None:
    assert hosts(text) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no SwitchName or BlockName line"),
        ("SwitchName=a Switches=b\n", "is named by a switch and not defined"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "is its own ancestor"),
        ("SwitchName=a Nodes=n[3-1]\n", "must be numbers and ranges"),
        ("SwitchName=a Nodes=n[1-99999999]\n", "must be numbers and ranges"),
        ("SwitchName=a Nodes=n[1\n", "must be a host list"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        read_switches(text)
