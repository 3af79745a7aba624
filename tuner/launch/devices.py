"""Whether accelerators' memory is free. `python -m tuner.launch.devices --wait 60` waits for it; exit code 75 where it does not come."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.launch.outcome import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MIB = 2**20
_IDLE_SHARE = 0.05  # drivers keep up to this much of an idle card
_IDLE_BYTES = 1024 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator: its index and unique id, bytes used and bytes in all."""

    index: str
    uuid: str
    used: float
    total: float

    @property
    def busy(self) -> bool:
        """Whether somebody holds memory of it."""
        return self.used > max(_IDLE_BYTES, _IDLE_SHARE * self.total)


def devices() -> tuple[Device, ...]:
    """Return the accelerators that nvidia-smi or rocm-smi tells of and that are visible here; () without such a tool."""
    for tool, options, read in _TOOLS:
        if shutil.which(tool):
            done = subprocess.run([tool, *options], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 -- a fixed command
            return visible(read(done.stdout)) if done.returncode == 0 else ()
    return ()


def visible(found: Sequence[Device]) -> tuple[Device, ...]:
    """Return those that CUDA_VISIBLE_DEVICES or its like leaves; all where it is not set."""
    wanted = next((os.environ[name] for name in _VISIBLE if os.environ.get(name)), "")
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return tuple(d for d in found if not names or any(name == d.index or d.uuid.startswith(name) for name in names))


def wait_free(wait_s: float, look: Callable[[], Sequence[Device]] = devices, poll_s: float = 1.0) -> str:
    """Wait until no visible accelerator's memory is in use; return what still is after `wait_s`, "" once all are free."""
    deadline = time.monotonic() + wait_s
    while busy := [device for device in look() if device.busy]:
        if time.monotonic() >= deadline:
            held = ", ".join(f"{d.index} ({d.used / 1e9:.1f} of {d.total / 1e9:.1f} GB)" for d in busy)
            return f"accelerators of {socket.gethostname()} are in use by others after {wait_s:g} s: {held}"
        time.sleep(poll_s)
    return ""


def _nvidia(text: str) -> list[Device]:
    """Read `index, uuid, memory.used, memory.total` in MiB; a MIG card says [N/A] and is left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Device(index=r[0], uuid=r[1], used=float(r[2]) * _MIB, total=float(r[3]) * _MIB)
        for r in rows
        if len(r) == 4 and r[2].isdigit() and r[3].isdigit()
    ]


def _rocm(text: str) -> list[Device]:
    """Read rocm-smi --showmeminfo vram --csv: device,VRAM Total Memory (B),VRAM Total Used Memory (B)."""
    rows = [line.split(",") for line in text.splitlines() if line.startswith("card")]
    return [Device(index=r[0].removeprefix("card"), uuid=r[0], used=float(r[2]), total=float(r[1])) for r in rows if len(r) >= 3]


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_TOOLS = (
    ("nvidia-smi", ("--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits"), _nvidia),
    ("rocm-smi", ("--showmeminfo", "vram", "--csv"), _rocm),
)


def main() -> int:
    """Wait as --wait says."""
    arguments = sys.argv[1:]
    wait_s = float(arguments[1]) if arguments[:1] == ["--wait"] and len(arguments) == 2 else 60.0
    if held := wait_free(wait_s):
        print(held, file=sys.stderr)
        return BUSY
    return 0


if __name__ == "__main__":
    sys.exit(main())
