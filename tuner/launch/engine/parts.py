"""Parameters as parts of whole ones: every layout starts from the same model, whatever a rank holds of it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEED = 20260


def _whole(full: Tensor) -> Tensor:
    return full


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of a parameter.

    key: the parameter's name in the whole model, which seeds its values; shape: of the whole; deviation: of its normal values (0: all
    are `mean`); cut: takes this rank's part out of the whole; axis, units: along which dimension tensor-parallel ranks share it out (None:
    they do not), in how many pieces of one size; sums: over which group partial gradients are summed ("": they are whole);
    copies: tensor-parallel ranks that hold the same values; expert: whether it is replicated like experts are; tied: whether the first
    and the last stage both hold it.
    """

    key: str
    shape: tuple[int, ...]
    deviation: float
    mean: float = 0.0
    cut: Callable[[Tensor], Tensor] = _whole
    axis: int | None = None
    units: int = 0
    sums: Literal["", "tp", "copies"] = ""
    copies: int = 1
    expert: bool = False
    tied: bool = False

    def draw(self, device: torch.device) -> Tensor:
        """Return this rank's values, the same for the same key on every rank."""
        full = torch.full(self.shape, self.mean, device=device, dtype=torch.float32)
        if self.deviation:
            generator = torch.Generator(device=device).manual_seed(SEED + zlib.crc32(self.key.encode()))
            full.normal_(self.mean, self.deviation, generator=generator)
        return self.cut(full)


class Parts(nn.Module):
    """A module that knows what its own parameters are parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Part] = {}

    def hold(self, name: str, part: Part) -> None:
        """Register a parameter, without memory yet."""
        shape = part.cut(torch.empty(part.shape, device="meta")).shape
        self.parts[name] = part
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


def parts_of(module: nn.Module) -> Iterator[tuple[Parts, str, Part]]:
    """Yield every parameter's owner, name there and part; a shared parameter once."""
    seen: set[int] = set()
    for owner in module.modules():
        if isinstance(owner, Parts):
            for name, part in owner.parts.items():
                parameter = owner.get_parameter(name)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield owner, name, part
