"""A pretend training program: prints the workload's lines, or misbehaves as FAKE says. `fake.py --trial FOLDER`; needs no package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

OOM = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"""
REFUSED = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
ValueError: heads (7) must be divisible by tp (2)"""


def say(text: str) -> None:
    print(text, flush=True)


def steps(count: int, pause: float = 0.0) -> None:
    for number in range(count):
        say("tuner-step " + json.dumps({"step": number, "seconds": 0.5 if number < 3 else 0.25, "loss": 3.0}))
        time.sleep(pause)


def ranks() -> None:
    for rank, seconds in enumerate((0.1, 0.1, 0.15, 0.1)):
        record = {"rank": rank, "max_allocated_bytes": 1e9 + rank, "max_reserved_bytes": 2e9, "host_peak_bytes": 3e9, "compute_s": seconds}
        say("tuner-rank " + json.dumps(record))
    say('tuner-versions {"torch": "2.13"}')


def family(folder: Path) -> None:
    """Start a child in this group, and one that left for a session of its own; both ignore SIGTERM."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    pids = [subprocess.Popen([sys.executable, "-c", deaf], start_new_session=apart).pid for apart in (False, True)]
    time.sleep(0.3)  # until they are deaf
    (folder / "pids.new").write_text(json.dumps([os.getpid(), *pids]))
    (folder / "pids.new").rename(folder / "pids.json")


def main(kind: str, folder: Path) -> int:
    if kind == "ok":
        steps(8)
        ranks()
    elif kind == "oom":
        steps(2)
        say(OOM)
        time.sleep(600)  # as ranks do that wait for the one that died
    elif kind == "failed":
        say(REFUSED)
        return 1
    elif kind == "silent":
        return 3
    elif kind == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        steps(2)
        time.sleep(600)
    elif kind == "hang-after":
        steps(8)
        time.sleep(600)
    elif kind == "slow":
        steps(10_000, 0.05)
    elif kind == "family":
        family(folder)
        steps(10_000, 0.05)
    elif kind == "orphans":
        family(folder)
        steps(8)
    elif kind == "flaky":
        if not (folder / "tried").exists():
            (folder / "tried").touch()
            say("OSError: [Errno 116] Stale file handle")
            return 1
        steps(8)
    elif kind == "machine":
        say("OSError: [Errno 116] Stale file handle")
        return 1
    elif kind == "secret":
        say("token is " + os.environ["PET_TOKEN"])
        steps(8)
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ["FAKE"], Path(sys.argv[-1])))
