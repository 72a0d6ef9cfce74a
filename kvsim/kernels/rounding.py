"""Numbers as narrower formats hold them: rounded to the nearest, or outward so that a bound stays one. Results are float64."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LARGEST = np.finfo(np.float64).max
FORMATS = {
    "float32": (23, -126),
    "float16": (10, -14),
    "bfloat16": (7, -126),
}  # bits of the fraction, exponent of the least normal
E4M3 = np.array([m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1])
E4M3_MIDDLE = (E4M3 + np.append(E4M3[1:], 480.0)) / 2  # past 448 and its rounding the format has no number


def stored(x: Floats, dtype: str, side: int) -> Floats:
    """What is kept of x. side -1: the largest number of the dtype that is not above x; +1: the smallest that is not below;
    0: the nearest. Past the largest number of the dtype: +-LARGEST, which stands for unbounded."""
    if holds(dtype, x):
        return x
    y = rounded(x, dtype)
    if side:
        inside = side * y < side * x
        y[inside] = side * above(side * y[inside], dtype)
    return np.clip(y, -LARGEST, LARGEST)


def holds(dtype: str, x: Floats) -> bool:
    """Whether all are numbers of the dtype, as captured keys are: to see it costs a fraction of rounding them."""
    if dtype not in FORMATS:
        return False
    (bits, least), flat = FORMATS[dtype], x.ravel()
    return bool(_held(flat, flat.view(np.uint64), 2.0**least, 2.0 ** (2 - least), 2.0 ** (bits - least), 2 ** (52 - bits) - 1))


@njit(nogil=True, cache=True, error_model="numpy")
def _held(x, bits, least, most, steps, beyond):
    """Whether every x [n] is of a size below `most` without any of the bits `beyond` or, below `least`, a whole number of steps, of which 1
    has `steps`; bits u64[n]: those of x."""
    bad, some = False, np.uint64(0)
    for i in range(len(x)):
        size = abs(x[i])
        small = size < least
        bad |= not size < most or (small and np.floor(size * steps) != size * steps)
        some |= np.uint64(0) if small else bits[i]
    return not bad and (some & np.uint64(beyond)) == 0


def rounded(x: Floats, dtype: str) -> Floats:
    """The nearest number of the dtype, halves to even; past its largest number: infinite."""
    if dtype == "fp8":
        near = np.searchsorted(E4M3_MIDDLE, np.abs(x))
        near += (near % 2 == 1) & (np.abs(x) == E4M3_MIDDLE[np.minimum(near, len(E4M3) - 1)])
        return np.copysign(np.append(E4M3, np.inf)[near], x)
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return x.astype(dtype).astype(np.float64)
        bits = x.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def above(x: Floats, dtype: str) -> Floats:
    """The next larger number of the dtype, for numbers of that dtype below infinity, of the zeros +0."""
    if dtype == "fp8":
        place = np.searchsorted(E4M3, np.abs(x))
        return np.where(x >= 0, np.append(E4M3, [np.inf, np.inf])[place + 1], -E4M3[np.maximum(place - 1, 0)])
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.nextafter(x.astype(dtype), np.asarray(np.inf, dtype)).astype(np.float64)
    bits = x.astype(np.float32).view(np.int32)
    step = np.int32(0x10000)
    return np.where(x >= 0, bits + step, bits - step).view(np.float32).astype(np.float64)
