"""A policy's own softmax, split by classes of tokens: what each class weighs, and what it adds to the output; and the same softmax with keys
as they were captured, beside it."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.exp import exp2_64
from kvsim.kernels.sparse import ALIVE, KEY_BLUR, VALUE_BLUR

HELD, READ, WEIGHT = range(3)


@njit(inline="always", nogil=True, cache=True, error_model="numpy")
def _logit(x, unit, cap):
    return np.float64(x * unit if cap == np.float32(0) else cap * np.tanh(x * unit / cap))


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def split(dots, blurred, values, blurred_values, pos, flags, of, page, chosen, unit, cap, lse, sink, sums, out, rest):
    """sums f64[R, C, 3]: of every class, the dense probability on tokens held (HELD) and read (READ), and 2**(own logit - top) of those
    read (WEIGHT), top the row's largest own logit or sink; out f64[R, C, dv]: own values times these weights; rest f64[R]: the weight of the
    learned sink.

    dots, blurred f32[n, R], values, blurred_values f32[T, dv], pos, flags, chosen, unit, cap, lse, sink: as kernels.sparse.attend; of u8[nb, n]:
    the class of each slot; page i64[n]: the place of its page in `chosen`."""
    nb, n = flags.shape
    group, dim = chosen.shape[1], values.shape[1]
    for i in range(nb):
        for g in range(group):
            r = i * group + g
            top = sink[r]
            for s in range(n):
                if flags[i, s] & ALIVE and chosen[i, g, page[s]]:
                    x = blurred[s, r] if flags[i, s] & KEY_BLUR else dots[s, r]
                    top = max(top, _logit(x, unit, cap))
            rest[r] = exp2_64(sink[r] - top)
            for s in range(n):
                f = flags[i, s]
                if not f & ALIVE:
                    continue
                c = of[i, s]
                p = exp2_64(min(_logit(dots[s, r], unit, cap) - lse[r], 0.0))
                sums[r, c, HELD] += p
                if not chosen[i, g, page[s]]:
                    continue
                sums[r, c, READ] += p
                w = exp2_64(_logit(blurred[s, r] if f & KEY_BLUR else dots[s, r], unit, cap) - top)
                sums[r, c, WEIGHT] += w
                v = blurred_values[pos[s]] if f & VALUE_BLUR else values[pos[s]]
                for j in range(dim):
                    out[r, c, j] += w * v[j]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def watched(dots, blurred, pos, flags, page, chosen, row, unit, cap, sink, out):
    """out f64[2, E, T]: out[0, row[i], pos[s]] += the own probability of every slot that was read, summed over the group's query heads;
    out[1]: the same of keys as captured. row i64[nb]; the rest as in `split`."""
    nb, n = flags.shape
    weight = np.empty((2, n))
    for i in range(nb):
        for g in range(chosen.shape[1]):
            r = i * chosen.shape[1] + g
            top_own = top_true = sink[r]
            for s in range(n):
                weight[0, s] = weight[1, s] = -1e300
                if flags[i, s] & ALIVE and chosen[i, g, page[s]]:
                    weight[1, s] = _logit(dots[s, r], unit, cap)
                    weight[0, s] = _logit(blurred[s, r], unit, cap) if flags[i, s] & KEY_BLUR else weight[1, s]
                    top_own, top_true = max(top_own, weight[0, s]), max(top_true, weight[1, s])
            z_own, z_true = exp2_64(sink[r] - top_own), exp2_64(sink[r] - top_true)
            for s in range(n):
                if weight[1, s] > -1e299:
                    weight[0, s], weight[1, s] = exp2_64(weight[0, s] - top_own), exp2_64(weight[1, s] - top_true)
                    z_own += weight[0, s]
                    z_true += weight[1, s]
                else:
                    weight[0, s] = weight[1, s] = 0.0
            for s in range(n):
                out[0, row[i], pos[s]] += weight[0, s] / z_own
                out[1, row[i], pos[s]] += weight[1, s] / z_true
