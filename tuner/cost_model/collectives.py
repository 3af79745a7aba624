"""Seconds of a collective over nested domains.

Symbols: V whole message in bytes; n members; g members in one innermost domain; b_i bytes/s of domain i per GPU and
direction. Ring collectives put (n-1)/n V on every link (all-reduce twice that); NCCL counts "bus bandwidth" the same way
(nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div

if TYPE_CHECKING:
    from tuner.cluster import Cluster
    from tuner.cost_model.calibration import Calibration

# Times each byte of the message crosses a link, over (n-1)/n.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


class Group(NamedTuple):
    """Ranks r, r + stride, r + 2 stride, ...: `size` of them."""

    size: Ints
    stride: Ints


def members(group: Group, domain: int) -> Ints:
    """Return how many ranks of the group share one domain of `domain` GPUs."""
    return np.minimum(np.maximum(domain // group.stride, 1), group.size)


def collective_seconds(op: str, bytes_: Floats, group: Group, *, cluster: Cluster, calibration: Calibration) -> Floats:
    """Return the seconds of `op` on a message of `bytes_` over `group`; zero for a group of one.

    bytes_: all_reduce buffer, gathered size of all_gather, input of reduce_scatter, send buffer of a rank in all_to_all.
    Rings: passes (n-1)/n V / bandwidth, where a ring over several domains runs at min(b_0 e_0, g b_i e_i): g members in a
    domain stripe over their g NICs, but no faster than the inner link. all_to_all: the share (n-g)/n leaves the domain over
    the rank's own NIC while (g-1)/n stays inside; the slower of the two.
    """
    curve = calibration.collectives[op]
    inside = members(group, cluster.sizes[0])
    inner = cluster.domains[0].bandwidth.value * curve.efficiency(inside * 1.0)
    nodes = ceil_div(group.size, inside)
    latency = curve.latency_s + curve.hop_s * (inside - 1) + (cluster.domains[0].latency.value + 0.0) * (inside - 1)
    if op == "all_to_all":
        seconds = bytes_ * (inside - 1) / group.size / inner
    else:
        seconds = _PASSES[op] * bytes_ * (group.size - 1) / group.size / inner
    before = inside
    for domain, size in zip(cluster.domains[1:], cluster.sizes[1:], strict=True):
        reached = members(group, size)
        spans = reached > before
        outer = domain.bandwidth.value * curve.outer_efficiency
        if op == "all_to_all":
            outward = bytes_ * (group.size - before) / group.size / outer
        else:
            outward = _PASSES[op] * bytes_ * (group.size - 1) / group.size / np.minimum(outer * inside, inner)
        seconds = np.where(spans, np.maximum(seconds, outward), seconds)
        latency = latency + np.where(spans, (domain.latency.value + curve.outer_latency_s) * _rounds(op, nodes), 0.0)
        before = reached
    seconds = latency + seconds
    if curve.correction:
        seconds = seconds * np.where(nodes > 1, 1.0, curve.correction(inside * 1.0, bytes_))
    return np.where(group.size > 1, seconds, 0.0)


_POWERS = np.array([2.0**i for i in range(21)])
_LOGS = np.arange(21.0)


def _rounds(op: str, nodes: Ints) -> Floats:
    """Return the latencies one after the other across nodes: a tree for all_reduce (NCCL's double binary tree), else a ring
    or pairwise exchange whose steps overlap; log2 by interpolation between powers of two.
    """
    depth = np.interp(nodes, _POWERS, _LOGS)
    return 2.0 * depth if op == "all_reduce" else depth


def send_seconds(bytes_: Floats, stride: Ints, *, cluster: Cluster, calibration: Calibration) -> Floats:
    """Return the seconds of a point-to-point message between ranks `stride` apart, over the innermost domain that both are in.

    Ranks r and r + stride share a domain of D GPUs when stride < D (for the aligned groups of a mesh whose degrees divide D).
    """
    curve = calibration.collectives["send"]
    efficiency = curve.efficiency(2.0)
    first = cluster.domains[0]
    seconds = curve.latency_s + first.latency.value + bytes_ / (first.bandwidth.value * efficiency)
    for size, domain in zip(cluster.sizes[:-1], cluster.domains[1:], strict=True):
        far = curve.outer_latency_s + domain.latency.value + bytes_ / (domain.bandwidth.value * curve.outer_efficiency)
        seconds = np.where(stride >= size, far, seconds)
    return seconds
