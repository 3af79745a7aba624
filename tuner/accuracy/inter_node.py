"""What a source says about the network between nodes, in words, as bytes/s an accelerator."""

from __future__ import annotations

import re

_TIMES = re.compile(r"(\d{1,3})\s*[x×]\s*")
_RATE = re.compile(r"(\d{1,5}(?:\.\d+)?)\s*([TGM])(b|B)?(?:it|yte)?s?\s*(?:/s|ps|/sec)?(?![A-Za-z])")
# Signalling generations by name: bits/s of a four-lane port.
_NAMES = (("hdr100", 100e9), ("hdr", 200e9), ("ndr200", 200e9), ("ndr", 400e9), ("xdr", 800e9), ("edr", 100e9), ("omni-path 100", 100e9))
_SCALE = {"T": 1e12, "G": 1e9, "M": 1e6}


def inter_node_bandwidth(text: str, gpus_per_node: int) -> float | None:
    """Return bytes/s an accelerator in one direction, or None when the text has no figure.

    "400 Gb/s per GPU" is each accelerator's; "8x200Gb/s per node", "800 Gb/s total per node" are shared by the node's; a figure
    without "per" is each accelerator's.
    """
    lower = text.lower()
    times = _TIMES.search(text)
    rate = _rate(_TIMES.sub("", text), lower)
    if not rate:
        return None
    total = rate * (int(times[1]) if times else 1)
    shared = (
        "per node" in lower or "a node" in lower or "/node" in lower or "total" in lower or (times is not None and "per gpu" not in lower)
    )
    return total / gpus_per_node if shared else total


def _rate(text: str, lower: str) -> float | None:
    if match := _RATE.search(text):
        bits = float(match[1]) * _SCALE[match[2]]
        return bits if match[3] == "B" else bits / 8
    return next((bits / 8 for name, bits in _NAMES if name in lower), None)
