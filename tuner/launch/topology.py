"""What the tools of this machine say about its accelerators, links and network cards: their texts in, plain facts out."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 2.0**20
_NVLINK = re.compile(r"NV(\d+)")
_NEAR = ("PIX", "PXB")  # behind the same PCIe switch as the accelerator: the cards that a training job uses
_RATE = re.compile(r"\s*([\d.]+)\s*Gb/sec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """`count` cards called `name` by their driver, with `memory` bytes (0: not said).

    link: the worst of what joins two of them: NV18 (bonded NVLinks), XGMI, or PIX, PXB, PHB, NODE, SYS over PCIe; "" unknown.
    near: names of the network cards on the same PCIe switch as one of them.
    """

    name: str
    count: int
    memory: float = 0.0
    link: str = ""
    near: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def nvlinks(self) -> int:
        """Bonded NVLinks of a card, 0 where the link is another."""
        match = _NVLINK.fullmatch(self.link)
        return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A port of an RDMA network card: bytes/s in one direction, and its link layer (InfiniBand, Ethernet, EFA)."""

    name: str
    rate: float
    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor: cores that this process may use, what /proc/cpuinfo calls it, hertz (0: not said), instruction sets, bytes of RAM."""

    cores: int
    model: str = ""
    clock: float = 0.0
    flags: frozenset[str] = frozenset()
    memory: float = 0.0


def nvidia_cards(query: str, topology: str = "") -> Accelerators | None:
    """Return the cards of `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader` and `nvidia-smi topo -m`; None for none."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(query.splitlines()) if len(row) >= 2]
    rows = [row for row in rows if re.match(r"\d+( MiB)?$|\[", row[1])]
    if not rows:
        return None
    names = [row[0] for row in rows]
    memory = re.match(r"\d+", rows[0][1])
    link, near = _matrix(topology)
    return Accelerators(
        name=names[0],
        count=names.count(names[0]),
        memory=int(memory[0]) * MIB if memory else 0.0,
        link=link,
        near=near,
        others=tuple(sorted(set(names) - {names[0]})),
    )


def _matrix(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the worst link between two cards and the network cards near one, from the matrix of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((cells for cells in lines if cells[:1] == ["GPU0"] and "X" not in cells), [])
    columns = [cell for cell in header if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+|ibp\w+|roce\w+|rdmap\w+|efa\w+", cell)]
    rows = {cells[0]: dict(zip(columns, cells[1:], strict=False)) for cells in lines if cells[:1] and cells[0] in columns and "X" in cells}
    cards = [name for name in rows if name.startswith("GPU")]
    links = [rows[a][b] for a in cards for b in cards if a != b and b in rows[a]]
    near = {c for a in cards for c in columns if not c.startswith("GPU") and rows[a].get(c) in _NEAR}
    legend = dict(re.findall(r"(NIC\d+): (\S+)", text))
    return (min(links, key=_speed) if links else ""), tuple(sorted(legend.get(name, name) for name in near))


def _speed(link: str) -> tuple[int, int]:
    match = _NVLINK.fullmatch(link)
    order = ("SYS", "NODE", "PHB", "PXB", "PIX")
    return (1, int(match[1])) if match else (0, order.index(link) if link in order else -1)


def amd_cards(listed: str, topology: str = "") -> Accelerators | None:
    """Return the cards of `rocm-smi --showproductname --showmeminfo vram --json` and `rocm-smi --showtopotype`; None for none."""
    try:
        data = json.loads(listed[listed.index("{") :]) if "{" in listed else {}
    except ValueError:
        return None
    cards = [_lowered(card) for key, card in data.items() if re.fullmatch(r"card\d+", str(key)) and isinstance(card, dict)]
    names = [str(card.get("card series") or card.get("card model") or "").strip() for card in cards]
    if not any(names):
        return None
    memory = str(cards[0].get("vram total memory (b)", "0"))
    kinds = re.findall(r"^GPU\d+\s+(.+)$", topology, re.MULTILINE)
    links = {word for line in kinds for word in line.split() if word in ("XGMI", "PCIE")}
    return Accelerators(
        name=names[0],
        count=names.count(names[0]),
        memory=float(memory) if memory.isdigit() else 0.0,
        link="" if not links else "PHB" if "PCIE" in links else "XGMI",
        others=tuple(sorted(set(names) - {names[0]})),
    )


def _lowered(card: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in card.items()}


def nic_of(name: str, rate: str, state: str, layer: str) -> Nic | None:
    """Return a port from the files of /sys/class/infiniband/NAME/ports/N; None for one that is down or does not tell its rate."""
    match = _RATE.match(rate)
    if match is None or "ACTIVE" not in state.upper():
        return None
    kind = "EFA" if re.match(r"efa|rdmap", name) else layer.strip() or "InfiniBand"
    return Nic(name=name, rate=float(match[1]) * 1e9 / 8, layer=kind)


def cpu_of(cpuinfo: str, meminfo: str, cores: int, *, max_khz: str = "", limit: str = "") -> Cpu:
    """Return the processor of /proc/cpuinfo and /proc/meminfo; max_khz: cpufreq's highest clock, limit: memory.max of the control group."""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo, re.MULTILINE))
    clock = float(max_khz) * 1e3 if max_khz.strip().isdigit() else 0.0
    if not clock and re.fullmatch(r"[\d.]+", fields.get("cpu MHz", "")):
        clock = float(fields["cpu MHz"]) * 1e6
    total = re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    memory = float(total[1]) * 1024 if total else 0.0
    if limit.strip().isdigit():
        memory = min(memory or float(limit), float(limit))
    flags = fields.get("flags") or fields.get("Features") or ""
    return Cpu(cores=cores, model=fields.get("model name", ""), clock=clock, flags=frozenset(flags.split()), memory=memory)
