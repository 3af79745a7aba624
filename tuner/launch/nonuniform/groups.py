"""A rank's process groups in a cast of replicas, how it enters them, and how it gets out of them when a rank has died.

Every rank makes all groups in one order (torch.distributed.new_group is a collective of the default group). A replica has three groups of
the same ranks: one for tensor parallelism, one for what goes before the sum over replicas and one for what goes behind it, so that what a
hook starts in the midst of the backward cannot mix with tensor parallelism's own collectives, nor the two directions with each other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tuner.launch.engine.mesh import Group, Mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

    from tuner.launch.nonuniform.layout import Cast

_FILES = Path("/proc/self/fd")


@dataclass(slots=True, kw_only=True)
class Groups:
    """cast: all replicas; replica, slot: this rank's place; world: all ranks; tp, before, after: this replica's; peers: the ranks in this
    slot of every replica (this rank alone where it is a spare). sockets: what gloo's waits end with.
    """

    device: torch.device
    cast: Cast
    rank: int
    replica: int
    slot: int
    world: Group
    tp: Group
    before: Group
    after: Group
    peers: Group
    sockets: dict[int, str] = field(default_factory=dict)

    @property
    def degree(self) -> int:
        """Tensor-parallel degree of this replica."""
        return self.cast.degrees[self.replica]

    @property
    def spare(self) -> bool:
        """Whether this rank is none of the cores that sum over replicas."""
        return self.slot >= self.cast.cores

    def mesh(self) -> Mesh:
        """Return the mesh that the model's modules ask: tensor parallelism alone."""
        alone = Group(ranks=(self.rank,), index=0, handle=None)
        return Mesh(
            device=self.device, world=self.world.size, stage=0, replica=self.replica, tp=self.tp, cp=alone, pp=alone, replicas=self.peers,
            shards=alone, twins=self.peers, ep=alone, expert_replicas=alone, copies=alone, ends=alone, alone=alone,
        )  # fmt: skip


def entered(store: Store, name: str, cast: Cast, rank: int, device: torch.device, timeout_s: float) -> Groups:
    """Enter the process groups of a cast as one of its ranks; every rank calls this. name: of this generation, new each time.

    An operation that waits longer than `timeout_s` fails.
    """
    before, limit = _sockets(), timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=cast.ranks, timeout=limit)
    replica, slot = cast.place(rank)
    made = [_made([cast.members(i)] * 3, rank, limit) for i in range(len(cast.degrees))]
    columns = [tuple(cast.members(i)[core] for i in range(len(cast.degrees))) for core in range(cast.cores)]
    peers = [_made([column], rank, limit)[0] for column in columns]
    world = Group(ranks=tuple(range(cast.ranks)), index=rank, handle=dist.group.WORLD)
    alone = Group(ranks=(rank,), index=0, handle=None)
    tp, pre, post = made[replica]
    return Groups(
        device=device, cast=cast, rank=rank, replica=replica, slot=slot, world=world, tp=tp, before=pre, after=post,
        peers=peers[slot] if slot < cast.cores else alone, sockets={n: to for n, to in _sockets().items() if before.get(n) != to},
    )  # fmt: skip


def _made(wanted: Sequence[tuple[int, ...]], rank: int, limit: timedelta) -> list[Group]:
    """Make a group of each of these lists of ranks, with those of one alone left to themselves."""
    found = []
    for ranks in wanted:
        handle = dist.new_group(list(ranks), timeout=limit) if len(ranks) > 1 else None
        mine = rank in ranks
        found.append(Group(ranks=ranks if mine else (rank,), index=ranks.index(rank) if mine else 0, handle=handle if mine else None))
    return found


def leave() -> None:
    """Leave all process groups; whoever holds some of this rank's has dropped them."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def interrupt(groups: Groups) -> None:
    """End every wait in these groups, from another thread: the waiting operations fail.

    NCCL aborts its communicators. Gloo has no abort (torch 2.13's does nothing), but all that it waits for comes over TCP connections, and
    these can be shut down.
    """
    if groups.device.type == "cuda":
        for group in (groups.tp, groups.before, groups.after, groups.peers, groups.world):
            if group.handle is not None:
                group.handle.abort()
        return
    for number, to in groups.sockets.items():
        with contextlib.suppress(OSError):
            if str((_FILES / str(number)).readlink()) == to:
                with socket.socket(fileno=os.dup(number)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo's listener does not bear it
                        connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Return this process's sockets: the numbers of open files, and what they stand for."""
    found = {}
    for name in os.listdir(_FILES):  # noqa: PTH208 (names, of which some are gone when one looks)
        with contextlib.suppress(OSError):
            to = str((_FILES / name).readlink())
            if to.startswith("socket:"):
                found[int(name)] = to
    return found
