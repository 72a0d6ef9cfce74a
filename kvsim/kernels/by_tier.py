"""A policy's own softmax and the dense one, split by classes of tokens: what each class weighs, and what it adds to the output."""

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
