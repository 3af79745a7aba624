"""A real Slurm of a test's own: munged, slurmctld and several slurmd on this host, all in one folder; /etc is not touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.services import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "TUNER_TEST_SLURM"


@dataclass
class Cluster:
    """nodes: names; daemons: by name, as this process's children."""

    folder: Path
    nodes: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def run(self, *argv: str) -> str:
        """Run one of Slurm's commands; return what it prints."""
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def idle(self) -> int:
        with contextlib.suppress(AssertionError):
            return len(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())
        return 0

    def wait_idle(self, count: int | None = None, wait_s: float = 30.0) -> None:
        """Wait until all nodes (or `count`) are idle."""
        wanted, deadline = len(self.nodes) if count is None else count, time.monotonic() + wait_s
        while self.idle() < wanted:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]) for path in logs)

    def spawn(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"SLURM_CONF": str(self.conf), MARK: str(self.folder)},
            )  # fmt: skip

    def spawn_node(self, name: str) -> None:
        self.spawn(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))


@contextlib.contextmanager
def slurm(nodes: int = 3, gpus: int = 4) -> Iterator[Cluster]:
    """Start a cluster of `nodes` nodes with `gpus` pretend accelerators each. Skips where Slurm is not installed."""
    if not all(map(_program, ("slurmctld", "slurmd", "munged", "sbatch"))):
        missing("Slurm", "slurm-wlm munge")
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), tuple(f"n{i + 1}" for i in range(nodes)))
    try:
        _write_conf(cluster, gpus)
        _start_munge(cluster)
        cluster.spawn("slurmctld", "slurmctld", "-D", "-f", str(cluster.conf))
        for name in cluster.nodes:
            (cluster.folder / "spool" / name).mkdir(parents=True)
            cluster.spawn_node(name)
        cluster.wait_idle()
        yield cluster
    finally:
        _stop(cluster)


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _start_munge(cluster: Cluster) -> None:
    """Start munged with a key and a socket of its own."""
    munge = cluster.folder / "munge"
    munge.mkdir(mode=0o755)
    key = munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = [f"--{option}={munge / name}" for option, name in _MUNGE_FILES.items()]
    cluster.spawn("munged", _program("munged") or "munged", "--foreground", "--force", *files)
    deadline = time.monotonic() + 15
    while not (munge / "socket").exists():
        assert time.monotonic() < deadline, cluster.said()
        time.sleep(0.05)


def _stop(cluster: Cluster) -> None:
    """End all jobs, then the daemons, by their ids; then what jobs left behind."""
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "--user", str(os.geteuid()), "--signal=KILL", "--full")
    for name in [*cluster.nodes, "slurmctld", "munged"]:
        if name in cluster.daemons:
            _end(cluster.daemons[name])
    for pid in _left(cluster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(cluster.folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)


def _left(cluster: Cluster) -> list[int]:
    """Return processes that this cluster's daemons started: they inherit its mark."""
    mark, found = f"{MARK}={cluster.folder}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


_MUNGE_FILES = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _write_conf(cluster: Cluster, gpus: int) -> None:
    folder, host = cluster.folder, socket.gethostname().partition(".")[0]
    folder.chmod(0o755)
    for name in ("state", "dev"):
        (folder / name).mkdir()
    for i in range(gpus):
        (folder / "dev" / f"gpu{i}").touch()
    ports = _free_ports(len(cluster.nodes) + 1)
    lines = [_CONF.format(folder=folder, host=host, port=ports[0])]
    for name, port in zip(cluster.nodes, ports[1:], strict=True):
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {_SHAPE} Gres=gpu:{gpus} State=UNKNOWN")
    lines.append(f"PartitionName=debug Nodes={','.join(cluster.nodes)} Default=YES MaxTime=INFINITE State=UP")
    cluster.conf.write_text("\n".join(lines) + "\n")
    gres = [f"NodeName={name} Name=gpu File={folder}/dev/gpu[0-{gpus - 1}]" for name in cluster.nodes]
    (folder / "gres.conf").write_text("\n".join(gres) + "\n")


_SHAPE = "CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000"
_CONF = """\
ClusterName=tunertest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=1
KillWait=2
SlurmdTimeout=5
SlurmctldTimeout=10
InactiveLimit=0
"""
