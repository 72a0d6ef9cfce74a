"""The cut: which slots survive when each holds or loses its place alone."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, error_model="numpy")
def survivors(score, protect, valid, limit, keep):
    """keep bool[H, n]: of the valid slots all protected ones, then the best by score until `limit[h]` are held; ties go to the
    lower slot. score f64[H, n], protect, valid bool[H, n], limit i64[H]."""
    heads, n = score.shape
    for h in range(heads):
        safe, free = 0, 0
        for s in range(n):
            keep[h, s] = valid[h, s]
            if valid[h, s]:
                if protect[h, s]:
                    safe += 1
                else:
                    free += 1
        drop = free - max(0, limit[h] - safe)
        if drop <= 0:
            continue
        if drop <= 2:
            for _ in range(drop):
                worst, least = -1, np.inf
                for s in range(n):
                    if keep[h, s] and not protect[h, s] and score[h, s] <= least:
                        worst, least = s, score[h, s]
                keep[h, worst] = False
            continue
        slots, value = np.empty(free, np.int64), np.empty(free, np.float64)
        i = 0
        for s in range(n):
            if keep[h, s] and not protect[h, s]:
                slots[i], value[i] = s, -score[h, s]
                i += 1
        order = np.argsort(value, kind="mergesort")
        for i in range(free - drop, free):
            keep[h, slots[order[i]]] = False
