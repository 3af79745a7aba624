"""A rank's share of a training run over replicas of different degree: model, gradients, optimizer, and one step after the other.

The loss is the sum over tokens divided by the tokens of the global batch, and gradients are summed over replicas, so that replicas weigh
what their samples weigh. A step is committed in two halves (see failover.py): first all ranks sum the loss and the gradients' norm, which
none leaves before all have their gradients whole; then each updates its own parameters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tuner.launch.engine.experts import Routing
from tuner.launch.engine.optimizer import adamw
from tuner.launch.engine.parts import parts_of
from tuner.launch.engine.recompute import Recompute
from tuner.launch.engine.tensor_parallel import TensorParallel, Uneven, summed_loss
from tuner.launch.engine.training import DATA_SEED
from tuner.launch.engine.transformer import Setting, Stage
from tuner.launch.nonuniform.layout import padded
from tuner.launch.nonuniform.reshard import Bucket, Member, Progress
from tuner.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.launch.engine.parts import Part, Parts
    from tuner.launch.nonuniform.groups import Groups
    from tuner.launch.nonuniform.trial import NonuniformTrial

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a rank in a step behind its backward: in what goes before the sum over replicas, in the sum, and in what goes behind it.

    With overlap these are waits, without it (each phase begun together) the phases themselves. backward_s: forward and backward of all
    micro batches, with what their hooks do.
    """

    backward_s: float
    before_s: float
    sum_s: float
    after_s: float


class Training:
    """A rank's model and optimizer. done: committed steps; ready: whether the next one's gradients are whole; norm: of the last committed
    step's gradients; point: called where a step passes a point of its way (a drill dies there).
    """

    def __init__(
        self, trial: NonuniformTrial, samples: tuple[int, ...], groups: Groups, point: Callable[[str], None] | None = None
    ) -> None:
        self.trial, self.samples, self.groups, self.point = trial, samples, groups, point or _pass
        self.done, self.ready, self.norm, self.loss = 0, False, 0.0, 0.0
        job = trial.job
        uneven = Uneven(units=_units(groups), most=groups.cast.most)
        self.tp = TensorParallel(group=groups.tp, sequence=trial.sequence_parallel, uneven=uneven)
        self.length = padded(job.seq_len, groups.degree) if trial.sequence_parallel else job.seq_len
        dtype = DTYPES[trial.arithmetic]
        setting = Setting(
            job=job.replace(seq_len=self.length), plan=Plan(tp=groups.degree), mesh=groups.mesh(), tp=self.tp,
            recompute=Recompute.of(Plan()), routing=Routing(), dtype=dtype,
        )  # fmt: skip
        self.stage = Stage(range(job.model.layers), setting, first=True, last=True)
        sums = torch.promote_types(dtype, torch.float32)
        for owner, name, part in list(parts_of(self.stage)):
            owner.register_parameter(name, nn.Parameter(part.draw(groups.device).to(dtype).contiguous()))
        self.buckets = [Bucket(members, groups, sums) for members in _buckets(self.stage)]
        self.masters = {m.part.key: _master(m.parameter, sums) for m in self.members()}
        self.optimizer = adamw(list(self.masters.values()))
        self.progress: Progress | None = None
        for index, bucket in enumerate(self.buckets):
            for member in bucket.members:
                self._follow(index, bucket, member)

    def members(self) -> Iterator[Member]:
        """Yield all parameters that this rank holds."""
        for bucket in self.buckets:
            yield from bucket.members

    def _follow(self, index: int, bucket: Bucket, member: Member) -> None:
        def collect(parameter: Tensor) -> None:
            del parameter
            member.collect()
            bucket.missing -= 1
            if self.progress is not None and bucket.missing == 0:
                self.progress.complete(index)
                self.point("backward")

        member.parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this replica's tokens and targets, (samples, padded length): its share of a global batch of one seed.

        Small tokens are frequent (the third power of a uniform number), so that the first steps have something to learn.
        """
        job, first = self.trial.job, sum(self.samples[: self.groups.replica])
        generator = torch.Generator().manual_seed(DATA_SEED + step)
        whole = torch.rand((sum(self.samples), job.seq_len + 1), generator=generator, dtype=torch.float32)
        tokens = (whole**3 * job.model.vocab).long().clamp_(max=job.model.vocab - 1)[first : first + self.samples[self.groups.replica]]
        longer = nn.functional.pad(tokens, (0, self.length - job.seq_len)).to(self.groups.device)
        return longer[:, : self.length], longer[:, 1:]

    def step(self, *, overlap: bool = True) -> Spent:
        """Run the next step: forward and backward, the sum over replicas, the commit and the update."""
        for bucket in self.buckets:
            bucket.sums.zero_()
        self.ready = False
        start = time.perf_counter()
        self.loss = self._backward(overlap=overlap)
        spent = self._reduced(start, overlap=overlap)
        self.ready = True
        self.point("commit")
        self._commit()
        self.point("update")
        self.update(self.norm)
        return spent

    def _backward(self, *, overlap: bool) -> float:
        """Accumulate gradients over micro batches; hooks start the reshard in the last of them."""
        tokens, targets = self.batch(self.done)
        size, length = self.trial.micro_batch, self.trial.job.seq_len
        scale, part = 1.0 / (sum(self.samples) * length), torch.zeros((), dtype=torch.float64, device=self.groups.device)
        pairs = list(zip(torch.split(tokens, size), torch.split(targets, size), strict=True))
        for i, (x, y) in enumerate(pairs):
            last = i == len(pairs) - 1
            self.progress = Progress(buckets=self.buckets) if last and overlap else None
            for bucket in self.buckets:
                bucket.missing = len(bucket.members)
            loss = summed_loss(self.stage(x)[:length], y[:, :length], self.tp, self.trial.job.model.vocab) * scale
            loss.backward()  # type: ignore[no-untyped-call]
            part += loss.detach()
        return float(part)

    def _reduced(self, start: float, *, overlap: bool) -> Spent:
        """Bring all gradients to their end: what the hooks have begun, or each phase for itself."""
        clock = _Clock(self.groups, start)
        backward = clock.lap()
        before, total, after = self._drained(clock) if overlap else self._in_phases(clock)
        return Spent(backward_s=backward, before_s=before, sum_s=total, after_s=after)

    def _drained(self, clock: _Clock) -> tuple[float, float, float]:
        progress, buckets = self.progress, self.buckets
        assert progress is not None  # noqa: S101 (the last micro batch has made it)
        while progress.reducing < len(buckets):
            buckets[progress.reducing].wait()
            progress.advance()
        before = clock.lap()
        while progress.finishing < len(buckets):
            buckets[progress.finishing].wait()
            progress.advance()
        total = clock.lap()
        for bucket in buckets:
            bucket.wait()
            bucket.end()
        return before, total, clock.lap()

    def _in_phases(self, clock: _Clock) -> tuple[float, float, float]:
        spent = []
        for start, stop in ((Bucket.begin, Bucket.arrive), (Bucket.reduce, _nothing), (Bucket.finish, Bucket.end)):
            clock.together()
            for bucket in self.buckets:
                start(bucket)
            for bucket in self.buckets:
                bucket.wait()
                stop(bucket)
            spent.append(clock.lap())
        return spent[0], spent[1], spent[2]

    def _commit(self) -> None:
        """Sum the loss and the squares of all gradients, each element counted once: by the first replica's ranks."""
        square = torch.zeros(2, dtype=torch.float64, device=self.groups.device)
        if self.groups.replica == 0:
            for member in self.members():
                if member.part.axis is not None or self.groups.slot == 0:
                    square[0] += member.sums[: member.kept].double().square().sum()
        if self.groups.slot == 0:
            square[1] = self.loss
        if self.groups.world.size > 1:
            dist.all_reduce(square, group=self.groups.world.handle)
        self.norm, self.loss = float(square[0].sqrt()), float(square[1])

    @torch.no_grad()
    def update(self, norm: float) -> None:
        """Update this rank's parameters from its whole gradients, clipped to the trial's norm where that is given."""
        clip = self.trial.clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for member in self.members():
            master = self.masters[member.part.key]
            master.grad = member.gradient().mul(factor).contiguous()
        self.optimizer.step()
        for member in self.members():
            master = self.masters[member.part.key]
            master.grad = None
            if master is not member.parameter:
                member.parameter.copy_(master)
        self.norm, self.done, self.ready = norm, self.done + 1, False

    def state(self, key: str) -> list[Tensor]:
        """Return what a parameter's training keeps: its full-precision values and both moments of its gradients (zeros before a step)."""
        master = self.masters[key]
        kept = self.optimizer.state.get(master, {})
        return [master.detach(), *(kept.get(name, torch.zeros_like(master)) for name in MOMENTS)]

    @torch.no_grad()
    def restore(self, states: dict[str, list[Tensor]], done: int) -> None:
        """Take over parameters and moments after `done` steps."""
        for member in self.members():
            key = member.part.key
            master, (values, *moments) = self.masters[key], states[key]
            master.copy_(values)
            if master is not member.parameter:
                member.parameter.copy_(values)
            if done:
                kept = dict(zip(MOMENTS, moments, strict=True))
                self.optimizer.state[master] = {"step": torch.tensor(float(done), device=master.device), **kept}
        self.done = done


class _Clock:
    """Seconds between laps, with this rank's own computation done at each."""

    def __init__(self, groups: Groups, start: float) -> None:
        self.groups, self.last = groups, start

    def lap(self) -> float:
        if self.groups.device.type == "cuda":
            torch.cuda.current_stream(self.groups.device).synchronize()
        now = time.perf_counter()
        spent, self.last = now - self.last, now
        return spent

    def together(self) -> None:
        """Begin the next lap with all ranks."""
        if self.groups.world.size > 1:
            dist.barrier(self.groups.world.handle)
        self.lap()


def _pass(name: str) -> None:
    del name


def _nothing(bucket: Bucket) -> None:
    del bucket


def _units(groups: Groups) -> Callable[[int], tuple[int, ...]]:
    cast, rank = groups.cast, groups.rank
    return lambda units: cast.held(rank, units)


def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return parameter if parameter.dtype == dtype else nn.Parameter(parameter.detach().to(dtype))


def _buckets(stage: Stage) -> list[list[tuple[Parts, str, Part]]]:
    """Return the parameters of each layer, of what is behind the layers and of what is before them, in the order of the backward."""
    found: dict[str, list[tuple[Parts, str, Part]]] = {}
    for member in parts_of(stage):
        name = member[2].key.partition(".")[0]
        found.setdefault(name if name.startswith("layer") else "last" if name in ("head", "norm") else "first", []).append(member)
    layers = [name for name in found if name.startswith("layer")]
    return [found[name] for name in ("last", *reversed(layers), "first") if name in found]
