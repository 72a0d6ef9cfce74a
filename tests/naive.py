"""Obvious twins of the kernels: plain numpy and loops, one section per module, slow on purpose."""

from __future__ import annotations

import numpy as np


# ------------------------------------------------------------------------------------------------ policies, boxes, codecs
def box_corners(keys, n):
    """keys [rows, d] in the order they are split -> the min and the max of n parts, larger parts first, [n, d] each."""
    parts = [p if len(p) else keys[: -(-len(keys) // n)] for p in np.array_split(keys, n)]
    return np.array([p.min(axis=0) for p in parts]), np.array([p.max(axis=0) for p in parts])


def box_bound(q, lo, hi):
    """q [d], lo and hi [n, d] -> the largest of the boxes' sums of max(q lo, q hi), added up one dimension after the other."""
    best = -np.inf
    for low, high in zip(lo, hi, strict=True):
        total = 0.0
        for a, b, c in zip(q, low, high, strict=True):
            total += max(a * b, a * c)
        best = max(best, total)
    return best


def minmax_roundtrip(x, bits):
    """One group of numbers, coded in `bits` and back, with the zero and the step that fp16 can hold."""
    zero = float(np.float16(min(x)))
    step = float(np.float16((max(x) - min(x)) / (2**bits - 1)))
    codes = [0 if step == 0 else min(max(round((v - zero) / step), 0), 2**bits - 1) for v in x]
    return [zero + step * code for code in codes]


def survivors(score, protect, limit):
    """One kv head: the slots that a cut to `limit` leaves; the protected first, then by score, ties to the lower slot."""
    order = sorted(range(len(score)), key=lambda i: (not protect[i], -score[i], i))
    return sorted(order[:limit])
