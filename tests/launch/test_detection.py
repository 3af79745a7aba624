"""Machines as clusters, from the texts of their tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.terminal import ROOT
from tuner import presets
from tuner.cluster_text import cluster_text, file_text
from tuner.errors import SpecError
from tuner.launch import detection
from tuner.launch.detection import Machine, detect, find_gpu, local_count, named_cluster, read_machine
from tuner.launch.topology import Accelerators, amd_cards, cpu_of, nic_of, nvidia_cards
from tuner.presets import read_cluster_text

TEXTS = ROOT / "tests/fixtures/machines"
PORTS = {
    "h100": {f"mlx5_{i}": ("400 Gb/sec (4X NDR)", "4: ACTIVE", "InfiniBand") for i in range(12)} | {"mlx5_1": ("", "1: DOWN", "Ethernet")},
    "a100-pcie": {f"mlx5_{i}": ("200 Gb/sec (4X HDR)", "4: ACTIVE", "InfiniBand") for i in range(2)},
    "gb200": {f"mlx5_{i}": ("400 Gb/sec (4X NDR)", "4: ACTIVE", "InfiniBand") for i in range(4)}
    | {f"mlx5_{i}": ("200 Gb/sec (4X HDR)", "4: ACTIVE", "Ethernet") for i in (4, 5)},
    "mi300x": {},
    "unknown": {f"mlx5_{i}": ("800 Gb/sec (4X XDR)", "4: ACTIVE", "InfiniBand") for i in range(8)},
    "none": {},
}
TREE = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n"


def machine(name: str, folder: Path, **env: str) -> Machine:
    """Return what `read_machine` makes of a machine's texts."""
    for port, (rate, state, layer) in PORTS[name].items():
        path = folder / f"sys/class/infiniband/{port}/ports/1"
        path.mkdir(parents=True)
        for file, text in (("rate", rate), ("state", state), ("link_layer", layer)):
            (path / file).write_text(text + "\n")
    (folder / "proc").mkdir(parents=True)
    (folder / "proc/cpuinfo").write_text((TEXTS / "cpuinfo.txt").read_text())
    (folder / "proc/meminfo").write_text("MemTotal:       16000000 kB\nMemFree:        15000000 kB\n")

    def run(*command: str) -> str:
        files = {"nvidia-smi": f"{name}-topo.txt" if "topo" in command else f"{name}-query.csv"}
        files["rocm-smi"] = f"{name}-topo.txt" if "--showtopotype" in command else f"{name}-cards.json"
        path = TEXTS / files[command[0]]
        wrong = command[0] == "nvidia-smi" and name == "mi300x"
        return path.read_text() if path.is_file() and not wrong else ""

    return read_machine(run, folder, env, cores=2)


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "domains"),
    [
        ("h100", "h100-sxm-80gb", 8, [("NVSwitch, NVLink 4", 8, 450e9), ("InfiniBand NDR", None, 50e9)]),
        ("a100-pcie", "a100-pcie-80gb", 4, [("PCIe 4.0", 4, 32e9), ("InfiniBand", None, 12.5e9)]),
        ("gb200", "gb200", 4, [("NVLink rack", 72, 900e9), ("InfiniBand NDR", None, 50e9)]),
        ("mi300x", "mi300x", 8, [("xGMI mesh", 8, 448e9), ("InfiniBand NDR", None, 50e9)]),
    ],
)
def test_machines_like_a_preset(name: str, gpu: str, gpus: int, domains: list[tuple[str, int | None, float]], tmp_path: Path) -> None:
    found = detect(machine(name, tmp_path))
    assert found.cluster is not None
    assert (found.cluster.gpu.name, found.cluster.gpus, found.cluster.gpus_per_node) == (gpu, gpus, gpus)
    assert [(d.name, d.size, d.bandwidth.value) for d in found.cluster.domains] == domains
    assert found.seen
    assert any("preset" in line for line in found.assumed)
    again = read_cluster_text(cluster_text(found.cluster, found.seen), "again")
    assert again == found.cluster


def test_what_was_not_seen_is_said_to_be_of_the_preset(tmp_path: Path) -> None:
    assert any("no RDMA port was seen" in line for line in detect(machine("mi300x", tmp_path / "a")).assumed)
    assert any("one node does not show it" in line for line in detect(machine("gb200", tmp_path / "b")).assumed)
    assert not any("no RDMA" in line for line in detect(machine("h100", tmp_path / "c")).assumed)


def test_ports_near_a_card_count_and_storage_ports_do_not(tmp_path: Path) -> None:
    assert "8 network ports of 50 GB/s (InfiniBand): 50 GB/s for each card" in detect(machine("h100", tmp_path)).seen


def test_nodes_and_switches_of_a_slurm_allocation(tmp_path: Path) -> None:
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm/topology.conf").write_text(TREE)
    found = detect(machine("h100", tmp_path, SLURM_JOB_NUM_NODES="4"))
    assert found.cluster is not None
    assert (found.cluster.gpus, found.cluster.sizes) == (32, (8, 16, 32))
    assert found.cluster.domains[1].name == "InfiniBand NDR, leaf switch"


def test_a_wrong_topology_conf_is_noted_and_left_out(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "topology.conf").write_text("SwitchName=s Switches=gone\n")
    found = detect(machine("h100", tmp_path / "m", SLURM_NNODES="2", SLURM_CONF=str(conf / "slurm.conf")))
    assert found.cluster is not None
    assert found.cluster.sizes == (8, 16)
    assert any("is named by a switch and not defined" in line for line in found.assumed)


def test_an_unknown_accelerator_is_a_file_to_fill_in(tmp_path: Path) -> None:
    found = detect(machine("unknown", tmp_path))
    assert found.cluster is None
    assert "gpu.peak.bf16" in found.missing
    assert "gpu.memory" not in found.missing  # the driver said it
    assert found.draft["domains"][1]["bandwidth"]["value"] == "1e+11 B/s"
    with pytest.raises(SpecError) as caught:
        read_cluster_text(file_text(found.draft), "draft.yaml")
    assert all(path in str(caught.value) for path in found.missing)


def test_no_gpu_means_processes_that_share_the_cores(tmp_path: Path) -> None:
    here = machine("none", tmp_path)
    four, two = detect(here).cluster, detect(here, 2).cluster
    assert four is not None
    assert two is not None
    assert (four.name, four.gpus, four.sizes, four.gpu.name) == ("localx4", 4, (4,), "cpu-core")
    assert four.gpu.memory.value == 16000000 * 1024 / 4
    assert two.gpu.peak["fp32"].value == 64 * 2.1e9  # two AVX-512 units; two processes on two cores
    assert two.gpu.peak["bf16"].value == 2048 * 2.1e9
    assert four.gpu.peak["fp32"].value == 0.5 * two.gpu.peak["fp32"].value
    assert "avx512f" in two.gpu.peak["fp32"].source
    assert read_cluster_text(cluster_text(four), "again") == four


def test_one_process_is_a_cluster_too(tmp_path: Path) -> None:
    one = detect(machine("none", tmp_path), 1).cluster
    assert one is not None
    assert one.sizes == (1,)


@pytest.mark.parametrize("count", [1025, 999_999])
def test_too_many_processes(count: int, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must be 1 to 1024 processes"):
        detect(machine("none", tmp_path), count)


def test_a_cpu_that_says_little_takes_the_preset_s_figures() -> None:
    arm = cpu_of((TEXTS / "cpuinfo-arm.txt").read_text(), "", 8)
    assert (arm.clock, arm.memory, "bf16" in arm.flags) == (0.0, 0.0, True)
    found = detect(Machine(accelerators=None, nics=(), cpu=arm)).cluster
    assert found is not None
    assert found.gpu.peak["fp32"].value == presets.gpu("cpu-core").peak["fp32"].value
    assert cpu_of("", "MemTotal: 100 kB\n", 1, limit="2048\n").memory == 2048


@pytest.mark.parametrize(
    ("name", "mib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 95830, "h100-nvl-94gb"),
        ("NVIDIA H200", 143771, "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-sxm2-32gb"),
        ("NVIDIA B200", 183359, "b200-sxm-180gb"),
        ("NVIDIA GB200", 189471, "gb200"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("AMD Instinct MI300X OAM", 196592, "mi300x"),
        ("AMD Instinct MI325X", 262128, "mi325x"),
        ("NVIDIA A100-PCIE-40GB", 40960, None),
        ("NVIDIA T4", 15360, None),
        ("", 1000, None),
    ],
)
def test_names_of_drivers(name: str, mib: int, preset: str | None) -> None:
    found = find_gpu(Accelerators(name=name, count=1, memory=mib * 2.0**20))
    assert (found.name if found else None) == preset


def test_texts_without_cards() -> None:
    assert nvidia_cards("No devices were found\n") is None
    assert nvidia_cards("") is None
    assert amd_cards("WARNING: No AMD GPUs specified\n") is None
    assert amd_cards("{not json") is None
    assert amd_cards('{"card0": {"Temperature": "40"}}') is None


def test_a_card_that_hides_its_memory_and_two_kinds() -> None:
    cards = nvidia_cards("NVIDIA GB10, [N/A]\nNVIDIA GB10, [N/A]\nNVIDIA T400, 4096 MiB\n")
    assert cards is not None
    assert (cards.count, cards.memory, cards.others) == (2, 0.0, ("NVIDIA T400",))


def test_ports() -> None:
    assert nic_of("mlx5_0", "100 Gb/sec (4X EDR)", "1: DOWN", "InfiniBand") is None
    efa = nic_of("rdmap0s6", "100 Gb/sec (4X EDR)\n", "4: ACTIVE\n", "Unspecified\n")
    assert efa is not None
    assert (efa.layer, efa.rate) == ("EFA", 12.5e9)


@pytest.mark.parametrize(
    ("text", "count"),
    [("local", 0), ("LOCAL:8", 8), ("localx2", 2), ("local*3", 3), ("local:", None), ("locals", None), ("h100x8", None)],
)
def test_names_of_the_machine_at_hand(text: str, count: int | None) -> None:
    assert local_count(text) == count


@pytest.mark.parametrize("text", ["local:0", "localx00", "local:-1", "local:99999999", "local*1000000", "local:\u0663", "localx\uff14"])
def test_a_count_that_no_machine_has_is_refused_by_its_own_words(text: str) -> None:
    import tuner

    said = rf"cluster = '{re.escape(text)}': must be 1 to 999999 accelerators, or 1 to 1024 processes on the CPU \(local:4\)"
    for ask in (local_count, named_cluster, lambda name: tuner.presets("cluster", name)):
        with pytest.raises(SpecError, match=said):
            ask(text)


@pytest.mark.parametrize("text", ["local:\u00b2", "loca\u2113:4", "thi\u017f-machine"])
def test_what_looks_like_this_machine_is_not(text: str) -> None:
    assert local_count(text) is None
    with pytest.raises(SpecError):
        named_cluster(text)


def test_local_in_every_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tuner

    here = machine("none", tmp_path)
    monkeypatch.setattr(detection, "read_machine", lambda: here)
    asked = {"model": "tiny", "cluster": "local:4", "seq_len": 128, "global_batch": 16, "precision": "fp32"}
    assert tuner.search(**asked, top=1).record()["job"]["cluster"] == "localx4"
    assert tuner.estimate(**asked, plan="tp=2").record()["job"]["gpus"] == 4
    assert named_cluster("dgx-h100").name == "dgx-h100"
    record = tuner.presets("cluster", "local").record()
    assert record["detected"][0].startswith("no accelerator; 4 processes on 2 cores")


def test_an_unknown_machine_is_said_with_a_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = machine("unknown", tmp_path)
    monkeypatch.setattr(detection, "read_machine", lambda: here)
    with pytest.raises(SpecError, match=r"tuner presets cluster local -o mine.yaml"):
        named_cluster("local")


def test_the_file_of_any_cluster_loads_back(tmp_path: Path) -> None:
    import tuner.workflow

    for name in ("h100x64", "gb200-nvl72", "mi300x", "cpu"):
        found = tuner.workflow.cluster_file(name)
        path = tmp_path / "mine.yaml"
        path.write_text(found.text)
        assert presets.cluster(str(path)).replace(aliases=()) == presets.cluster(name).replace(aliases=())
