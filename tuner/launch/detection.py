"""The machine at hand as a Cluster: what was seen, what was taken from a preset, and what a person must fill in.

Accelerators come first; where there are none, processes on the CPU stand in for them, so that everything can be tried on a laptop.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.cluster import Cluster, Domain, Gpu, Sourced
from tuner.errors import InfrastructureError, SpecError, one_problem
from tuner.launch.switches import Level, nested, read_switches
from tuner.launch.topology import Accelerators, Cpu, Nic, amd_cards, cpu_of, nic_of, nvidia_cards
from tuner.load import read_text
from tuner.units import show_bytes, show_flops, show_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOCAL = re.compile(r"(?a:local|this-machine)(?:\s*[x*:]\s*(-?\d+))?", re.IGNORECASE)
PROCESSES = 4
MOST_PROCESSES = 1024
MOST_ACCELERATORS = 999_999
TIMEOUT_S = 10
SAME_MEMORY = 0.08  # of what the preset says: drivers reserve a little, and GB is not GiB
SAME_RATE = 0.05
LINK_RATE = {"v100": 25e9, "a100": 25e9, "h100": 25e9, "h200": 25e9, "b200": 50e9, "b300": 50e9, "gb200": 50e9, "gb300": 50e9}
# FLOP a cycle of a core: vector units x lanes x 2, or the tile unit.
FP32_CYCLE = (("avx512f", 64.0), ("fma", 32.0), ("avx2", 16.0), ("asimd", 16.0), ("sse2", 8.0))
BF16_CYCLE = (("amx_bf16", 2048.0), ("avx512_bf16", 128.0), ("bf16", 64.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the tools of a machine say."""

    accelerators: Accelerators | None
    nics: tuple[Nic, ...]
    cpu: Cpu
    nodes: int = 1
    switches: tuple[Level, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """cluster: None where something is missing; draft: its file's content all the same; seen, assumed: one line each; missing: what a
    person must fill in, as paths of the file.
    """

    cluster: Cluster | None
    draft: dict[str, Any] = field(default_factory=dict)
    seen: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def command_output(*command: str) -> str:
    """Return what a program prints, "" where there is no such program or it fails."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 (a fixed list of programs)
            [path, *command[1:]], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_machine(
    run: Callable[..., str] = command_output, root: Path = Path("/"), env: Mapping[str, str] = os.environ, cores: int | None = None
) -> Machine:
    """Return what this machine says. run: asks a program; root: where /proc, /sys and /etc lie. Nothing is loaded, no device is opened."""
    cards = nvidia_cards(run("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"), run("nvidia-smi", "topo", "-m"))
    if cards is None:
        cards = amd_cards(run("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"), run("rocm-smi", "--showtopotype"))
    nodes = next((int(env[name]) for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES") if env.get(name, "").isdigit() and int(env[name])), 1)
    levels, notes = _switches(root, env) if nodes > 1 else ((), ())
    return Machine(accelerators=cards, nics=tuple(_nics(root)), cpu=_cpu(root, cores), nodes=nodes, switches=levels, notes=notes)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _nics(root: Path) -> Iterator[Nic]:
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        found = nic_of(port.parts[-3], _text(port / "rate"), _text(port / "state"), _text(port / "link_layer"))
        if found:
            yield found


def _cpu(root: Path, cores: int | None) -> Cpu:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    max_khz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    limit = _text(root / "sys/fs/cgroup/memory.max")
    found = cpu_of(_text(root / "proc/cpuinfo"), _text(root / "proc/meminfo"), cores or allowed, max_khz=max_khz, limit=limit)
    if found.memory:
        return found
    from dataclasses import replace

    return replace(found, model=found.model or platform.processor(), memory=_total_memory())


def _total_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return 0.0


def _switches(root: Path, env: Mapping[str, str]) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    folder = Path(env["SLURM_CONF"]).parent if env.get("SLURM_CONF") else root / "etc/slurm"
    path = folder / "topology.conf"
    if not path.is_file():
        return (), ()
    try:
        return read_switches(read_text(path), str(path)), ()
    except SpecError as error:
        return (), (f"{error}",)


def local_count(text: str) -> int | None:
    """Return N of "local:N" or "localxN", 0 of "local" alone, None for another text. Raises SpecError for a count that no machine has."""
    match = LOCAL.fullmatch(text.strip()) if len(text) < 40 else None
    if match is None:
        return None
    if match[1] is not None and not (match[1].isascii() and 1 <= int(match[1]) <= MOST_ACCELERATORS):
        rule = f"must be 1 to {MOST_ACCELERATORS} accelerators, or 1 to {MOST_PROCESSES} processes on the CPU"
        raise one_problem("cluster", "", text, rule, f"local:{PROCESSES}")
    return int(match[1] or 0)


def local(text: str) -> Detected:
    """Return what "local", "local:N" or "localxN" means on this machine. Raises SpecError for a count that cannot be."""
    return detect(read_machine(), local_count(text) or 0)


def named_cluster(text: str) -> Cluster:
    """Return a cluster by name, by name and count, from a file, or this machine ("local"). Raises SpecError."""
    if local_count(text) is None:
        return presets.cluster(text)
    found = local(text)
    if found.cluster is None:
        rule = f"is not known well enough to plan for: {found.seen[0]}"
        raise one_problem(
            "cluster", "", text, rule, f"`tuner presets cluster local -o mine.yaml` writes what was read; fill in {found.missing[0]}"
        )
    return found.cluster


def detect(machine: Machine, count: int = 0) -> Detected:
    """Return the machine as a cluster of `count` accelerators or processes (0: all of them, or PROCESSES on the CPU)."""
    if machine.accelerators is None:
        return _processes(machine.cpu, count or PROCESSES)
    return _accelerated(machine, machine.accelerators, count)


def _processes(cpu: Cpu, count: int) -> Detected:
    """Return CPU processes as a cluster: one thread each; where they outnumber the cores they share them."""
    if not 1 <= count <= MOST_PROCESSES:
        raise one_problem("cluster", "", f"local:{count}", f"must be 1 to {MOST_PROCESSES} processes", f"local:{PROCESSES}")
    base = presets.gpu("cpu-core")
    kind = presets.cluster("cpu-processes")
    share = min(1.0, cpu.cores / count)
    gpu = base.replace(**_core(cpu, base, share, count))
    link = kind.domains[0]
    rate = Sourced[float](value=link.bandwidth.value * share, source=_shared(link.bandwidth.source, share))
    domain = link.replace(size=max(count, 1), bandwidth=rate)
    cluster = kind.replace(name=f"localx{count}", aliases=(), gpu=gpu, gpus=count, gpus_per_node=count, domains=(domain,))
    seen = (
        f"no accelerator; {count} processes on {cpu.cores} cores of {cpu.model or 'a CPU'} stand in, {show_bytes(gpu.memory.value)} each",
        *(f"{name} {show_flops(peak.value)} a process: {peak.source}" for name, peak in gpu.peak.items()),
    )
    assumed = tuple(f"{name}: {source}" for name, source in (("memory bandwidth", gpu.hbm.source), (domain.name, domain.bandwidth.source)))
    return Detected(cluster=cluster, seen=seen, assumed=assumed)


def _shared(source: str, share: float) -> str:
    return source if share >= 1 else f"{source}; times {share:.3g}, the share of a core that a process has"


def _core(cpu: Cpu, base: Gpu, share: float, count: int) -> dict[str, Any]:
    """Return the fields of one process: peaks from the clock and instruction sets of /proc/cpuinfo, else those of cpu-core."""
    changes: dict[str, Any] = {"aliases": (), "hbm": Sourced[float](value=base.hbm.value * share, source=_shared(base.hbm.source, share))}
    if cpu.memory:
        source = f"{show_bytes(cpu.memory)} of RAM over {count} processes"
        changes["memory"] = Sourced[float](value=cpu.memory / count, source=source)
    wide = next(((name, cycle) for name, cycle in FP32_CYCLE if name in cpu.flags), None)
    if wide is None or not cpu.clock:
        peaks = {n: Sourced[float](value=p.value * share, source=_shared(f"cpu-core: {p.source}", share)) for n, p in base.peak.items()}
        return changes | {"peak": peaks}
    source = f"{wide[0]}, {wide[1]:g} FLOP a cycle at {cpu.clock / 1e9:.3g} GHz (/proc/cpuinfo)"
    fp32 = Sourced[float](value=wide[1] * cpu.clock * share, source=_shared(source, share))
    tile = next(((name, cycle) for name, cycle in BF16_CYCLE if name in cpu.flags), None)
    words = f"{tile[0]}, {tile[1]:g} FLOP a cycle" if tile else f"{wide[1] / 2:g} FLOP a cycle: no bf16 instructions, half of fp32 assumed"
    bf16 = Sourced[float](value=(tile[1] if tile else wide[1] / 2) * cpu.clock * share, source=_shared(words, share))
    return changes | {"peak": {"fp32": fp32, "bf16": bf16}, "clock": Sourced[float](value=cpu.clock, source="/proc/cpuinfo")}


def _accelerated(machine: Machine, cards: Accelerators, count: int) -> Detected:
    seen = [f"{cards.count} x {cards.name}" + (f", {show_bytes(cards.memory)} each" if cards.memory else "")]
    if cards.others:
        seen.append(f"also {', '.join(cards.others)}: left out, a job runs on one kind")
    if cards.link:
        seen.append(f"joined by {cards.link}")
    compute = _compute_nics(machine.nics, cards)
    rate = sum(nic.rate for nic in compute) / cards.count
    if compute:
        seen.append(f"{len(compute)} network ports of {show_rate(compute[0].rate)} ({compute[0].layer}): {show_rate(rate)} for each card")
    seen += [f"{machine.nodes} nodes in this Slurm allocation"] if machine.nodes > 1 else []
    gpu = find_gpu(cards)
    if gpu is None:
        return _draft(machine, cards, compute, rate, seen)
    cluster, assumed = _like_preset(machine, cards, gpu, compute, rate)
    if count and count != cluster.gpus:
        cluster = presets.with_gpus(cluster, count, "cluster").replace(name=f"localx{count}")
    return Detected(cluster=cluster, seen=tuple(seen), assumed=(*assumed, *machine.notes))


def _compute_nics(nics: tuple[Nic, ...], cards: Accelerators) -> list[Nic]:
    """Return the ports that training uses: those near a card where the matrix tells, else the fastest kind."""
    near = [nic for nic in nics if nic.name in cards.near]
    pool = near or list(nics)
    fastest = max((nic.rate for nic in pool), default=0.0)
    chosen = [nic for nic in pool if nic.rate == fastest]
    layer = next((nic.layer for nic in chosen if nic.layer != "Ethernet"), "Ethernet")
    return [nic for nic in chosen if nic.layer == layer]


def find_gpu(cards: Accelerators) -> Gpu | None:
    """Return the preset of a driver's name for a card, where the memory agrees too; None for one that is not known."""
    for word in _spellings(cards.name):
        try:
            found = presets.gpu(word)
        except SpecError:
            continue
        if _same_form(found, cards) and (not cards.memory or abs(found.memory.value / cards.memory - 1) < SAME_MEMORY):
            return found
    close = [g for g in map(presets.gpu, presets.names("gpus")) if _family(g.name) == _family(_spellings(cards.name)[0])]
    return next((g for g in close if cards.memory and abs(g.memory.value / cards.memory - 1) < SAME_MEMORY and _same_form(g, cards)), None)


def _spellings(name: str) -> list[str]:
    """Return the names under which presets may know "NVIDIA H100 80GB HBM3" or "AMD Instinct MI300X OAM", longest first."""
    text = re.sub(r"[\s_]+", "-", name.strip().lower())
    text = re.sub(r"^(?:nvidia|amd|tesla|geforce|instinct|-)+", "", text)
    text = re.sub(r"-(?:oam|vf|hf|mcm)\b", "", text).strip("-")
    words = text.split("-")
    return ["-".join(words[:n]) for n in range(len(words), 0, -1)] or [text]


def _family(name: str) -> str:
    return name.split("-")[0]


def _same_form(gpu: Gpu, cards: Accelerators) -> bool:
    """Whether a preset is a PCIe card where the driver's name says so, and none where it does not."""
    return ("pcie" in gpu.name) == ("pcie" in cards.name.lower()) and ("nvl" in gpu.name.split("-")) == (
        "nvl" in cards.name.lower().split()
    )


def _like_preset(machine: Machine, cards: Accelerators, gpu: Gpu, compute: list[Nic], rate: float) -> tuple[Cluster, tuple[str, ...]]:
    """Return the machine with the figures that were seen in place of those of the preset cluster that is nearest to it."""
    kinds = [found for found in map(presets.cluster, presets.names("clusters")) if found.gpu.name == gpu.name]
    if not kinds:
        raise InfrastructureError(f"no cluster preset has {gpu.name}: write a cluster file by hand (docs/files.md)")
    nearest = min(kinds, key=lambda kind: _distance(kind, cards, compute, rate))
    assumed = [f"latencies, and what was not seen: preset {nearest.name}"]
    inner, outer = nearest.domains[0], nearest.domains[-1]
    seen_link = _link_rate(gpu, cards)
    if seen_link and abs(seen_link / inner.bandwidth.value - 1) > SAME_RATE:
        source = f"nvidia-smi topo -m: {cards.link}"
        inner = inner.replace(name=f"NVLink, {cards.nvlinks} links", bandwidth=Sourced[float](value=seen_link, source=source))
    elif cards.link and not cards.nvlinks and cards.link != "XGMI" and "PCIe" not in inner.name:
        inner = inner.replace(name=f"PCIe ({cards.link})", bandwidth=_host_link(gpu), size=cards.count)
    rack = inner.size is not None and inner.size > cards.count and nearest.gpus_per_node == cards.count
    if rack:
        assumed.append(f"{inner.name} joins {inner.size} cards: preset {nearest.name}, one node does not show it")
    size = inner.size if rack else cards.count
    if compute and abs(rate / outer.bandwidth.value - 1) > SAME_RATE:
        outer = outer.replace(name=compute[0].layer, bandwidth=Sourced[float](value=rate, source="/sys/class/infiniband, over the cards"))
    elif not compute:
        assumed.append(f"{outer.name} {show_rate(outer.bandwidth.value)} a card: preset {nearest.name}, no RDMA port was seen")
    domains = _domains(inner.replace(size=size), outer, machine, cards.count)
    gpus = cards.count * machine.nodes
    changes = {"name": f"localx{gpus}", "aliases": (), "gpu": gpu, "gpus": cards.count, "gpus_per_node": cards.count, "domains": domains}
    cluster = nearest.replace(**changes)
    return (presets.with_gpus(cluster, gpus, "cluster").replace(name=f"localx{gpus}") if machine.nodes > 1 else cluster), tuple(assumed)


def _host_link(gpu: Gpu) -> Sourced[float]:
    if gpu.host_link is not None:
        return Sourced[float](value=gpu.host_link.value, source=f"host link of {gpu.name}: {gpu.host_link.source}")
    return Sourced[float](value=32e9, source="assumption: PCIe 4.0 x16, one direction")


def _link_rate(gpu: Gpu, cards: Accelerators) -> float:
    return cards.nvlinks * LINK_RATE.get(_family(gpu.name), 0.0)


def _distance(kind: Cluster, cards: Accelerators, compute: list[Nic], rate: float) -> tuple[Any, ...]:
    """Return how far a preset is from what was seen: other node, other link, other network rate, other network, a vendor's own name."""
    inner, outer = kind.domains[0], kind.domains[-1]
    over_pcie = bool(cards.link) and not cards.nvlinks and cards.link != "XGMI"
    seen = compute[0].layer.lower() if compute else "infiniband"
    off = abs(rate / outer.bandwidth.value - 1) if compute else 0.0
    return (
        kind.gpus_per_node != cards.count,
        over_pcie != ("PCIe" in inner.name),
        off > SAME_RATE,
        seen not in outer.name.lower(),
        round(off, 3),
        not re.match(r"dgx|gb\d00-nvl|mi\d+x-node", kind.name),
        kind.name,
    )


def _domains(inner: Domain, outer: Domain, machine: Machine, cards: int) -> tuple[Domain, ...]:
    """Return the domains, with those of Slurm's switches between the node and the whole; rates of inner switches as of the outermost."""
    between = []
    for level in nested(machine.switches, machine.nodes):
        if level.nodes * cards > (inner.size or 0):
            source = f"{outer.bandwidth.source}; topology.conf: {level.nodes} nodes under each {level.name}"
            rate = Sourced[float](value=outer.bandwidth.value, source=source)
            between.append(outer.replace(name=f"{outer.name}, {level.name}", size=level.nodes * cards, bandwidth=rate))
    return (inner, *between, outer.replace(size=None))


def _draft(machine: Machine, cards: Accelerators, compute: list[Nic], rate: float, seen: list[str]) -> Detected:
    """Return a file of what was read of an accelerator that no preset knows; what is null must be filled in."""
    fill = {"value": None, "source": "fill in: data sheet"}
    inner = {"value": None, "source": f"fill in: what a card sends to another over {cards.link or 'their link'}, one direction"}
    outer = {"value": f"{rate:.6g} B/s", "source": "/sys/class/infiniband, over the cards"} if compute else dict(fill)
    memory = {"value": f"{cards.memory:.0f} B", "source": "the driver's tool"} if cards.memory else dict(fill)
    wait = {"value": None, "source": "fill in: latency of one message"}
    gpu = {"name": _spellings(cards.name)[0] or "accelerator", "vendor": "fill in", "peak": {"bf16": dict(fill)}, "memory": memory}
    domains = [
        {"name": cards.link or "inside the node", "size": cards.count, "bandwidth": inner, "latency": dict(wait)},
        {"name": compute[0].layer if compute else "network", "size": None, "bandwidth": outer, "latency": dict(wait)},
    ]
    gpus = cards.count * machine.nodes
    draft = {"name": "local", "gpu": gpu | {"hbm": dict(fill)}, "gpus": gpus, "gpus_per_node": cards.count, "domains": domains}
    return Detected(cluster=None, draft=draft, seen=tuple(seen), assumed=machine.notes, missing=tuple(_nulls(draft)))


def _nulls(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the figures that a draft leaves open."""
    if isinstance(value, dict):
        if value.get("value", 0) is None:
            yield path.lstrip(".")
        for key, part in value.items():
            yield from _nulls(part, f"{path}.{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _nulls(part, f"{path}[{i}]")
