"""Min-max integer codes, there and back in one pass."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.exp import _rint64, larger64

Floats = NDArray[np.float64]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz"})
def extremes(x: Floats, low: Floats, high: Floats) -> None:
    """low, high [a, b]: the ends of each group x[a, :, b]; one pass, where numpy makes two."""
    for a in range(x.shape[0]):
        if x.shape[2] == 1:
            row, lowest, highest = x[a, :, 0], -x[a, 0, 0], x[a, 0, 0]
            for g in range(1, len(row)):
                lowest, highest = larger64(-row[g], lowest), larger64(row[g], highest)
            low[a, 0], high[a, 0] = -lowest, highest
            continue
        least, most = low[a], high[a]
        for b in range(x.shape[2]):
            least[b] = most[b] = x[a, 0, b]
        for g in range(1, x.shape[1]):
            row = x[a, g]
            for b in range(x.shape[2]):
                most[b] = larger64(row[b], most[b])
                least[b] = -larger64(-row[b], -least[b])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz"})
def one(x: Floats, zero: float, step: float, top: float, out: Floats) -> None:
    """roundtrip of a single group x [g]."""
    divisor = step if step > 0.0 else np.inf
    for g in range(len(x)):
        code = larger64(_rint64((x[g] - zero) / divisor), 0.0)
        out[g] = zero - larger64(-code, -top) * step


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz"})
def roundtrip(x: Floats, zero: Floats, step: Floats, top: float, out: Floats) -> None:
    """x, out [a, g, b]; zero, step [a, b] of each group x[a, :, b]: out = zero + step * code, codes 0..top, half to even.

    No branch inside, and nothing contracted: a code is that of a plain division, and the loop over b vectorises."""
    divisor = np.empty(x.shape[2])
    for a in range(x.shape[0]):
        if x.shape[2] == 1:
            one(x[a, :, 0], zero[a, 0], step[a, 0], top, out[a, :, 0])
            continue
        start, width = zero[a], step[a]
        for b in range(x.shape[2]):
            divisor[b] = width[b] if width[b] > 0.0 else np.inf
        for g in range(x.shape[1]):
            row, decoded = x[a, g], out[a, g]
            for b in range(x.shape[2]):
                code = larger64(_rint64((row[b] - start[b]) / divisor[b]), 0.0)
                code = -larger64(-code, -top)
                decoded[b] = start[b] + code * width[b]
