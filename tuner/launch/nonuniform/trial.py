"""What a run over replicas of different degree is asked: plain JSON in its own folder. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tuner.job import Job
from tuner.launch.limits import refusals_of_job
from tuner.launch.nonuniform.layout import padded, shared
from tuner.load import load_spec, parse_json, read_text
from tuner.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPEC = "ntp.json"
MOST_RANKS = 256
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
POINTS = ("backward", "commit", "update")


class Phase(Spec):
    """Steps of a run, from the first weights on: which degrees the replicas have and how many samples of a step each takes; overlap:
    whether the reshard goes beside the backward, or each of its phases alone.
    """

    degrees: Annotated[tuple[Positive, ...], Field(min_length=1)]
    samples: Annotated[tuple[Positive, ...], Field(min_length=1)]
    steps: Positive
    overlap: bool = True

    @property
    def name(self) -> str:
        """The degrees and how it runs."""
        return "tp " + "+".join(map(str, self.degrees)) + ("" if self.overlap else " in phases")


class Loss(Spec):
    """A rank that dies in the midst of a step (counted from 1) of the first phase: killed (SIGKILL) behind the first bucket of the
    backward, before the commit, or behind it.
    """

    rank: Annotated[int, Field(ge=0)]
    step: Positive
    point: Literal["backward", "commit", "update"] = "backward"


class NonuniformTrial(Spec):
    """phases: run one after the other by the first ranks of as many as the largest needs; arithmetic: of weights and activations (bf16:
    with fp32 master weights and gradient sums); clip: the norm that gradients are clipped to (0: they are not); timeout_s: an operation
    that waits longer fails; lost: the ranks that are killed.
    """

    job: Job
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    micro_batch: Positive = 1
    arithmetic: Literal["bf16", "fp32", "fp64"] = "fp32"
    sequence_parallel: bool = False
    clip: Annotated[float, Field(ge=0)] = 0.0
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    lost: tuple[Loss, ...] = ()

    @property
    def ranks(self) -> int:
        """How many processes it needs."""
        return max(sum(phase.degrees) for phase in self.phases)


def read_nonuniform(folder: Path) -> NonuniformTrial:
    """Return the run that stands in a folder. Raises SpecError."""
    path = folder / SPEC
    return load_spec(NonuniformTrial, parse_json(read_text(path), str(path)), str(path), units=False)


def refusals(trial: NonuniformTrial) -> list[str]:
    """Return why this run is not made, one line each; none where it is."""
    found = [*refusals_of_job(trial.job), *_about_the_model(trial)]
    for phase in trial.phases:
        found += _about_degrees(trial, phase)
    return list(dict.fromkeys([*found, *_about_losses(trial)]))


def _about_the_model(trial: NonuniformTrial) -> Iterator[str]:
    model = trial.job.model
    if model.moe is not None:
        yield f"{model.name} has experts: nonuniform tensor parallelism runs dense models alone"
    if model.dropout:
        yield f"{model.name} is trained with dropout, whose masks would differ between replicas of different degree"
    if trial.zero:
        yield f"zero = {trial.zero}: replicas hold the whole optimizer state (zero 0): a lost rank's shard of it would be nowhere else"


def _about_degrees(trial: NonuniformTrial, phase: Phase) -> Iterator[str]:
    model, most = trial.job.model, max(phase.degrees)
    for name, units in {"heads": model.heads, "ffn_hidden": model.ffn_hidden, "vocab": model.vocab}.items():
        if units < most:
            yield f"{phase.name}: {name} = {units} must be at least the largest degree, {most}: a rank without any has nothing to do"
    if len(phase.samples) != len(phase.degrees):
        yield f"{phase.name}: samples = {list(phase.samples)} must have one count for each of {len(phase.degrees)} replicas"
    if sum(phase.degrees) > MOST_RANKS:
        yield f"{phase.name}: {sum(phase.degrees)} ranks on one machine; at most {MOST_RANKS}"
    longest = max(padded(trial.job.seq_len, n) for n in phase.degrees) if trial.sequence_parallel else trial.job.seq_len
    if model.positions == "learned" and longest > (model.max_positions or trial.job.seq_len):
        yield f"{phase.name}: sequences padded to {longest} for sequence parallelism exceed max_positions = {model.max_positions}"


def _about_losses(trial: NonuniformTrial) -> Iterator[str]:
    first = trial.phases[0]
    for loss in trial.lost:
        if loss.rank >= sum(first.degrees) or loss.step > first.steps:
            yield f"lost rank {loss.rank} in step {loss.step}: there are ranks 0 to {sum(first.degrees) - 1} and steps 1 to {first.steps}"
    if trial.lost and len(trial.phases) > 1:
        yield f"a run that loses ranks has one phase, not {len(trial.phases)}"
    if trial.lost and len(first.degrees) < 2:
        yield "a lost rank's weights come from another replica, and there is one alone"


def samples_of(global_batch: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """Return how many samples of a step each replica takes: in proportion to its degree, so that all take about as long."""
    return shared(global_batch, degrees)
