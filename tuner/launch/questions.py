"""What microbenchmarks ask: shapes of products and attention, sizes of streams and messages, groups of ranks."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

Question = dict[str, Any]

# (n, k) of a layer's products, whole and split by tensor parallelism: small widths for CPUs, wide ones for accelerators.
CPU_WIDTHS = (
    *((256, 256), (64, 256), (256, 64), (176, 256), (256, 176), (704, 256), (256, 704), (1024, 256)),
    *((512, 512), (1536, 768), (768, 1536), (1024, 1024)),
)
CPU_ROWS = (64, 256, 1024)
WIDTHS = (
    *((1024, 4096), (4096, 1024), (2048, 4096), (4096, 4096), (6144, 4096), (4096, 2048), (14336, 4096), (4096, 14336), (28672, 4096)),
    *((8192, 8192), (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (32000, 4096)),
)
ROWS = (512, 2048, 4096, 8192)
# (heads, kv_heads, head_dim), and (batch, length)
CPU_HEADS = ((1, 1, 64), (2, 1, 64), (4, 2, 64), (4, 4, 64), (2, 2, 128))
CPU_SEQUENCES = ((1, 128), (4, 128), (1, 256), (1, 512), (4, 256), (1, 1024))
HEADS = ((16, 16, 64), (4, 1, 128), (8, 2, 128), (8, 8, 128), (32, 8, 128), (32, 32, 128))
SEQUENCES = ((1, 1024), (4, 1024), (1, 2048), (4, 2048), (1, 4096), (4, 4096), (1, 8192))
KIB, MIB = 2**10, 2**20
CPU_STREAMS = tuple(KIB * 3 * 4**i for i in range(3, 8))
STREAMS = tuple(3 * MIB * 2**i for i in range(0, 10, 2))
CPU_MESSAGES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
MESSAGES = tuple(64 * KIB * 4**i for i in range(8))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KERNELS = 100


def questions(world: int, local: int, *, accelerated: bool, precision: str) -> list[Question]:
    """Return what is asked of `world` ranks, `local` of them on each node, kinds by turns, so that a short budget leaves some of each."""
    kinds: list[list[Question]] = [
        _products(accelerated),
        _attention(accelerated),
        _memory_bound(accelerated),
        *([_messages(world, local, accelerated)] if world > 1 else []),
    ]
    longest = max(map(len, kinds))
    spread = [[part[i * len(part) // longest] if _new(i, len(part), longest) else None for i in range(longest)] for part in kinds]
    return [{**q, "precision": precision} for row in zip_longest(*spread) for q in row if q is not None]


def _new(i: int, length: int, longest: int) -> bool:
    return i == 0 or i * length // longest != (i - 1) * length // longest


def _memory_bound(accelerated: bool) -> list[Question]:
    issue: list[Question] = [{"op": "issue"}, {"op": "launch", "repeats": KERNELS}]
    return issue + [{"op": "stream", "bytes": size} for size in (STREAMS if accelerated else CPU_STREAMS)]


def _products(accelerated: bool) -> list[Question]:
    rows, widths = (ROWS, WIDTHS) if accelerated else (CPU_ROWS, CPU_WIDTHS)
    return [{"op": "gemm", "m": m, "n": n, "k": k} for m in rows for n, k in widths]


def _attention(accelerated: bool) -> list[Question]:
    heads, sequences = (HEADS, SEQUENCES) if accelerated else (CPU_HEADS, CPU_SEQUENCES)
    names = ("heads", "kv_heads", "head_dim", "batch", "length")
    shapes = [dict(zip(names, (*of, *sequence), strict=True)) for of in heads for sequence in sequences]
    return [{"op": "attention", **shape, **way} for shape in shapes for way in ({}, {"backward": True})]


def _messages(world: int, local: int, accelerated: bool) -> list[Question]:
    """Collectives by size in contiguous groups of powers of two, and across nodes also in groups of one rank a node; messages of pairs."""
    sizes = MESSAGES if accelerated else CPU_MESSAGES
    groups = [(2**i, 1) for i in range(1, world.bit_length()) if 2**i <= world]
    nodes = world // local
    across = nodes > 1 and local > 1 and world % local == 0
    groups += [(nodes, local)] if across else []
    asked: list[tuple[str, int, int, int]] = []
    for size in sizes:
        asked += [(op, size, *group) for group in groups for op in COLLECTIVES]
        asked += [("p2p", size, 2, stride) for stride in ((1, local) if across else (1,))]
    return [{"op": o, "bytes": size, "members": m, "stride": s, "nodes": _spanned(m, s, local)} for o, size, m, s in asked]


def _spanned(members: int, stride: int, local: int) -> int:
    """Return how many nodes of `local` ranks hold ranks 0, stride, 2 stride, ..."""
    return (members - 1) * stride // local + 1
