"""A step over pipeline stages, by torch.distributed.pipelining, or over micro batches alone where there is one stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tuner.launch.engine.tensor_parallel import summed_loss
from tuner.launch.engine.transformer import Setting, Stage
from tuner.plan import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.pipelining import PipelineStage

_NAMES = {code: name for name, code in SCHEDULES.items()}


class Pipeline:
    """Forward and backward of all micro batches of a step. scale: what the summed loss of a micro batch is multiplied by."""

    def __init__(self, chunks: Sequence[Stage], setting: Setting, *, microbatches: int, scale: float) -> None:
        self.chunks, self.setting, self.microbatches, self.scale = chunks, setting, microbatches, scale
        self.schedule = self._schedule() if setting.mesh.pp.size > 1 else None

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's part of the step's mean loss."""
        return summed_loss(logits, targets, self.setting.tp, self.setting.job.model.vocab) * self.scale

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run the (batch, seq) tokens of this replica forward and backward; return its part of the mean loss (0 but on the last stage)."""
        if self.schedule is None:
            return self._accumulated(tokens, targets)
        losses: list[Tensor] = []
        args = (tokens,) if any(chunk.first for chunk in self.chunks) else ()
        last = any(chunk.last for chunk in self.chunks)
        self.schedule.step(*args, target=targets if last else None, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if last else torch.zeros((), device=tokens.device)

    def _accumulated(self, tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for x, y in zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            loss = self.loss(self.chunks[0](x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _schedule(self) -> Any:
        from torch.distributed import pipelining  # takes a second to import

        plan, pp = self.setting.plan, self.setting.mesh.pp
        count = pp.size * int(plan.vpp)
        stages: list[Any] = [self._stage(chunk, pp.index + i * pp.size, count) for i, chunk in enumerate(self.chunks)]
        options: dict[str, Any] = {"n_microbatches": self.microbatches, "loss_fn": self.loss, "scale_grads": False}
        name = _NAMES[int(plan.schedule)]
        if name == "zb-1p":
            return pipelining.ScheduleInterleavedZeroBubble(stages, **options)
        if len(stages) > 1:
            return pipelining.ScheduleInterleaved1F1B(stages, **options)
        kind: Any = pipelining.ScheduleGPipe if name == "gpipe" else pipelining.Schedule1F1B
        return kind(stages[0], **options)

    def _stage(self, chunk: Stage, index: int, count: int) -> PipelineStage:
        """Return torch's stage, told its shapes: what it would else find out by a run of the first micro batch."""
        from torch.distributed.pipelining import PipelineStage

        job, plan, mesh, tp = self.setting.job, self.setting.plan, self.setting.mesh, self.setting.tp
        batch, seq, dtype = int(plan.micro_batch), job.seq_len // mesh.cp.size, self.setting.dtype
        tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
        rows = seq // tp.group.size if tp.sequence else seq
        hidden = torch.empty(rows, batch, job.model.hidden, dtype=dtype, device="meta", requires_grad=True)
        vocab = -(-job.model.vocab // tp.group.size)
        logits = torch.empty(seq, batch, vocab, dtype=dtype, device="meta", requires_grad=True)
        return PipelineStage(
            chunk, index, count, mesh.device, group=mesh.pp.handle,
            input_args=tokens if chunk.first else hidden, output_args=logits if chunk.last else hidden,
        )  # fmt: skip
