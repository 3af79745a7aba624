"""Seconds of a collective over nested domains.

Symbols: V whole message in bytes; n members; g of them in one innermost domain; b_0 and b_i bytes/s of the innermost and of
outer domain i, for each GPU and direction. Ring collectives put (n-1)/n V on every link, all-reduce twice that; the "bus
bandwidth" of nccl-tests (doc/PERFORMANCE.md) is defined by the same counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tuner.arrays import Floats, Ints, ceil_div

if TYPE_CHECKING:
    from tuner.cluster import Cluster
    from tuner.cost_model.calibration import Calibration

# How often (n-1)/n of the message crosses a member's link.
PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
_POWERS = np.array([2.0**i for i in range(25)])
_LOG2 = np.arange(25.0)


class Group(NamedTuple):
    """Ranks r, r + stride, r + 2 stride, ...: `size` of them."""

    size: Ints
    stride: Ints


def members(group: Group, domain: int) -> Ints:
    """Return how many ranks of the group share one domain of `domain` GPUs."""
    return np.minimum(np.maximum(domain // group.stride, 1), group.size)


def inner_seconds(op: str, bytes_: Floats, size: Ints, *, link: float, calibration: Calibration) -> Floats:
    """Return the seconds of `op` among `size` members of one domain: latency + passes (n-1)/n V / (b_0 efficiency(n, V))."""
    curve = calibration.collectives[op]
    wire = PASSES[op] * bytes_ * ((size - 1) / size)
    return curve.latency(size) + wire / (link * curve.efficiency(size, bytes_))


def collective_seconds(op: str, bytes_: Floats, group: Group, *, cluster: Cluster, calibration: Calibration) -> Floats:
    """Return the seconds of `op` on a message of `bytes_` over `group`; zero for a group of one.

    bytes_: buffer of all_reduce, gathered size of all_gather, input of reduce_scatter, send buffer of a rank in all_to_all.
    Inside one domain: inner_seconds. Across domains a ring is as fast as its slowest link, where the g members in a domain
    stripe over their g NICs but no faster than the inner link: min(b_0 e_0, g b_i e). all_to_all: the share (n-g)/n leaves
    the domain over the rank's own NIC while the rest stays, at once; the slower of the two counts. Latencies add.
    e: coefficients inter_node_efficiency and inter_node_all_to_all_efficiency. Neglected: contention with other groups.
    """
    inside = members(group, cluster.sizes[0])
    link = cluster.domains[0].bandwidth.value
    seconds = inner_seconds(op, bytes_, inside, link=link, calibration=calibration)
    seconds = np.where(inside > 1, seconds, 0.0)
    before = inside
    for domain, size in zip(cluster.domains[1:], cluster.sizes[1:], strict=True):
        reached = members(group, size)
        if op == "all_to_all":
            rate = domain.bandwidth.value * calibration["inter_node_all_to_all_efficiency"]
            outward = bytes_ * ((reached - before) / group.size) / rate
        else:
            rate = domain.bandwidth.value * calibration["inter_node_efficiency"]
            outward = PASSES[op] * bytes_ * ((group.size - 1) / group.size) / np.minimum(rate * inside, link)
        delay = _rounds(op, ceil_div(reached, before)) * (domain.latency.value + calibration["inter_node_hop_s"])
        seconds = np.where(reached > before, np.maximum(seconds, outward) + delay, seconds)
        before = reached
    return np.where(group.size > 1, seconds, 0.0)


def _rounds(op: str, nodes: Ints) -> Floats:
    """Return how many latencies follow each other across `nodes` domains: NCCL's double binary tree for all_reduce goes up
    and down (Sanders 2009), a ring takes a step for each further node, a pairwise exchange has all its messages in flight.
    log2 is interpolated between powers of two.
    """
    if op == "all_reduce":
        return 2.0 * np.interp(nodes, _POWERS, _LOG2)
    return (nodes - 1) * 1.0 if op != "all_to_all" else 1.0


def dispatch_seconds(
    tokens: Floats, token_bytes: Floats, top_k: int, group: Group, *, cluster: Cluster, calibration: Calibration
) -> Floats:
    """Return the seconds of sending each rank's `tokens` to the ranks of their `top_k` experts (or back), once for each rank
    and across domains once for each domain, from where the inner link forwards them (DeepEP, HybridEP).

    A token meets n hit(n) of n equally likely places, hit(n) = 1 - (1 - 1/n)^top_k. Inside: all_to_all of
    tokens token_bytes n hit(n). Leaving a domain, of N that the group spans: tokens token_bytes (N-1) hit(N) over the rank's
    own NIC; the slower counts, latencies add. Neglected: imbalance, and routing limited to a few nodes.
    """
    inside = members(group, cluster.sizes[0])
    moved = 1.0 * tokens * token_bytes
    reached = moved * group.size * _hit(group.size, top_k)
    seconds = inner_seconds("all_to_all", reached, inside, link=cluster.domains[0].bandwidth.value, calibration=calibration)
    seconds = np.where(inside > 1, seconds, 0.0)
    before = inside
    for domain, size in zip(cluster.domains[1:], cluster.sizes[1:], strict=True):
        within = members(group, size)
        places = ceil_div(group.size, before)
        rate = domain.bandwidth.value * calibration["inter_node_all_to_all_efficiency"]
        outward = moved * ((places - 1) * _hit(places, top_k)) / rate
        delay = domain.latency.value + calibration["inter_node_hop_s"]
        seconds = np.where(within > before, np.maximum(seconds, outward) + delay, seconds)
        before = within
    return np.where(group.size > 1, seconds, 0.0)


def _hit(places: Ints, draws: int) -> Floats:
    """Return the chance that one of `places` is among `draws` independent ones."""
    miss: Floats = 1.0
    for _ in range(draws):
        miss = miss * (1.0 - 1.0 / places)
    return 1.0 - miss


def send_seconds(bytes_: Floats, stride: Ints, *, cluster: Cluster, calibration: Calibration) -> Floats:
    """Return the seconds of a message between ranks `stride` apart, over the innermost domain that holds both.

    Inside a domain it moves like each half of an all_gather between two (V of 2 V bytes); ranks r and r + stride share a
    domain of D GPUs when stride < D (aligned groups of a mesh whose degrees divide D). Across domains: one NIC.
    """
    seconds = inner_seconds("all_gather", 2.0 * bytes_, 2, link=cluster.domains[0].bandwidth.value, calibration=calibration)
    for size, domain in zip(cluster.sizes[:-1], cluster.domains[1:], strict=True):
        rate = domain.bandwidth.value * calibration["inter_node_efficiency"]
        far = domain.latency.value + calibration["inter_node_hop_s"] + bytes_ / rate
        seconds = np.where(stride >= size, far, seconds)
    return seconds
