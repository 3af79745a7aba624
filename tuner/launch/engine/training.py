"""A plan at work: the rank's model chunks, their optimizer, and one training step after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tuner.launch.engine.context_parallel import positions
from tuner.launch.engine.experts import Routing
from tuner.launch.engine.mesh import Mesh, mesh_of
from tuner.launch.engine.optimizer import ReplicatedWeights, norm_of_parts
from tuner.launch.engine.pipeline import Pipeline
from tuner.launch.engine.recompute import Recompute
from tuner.launch.engine.stages import chunk_layers
from tuner.launch.engine.tensor_parallel import TensorParallel
from tuner.launch.engine.transformer import Setting, Stage, compute_type

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.engine.fully_sharded import ShardedWeights
    from tuner.plan import Plan

DATA_SEED = 77


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a replica trains on in one step: tokens and the tokens behind them, (sequences, seq of this context rank)."""

    tokens: Tensor
    targets: Tensor


class Training:
    """A rank's share of a training run. microbatches: those of a step (0: of the job's global batch), until `hold` changes them."""

    def __init__(self, job: Job, plan: Plan, device: torch.device, *, microbatches: int = 0, routing: Routing | None = None) -> None:
        torch.manual_seed(DATA_SEED)
        self.job, self.plan = job, plan
        self.mesh: Mesh = mesh_of(plan, job.model.kv_heads, device)
        self.microbatches = microbatches or int(plan.microbatches(job.gpus, job.global_batch))
        self.chunks = self._chunks(routing or Routing())
        self.weights = self._weights()
        self.pipelines: dict[int, Pipeline] = {}
        self.hold(self.microbatches)

    def hold(self, microbatches: int) -> None:
        """Have the next steps hold this many micro batches. Schedules are kept: torch's allocates what its stages receive into."""
        self.microbatches = microbatches
        if isinstance(self.weights, ReplicatedWeights):
            self.weights.hold(microbatches)
        tokens = self.sequences * int(self.plan.dp(self.job.gpus)) * self.job.seq_len
        if microbatches not in self.pipelines:
            self.pipelines[microbatches] = Pipeline(self.chunks, self.setting, microbatches=microbatches, scale=1.0 / tokens)
        self.pipeline = self.pipelines[microbatches]

    def _chunks(self, routing: Routing) -> list[Stage]:
        job, plan, mesh = self.job, self.plan, self.mesh
        tp = TensorParallel(group=mesh.tp, sequence=bool(plan.sequence_parallel) and mesh.tp.size > 1)
        recompute, dtype = Recompute.of(plan), compute_type(job.precision)
        self.setting = Setting(job=job, plan=plan, mesh=mesh, tp=tp, recompute=recompute, routing=routing, dtype=dtype)
        layers = chunk_layers(job.model.layers, plan)
        mine = range(mesh.pp.index, len(layers), mesh.pp.size)
        return [Stage(layers[i], self.setting, first=i == 0, last=i == len(layers) - 1) for i in mine]

    def _weights(self) -> ReplicatedWeights | ShardedWeights:
        dtype, zero = compute_type(self.job.precision), int(self.plan.zero)
        if zero >= 2:
            from tuner.launch.engine.fully_sharded import ShardedWeights  # FSDP2 takes a second to import

            return ShardedWeights(self.chunks, self.mesh, dtype=dtype, reshard=zero == 3)
        overlap = bool(self.plan.dp_overlap)
        return ReplicatedWeights(self.chunks, self.mesh, dtype=dtype, microbatches=self.microbatches, overlap=overlap)

    @property
    def sequences(self) -> int:
        """Sequences of one replica in a step."""
        return self.microbatches * int(self.plan.micro_batch)

    def batch(self, step: int) -> Batch:
        """Return this replica's share of a step's synthetic tokens: a global batch of one seed, whatever the layout.

        Small tokens are frequent (the third power of a uniform number), so that the first steps have something to learn.
        """
        job, mesh = self.job, self.mesh
        generator = torch.Generator().manual_seed(DATA_SEED + step)
        shape = (self.sequences * int(self.plan.dp(job.gpus)), job.seq_len + 1)
        whole = (torch.rand(shape, generator=generator) ** 3 * job.model.vocab).long().clamp_(max=job.model.vocab - 1)
        mine = whole[mesh.replica * self.sequences : (mesh.replica + 1) * self.sequences]
        held = positions(job.seq_len, mesh.cp, torch.device("cpu"))
        return Batch(tokens=mine[:, held].to(mesh.device), targets=mine[:, held + 1].to(mesh.device))

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch; return this rank's part of the mean loss."""
        loss = self.pipeline.run(batch.tokens, batch.targets)
        self.weights.step()
        return loss

    def mean_loss(self, part: Tensor) -> float:
        """Return the step's mean loss from everyone's parts; every rank calls this."""
        whole = part.clone() if self.mesh.tp.index == 0 else torch.zeros_like(part)
        dist.all_reduce(whole)
        return float(whole)

    def parameter_norm(self) -> float:
        """Return the norm of all parameters; every rank calls this."""
        return norm_of_parts(self.chunks, self.mesh, sharded=int(self.plan.zero) >= 2)
