"""Dense attention by when a token was evicted, and by the interval of steps in which it was received."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.exp import exp2_64


@njit(inline="always", nogil=True, cache=True, error_model="numpy")
def _probability(x, unit, cap, lse):
    """Dense probability of a dot product."""
    logit = x * unit if cap == np.float32(0) else cap * np.tanh(x * unit / cap)
    return exp2_64(min(np.float64(logit) - lse, 0.0))


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def mass_by_lag(dots, first, t, group, died, step, unit, cap, lse, out):
    """out f64[R, B] += the dense probability of every visible token that died before the step, in the bucket floor(log2(lag)).

    dots f32[T, R], row r = i * G + g; first, t, step i64[nb]: what is visible at step[i]; died i64[T]: the step at whose cut a token was
    evicted, larger than any step where it never was; lse f64[R]: the dense log2 denominator."""
    for i in range(len(step)):
        for s in range(first[i], t[i] + 1):
            lag = step[i] - died[s]
            if lag <= 0:
                continue
            b = 0
            while lag > 1:
                lag >>= 1
                b += 1
            for g in range(group):
                r = i * group + g
                out[r, b] += _probability(dots[s, r], unit, cap, lse[r])


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def received(dots, first, t, group, unit, cap, lse, row, out):
    """out f64[E, T]: out[row[i], s] += the dense probability of token s at step i, summed over the group's query heads; as above."""
    for i in range(len(row)):
        for s in range(first[i], t[i] + 1):
            total = 0.0
            for g in range(group):
                r = i * group + g
                total += _probability(dots[s, r], unit, cap, lse[r])
            out[row[i], s] += total
