"""Legal plans of a space to draw from: all of them when they are few, else an even sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.search.blocks import blocks

if TYPE_CHECKING:
    from tuner.arrays import Ints
    from tuner.search.space import Space

POOL = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """indices: legal plans in random order, by their index in the space; legal: how many the space has."""

    indices: Ints
    legal: int

    @property
    def complete(self) -> bool:
        """Whether the pool holds every legal plan."""
        return len(self.indices) == self.legal


def draw_pool(space: Space, seed: int, most: int = POOL) -> Pool:
    """Return up to `most` legal plans, each as likely as the other: those with the lowest of one random key each."""
    random = np.random.default_rng(seed)
    kept_keys, kept = np.empty(0), np.empty(0, dtype=np.int64)
    legal = 0
    for block in blocks(space):
        rows = np.flatnonzero(np.broadcast_to(block.allowed, block.shape)) if block.plan is not None else np.empty(0, dtype=np.int64)
        legal += rows.size
        keys = random.random(rows.size)
        if legal > most and kept_keys.size == most:
            near = np.flatnonzero(keys < kept_keys[-1])
            rows, keys = rows[near], keys[near]
        kept_keys = np.concatenate((kept_keys, keys))
        kept = np.concatenate((kept, block.indices(space, rows))) if rows.size else kept
        order = np.argsort(kept_keys, kind="stable")[:most]
        kept_keys, kept = kept_keys[order], kept[order]
    return Pool(indices=kept, legal=legal)
