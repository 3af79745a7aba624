"""Weights that replicas share out and gather when they are needed: torch's FSDP2 (ZeRO 3), in groups (HSDP), or kept once gathered
until the backward is over (ZeRO 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tuner.launch.engine import collectives
from tuner.launch.engine.mesh import handle_of
from tuner.launch.engine.optimizer import adamw
from tuner.launch.engine.parts import parts_of
from tuner.launch.engine.transformer import Layer, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.launch.engine.mesh import Group, Mesh


class ShardedWeights:
    """The weights of some model chunks, sharded over replicas, and their optimizer."""

    def __init__(self, chunks: Sequence[Stage], mesh: Mesh, *, dtype: torch.dtype, reshard: bool) -> None:
        self.mesh = mesh
        dense, experts = _device_mesh(mesh, mesh.shards, mesh.twins), _device_mesh(mesh, mesh.expert_replicas, mesh.alone)
        # Norms and residuals stay in the type that activations have; sums over replicas are in fp32.
        policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for chunk in chunks:
            _shard(chunk, dense, experts, policy, reshard=reshard)
            chunk.to_empty(device=mesh.device)
            self._fill(chunk)
        self.pairs = [
            (parameter, nn.Parameter(local(parameter).detach()), part)
            for chunk in chunks
            for owner, name, part in parts_of(chunk)
            if local(parameter := owner.get_parameter(name)).numel()
        ]
        self.optimizer = adamw([mine for _, mine, _ in self.pairs])

    def _fill(self, chunk: Stage) -> None:
        for owner, name, part in parts_of(chunk):
            group = self.mesh.expert_replicas if part.expert else self.mesh.shards
            pieces = part.draw(self.mesh.device).chunk(group.size)
            if group.index < len(pieces):
                local(owner.get_parameter(name)).detach().copy_(pieces[group.index])

    @torch.no_grad()
    def step(self) -> None:
        """Sum what tensor-parallel ranks hold in part, update, and clear the gradients."""
        for group, wanted in ((self.mesh.tp, "tp"), (self.mesh.copies, "copies"), (self.mesh.ends, "ends")):
            partial = [p for p, _, part in self.pairs if wanted == part.sums or (wanted == "ends" and part.tied)]
            _sum_together([local(p.grad) for p in partial if p.grad is not None], group)
        for parameter, mine, _ in self.pairs:
            mine.grad = None if parameter.grad is None else local(parameter.grad)
            parameter.grad = None
        self.optimizer.step()


def local(x: Any) -> Tensor:
    """Return this rank's part of a sharded tensor."""
    result: Tensor = x.to_local()
    return result


def _sum_together(parts: list[Tensor], group: Group) -> None:
    """Sum many small tensors over a group as one."""
    if group.size == 1 or not parts:
        return
    flat = collectives.summed(torch.cat([part.flatten() for part in parts]), group)
    for part, whole in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        part.copy_(whole.view_as(part))


def _device_mesh(mesh: Mesh, shards: Group, twins: Group) -> DeviceMesh:
    """Return what FSDP2 takes: shards, or (twins, shards) for HSDP."""
    kind = mesh.device.type
    if twins.size == 1:
        return _line(kind, shards)
    table = torch.tensor(mesh.replicas.ranks, dtype=torch.int).view(twins.size, shards.size)
    handles = [twins.handle, shards.handle]
    return DeviceMesh.from_group(handles, kind, mesh=table, mesh_dim_names=("twins", "shards"))  # type: ignore[arg-type]


def _line(kind: str, group: Group) -> DeviceMesh:
    return DeviceMesh.from_group(handle_of(group.ranks), kind, mesh=torch.tensor(group.ranks, dtype=torch.int))


def _shard(chunk: Stage, dense: DeviceMesh, experts: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    for layer in chunk.layers:
        assert isinstance(layer, Layer)  # noqa: S101
        inner = getattr(layer.mlp, "experts", None)
        if isinstance(inner, nn.Module):
            _whole_sum(fully_shard(inner, mesh=experts, mp_policy=policy, reshard_after_forward=reshard))
        _whole_sum(fully_shard(layer, mesh=dense, mp_policy=policy, reshard_after_forward=reshard))
    _whole_sum(fully_shard(chunk, mesh=dense, mp_policy=policy, reshard_after_forward=False))


def _whole_sum(module: Any) -> None:
    """Have gradients summed, not averaged: the loss is already divided by the tokens of the whole batch."""
    assert isinstance(module, FSDPModule)  # noqa: S101
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
