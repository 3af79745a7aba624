"""Which ranks work together: one process group for each axis of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tuner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that work together: in their order, this one's place, and torch's group (None where it is alone).

    paired: these are two ranks of a larger group of torch's, which exchange what others sum.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    paired: bool = False

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


@cache
def handle_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return torch's group of these ranks, of which this is one; a process makes each once.

    torch 2.13 names such a group after its ranks and the count of groups that this process has, so all ranks must make equally many.
    """
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD  # type: ignore[return-value]
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # noqa: S101 (this rank is a member)
    return made


def _group(rank: int, ranks: range | list[int]) -> Group:
    members = tuple(ranks)
    if len(members) == 1 or rank not in members:
        return Group(ranks=(rank,), index=0, handle=None)
    return Group(ranks=members, index=members.index(rank), handle=handle_of(members))


def mesh_of(plan: Plan, kv_heads: int, device: torch.device) -> Mesh:
    """Return the mesh of this rank; every rank calls this at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tp, cp, pp, ep = int(plan.tp), int(plan.cp), int(plan.pp), int(plan.ep)
    within = world // pp  # ranks of a stage
    stage, place = divmod(rank, within)
    start, t, c = stage * within, place % tp, place // tp % cp
    make = partial(_group, rank)
    replicas = list(range(start + t, start + within, tp))
    shard = _shard_ranks(plan, len(replicas))
    mine = replicas.index(rank)
    alike = max(tp // kv_heads, 1)
    pp_group = make(range(place, world, within))
    return Mesh(
        device=device,
        world=world,
        stage=stage,
        replica=place // (tp * cp),
        tp=make(range(rank - t, rank - t + tp)),
        cp=make(range(rank - c * tp, rank - c * tp + cp * tp, tp)),
        pp=pp_group,
        replicas=make(replicas),
        shards=make(replicas[mine // shard * shard :][:shard]),
        twins=make(replicas[mine % shard :: shard]),
        ep=make(range(start + place // ep * ep, start + place // ep * ep + ep)),
        expert_replicas=make(range(start + place % ep, start + within, ep)),
        copies=make(range(rank - t % alike, rank - t % alike + alike)),
        ends=_ends(pp_group),
        alone=make([rank]),
    )


def _ends(pp: Group) -> Group:
    if pp.size == 1 or pp.index not in (0, pp.size - 1):
        return Group(ranks=(pp.ranks[pp.index],), index=0, handle=None)
    return Group(ranks=(pp.ranks[0], pp.ranks[-1]), index=int(pp.index > 0), handle=pp.handle, paired=True)


def _shard_ranks(plan: Plan, replicas: int) -> int:
    """Return how many replicas share a copy of what ZeRO shards."""
    if not plan.zero:
        return 1
    return int(plan.shard_group) or replicas
