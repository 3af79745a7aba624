"""How a running job goes on without ranks that died: in place, without a checkpoint, no process started again.

1. The driver that started the ranks sees one end, and names the dead in the store. Each survivor's watcher ends all waits of its process.
2. Survivors say in the store how far they are, and agree. A step is committed by one sum over all ranks, which none leaves before all have
   entered it with their gradients whole. So if any has left it, all the others can finish that step alone with the gradients they have;
   if none has, nobody has touched a parameter, and the step is repeated. Nothing is kept twice, no step is lost or done twice.
3. They enter new groups as a smaller cast (TP4+TP4 becomes TP4+TP3), by the same store under a new name.
4. Parameters and both moments of AdamW move to the new layout by one all-to-all: a rank keeps what it has, takes the rest from its own
   replica, and what died with the dead from the next replica that holds it. Healthy replicas permute their units too, as the comp layout
   depends on the least degree.

With an optimizer state that is shared out over replicas (ZeRO 1 and up) the dead rank's share is nowhere else: refused at the start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tuner.launch.nonuniform.layout import Cast, sources
from tuner.launch.nonuniform.reshard import by_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from tuner.launch.engine.parts import Part
    from tuner.launch.nonuniform.groups import Groups
    from tuner.launch.nonuniform.training import Training

PARTS = 3  # of a parameter's state: values and two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a survivor stands: committed steps, whether it has the whole gradients of the next, the norm of the last committed one's."""

    done: int
    ready: bool
    norm: float


class Split(Exception):
    """Survivors whose steps cannot be brought together."""


def agreed(standings: Sequence[Standing]) -> tuple[int, float]:
    """Return the committed steps that all survivors go on from, and the norm of the last one's gradients, with which those that are one
    behind finish it. Raises Split where one that is behind cannot.
    """
    done = max(standing.done for standing in standings)
    norm = next(standing.norm for standing in standings if standing.done == done)
    for standing in standings:
        if standing.done < done and not (standing.done == done - 1 and standing.ready):
            raise Split(f"a rank has {done} steps behind it, another {standing.done} and no gradients of the next")
    return done, norm


def settle(store: Store, name: str, training: Training, rank: int, survivors: Sequence[int], timeout_s: float) -> None:
    """Bring all survivors (old ranks) to the same committed step; each calls this with its own old rank. Raises Split."""
    own = {"done": training.done, "ready": training.ready, "norm": training.norm}
    store.set(f"{name}/{rank}", json.dumps(own))
    keys = [f"{name}/{other}" for other in survivors]
    store.wait(keys, timedelta(seconds=timeout_s))
    done, norm = agreed([Standing(**json.loads(store.get(key))) for key in keys])
    if training.done < done:
        training.update(norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a rank keeps of its training while it has no groups: its states with units first, by parameter."""

    cast: Cast
    done: int
    parts: dict[str, Part]
    states: dict[str, list[Tensor]]


def kept(training: Training) -> Kept:
    """Return a rank's parameters and moments."""
    parts = {member.part.key: member.part for member in training.members()}
    states = {key: [by_unit(x, part) for x in training.state(key)] for key, part in parts.items()}
    return Kept(cast=training.groups.cast, done=training.done, parts=parts, states=states)


def taken_over(old: Kept, lost: Sequence[int], training: Training, groups: Groups) -> int:
    """Fill a new training of the smaller cast from the survivors of the old one; return the bytes that came from other ranks."""
    plans = _plans(old, lost)
    sent = [torch.empty(0)] * groups.world.size
    came = [0] * groups.world.size
    for other in range(groups.world.size):
        pieces = [p for key, plan in plans.items() for p in _picked(old, key, plan, other, groups.rank)] if other != groups.rank else []
        sent[other] = torch.cat([x.flatten() for x in pieces]) if pieces else _empty(old)
        came[other] = sum(PARTS * len(_units_from(plan, groups.rank, other)) * _each(old, key) for key, plan in plans.items())
    came[groups.rank] = 0
    packed, got = torch.cat(sent), _empty(old).new_empty(sum(came))
    dist.all_to_all_single(got, packed, came, [len(x) for x in sent], group=groups.world.handle)
    training.restore(_filled(old, plans, training, groups, torch.split(got, came)), old.done)
    return len(got) * got.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Of one parameter: each new rank's units before (of survivors, by new rank) and behind, and which new rank each comes from."""

    before: list[tuple[int, ...]]
    behind: list[tuple[int, ...]]
    sources: list[list[int]]


def _plans(old: Kept, lost: Sequence[int]) -> dict[str, _Plan]:
    new, numbers = old.cast.without(lost)
    by_count: dict[int, _Plan] = {}
    for units in {part.units for part in old.parts.values() if part.axis is not None}:
        before = [old.cast.held(rank, units) for rank in numbers]
        behind = [new.held(number, units) for number in numbers.values()]
        by_count[units] = _Plan(before=before, behind=behind, sources=sources(units, old.cast, lost))
    return {key: by_count[part.units] for key, part in old.parts.items() if part.axis is not None}


def _units_from(plan: _Plan, rank: int, other: int) -> list[int]:
    return [unit for unit, source in zip(plan.behind[rank], plan.sources[rank], strict=True) if source == other]


def _picked(old: Kept, key: str, plan: _Plan, other: int, rank: int) -> list[Tensor]:
    """Return the states of the units that this rank sends to another."""
    at = _places(plan.before[rank], _units_from(plan, other, rank))
    return [state[at] for state in old.states[key]] if at else []


def _places(held: tuple[int, ...], units: list[int]) -> list[int]:
    at = {unit: place for place, unit in enumerate(held)}
    return [at[unit] for unit in units]


def _each(old: Kept, key: str) -> int:
    state = old.states[key][0]
    return state[0].numel() if len(state) else 0


def _empty(old: Kept) -> Tensor:
    return next(iter(old.states.values()))[0].new_empty(0)


def _filled(old: Kept, plans: dict[str, _Plan], training: Training, groups: Groups, came: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return the states of all parameters in the new layout, in their own shapes."""
    offsets, found = [0] * groups.world.size, {}
    for member in training.members():
        found[member.part.key] = [torch.empty_like(x) for x in training.state(member.part.key)]
    for key, part in old.parts.items():
        targets = [by_unit(x, part) for x in found[key]]
        if key not in plans:
            for target, state in zip(targets, old.states[key], strict=True):
                target.copy_(state)
            continue
        plan = plans[key]
        for other in sorted(set(plan.sources[groups.rank])):
            units = _units_from(plan, groups.rank, other)
            at = _places(plan.behind[groups.rank], units)
            for i, target in enumerate(targets):
                if other == groups.rank:
                    target[at] = old.states[key][i][_places(plan.before[groups.rank], units)]
                    continue
                size = len(at) * target[0].numel()
                target[at] = came[other][offsets[other] : offsets[other] + size].view(len(at), *target.shape[1:])
                offsets[other] += size
    return found
