"""A mixture of experts over an expert-parallel group: tokens go to their experts' ranks and back by all-to-all. No token is dropped.

Lepikhin 2020 (arXiv 2006.16668); Rajbhandari 2022 (arXiv 2201.05596).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tuner.launch.engine import collectives
from tuner.launch.engine.parts import Part, Parts
from tuner.launch.engine.recompute import recomputed, remade
from tuner.launch.engine.tensor_parallel import taker

if TYPE_CHECKING:
    from tuner.launch.engine.mesh import Group
    from tuner.launch.engine.tensor_parallel import TensorParallel
    from tuner.model import Model, Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """balanced: tokens go to the experts in turn, as in published throughput runs (--moe-router-force-load-balancing); else to those
    that the router scores highest.
    """

    balanced: bool = True


class Router(Parts):
    """Scores of a token's experts: a softmax over all, renormalised over the chosen ones."""

    weight: Tensor
    bias: Tensor

    def __init__(self, key: str, tp: TensorParallel, model: Model, moe: Moe, routing: Routing) -> None:
        super().__init__()
        self.experts, self.top_k, self.balanced, self.biased = moe.experts, moe.top_k, routing.balanced, moe.router_bias
        self.hold("weight", tp.replicated(f"{key}.weight", (moe.experts, model.hidden), deviation=model.hidden**-0.5))
        if self.biased:
            self.hold("bias", tp.replicated(f"{key}.bias", (moe.experts,)))

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts, both (tokens, top_k); places: a number of each token that no layout changes."""
        bias = self.bias.float() if self.biased else None
        scores = F.linear(x.float(), self.weight.float(), bias).softmax(-1)
        if self.balanced:
            chosen = (places[:, None] * self.top_k + torch.arange(self.top_k, device=x.device)) % self.experts
            weights = scores.gather(-1, chosen)
        else:
            weights, chosen = scores.topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(Parts):
    """The experts that a rank holds: gated or plain MLPs, each over the tokens that were sent to it."""

    up: Tensor
    down: Tensor

    def __init__(self, key: str, model: Model, moe: Moe, ep: Group, modules: frozenset[str]) -> None:
        super().__init__()
        self.held, self.gates, self.remake = moe.experts // ep.size, 2 if model.gated_mlp else 1, "moe_act" in modules
        cut = taker(0, slice(ep.index * self.held, (ep.index + 1) * self.held))
        wide, hidden = moe.expert_ffn_hidden, model.hidden
        up, down = (moe.experts, self.gates * wide, hidden), (moe.experts, hidden, wide)
        self.hold("up", Part(key=f"{key}.up", shape=up, deviation=hidden**-0.5, cut=cut, expert=True))
        self.hold("down", Part(key=f"{key}.down", shape=down, deviation=wide**-0.5, cut=cut, expert=True))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs for tokens sorted by expert, of which expert i has counts[i]."""
        parts = [self._one(tokens, i) for i, tokens in enumerate(torch.split(x, counts))]
        return torch.cat(parts)

    def _one(self, x: Tensor, expert: int) -> Tensor:
        wide = F.linear(x, self.up[expert])
        if self.remake:
            return remade(lambda: activated(wide, self.gates), lambda y: F.linear(y, self.down[expert]))
        return F.linear(activated(wide, self.gates), self.down[expert])


def activated(x: Tensor, gates: int) -> Tensor:
    """Return silu(gate) * up of a gated MLP, gelu of a plain one."""
    if gates == 1:
        return F.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class MixtureOfExperts(nn.Module):
    """Router, dispatch, experts and the shared expert of a layer."""

    def __init__(self, key: str, tp: TensorParallel, ep: Group, model: Model, moe: Moe, routing: Routing, shared: nn.Module | None,
                 modules: frozenset[str]) -> None:  # fmt: skip
        super().__init__()
        self.tp, self.ep, self.top_k, self.total = tp, ep, moe.top_k, moe.experts
        self.router = Router(f"{key}.router", tp, model, moe, routing)
        self.experts = Experts(f"{key}.experts", model, moe, ep, modules)
        self.shared, self.remake_shared = shared, "shared_experts" in modules

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Return the output for (seq, batch, hidden), whose tokens `places` numbers."""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat, places)
        out = self._through_experts(flat, weights.to(x.dtype), chosen).view_as(x)
        if self.shared is None:
            return out
        own = recomputed(self._shared, x) if self.remake_shared else self._shared(x)
        return out + own

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None  # noqa: S101
        result: Tensor = self.shared(self.tp.enter(x))
        return result

    def _through_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sort token copies by expert, exchange them, run the experts, and bring the weighed outputs back."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.total)
        sent = x[order // self.top_k]
        theirs = self._their_counts(counts)  # (ranks, experts held)
        to_ranks, from_ranks = counts.view(self.ep.size, -1).sum(1).tolist(), theirs.sum(1).tolist()
        taken = collectives.exchange(sent, to_ranks, from_ranks, self.ep)
        by_expert = _by_expert(theirs)
        done = self.experts(taken[by_expert], theirs.sum(0).tolist())
        back = collectives.exchange(done[by_expert.argsort()], from_ranks, to_ranks, self.ep)
        weighed = back * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // self.top_k, weighed)

    def _their_counts(self, counts: Tensor) -> Tensor:
        """Return how many copies each rank sends to each expert held here."""
        if self.ep.size == 1:
            return counts.view(1, -1)
        out = torch.empty_like(counts)
        torch.distributed.all_to_all_single(out, counts, group=self.ep.handle)
        return out.view(self.ep.size, -1)


def _by_expert(counts: Tensor) -> Tensor:
    """Return the order that sorts rows, which lie by rank and then by expert, by expert alone."""
    ranks, experts = counts.shape
    labels = torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
    return labels.argsort(stable=True)
