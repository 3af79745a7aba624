"""A parallelism plan: what the tuner chooses.

Each field is an int or a column of ints (see arrays.py), so one Plan is a single layout, a table of them, or an open grid.
Enumerations are codes; `NAMES` spells them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.arrays import Ints, ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALL_LAYERS = 1_000_000  # recompute_layers: no stage has more

# What a recompute set may hold, as bits. FULL keeps only the layer's input; the others drop one part each.
RECOMPUTE_MODULES: Mapping[str, int] = {
    "core_attn": 1,
    "mlp": 2,
    "layernorm": 4,
    "moe_act": 8,
    "mla_up_proj": 16,
    "moe": 32,
    "shared_experts": 64,
}
FULL = 128
OFFLOADS: Mapping[str, int] = {"none": 0, "optimizer": 1, "activations": 2, "optimizer+activations": 3}
SCHEDULES: Mapping[str, int] = {"1f1b": 0, "gpipe": 1, "zb-1p": 2, "zb-2p": 3}
CP_KINDS: Mapping[str, int] = {"p2p": 0, "all_gather": 1, "a2a": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees, batch cut and knobs of one training layout (or of columns of them).

    tp, pp, cp, ep, etp: tensor, pipeline, context, expert and expert-tensor degree; vpp: model chunks a stage holds
    (interleaving); micro_batch: sequences. recompute: bits of RECOMPUTE_MODULES or FULL, the latter over recompute_layers
    layers of a stage. zero: 0-3 (3 is FSDP); shard_group: ranks that shard parameters and optimizer (0: all data-parallel
    ranks; smaller: HSDP). embedding_layers, loss_layers: layers that the embedding and the loss count as when layers are
    dealt to stages (0: not counted). *_overlap, cuda_graphs: 0 or 1. fallback_tp: tensor-parallel degree at which a replica goes on
    when GPUs of it fail (0, or tp itself: none, it is dropped); idle_tp: ranks of a tensor-parallel group that sit idle, in the plan of
    a replica that fell back. The data-parallel degree is derived.
    """

    tp: Ints = 1
    pp: Ints = 1
    vpp: Ints = 1
    cp: Ints = 1
    ep: Ints = 1
    etp: Ints = 1
    micro_batch: Ints = 1
    sequence_parallel: Ints = 0
    recompute: Ints = 0
    recompute_layers: Ints = ALL_LAYERS
    zero: Ints = 0
    shard_group: Ints = 0
    schedule: Ints = 0
    embedding_layers: Ints = 0
    loss_layers: Ints = 0
    offload: Ints = 0
    tp_overlap: Ints = 0
    dp_overlap: Ints = 0
    ep_overlap: Ints = 0
    cuda_graphs: Ints = 0
    cp_kind: Ints = 0
    fallback_tp: Ints = 0
    idle_tp: Ints = 0

    @property
    def block(self) -> Ints:
        """GPUs that a tensor-parallel group takes up, idle ones too."""
        return self.tp + self.idle_tp

    @property
    def fallback(self) -> Ints:
        """Tensor-parallel degree of a replica after a failure: tp where there is no lower one."""
        return self.fallback_tp + (self.fallback_tp < 1) * self.tp

    def dp(self, gpus: int) -> Ints:
        """Data-parallel degree: gpus = tp x cp x dp x pp."""
        return gpus // (self.block * self.pp * self.cp)

    def edp(self, gpus: int) -> Ints:
        """Data-parallel degree of the experts: gpus = etp x ep x edp x pp (at least 1)."""
        degree = gpus // (self.etp * self.ep * self.pp)
        return degree + (degree < 1)

    def microbatches(self, gpus: int, global_batch: Ints) -> Ints:
        """Micro batches that one data-parallel replica runs in a step."""
        replicas = self.dp(gpus)
        return ceil_div(global_batch, self.micro_batch * (replicas + (replicas < 1)))

    @classmethod
    def table(cls, plans: Sequence[Plan]) -> Plan:
        """Return single plans as one table of plans."""
        import numpy as np

        return cls(**{f.name: np.array([getattr(plan, f.name) for plan in plans], dtype=np.int64) for f in dataclasses.fields(cls)})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the grid this plan spans; () for a single plan."""
        import numpy as np

        return np.broadcast_shapes(*(np.shape(getattr(self, f.name)) for f in dataclasses.fields(self)))

    def row(self, index: int) -> Plan:
        """Return the single plan at this flat index of the grid, in Python ints."""
        import numpy as np

        where = np.unravel_index(index, self.shape)
        columns = {f.name: np.broadcast_to(getattr(self, f.name), self.shape) for f in dataclasses.fields(self)}
        return Plan(**{name: int(column[where]) for name, column in columns.items()})

    def take(self, indices: Ints) -> Plan:
        """Return the table of plans at these flat indices."""
        import numpy as np

        where = np.unravel_index(indices, self.shape)
        return Plan(**{f.name: np.broadcast_to(getattr(self, f.name), self.shape)[where] for f in dataclasses.fields(self)})
