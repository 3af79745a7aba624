"""Which ranks work together: one process group for each axis of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tuner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that work together: in their order, this one's place, and torch's group (None where it is alone)."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


@dataclass(slots=True, kw_only=True)
class Mesh:
    """A rank's place in a plan, and its groups.

    tp, cp, pp: one axis each; replicas: all that hold the same dense parameters (dp x cp); shards: those of `replicas` that shard a
    copy of the optimizer state or of the weights, twins: those that hold the same shard; ep: ranks that exchange tokens,
    expert_replicas: those with the same experts; copies: tensor-parallel ranks with the same key and value heads; ends: the first and
    the last stage, which share a tied embedding.
    """

    device: torch.device
    world: int
    stage: int
    replica: int
    tp: Group
    cp: Group
    pp: Group
    replicas: Group
    shards: Group
    twins: Group
    ep: Group
    expert_replicas: Group
    copies: Group
    ends: Group
    alone: Group


@dataclass(slots=True)
class _Maker:
    """Makes each group once: groups of the same ranks are the same group."""

    rank: int
    world: int
    made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def group(self, ranks: range | list[int]) -> Group:
        members = tuple(ranks)
        index = members.index(self.rank) if self.rank in members else 0
        if len(members) == 1 or self.rank not in members:
            return Group(ranks=(self.rank,), index=0, handle=None)
        if len(members) == self.world and members == tuple(range(self.world)):
            return Group(ranks=members, index=index, handle=dist.group.WORLD)
        if members not in self.made:
            handle = dist.new_group(list(members), use_local_synchronization=True)
            assert isinstance(handle, dist.ProcessGroup)  # noqa: S101 (this rank is a member)
            self.made[members] = handle
        return Group(ranks=members, index=index, handle=self.made[members])


def mesh_of(plan: Plan, kv_heads: int, device: torch.device) -> Mesh:
    """Return the mesh of this rank; every rank calls this at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tp, cp, pp, ep = int(plan.tp), int(plan.cp), int(plan.pp), int(plan.ep)
    within = world // pp  # ranks of a stage
    stage, place = divmod(rank, within)
    start, t, c = stage * within, place % tp, place // tp % cp
    make = _Maker(rank, world)
    replicas = list(range(start + t, start + within, tp))
    shard = _shard_ranks(plan, len(replicas))
    mine = replicas.index(rank)
    alike = max(tp // kv_heads, 1)
    return Mesh(
        device=device,
        world=world,
        stage=stage,
        replica=place // (tp * cp),
        tp=make.group(range(rank - t, rank - t + tp)),
        cp=make.group(range(rank - c * tp, rank - c * tp + cp * tp, tp)),
        pp=make.group(range(place, world, within)),
        replicas=make.group(replicas),
        shards=make.group(replicas[mine // shard * shard :][:shard]),
        twins=make.group(replicas[mine % shard :: shard]),
        ep=make.group(range(start + place // ep * ep, start + place // ep * ep + ep)),
        expert_replicas=make.group(range(start + place % ep, start + within, ep)),
        copies=make.group(range(rank - t % alike, rank - t % alike + alike)),
        ends=make.group([place, place + (pp - 1) * within] if pp > 1 else [rank]),
        alone=make.group([rank]),
    )


def _shard_ranks(plan: Plan, replicas: int) -> int:
    """Return how many replicas share a copy of what ZeRO shards."""
    if not plan.zero:
        return 1
    return int(plan.shard_group) or replicas
