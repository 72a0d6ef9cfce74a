"""Min-max integer codes, there and back in one pass over each group: its ends, its zero and step as fp16 holds them, its codes."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.exp import _bits_double, _double_bits, _rint64, larger64

Floats = NDArray[np.float64]
_LOW_BITS = 42  # of a float64's fraction are none of fp16's
_LEAST_NORMAL, _TOO_LARGE = 2.0**-14, 65536.0
_GRID = 1.5 * 2.0**28  # a sum with it is rounded to the grid of fp16's subnormals, 2**-24


@numba.njit(inline="always", nogil=True, cache=True, error_model="numpy")
def fp16(x: float) -> float:
    """The nearest number of fp16, halves to even; 65536 or more in size where it would be infinite."""
    bits = _double_bits(x)
    odd = (bits >> np.int64(_LOW_BITS)) & np.int64(1)
    rounded = _bits_double((bits + odd + np.int64(2 ** (_LOW_BITS - 1) - 1)) & np.int64(-(2**_LOW_BITS)))
    return rounded if abs(x) >= _LEAST_NORMAL else (x + _GRID) - _GRID


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz"})
def _one(x: Floats, top: float, out: Floats) -> float:
    """roundtrip of a single group x [g]; the size of its zero or step."""
    lowest, highest = -x[0], x[0]
    for g in range(1, len(x)):
        lowest, highest = larger64(-x[g], lowest), larger64(x[g], highest)
    zero, step = fp16(-lowest), fp16((highest + lowest) / top)
    divisor = step if step > 0.0 else np.inf
    for g in range(len(x)):
        code = larger64(_rint64((x[g] - zero) / divisor), 0.0)
        out[g] = zero - larger64(-code, -top) * step
    return larger64(abs(zero), step)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz"})
def roundtrip(x: Floats, top: float, out: Floats) -> bool:
    """x, out [a, g, b]: out = zero + step * code of each group x[a, :, b], codes 0..top, half to even; whether all zeros and steps fit fp16.

    No branch inside, and nothing contracted: a code is that of a plain division, and the loops over b vectorise."""
    width, largest = x.shape[2], 0.0
    zero, step, divisor = np.empty(width), np.empty(width), np.empty(width)
    for a in range(x.shape[0]):
        if width == 1:
            largest = larger64(_one(x[a, :, 0], top, out[a, :, 0]), largest)
            continue
        first = x[a, 0]
        for b in range(width):
            zero[b], step[b] = -first[b], first[b]  # the lowest with its sign turned, the highest
        for g in range(1, x.shape[1]):
            row = x[a, g]
            for b in range(width):
                zero[b] = larger64(-row[b], zero[b])
                step[b] = larger64(row[b], step[b])
        for b in range(width):
            step[b] = fp16((step[b] + zero[b]) / top)
            zero[b] = fp16(-zero[b])
            divisor[b] = step[b] if step[b] > 0.0 else np.inf
        for b in range(width):
            largest = larger64(larger64(abs(zero[b]), step[b]), largest)
        for g in range(x.shape[1]):
            row, decoded = x[a, g], out[a, g]
            for b in range(width):
                code = larger64(_rint64((row[b] - zero[b]) / divisor[b]), 0.0)
                code = -larger64(-code, -top)
                decoded[b] = zero[b] + code * step[b]
    return largest < _TOO_LARGE
