"""Which layers a pipeline stage's model chunks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.plan import Plan


def chunk_layers(layers: int, plan: Plan) -> list[range]:
    """Return the layers of each of the pp x vpp chunks, front to back; stage s holds chunks s, s + pp, ...

    The embedding and the loss count as plan.embedding_layers and plan.loss_layers layers. Stage s holds units // pp of all units, and
    one more where s < units % pp; with vpp chunks each chunk of a stage holds its share of them, the rest in the front ones.
    """
    pp, vpp = int(plan.pp), int(plan.vpp)
    units = layers + int(plan.embedding_layers) + int(plan.loss_layers)
    of_stage = [units // pp + (stage < units % pp) for stage in range(pp)]
    sizes = [of_stage[i % pp] // vpp + (i // pp < of_stage[i % pp] % vpp) for i in range(pp * vpp)]
    found, start = [], -int(plan.embedding_layers)
    for size in sizes:
        found.append(range(min(max(start, 0), layers), min(max(start + size, 0), layers)))
        start += size
    return found
