"""Slurm's topology.conf: which nodes share a switch or a block, as sizes of nested domains."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from tuner.errors import one_problem

MOST_NODES = 1_000_000
_ITEM = re.compile(r"(\w+)=(\S+)")


class Level(NamedTuple):
    """A level of switches: the nodes under each (0 where they differ), and how many switches there are."""

    name: str
    nodes: int
    switches: int


def hosts(text: str, where: str = "topology.conf") -> list[str]:
    """Return the names of a Slurm host list: "dev[0-2,7],login" is dev0 dev1 dev2 dev7 login. Raises SpecError."""
    found: list[str] = []
    if set("[]") & set(re.sub(r"\[[^\[\]]*\]", "", text)):
        raise one_problem(where, "", text[:80], "must be a host list", "like node[01-16]")
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found += _expanded(part, where)
        if len(found) > MOST_NODES:
            raise one_problem(where, "", text[:80], f"must name at most {MOST_NODES} nodes")
    return found


def _expanded(part: str, where: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", part)
    if match is None:
        return [part]
    tails = _expanded(match[3], where) if match[3] else [""]
    return [match[1] + number + tail for number in _numbers(match[2], where) for tail in tails]


def _numbers(text: str, where: str) -> list[str]:
    found: list[str] = []
    for item in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if bounds is None or last < first or last - first > MOST_NODES:
            raise one_problem(where, "", text[:80], "must be numbers and ranges", "like 01-16,20")
        found += [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    return found


def read_switches(text: str, where: str = "topology.conf") -> tuple[Level, ...]:
    """Return the levels of a topology.conf of tree or block plugin, inner first. Raises SpecError for a switch that is not defined.

    A level whose switches hold different numbers of nodes says 0 nodes: nothing can be told of all ranks alike.
    """
    lines = [line.split("#")[0] for line in re.sub(r"\\\n", " ", text).splitlines()]
    entries = [{key.lower(): value for key, value in _ITEM.findall(line)} for line in lines if line.strip()]
    switches = {entry["switchname"]: entry for entry in entries if "switchname" in entry}
    blocks = [entry for entry in entries if "blockname" in entry]
    if blocks:
        return _blocks(blocks, entries, where)
    if not switches:
        raise one_problem(where, "", "", "has no SwitchName or BlockName line", "SwitchName=leaf1 Nodes=node[01-16]")
    return _tree(switches, where)


def _blocks(blocks: list[dict[str, str]], entries: list[dict[str, str]], where: str) -> tuple[Level, ...]:
    sizes = [len(hosts(block.get("nodes", ""), where)) for block in blocks]
    stated = next((entry["blocksizes"] for entry in entries if "blocksizes" in entry), "")
    planned = [int(part) for part in stated.split(",") if part.isdigit()]
    first = planned[0] if planned else sizes[0] if len(set(sizes)) == 1 else 0
    outer = [Level("blocks", size, 0) for size in planned[1:]]
    return (Level("block", first, len(blocks)), *outer)


def _tree(switches: dict[str, dict[str, str]], where: str) -> tuple[Level, ...]:
    height: dict[str, int] = {}
    under: dict[str, frozenset[str]] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name not in switches or name in path:
            rule = "is its own ancestor" if name in path else "is named by a switch and not defined"
            raise one_problem(where, "Switches", name, rule, "a line SwitchName=" + name)
        if name in height:
            return
        below = hosts(switches[name].get("switches", ""), where)
        for child in below:
            visit(child, (*path, name))
        own = frozenset(hosts(switches[name].get("nodes", ""), where))
        under[name] = own.union(*(under[child] for child in below))
        height[name] = 1 + max((height[child] for child in below), default=0)

    for name in switches:
        visit(name, ())
    levels = []
    for level in sorted(set(height.values())):
        counts = {len(under[name]) for name in switches if height[name] == level}
        same = counts.pop() if len(counts) == 1 else 0
        levels.append(Level("leaf switch" if level == 1 else f"switch level {level}", same, list(height.values()).count(level)))
    return tuple(levels)


def nested(levels: tuple[Level, ...], nodes: int) -> list[Level]:
    """Return the levels that divide a job of `nodes` nodes into equal parts, each a multiple of the one inside it, smaller than the job."""
    kept = [level for level in levels if level.nodes and level.nodes < nodes and nodes % level.nodes == 0]
    return [level for i, level in enumerate(kept) if all(b.nodes % a.nodes == 0 and b.nodes > a.nodes for a, b in pairwise(kept[: i + 1]))]
