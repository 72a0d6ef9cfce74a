"""Min-max boxes of pages, and their upper bounds of q·k.

Both are plain sums and comparisons of float64 in a fixed order, without fused or reordered operations, so a score has the same
bits whatever else is scored beside it. Pages are turned, a tile at a time, to lie side by side in the vector lanes."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TILE = 128
PAD = 4  # keeps the rows of a tile off each other's cache sets


@numba.njit(nogil=True, cache=True, error_model="numpy")
def corners(low: Floats, high: Floats, rows: NDArray[np.int64], count: NDArray[np.int64], lo: Floats, hi: Floats) -> None:
    """low, high [m, S, d]: where each key lies, the same array twice when it is known; rows [m, S]: the first count[m] are the page's
    rows in the order they are split; lo, hi [m, n, d].

    n parts of sizes that differ by at most one, larger first; a part without rows repeats the first box."""
    m, _, d = low.shape
    n = lo.shape[1]
    for i in range(m):
        start = 0
        for b in range(n):
            size = count[i] // n + (1 if b < count[i] % n else 0)
            if size == 0:
                for j in range(d):
                    lo[i, b, j] = lo[i, 0, j] if b else 0.0
                    hi[i, b, j] = hi[i, 0, j] if b else 0.0
                continue
            for j in range(d):
                lo[i, b, j] = low[i, rows[i, start], j]
                hi[i, b, j] = high[i, rows[i, start], j]
            for s in range(start + 1, start + size):
                for j in range(d):
                    lo[i, b, j] = min(lo[i, b, j], low[i, rows[i, s], j])
                    hi[i, b, j] = max(hi[i, b, j], high[i, rows[i, s], j])
            start += size


@numba.njit(nogil=True, cache=True, error_model="numpy")
def bounds(q: Floats, lo: Floats, hi: Floats, out: Floats) -> None:
    """q [N, H, G, d], lo, hi [H, P, n, d], out [N, H, G, P]: the largest q·k in a page's boxes, summed over d ascending."""
    steps, heads, group, d = q.shape
    pages, n = lo.shape[1:3]
    box = np.empty((2, d, TILE + PAD))
    total = np.empty(TILE)
    for h in range(heads):
        for first in range(0, pages, TILE):
            width = min(TILE, pages - first)
            for b in range(n):
                for p in range(width):
                    for j in range(d):
                        box[0, j, p] = lo[h, first + p, b, j]
                        box[1, j, p] = hi[h, first + p, b, j]
                for i in range(steps):
                    for g in range(group):
                        reach(q[i, h, g], box, total)
                        for p in range(width):
                            if b == 0 or total[p] > out[i, h, g, first + p]:
                                out[i, h, g, first + p] = total[p]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def reach(q: Floats, box: Floats, total: Floats) -> None:
    """q [d], box [2, d, TILE + PAD] (low and high corners), total [TILE]: sum over j of q_j times the corner on its side."""
    d = q.shape[0]
    total[:] = 0.0
    for j in range(0, d - 3, 4):
        a, b, c, e = q[j], q[j + 1], q[j + 2], q[j + 3]
        s, t, u, v = int(a > 0.0), int(b > 0.0), int(c > 0.0), int(e > 0.0)
        for p in range(TILE):
            total[p] = total[p] + a * box[s, j, p] + b * box[t, j + 1, p] + c * box[u, j + 2, p] + e * box[v, j + 3, p]
    for j in range(d - d % 4, d):
        s = int(q[j] > 0.0)
        for p in range(TILE):
            total[p] += q[j] * box[s, j, p]
