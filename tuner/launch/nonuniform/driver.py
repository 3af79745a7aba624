"""Starts the ranks of a run and stays with them: `python -m tuner.launch.nonuniform.driver --trial FOLDER`.

It keeps the store in which they meet, so that the store outlives any rank. Torchrun ends all ranks when one ends; this driver, where the
trial says that ranks will be lost, names the dead to the others (see failover.py), and ends the rest only where these cannot go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import TunerError
from tuner.launch import workload
from tuner.launch.nonuniform.trial import read_nonuniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

MODULE = "tuner.launch.ntp"
TOGETHER_S = 0.2  # deaths within this time are one loss
POLL_S = 0.01
FAILED = 4


def drive(ranks: int, arguments: Sequence[str], *, module: str = MODULE, goes_on: bool = False) -> int:
    """Run a module on some ranks of this machine until all have ended; return the exit code: 0 where those that were not killed ended well.

    goes_on: whether ranks that a signal kills are named to the others, in the key phase0.GENERATION/lost; else all end with the first.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [_started(rank, ranks, store.port, [module, *arguments]) for rank in range(ranks)]
    try:
        return _watched(processes, store if goes_on else None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()


def _started(rank: int, ranks: int, port: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    usual = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**usual, **os.environ, **{name: str(value) for name, value in own.items()}, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return subprocess.Popen([sys.executable, "-m", *command], env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 (our own module)


def _watched(processes: Sequence[subprocess.Popen[bytes]], store: dist.Store | None) -> int:
    """Wait for all ranks; return the exit code."""
    living, generation, well = dict(enumerate(processes)), 0, 0
    while living:
        ended = {rank: code for rank, process in living.items() if (code := process.poll()) is not None}
        killed = [rank for rank, code in ended.items() if code < 0]
        if killed and store is not None:
            seen = time.time()
            time.sleep(TOGETHER_S)
            lost = [rank for rank, process in living.items() if (process.poll() or 0) < 0]
            store.set(f"phase0.{generation}/lost", json.dumps({"ranks": lost, "seen": seen}))
            generation += 1
            living = {rank: process for rank, process in living.items() if rank not in lost}
            continue
        if any(ended.values()):
            return FAILED if killed else max(ended.values())
        living, well = {rank: process for rank, process in living.items() if rank not in ended}, well + len(ended)
        time.sleep(POLL_S)
    return 0 if well else FAILED


def main() -> int:
    """Run the trial that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description="Start the ranks of a run over replicas of different degree.")
    parser.add_argument("--trial", type=Path, required=True, metavar="FOLDER", help="holds ntp.json")
    folder = parser.parse_args().trial
    try:
        trial = read_nonuniform(folder)
    except TunerError as error:
        return workload.refuse(str(error).splitlines())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    with contextlib.suppress(KeyboardInterrupt):
        return drive(trial.ranks, ["--trial", str(folder)], goes_on=bool(trial.lost))
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
