"""The one entry of the cost model: estimate(job, plan, calibration) -> Estimate, for a single plan and for an open grid alike."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, term, total
from tuner.cost_model.data_parallel import Traffic, embedding_reduce_seconds, exposed, optimizer_seconds, traffic
from tuner.cost_model.flops import model_flops
from tuner.cost_model.memory import NORMAL_90, Memory, out_of_memory_probability, stage_memory
from tuner.cost_model.pipeline import StageTime, all_stages_seconds, bubble_seconds, pieces, stage_time, stages_to_watch
from tuner.cost_model.residual import correction, spread90
from tuner.cost_model.weights import Weights, stage_weights
from tuner.job import peak_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step by phase; their sum is the step."""

    steady: Floats = term("s", "micro batches on the slowest stage", "m x busy seconds of a micro batch; layer.py")
    bubble: Floats = term("s", "filling and draining the pipeline", "Narayanan 2021, section 2.2; Qi 2023, table 1")
    dp_comm: Floats = term("s", "exposed data-parallel communication", "Rajbhandari 2020, section 7")
    embedding_reduce: Floats = term("s", "gradient of the tied embedding between first and last stage", "Narayanan 2021, section 2.2")
    optimizer: Floats = term("s", "gradient norm and update", "bytes of Adam's state / HBM bandwidth, or the host link's where offloaded")
    fixed: Floats = term("s", "what a step costs whatever its size", "calibration: step_fixed_s")
    jitter: Floats = term("s", "stragglers", "calibration: jitter_per_doubling x log2(GPUs)")
    measured_runs: Floats = term("s", "what measured runs near this one add or take", "residual.py; Rasmussen 2006, equation 2.25")


class Slowest(NamedTuple):
    """The slowest stage: its index, seconds of a micro batch, the most parameters that a rank of any stage holds, and the seconds of
    its data-parallel collectives before overlap.
    """

    stage: Ints
    time: StageTime
    held: Weights
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan costs: columns that broadcast to the plan's shape.

    step_s: seconds a step, which spread() divides and multiplies to its 90 % interval low_s to high_s; memory_bytes: device bytes
    of a rank of the fullest stage (worst_stage), which memory_spread divides and multiplies to its 90 % interval; p_oom: probability
    that it runs out; slowest: the stage that sets the pace; step: the parts of step_s; calibration: its hash.
    """

    step_s: Floats
    spread: Callable[[], Floats]
    memory_bytes: Floats
    p_oom: Floats
    worst_stage: Ints
    slowest: Slowest
    step: StepTime
    calibration: str
    memory_spread: float = 1.0

    @property
    def slowest_stage(self) -> Ints:
        """Index of the stage that sets the pace."""
        return self.slowest.stage

    @property
    def low_s(self) -> Floats:
        """Lower end of the 90 % interval of a step, in seconds."""
        return self.step_s / self.spread()

    @property
    def high_s(self) -> Floats:
        """Upper end of the 90 % interval of a step, in seconds."""
        return self.step_s * self.spread()

    @property
    def low_bytes(self) -> Floats:
        """Lower end of the 90 % interval of the memory, in bytes."""
        return self.memory_bytes / self.memory_spread

    @property
    def high_bytes(self) -> Floats:
        """Upper end of the 90 % interval of the memory, in bytes."""
        return self.memory_bytes * self.memory_spread


def estimate(job: Job, plan: Plan, calibration: Calibration) -> Estimate:
    """Return time and memory of one step of `job` under `plan`.

    step = m x slowest stage + bubble + exposed data-parallel communication + optimizer + fixed, times (1 + jitter), times what the
    calibration's measured runs say of the model's error near here (residual.py).
    """
    microbatches = plan.microbatches(job.gpus, job.global_batch)
    watched = stages_to_watch(job, plan)
    step, slowest = step_time(job, plan, calibration, microbatches, watched)
    memory = stage_memory(job, plan, calibration, microbatches, watched)
    memory_bytes, worst_stage = _most(memory.device, watched)
    host, _ = _most(memory.host, watched)
    return Estimate(
        step_s=total(step),
        spread=lambda: spread(job, plan, calibration),
        memory_bytes=memory_bytes,
        p_oom=np.where(host > calibration["host_bytes_per_gpu"], 1.0, out_of_memory_probability(job, memory_bytes, calibration)),
        worst_stage=worst_stage,
        slowest=slowest,
        step=step,
        calibration=calibration.hash,
        memory_spread=math.exp(NORMAL_90 * calibration["oom_margin_spread"]),
    )


def step_time(job: Job, plan: Plan, calibration: Calibration, microbatches: Ints, watched: Ints) -> tuple[StepTime, Slowest]:
    """Return the parts of a step and its slowest stage."""
    parts = pieces(job, plan, calibration)
    slowest, slowest_stage = _slowest(watched, stage_time(job, plan, parts, calibration, watched))
    held = Weights(*(_most(column, watched)[0] for column in stage_weights(job, plan, watched)))
    steady = microbatches * slowest.busy
    bubble = bubble_seconds(plan, all_stages_seconds(job, plan, parts, calibration), slowest)
    comm = traffic(job, plan, held, microbatches, calibration)
    dp_comm = exposed(plan, comm, slowest, microbatches, calibration)
    optimizer = optimizer_seconds(job, plan, held, calibration)
    reduce = embedding_reduce_seconds(job, plan, calibration)
    fixed = calibration["step_fixed_s"]
    jitter = calibration["jitter_per_doubling"] * math.log2(job.gpus)
    step = StepTime(
        steady=steady,
        bubble=bubble,
        dp_comm=dp_comm,
        embedding_reduce=reduce,
        optimizer=optimizer,
        fixed=fixed,
        jitter=((steady + bubble) + ((dp_comm + reduce) + (optimizer + fixed))) * jitter,
        measured_runs=0.0,
    )
    of = Slowest(slowest_stage, slowest, held, comm)
    if calibration.residual is None:
        return step, of
    return dataclasses.replace(step, measured_runs=total(step) * (correction(job, plan, calibration.residual) - 1.0)), of


def spread(job: Job, plan: Plan, calibration: Calibration) -> Floats:
    """Return the factor by which a step time divided and multiplied spans its 90 % interval: told by how near measured runs are, or
    by time_spread_90 where the calibration has none.
    """
    if calibration.residual is None:
        return 1.0 + calibration["time_spread_90"]
    return spread90(job, plan, calibration.residual)


def _at(column: Floats, row: int, watched: Ints) -> Floats:
    """Return `column` on one of the watched stages; a column that does not depend on the stage is the same on all."""
    return np.broadcast_to(column, np.broadcast_shapes(np.shape(column), watched.shape))[row]


def _slowest(watched: Ints, time: StageTime) -> tuple[StageTime, Ints]:
    seconds = time.busy
    slowest, index, busy = StageTime(*(_at(column, 0, watched) for column in time)), watched[0], seconds[0]
    for row in range(1, len(watched)):
        slower = seconds[row] > busy
        slowest = StageTime(*(np.where(slower, _at(new, row, watched), old) for new, old in zip(time, slowest, strict=True)))
        index, busy = np.where(slower, watched[row], index), np.maximum(seconds[row], busy)
    return slowest, index


def _most(column: Floats, watched: Ints) -> tuple[Floats, Ints]:
    """Return the largest value of `column` over the watched stages, and the first stage that has it."""
    most, index = _at(column, 0, watched), watched[0]
    for row in range(1, len(watched)):
        other = _at(column, row, watched)
        index, most = np.where(other > most, watched[row], index), np.maximum(other, most)
    return most, index


def peak_memory(job: Job, plan: Plan, calibration: Calibration, stage: Ints) -> Memory:
    """Return the memory of `stage` by term (the worst one of an estimate, to see its allocator's peak)."""
    return stage_memory(job, plan, calibration, plan.microbatches(job.gpus, job.global_batch), stage)


def tokens_per_s_per_gpu(job: Job, step_s: Floats) -> Floats:
    """Return tokens a second and accelerator."""
    return 1.0 * job.global_batch * job.seq_len / step_s / job.gpus


def mfu(job: Job, step_s: Floats) -> Floats:
    """Return model FLOPs utilisation: model_flops / (step x GPUs x dense peak of the job's precision); recompute not counted."""
    return model_flops(job) / (step_s * (job.gpus * peak_flops(job)))


def training_seconds(job: Job, plan: Plan, calibration: Calibration) -> float:
    """Return the seconds of a whole run of job.tokens with a single plan, ramp-up included. Raises ValueError without a budget.

    Ramp-up (Megatron-LM --rampup-batch-size): the batch grows by `increment` from `start`, each size for the same number of samples.
    """
    if job.tokens is None:
        raise ValueError("the job states no token budget")
    left = job.tokens / job.seq_len
    seconds = 0.0
    if job.ramp_up:
        sizes = np.arange(job.ramp_up.start, job.global_batch, job.ramp_up.increment)
        steps, _ = step_time(job, plan, calibration, plan.microbatches(job.gpus, sizes), stages_to_watch(job, plan))
        for size, step in zip(sizes.tolist(), np.broadcast_to(total(steps), sizes.shape).tolist(), strict=True):
            samples = min(job.ramp_up.samples / len(sizes), left)
            seconds += samples / size * step
            left -= samples
    return seconds + left / job.global_batch * float(estimate(job, plan, calibration).step_s)
