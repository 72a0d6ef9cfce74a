"""The number formats of a trace: raw little-endian bits on disk, numpy arrays in memory, bfloat16 as its 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RAW: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}  # all ones: NaN or infinity
_CHUNK = 1 << 18  # numbers looked at together: their bits stay in cache

Raw = NDArray[Any]


def widen(x: Raw) -> NDArray[np.float64]:
    """Raw numbers of any shape -> float64, exactly."""
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def narrow(x: NDArray[Any], dtype: str) -> Raw:
    """Numbers -> the raw numbers of a trace of that dtype, rounded to nearest even."""
    if dtype != "bfloat16":
        return x.astype(RAW[dtype])
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def first_not_finite(x: Raw, dtype: str) -> int | None:
    """Raw numbers [n, d] -> the first row that holds NaN or infinity, or None."""
    ones, step = _EXPONENT[dtype], max(1, _CHUNK // x.shape[1])
    negative = 1 << 8 * x.itemsize - 1 | ones
    for row in range(0, len(x), step):
        part = x[row : row + step]
        bits = part.view(f"u{x.itemsize}")
        if part.view(f"i{x.itemsize}").max() >= ones or bits.max() >= negative:  # with either sign; no third array is made
            return row + int(((bits & ones) == ones).any(axis=1).argmax())
    return None
