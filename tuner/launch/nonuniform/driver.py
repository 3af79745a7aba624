"""Starts the ranks of a run and stays with them: `python -m tuner.launch.nonuniform.driver --trial FOLDER`.

It keeps the store in which they meet, so that the store outlives any rank. Torchrun ends all ranks when one ends; this driver, where the
trial says that ranks will be lost, names the dead to the others (see failover.py), and ends the rest only where these cannot go on.
Ranks are forked, behind the import of torch, which would take longer than most runs if each did it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import TunerError
from tuner.launch import ntp, workload
from tuner.launch.nonuniform.trial import read_nonuniform, refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkProcess

    from torch.distributed.distributed_c10d import Store

TOGETHER_S = 0.2  # deaths within this time are one loss
POLL_S = 0.01
FAILED = 4


def drive(ranks: int, work: Callable[[], int], *, goes_on: bool = False) -> int:
    """Run `work` in some ranks of this machine until all have ended; return the exit code: 0 where those that were not killed ended well.

    goes_on: whether ranks that a signal kills are named to the others, in the key phase0.GENERATION/lost; else all end with the first.
    """
    _import_what_ranks_need()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    processes: list[ForkProcess] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        try:
            for rank in range(ranks):
                processes.append(multiprocessing.get_context("fork").Process(target=_rank, args=(rank, ranks, port, work), daemon=True))
                processes[-1].start()
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno()))
            return _watched(processes, store if goes_on else None)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _import_what_ranks_need() -> None:
    import torch._dynamo  # torch.optim's first step does

    from tuner.launch.nonuniform import failover, groups, training

    del torch, failover, groups, training


def _rank(rank: int, ranks: int, port: int, work: Callable[[], int]) -> None:
    """Be one rank: a process with torchrun's environment."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    code = work()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still wait for the store would hold it up


def _watched(processes: Sequence[ForkProcess], store: Store | None) -> int:
    """Wait for all ranks; return the exit code."""
    living, generation, well = dict(enumerate(processes)), 0, 0
    while living:
        ended = {rank: process.exitcode for rank, process in living.items() if process.exitcode is not None}
        killed = [rank for rank, code in ended.items() if code < 0]
        if killed and store is not None:
            seen = time.time()
            time.sleep(TOGETHER_S)
            lost = [rank for rank, process in living.items() if (process.exitcode or 0) < 0]
            store.set(f"phase0.{generation}/lost", json.dumps({"ranks": lost, "seen": seen}))
            generation += 1
            living = {rank: process for rank, process in living.items() if rank not in lost}
            continue
        if any(ended.values()):
            for rank in killed:
                workload.say(f"tuner-failed: rank {rank} was ended by {signal.Signals(-(processes[rank].exitcode or 0)).name}")
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
    if why := refusals(trial):
        return workload.refuse(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    with contextlib.suppress(KeyboardInterrupt):
        return drive(trial.ranks, partial(ntp.run_rank, trial), goes_on=bool(trial.lost))
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
