"""What works on this machine: the lines of `tuner doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Status = Literal["ok", "warn", "fail"]
OLDEST_PYTHON = (3, 11)
PACKAGES = ("numpy", "scipy", "pydantic", "pyyaml", "optuna", "typer", "rich")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    status: Status
    name: str
    found: str


@dataclass(frozen=True, slots=True)
class DoctorAnswer:
    """Every check, in order."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return all(check.status != "fail" for check in self.checks)

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        return {"healthy": self.healthy, "checks": [asdict(check) for check in self.checks]}


def examine() -> DoctorAnswer:
    """Look at Python, the packages, accelerators, the scheduler, the folders and the presets."""
    parts: tuple[Callable[[], Iterator[Check]], ...] = (_python, _packages, _torch, _accelerators, _slurm, _folders, _presets)
    return DoctorAnswer(tuple(check for part in parts for check in part()))


def _python() -> Iterator[Check]:
    import tuner

    version = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, OLDEST_PYTHON))
    yield Check("ok", "tuner", f"{tuner.__version__} in {Path(__file__).parent}")
    yield Check("ok" if sys.version_info >= OLDEST_PYTHON else "fail", "python", f"{version} (needs {wanted}) at {sys.executable}")
    yield Check("ok", "cpu", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores")


def _packages() -> Iterator[Check]:
    needed = _requirements()
    for name in PACKAGES:
        wanted = needed.get(name, ())
        asks = f" (needs {'.'.join(map(str, wanted))})" if wanted else ""
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check("fail", name, f"is not installed{asks}")
            continue
        yield Check("ok" if _parts(version) >= wanted else "fail", name, version + asks)


def _requirements() -> dict[str, tuple[int, ...]]:
    """Return the least version of each package that the installed distribution asks for."""
    try:
        lines = importlib.metadata.requires("meshtuner") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        match = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)\s*$", line)
        if match:
            found[match[1].lower()] = _parts(match[2])
    return found


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _torch() -> Iterator[Check]:
    try:
        yield Check("ok", "torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        yield Check("ok", "torch", "no (planning needs none; measured trials do: pip install 'meshtuner[profile]')")


def _run(*command: str) -> str | None:
    """Return what a program prints, "" when it fails, or None when there is no such program."""
    if shutil.which(command[0]) is None:
        return None
    from tuner.launch.detection import command_output

    return command_output(*command).strip()


def _accelerators() -> Iterator[Check]:
    from tuner.launch.detection import detect, read_machine

    machine = read_machine()
    found = detect(machine)
    if machine.accelerators is None:
        silent = [tool for tool in ("nvidia-smi", "rocm-smi") if shutil.which(tool)]
        none = "none here (plans are for the cluster that --cluster names)"
        yield Check("warn" if silent else "ok", "gpus", f"{silent[0]} is here and lists none" if silent else none)
    else:
        yield Check("ok", "gpus", "; ".join(found.seen))
    if found.cluster is None:
        yield Check(
            "warn", "--cluster local", f"not known well enough: `tuner presets cluster local -o mine.yaml`, fill in {len(found.missing)}"
        )
    else:
        yield Check("ok", "--cluster local", f"{found.cluster.gpus} x {found.cluster.gpu.name}: {found.seen[0]}")


def _slurm() -> Iterator[Check]:
    version = _run("sinfo", "--version")
    if version is None:
        yield Check("ok", "slurm", "no sinfo here")
    else:
        yield Check("ok" if version else "warn", "slurm", version or "sinfo is here and does not answer")


def _folders() -> Iterator[Check]:
    for name, folder in (("current folder", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        try:
            with tempfile.NamedTemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
            yield Check("ok" if free > 100e6 else "warn", name, f"{folder} is writable, {free / 1e9:.1f} GB free")
        except OSError as error:
            yield Check("warn", name, f"{folder} is not writable ({error.strerror}): --out needs another folder")


def _presets() -> Iterator[Check]:
    from tuner.presets import KINDS, configs_dir, names
    from tuner.shelf import load_preset

    if not configs_dir().is_dir():
        yield Check("fail", "presets", f"{configs_dir()} does not exist: the installation is broken")
        return
    for kind in KINDS:
        known, bad = names(kind), []
        for name in known:
            try:
                load_preset(kind, name)
            except Exception as error:  # whatever is wrong with a preset is this check's answer
                bad.append(f"{name}: {str(error).splitlines()[0]}")
        status: Status = "fail" if bad or not known else "ok"
        yield Check(status, kind, f"{len(bad)} of {len(known)} do not load: {'; '.join(bad[:3])}" if bad else f"{len(known)} presets")
