"""How much of what a query head read it had read at the step before."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.sparse import ALIVE


@njit(nogil=True, cache=True, error_model="numpy")
def read_churn(pos, t, flags, start, chosen, before, since, churn):
    """churn f64[nb, G]: 1 - |A and B| / |A or B| of the tokens read at the step before and at this one, of those that existed before;
    0 when both are empty, NaN where there is no step before.

    pos i64[n], t i64[nb], flags u8[nb, n], start i64[P + 1], chosen bool[nb, G, P]; before bool[G, T]: what was read at position `since`
    (-1: nothing was), by position; holds the last step's reads on return."""
    nb, group, pages = chosen.shape
    for i in range(nb):
        last = t[i - 1] if i else since
        for g in range(group):
            both, either, old = 0, 0, 0
            for s in range(before.shape[1]):
                old += before[g, s]
            for p in range(pages):
                if chosen[i, g, p]:
                    for s in range(start[p], start[p + 1]):
                        if flags[i, s] & ALIVE and pos[s] <= last:
                            either += 1
                            both += before[g, pos[s]]
            either += old - both
            churn[i, g] = np.nan if last < 0 else (1.0 - both / either if either else 0.0)
            for s in range(before.shape[1]):
                before[g, s] = False
            for p in range(pages):
                if chosen[i, g, p]:
                    for s in range(start[p], start[p + 1]):
                        if flags[i, s] & ALIVE:
                            before[g, pos[s]] = True
