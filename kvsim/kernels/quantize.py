"""Min-max integer codes, there and back in one pass."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def roundtrip(x: Floats, zero: Floats, step: Floats, top: int, out: Floats) -> None:
    """x, out [a, g, b]; zero, step [a, b] of each group x[a, :, b]: out = zero + step * code, codes 0..top, half to even."""
    for a in range(x.shape[0]):
        for g in range(x.shape[1]):
            for b in range(x.shape[2]):
                code = 0.0
                if step[a, b] > 0.0:
                    code = np.rint((x[a, g, b] - zero[a, b]) / step[a, b])
                    code = min(max(code, 0.0), float(top))
                out[a, g, b] = zero[a, b] + code * step[a, b]
