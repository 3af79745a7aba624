"""How Megatron-Core deals layers to pipeline stages: layout strings, and patterns of layers, read without evaluating anything.

A layout names what each of the pp x vpp chunks holds, in the order a micro batch passes them: E the embedding, t a layer, m an MTP layer, L
the loss, | between chunks, X*3 and (..)*3 repeated (megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

from __future__ import annotations

import re
from itertools import groupby

MOST_LAYERS = 10_000
_REPEATED = re.compile(r"\(([^()]{0,2000})\)\*(\d{1,5})|([EtmL|])\*(\d{1,5})")
_PATTERN = re.compile(r"\[([\d,]{0,20000})\](?:\*(\d{1,5}))?")


def layout_of(layers: int, mtp_layers: int, chunks: int, embedding: int, loss: int) -> str:
    """Return the layout of `layers` over `chunks` equal chunks where embedding and loss take the place of so many layers."""
    each = (layers + embedding + loss) // chunks
    counts = [each] * chunks
    counts[0] -= embedding
    counts[-1] -= loss
    inner = ["t" * count for count in counts]
    inner[0] = "E" + inner[0]
    inner[-1] += "m" * mtp_layers + "L"
    return "|".join(_short(chunk) for chunk in inner)


def _short(chunk: str) -> str:
    runs = ((letter, len(list(same))) for letter, same in groupby(chunk))
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of each chunk. Raises ValueError."""
    flat = text.replace(",", "").replace(" ", "")
    for _ in range(20):  # repetitions may stand in each other
        longer, count = _REPEATED.subn(_repeat, flat)
        if len(longer) > 4 * MOST_LAYERS:
            raise ValueError(f"has more than {MOST_LAYERS} layers")
        flat = longer
        if not count:
            break
    if re.search(r"[^EtmL|]", flat):
        raise ValueError("must be made of E, t, m, L, | and repetitions like t*3 or (tt|)*4")
    return tuple(flat.split("|"))


def _repeat(found: re.Match[str]) -> str:
    body, times = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
    if len(body) * int(times) > 4 * MOST_LAYERS:
        raise ValueError(f"has more than {MOST_LAYERS} layers")
    return str(body * int(times))


def counted(chunks: tuple[str, ...]) -> tuple[int, int] | None:
    """Return for how many layers embedding and loss stand where all chunks are equal otherwise; None where they are not."""
    layers = [chunk.count("t") for chunk in chunks]
    shapes = "".join(chunks[1:-1]), chunks[0], chunks[-1]
    if len(chunks) < 2 or set(shapes[0]) - {"t"} or not re.fullmatch(r"Et*", shapes[1]) or not re.fullmatch(r"t*m*L", shapes[2]):
        return None
    each = max(layers) if len(layers) == 2 else layers[1]
    if any(count != each for count in layers[1:-1]) or layers[0] > each or layers[-1] > each:
        return None
    return each - layers[0], each - layers[-1]


def moe_pattern(moe: list[bool]) -> str:
    """Return a pattern of mixture-of-experts layers as --moe-layer-freq takes it: "([0]*3+[1]*58)"."""
    runs = [(is_moe, len(list(same))) for is_moe, same in groupby(moe)]
    if len(runs) > 4:
        return "[" + ",".join(str(int(is_moe)) for is_moe in moe) + "]"
    return "(" + "+".join(f"[{int(is_moe)}]*{count}" for is_moe, count in runs) + ")"


def parse_pattern(text: str) -> list[int]:
    """Return a pattern of layers, such as "([0]*3+[1]*58)", "[0,1]*12" or "([0]*3+[1]*1)*2". Raises ValueError."""
    flat = text.replace(" ", "")
    if len(flat) > 2 * MOST_LAYERS + 2:
        raise ValueError("is too long")
    whole = re.fullmatch(r"\(([^()]{0,20000})\)(?:\*(\d{1,5}))?", flat)
    inner, times = (whole[1], int(whole[2] or 1)) if whole else (flat, 1)
    found: list[int] = []
    for term in inner.split("+"):
        match = _PATTERN.fullmatch(term)
        numbers = match[1].split(",") if match and match[1] else []
        if match is None or any(not re.fullmatch(r"\d{1,4}", n) for n in numbers) or len(numbers) * int(match[2] or 1) > MOST_LAYERS:
            raise ValueError("must be like ([0]*3+[1]*58)")
        found += [int(n) for n in numbers] * int(match[2] or 1)
        if len(found) > MOST_LAYERS:
            raise ValueError(f"has more than {MOST_LAYERS} layers")
    if len(found) * times > MOST_LAYERS:
        raise ValueError(f"has more than {MOST_LAYERS} layers")
    return found * times


def read_moe_pattern(moe: list[int]) -> dict[str, int] | None:
    """Return first_dense_layers and every of a pattern, or None where a model has no words for it."""
    first = moe.index(1) if 1 in moe else len(moe)
    if all(moe[first:]):
        return {"first_dense_layers": first, "every": 1}
    every = first + 1
    if [int((i + 1) % every == 0) for i in range(len(moe))] == moe:
        return {"first_dense_layers": 0, "every": every}
    return None
