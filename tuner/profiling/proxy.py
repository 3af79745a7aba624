"""Layer-cropped proxies: a plan's job in small, on one node, whose time says how far off the cost model is for the plan.

What a proxy keeps as it is: hidden size, heads, vocabulary, sequence length, tp, cp, micro batch, recompute, precision, ZeRO stage, the
experts that a rank holds. What the model extrapolates: layers, pipeline (stages, chunks, schedule), data parallelism, micro batches, and
expert parallelism beyond a node. With t seconds a step and ^ what the cost model says,

    log t(plan) = log t^(plan) + log t(proxy) - log t^(proxy) + e

where the errors e of the plans of a job have the covariance that the shipped kernel of the model's errors gives them (`errors`). What they
have in common moves all plans alike: it widens the ranges, and says nothing of which plan is faster. The rest, with PROXY, is a plan's own.
Memory is not extrapolated: what a proxy takes is other layers' states under other shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.cost_model.estimate import estimate
from tuner.cost_model.residual import covariance, job_features
from tuner.cost_model.runs import KNOBS, Runs
from tuner.plan import ALL_LAYERS, FULL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.arrays import Floats
    from tuner.cost_model.calibration import Calibration
    from tuner.cost_model.residual import Kernel
    from tuner.job import Job
    from tuner.launch.trial import Result
    from tuner.model import Model
    from tuner.plan import Plan

MICROBATCHES = 4  # of a proxy's step: the same for all plans, so that those alike but for pp and dp share one
FITS = 0.8  # of the accelerator's memory, by the model: a proxy that runs out of it says little
# What the kernel does not see of the crop: caches, clocks and heat of a short node, its links without neighbours' traffic. No public
# sweep has both runs; the own noise of a plan's run in another setting (beliefs.OWN_TIME) is the nearest that was measured.
PROXY = 0.06


class Cropped(NamedTuple):
    """A job in small and the plan for it."""

    job: Job
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """What is run for a plan. factor: t^(plan) / t^(proxy); tells_memory: the plan needs more memory than it, by
    the model; words: what of the plan it is.
    """

    of: Cropped
    factor: float
    tells_memory: bool
    words: str


def period(model: Model) -> int:
    """Return after how many body layers the kinds of layers repeat."""
    experts = model.moe.every if model.moe else 1
    window = model.sliding_window.full_every if model.sliding_window else 1
    return math.lcm(experts, window or 1)


def cropped_model(model: Model, periods: int) -> Model:
    """Return a model with `periods` repeats of its body's kinds of layers, as many leading dense ones in proportion, and each kind at
    least once; all else as it is. The whole model where it has no more layers.
    """
    leading, repeat = model.leading_dense_layers, period(model)
    body = model.layers - leading
    kept = min(body, periods * repeat)
    front = leading if not body else min(leading, max(1, round(leading * kept / body)))
    while {model.kind(i) for i in range(front)} != {model.kind(i) for i in range(leading)}:
        front += 1
    moe = model.moe.replace(first_dense_layers=front) if model.moe else None
    small: Model = model.replace(layers=front + kept, moe=moe)
    return small


def most_periods(model: Model) -> int:
    """Return how many periods give the whole model."""
    return max(1, math.ceil((model.layers - model.leading_dense_layers) / period(model)))


def why_none(job: Job, plan: Plan) -> str:
    """Return why a plan has no proxy on one node, "" where it has one."""
    node = min(job.cluster.gpus_per_node, job.gpus)
    if plan.tp * plan.cp > node:
        return f"tp*cp = {plan.tp}*{plan.cp} exceeds the {node} accelerators of a node"
    moe, ep = job.model.moe, _ep(job, plan)
    if moe and (moe.experts * ep % int(plan.ep) or moe.experts * ep // int(plan.ep) < moe.top_k):
        return f"ep = {plan.ep}: the experts of {ep} of its ranks are fewer than top_k = {moe.top_k}"
    return ""


def cropped(job: Job, plan: Plan, periods: int = 1) -> Cropped:
    """Return a job of `periods` periods of layers on one node, and the plan for it. The plan must have one (`why_none`)."""
    gpus, ep = _gpus(job, plan), _ep(job, plan)
    recomputed = _recomputed(job, plan, periods)
    small = replace(plan, pp=1, vpp=1, schedule=0, embedding_layers=0, loss_layers=0, ep=ep, shard_group=0, recompute_layers=recomputed)
    replicas = int(small.dp(gpus) * plan.cp)
    if plan.shard_group and plan.shard_group < replicas and replicas % plan.shard_group == 0:
        small = replace(small, shard_group=plan.shard_group)
    model = cropped_model(job.model, periods)
    if model.moe and ep != plan.ep:
        model = model.replace(moe=model.moe.replace(experts=model.moe.experts * ep // int(plan.ep)))
    batch = MICROBATCHES * int(plan.micro_batch * small.dp(gpus))
    cluster = job.cluster.replace(gpus=gpus)
    return Cropped(job.replace(model=model, cluster=cluster, global_batch=batch, tokens=None, ramp_up=None), small)


def _gpus(job: Job, plan: Plan) -> int:
    """Return the accelerators of the proxy: as many of a node as tp x cp divides."""
    ranks = int(plan.tp * plan.cp)
    return min(job.cluster.gpus_per_node, job.gpus) // ranks * ranks


def _ep(job: Job, plan: Plan) -> int:
    """Return the largest divisor of the plan's ep whose expert ranks a proxy holds."""
    room = _gpus(job, plan) // int(plan.etp)
    return max((ep for ep in range(1, int(plan.ep) + 1) if plan.ep % ep == 0 and ep <= room and room % ep == 0), default=1)


def _recomputed(job: Job, plan: Plan, periods: int) -> int:
    """Return of how many layers the proxy recomputes: the share that the plan's stages do."""
    if not plan.recompute & FULL or plan.recompute_layers >= ALL_LAYERS:
        return int(plan.recompute_layers)
    stage = math.ceil(job.model.layers / int(plan.pp))
    return max(1, round(min(int(plan.recompute_layers) / stage, 1.0) * cropped_model(job.model, periods).layers))


def proxy_of(job: Job, plan: Plan, calibration: Calibration) -> Proxy:
    """Return the proxy of a plan with the most layers that fit a node, at least one period of them."""
    low, high = 1, most_periods(job.model)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _memory(cropped(job, plan, middle), calibration) <= FITS * job.cluster.gpu.memory.value
        low, high = (middle, high) if fits else (low, middle - 1)
    of = cropped(job, plan, low)
    said, small = estimate(job, plan, calibration), estimate(of.job, of.plan, calibration)
    return Proxy(
        of=of,
        factor=float(said.step_s) / float(small.step_s),
        tells_memory=float(small.memory_bytes) <= float(said.memory_bytes),
        words=_words(job, plan, of),
    )


def errors(kernel: Kernel, pairs: Sequence[tuple[Cropped, Cropped]]) -> Floats:
    """Return the (n, n) covariance of the errors of extrapolating from each pair's second to its first, on the same GPU, release and
    precision, where no run is near: cov(f_i - g_i, f_j - g_j) with f, g the model's log errors of plans and proxies.
    """
    flat = [*(plan for plan, _ in pairs), *(proxy for _, proxy in pairs)]
    n, same, nothing = len(pairs), np.zeros(len(flat)), np.zeros(len(flat))
    knobs = np.array([[at(int(getattr(plan, name))) for name, at in KNOBS] for _, plan in flat])
    jobs = np.stack([job_features(job) for job, _ in flat])
    found = covariance(kernel, Runs(("",) * len(flat), same, same, same, jobs, knobs, nothing, nothing, nothing, nothing))
    between: Floats = found[:n, :n] + found[n:, n:] - found[:n, n:] - found[n:, :n]
    return between


def spreads(kernel: Kernel, pairs: Sequence[tuple[Cropped, Cropped]]) -> tuple[float, float]:
    """Return the standard deviations of what the extrapolations of these plans of a job have in common, and of a plan's own part."""
    found = errors(kernel, pairs)
    n, total = len(pairs), float(np.trace(found))
    common = max(float(found.sum() - total) / (n * (n - 1)), 0.0) if n > 1 else 0.0
    return math.sqrt(common), math.hypot(math.sqrt(max(total / n - common, 0.0)), PROXY)


def _memory(of: Cropped, calibration: Calibration) -> float:
    return float(estimate(of.job, of.plan, calibration).memory_bytes)


def _words(job: Job, plan: Plan, of: Cropped) -> str:
    whole, small = job.model, of.job.model
    parts = [f"{small.layers} of {whole.layers} layers", f"{of.job.gpus} of {job.gpus} GPUs", f"{MICROBATCHES} micro batches"]
    parts += [f"{small.moe.experts} of {whole.moe.experts} experts"] if whole.moe and small.moe and of.plan.ep != plan.ep else []
    return "proxy of " + ", ".join(parts)


def extrapolated(result: Result, proxy: Proxy, spread: float) -> Result:
    """Return what a proxy's result says of its plan: a time, whose own error is `spread` (a share), and nothing of the memory it takes. A
    proxy that ran out of memory says so of the plan where that needs more; else it says that the plan cannot be told by a proxy.
    """
    changes: dict[str, object] = {"memory_bytes": None, "basis": proxy.words}
    if result.step_s is not None:
        changes |= {"step_s": result.step_s * proxy.factor, "extrapolated": spread}
        changes |= {"basis": f"{proxy.words}: {result.step_s:.4g} s, times {proxy.factor:.4g} by the model"}
        changes |= {"spread_s": None if result.spread_s is None else result.spread_s * proxy.factor}
    if result.end == "oom" and not proxy.tells_memory:
        changes |= {"end": "failed", "reason": f"its proxy ran out of memory, which needs more than the plan: {result.reason}"[:2000]}
    return result.model_copy(update=changes)
