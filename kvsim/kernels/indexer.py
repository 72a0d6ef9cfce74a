"""Scores of a learned indexer: weighted sums over its heads.

Sums run over numbers and heads in ascending order, a tile of tokens side by side, so a score has the same bits whatever is scored
beside it."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TILE = 64  # tokens whose sums lie side by side in the vector lanes


@numba.njit(nogil=True, cache=True, error_model="numpy")
def weighted(q: Floats, w: Floats, k: Floats, relu: bool, out: Floats) -> None:
    """q [N, H, d], w [N, H], k [P, d], out [N, P]: the sum over heads of w times q·k, or with relu times max(0, q·k)."""
    steps, heads, d = q.shape
    turned, dots, total = np.zeros((d, TILE)), np.empty(TILE), np.empty(TILE)
    for first in range(0, len(k), TILE):
        width = min(TILE, len(k) - first)
        for x in range(width):
            for j in range(d):
                turned[j, x] = k[first + x, j]
        for n in range(steps):
            total[:] = 0.0
            for h in range(heads):
                dots[:] = 0.0
                for j in range(d):
                    for x in range(TILE):
                        dots[x] += q[n, h, j] * turned[j, x]
                for x in range(TILE):
                    dot = 0.0 if relu and dots[x] < 0.0 else dots[x]
                    total[x] += w[n, h] * dot
            out[n, first : first + width] = total[:width]
