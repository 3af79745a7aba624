"""What a layer does not keep for its backward: all of it, or single modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tuner.plan import ALL_LAYERS, FULL, RECOMPUTE_MODULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.plan import Plan


def recomputed(function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """Return function(*args), run again in the backward from its inputs alone."""
    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


@dataclass(slots=True)
class _Remade:
    """A tensor that its users do not keep: the backward makes it again, once for all of them."""

    make: Callable[[], Tensor]
    tensor: Tensor
    users: int = 0
    again: Tensor | None = field(default=None)

    def pack(self, kept: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        if kept.data_ptr() != self.tensor.data_ptr() or kept.numel() != self.tensor.numel():
            return kept
        self.users += 1
        return kept.shape, kept.stride()

    def unpack(self, kept: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.again is None:
            with torch.no_grad():
                self.again = self.make()
        found = self.again.as_strided(*kept)
        self.users -= 1
        if not self.users:
            self.again = None
        return found


def remade(make: Callable[[], Tensor], use: Callable[[Tensor], Tensor]) -> Tensor:
    """Return use(make()), where what `use` would keep of its argument is made again in the backward (Megatron-LM's
    CheckpointWithoutOutput: a norm or an activation before a product).
    """
    tensor = make()
    remembered = _Remade(make, tensor)
    with torch.autograd.graph.saved_tensors_hooks(remembered.pack, remembered.unpack):
        out = use(tensor)
    remembered.tensor = tensor.new_empty(0)
    return out


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a plan recomputes: modules by name in every layer, and the first `layers` layers of each model chunk as a whole."""

    modules: frozenset[str]
    layers: int

    @classmethod
    def of(cls, plan: Plan) -> Recompute:
        """Return what `plan` recomputes. A chunk's share of a stage's recomputed layers is that of the other chunks."""
        bits = int(plan.recompute)
        if bits & FULL:
            count = int(plan.recompute_layers)
            return cls(frozenset(), count if count >= ALL_LAYERS else count // int(plan.vpp))
        return cls(frozenset(name for name, bit in RECOMPUTE_MODULES.items() if bits & bit), 0)
