"""Quantities with units. SI inside (seconds, bytes, FLOP/s, bytes/s, watts), words outside: here and nowhere else.

GB is 1e9 bytes and GiB is 2**30; Gb/s counts bits. In YAML a quantity is a string with its unit ("80 GB", "989 TFLOP/s",
"400 Gb/s", "3 us"), so that no number's unit is ever guessed.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo

_SI = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

_BYTES = {f"{p}B": f for p, f in (_SI | _BINARY).items()}
_DIMENSIONS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{u}/s": f for u, f in _BYTES.items()} | {f"{p}b/s": f / 8 for p, f in _SI.items()},
    "FLOP/s": {f"{p}FLOP/s": f for p, f in _SI.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "watts": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "hertz": {"Hz": 1.0, "MHz": 1e6, "GHz": 1e9},
    "tokens": {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
}
_EXAMPLE = {
    "bytes": "80 GB",
    "bytes/s": "400 Gb/s or 3.35 TB/s",
    "FLOP/s": "989 TFLOP/s",
    "seconds": "3 us or 30d",
    "watts": "700 W",
    "hertz": "1.83 GHz",
    "tokens": "15T",
}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")


def parse_quantity(text: object, *, dimension: str, units: bool = False) -> float:
    """Return `text` in SI units of `dimension` (a key of the table above).

    Raises ValueError naming an example when the unit is missing or foreign. A float or int passes unchanged, because inside the
    program numbers are SI already, unless `units` are asked for, as in a file that a person writes.
    """
    bare = "" in _DIMENSIONS[dimension] or not units
    if isinstance(text, (int, float)) and not isinstance(text, bool) and bare:
        return _finite(text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) < 64 else None
    if match is None or match[2] not in _DIMENSIONS[dimension]:
        raise ValueError(f"must be {dimension} with a unit, like {_EXAMPLE[dimension]}")
    return _finite(float(match[1]) * _DIMENSIONS[dimension][match[2]])


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number


def _quantity(dimension: str) -> BeforeValidator:
    def check(value: object, info: ValidationInfo) -> float:
        return parse_quantity(value, dimension=dimension, units=bool(info.context and info.context.get("units")))

    return BeforeValidator(check)


_positive = Field(gt=0, le=1e30, allow_inf_nan=False)
Bytes = Annotated[float, _quantity("bytes"), _positive]
BytesPerSecond = Annotated[float, _quantity("bytes/s"), _positive]
FlopPerSecond = Annotated[float, _quantity("FLOP/s"), _positive]
Seconds = Annotated[float, _quantity("seconds"), Field(ge=0, le=1e12, allow_inf_nan=False)]
Watts = Annotated[float, _quantity("watts"), _positive]
Hertz = Annotated[float, _quantity("hertz"), _positive]
Tokens = Annotated[float, _quantity("tokens"), _positive]
Count = Annotated[int, Field(ge=1, le=2**31, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31, strict=True)]


def _scaled(value: float, unit: str, steps: tuple[tuple[float, str], ...], digits: int = 3) -> str:
    for factor, prefix in steps:
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"


_LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show_bytes(value: float) -> str:
    """Return bytes for a person, in decimal units: 93.4 GB."""
    return _scaled(value, "B", _LARGE)


def show_flops(value: float) -> str:
    """Return FLOP/s for a person: 989 TFLOP/s."""
    return _scaled(value, "FLOP/s", _LARGE)


def show_rate(value: float) -> str:
    """Return bytes/s for a person: 3.35 TB/s."""
    return _scaled(value, "B/s", _LARGE)


def show_seconds(value: float) -> str:
    """Return seconds for a person: 12.3 us, 4.56 s, 2.1 h, 24.0 d."""
    for factor, unit in ((86400.0, "d"), (3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor * (2 if factor > 1 else 1):
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} s"


def show_count(value: float) -> str:
    """Return a count of parameters or tokens for a person: 70.6B, 671B, 15T."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
