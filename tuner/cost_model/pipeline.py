"""How layers are dealt to pipeline stages, how long a stage is busy, how long it waits, and how much it keeps.

Symbols: p stages, v model chunks a stage (vpp), m micro batches, s stage index from 0. Layers are dealt as units: the embedding and
the loss may count as layers of their own (Megatron-LM's account-for-embedding/loss-in-pipeline-split); what does not divide goes to
the front stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div
from tuner.cost_model.collectives import send_seconds
from tuner.cost_model.layer import LayerTime, embedding_time, head_time, layer_time, mtp_time
from tuner.cost_model.work import E, Operators, Part
from tuner.job import says
from tuner.plan import SCHEDULES

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.model import LayerKind
    from tuner.plan import Plan

ZB_1P, ZB_2P, GPIPE = SCHEDULES["zb-1p"], SCHEDULES["zb-2p"], SCHEDULES["gpipe"]


class StageLayers(NamedTuple):
    """Layers of a stage: the leading dense ones of a mixture-of-experts model, and the others."""

    leading: Ints
    body: Ints

    @property
    def total(self) -> Ints:
        """All layers of the stage."""
        return self.leading + self.body


def stage_layers(job: Job, plan: Plan, stage: Ints) -> StageLayers:
    """Return the layers of `stage`.

    units = layers + embedding_layers + loss_layers, base = units // p each and one more for the first units % p stages. With v
    chunks, stage s holds chunks s, s + p, ...; the leading dense layers lie in its first one.
    """
    model = job.model
    units = model.layers + plan.embedding_layers + plan.loss_layers
    base, rest = units // plan.pp, units % plan.pp
    start = stage * base + np.minimum(stage, rest) - plan.embedding_layers
    stop = start + base + (stage < rest)
    held = np.clip(stop, 0, model.layers) - np.clip(start, 0, model.layers)
    if not model.leading_dense_layers:
        return StageLayers(0 * held, held)
    first = (stage * base + np.minimum(stage, rest)) // plan.vpp - plan.embedding_layers
    last = first + ceil_div(base + (stage < rest), plan.vpp)
    leading = np.clip(last, 0, model.leading_dense_layers) - np.clip(first, 0, model.leading_dense_layers)
    leading = np.minimum(leading, held)
    return StageLayers(leading, held - leading)


def stages_to_watch(job: Job, plan: Plan) -> Ints:
    """Return stage indices that include the slowest and the fullest, along a new leading axis: the first, the second (the fullest of
    the middle, as what is kept falls with the index), the first without leading dense layers, and the last; clipped to p - 1.
    """
    last = plan.pp - 1
    watched: list[Ints] = [0 * last, np.minimum(1, last)]
    if job.model.leading_dense_layers:
        per_chunk = np.maximum(ceil_div(job.model.layers, plan.pp * plan.vpp), 1)
        watched.append(np.minimum(ceil_div(job.model.leading_dense_layers, per_chunk), last))
    column = np.stack(np.broadcast_arrays(*watched, last))
    return column.reshape(len(column), *(1,) * (len(plan.shape) + 1 - column.ndim), *column.shape[1:])


def in_flight(job: Job, plan: Plan, microbatches: Ints, stage: Ints) -> Floats:
    """Return how many micro batches' activations of all its layers stage s keeps at its peak.

    All m where the framework runs all forwards first (differentiating a loop over micro batches does). Else, 1F1B and ZB-1p:
    min(m, p - s). Interleaved: min(m v, 2 (p - 1 - s) + (v - 1) p + 1) chunks of 1 / v of its layers. ZB-2p: min(m, 2 (p - s) - 1).
    GPipe: m. Source: Narayanan 2021 (2104.04473) section 2.2, Megatron-LM schedules.py (warm-up count), Qi 2023 (2401.10241) section 3.
    """
    if says(job.framework.forwards_first, False):
        return 1.0 * np.where(plan.pp > 1, microbatches, 1) + 0.0 * stage
    plain = np.minimum(microbatches, plan.pp - stage)
    chunks = np.minimum(microbatches * plan.vpp, 2 * (plan.pp - 1 - stage) + (plan.vpp - 1) * plan.pp + 1)
    doubled = np.minimum(microbatches, 2 * (plan.pp - stage) - 1)
    one_chunk = np.where(plan.schedule == ZB_2P, doubled, np.where(plan.schedule == GPIPE, microbatches, plain))
    return np.where(plan.vpp > 1, chunks / plan.vpp, 1.0 * one_chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Seconds of everything a stage can hold, for one micro batch."""

    layers: dict[LayerKind, LayerTime]
    embedding: Part
    head: Part
    mtp: Part
    send: Floats


def pieces(job: Job, plan: Plan, calibration: Calibration) -> Pieces:
    """Return the pieces; their columns do not span p, v, ZeRO or the data-parallel degree (but `send` spans p's stride).

    A send carries the rank's shard of T x h; a replicated one is cut in t pieces and gathered where the framework does so
    (Narayanan 2021, section 4.1).
    """
    c = Operators(job, plan, calibration)
    whole = E * c.shard.tokens * job.model.hidden
    scattered = says(job.framework.scattered_sends, False)
    cut = plan.tp if scattered else c.shard.spread
    hop = send_seconds(whole / cut, c.groups["pp"].stride, cluster=job.cluster, calibration=calibration)
    if scattered:
        hop = hop + np.where(plan.sequence_parallel > 0, 0.0, c.tp_collectives[0])
    return Pieces(
        layers={kind: layer_time(c, kind) for kind, _ in job.model.layer_groups()},
        embedding=embedding_time(c),
        head=head_time(c),
        mtp=mtp_time(c),
        send=np.where(plan.pp > 1, hop + calibration["pp_send_s"], 0.0),
    )


class StageTime(NamedTuple):
    """Seconds of one micro batch on a stage; recompute runs before the backward; sends are those it waits for; host: what the host
    spends on a micro batch whatever its size (scheduling, data, checks).
    """

    forward: Floats
    backward: Floats
    recompute: Floats
    wgrad: Floats
    sends: Floats
    host: Floats

    @property
    def busy(self) -> Floats:
        """All of it: what each further micro batch costs a stage."""
        return self.forward + self.backward + self.recompute + (self.sends + self.host)


def _over_layers(job: Job, held: StageLayers, of: dict[LayerKind, Floats]) -> Floats:
    """Return the sum over the held layers: leading ones and body, each the mean of its kinds (the body's kinds are interleaved)."""
    seconds: Floats = 0.0
    for count, kinds in ((held.leading, job.model.leading_groups()), (held.body, job.model.body_groups())):
        of_all = sum(n for _, n in kinds)
        for kind, n in kinds:
            seconds = seconds + count * (of[kind] * (n / of_all))
    return seconds


def _one_way(job: Job, part: Pieces, held: StageLayers, first: Ints, last: Ints, way: str, leaf: str) -> Floats:
    """Return the forward or backward (`way`) seconds, all or one leaf of them, of these layers plus the ends a stage holds."""
    mtp = job.model.mtp_layers

    def seconds(of: LayerTime | Part) -> Floats:
        return getattr(getattr(of, way), leaf)

    layers = {kind: seconds(time) for kind, time in part.layers.items()}
    end = (1 + mtp) * seconds(part.head)
    if mtp:
        end = end + mtp * (layers[job.model.kind(job.model.layers - 1)] + seconds(part.mtp))
    return _over_layers(job, held, layers) + first * seconds(part.embedding) + last * end


def _redone(job: Job, part: Pieces, held: StageLayers, share: Floats, leaf: str) -> Floats:
    """Return the seconds of recompute: single modules in every layer, whole layers in a share of them."""
    modules = {kind: getattr(time.recompute, leaf) for kind, time in part.layers.items()}
    whole = {kind: getattr(time.full_recompute, leaf) for kind, time in part.layers.items()}
    return _over_layers(job, held, modules) + share * _over_layers(job, held, whole)


def _hops(plan: Plan, calibration: Calibration, sends: Ints) -> Floats:
    """Return how many of these `sends` are exposed: interleaved schedules post them early and hide a fraction."""
    exposed = np.where(plan.vpp > 1, 1.0 - calibration["pp_overlap_fraction"], 1.0)
    return np.where(plan.pp > 1, sends * exposed, 0.0)


def stage_time(job: Job, plan: Plan, part: Pieces, calibration: Calibration, stage: Ints, leaf: str = "seconds") -> StageTime:
    """Return the seconds of one micro batch on `stage`: its layers, the embedding on the first, head and MTP on the last.

    leaf: a leaf of Work, to see only its share (sends and wgrad are given whole). A stage sends an activation and a gradient a chunk,
    but the first has no gradient and the last no activation to pass on.
    """
    held = stage_layers(job, plan, stage)
    first, last = stage == 0, stage == plan.pp - 1
    share = np.minimum(plan.recompute_layers, held.total) / np.maximum(held.total, 1)
    return StageTime(
        forward=_one_way(job, part, held, first, last, "forward", leaf),
        backward=_one_way(job, part, held, first, last, "backward", leaf),
        recompute=_redone(job, part, held, share, leaf),
        wgrad=_over_layers(job, held, {kind: time.wgrad for kind, time in part.layers.items()}),
        sends=_hops(plan, calibration, 2 * plan.vpp - first - last) * part.send,
        host=calibration["microbatch_fixed_s"],
    )


def all_stages_seconds(job: Job, plan: Plan, part: Pieces, calibration: Calibration) -> Floats:
    """Return the sum over stages of the seconds of one micro batch, without listing the stages."""
    leading = job.model.leading_dense_layers
    everything = StageLayers(leading, job.model.layers - leading)
    share = np.minimum(1.0 * plan.recompute_layers * plan.pp, job.model.layers) / job.model.layers
    ways = [_one_way(job, part, everything, 1, 1, way, "seconds") for way in ("forward", "backward")]
    sends = _hops(plan, calibration, 2 * (plan.pp * plan.vpp - 1)) * part.send + plan.pp * calibration["microbatch_fixed_s"]
    return ways[0] + ways[1] + _redone(job, part, everything, share, "seconds") + sends


def bubble_seconds(plan: Plan, all_stages: Floats, slowest: StageTime) -> Floats:
    """Return what the slowest stage waits for in filling and draining the pipeline.

    A micro batch passes all stages once (sum over stages of their seconds); the slowest is then busy m times, so it waits for the
    others' share: (sum - slowest) / v, which is (p - 1) t / v for equal stages (Narayanan 2021, section 2.2). Zero-bubble schedules
    fill it with weight gradients: ZB-1p with 2 and ZB-2p with 3 of them a stage (Qi 2023, table 1), never below zero.
    """
    others = np.maximum(all_stages - slowest.busy, 0.0) / plan.vpp
    moved = np.where(plan.schedule == ZB_1P, 2.0, np.where(plan.schedule == ZB_2P, 3.0, 0.0))
    return np.maximum(others - moved * (plan.pp - 1) * slowest.wgrad, 0.0)
