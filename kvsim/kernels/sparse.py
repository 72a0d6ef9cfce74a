"""Attention over the rows a policy read, and the counts of what it read and holds.

Slots are the live tokens of one kv head in ascending order of position. flags u8[nb, n] says what a slot is at each step of a
block: ALIVE, key or value stored coded (KEY_CODED, VALUE_CODED), attention sees decoded numbers (KEY_BLUR, VALUE_BLUR), codes are
kept beside an exact row (KEY_KEPT, VALUE_KEPT)."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.exp import exp2_32, exp2_64, larger64

ALIVE, KEY_CODED, VALUE_CODED, KEY_BLUR, VALUE_BLUR, KEY_KEPT, VALUE_KEPT = 1, 2, 4, 8, 16, 32, 64
MASS, FAR, EVIDENCE, CODED_MASS, OWN_EVIDENCE, TOKENS, ENTROPY, SUMS = range(8)
GROUP, BITS, ROW_META, GROUP_META, NOMINAL, COSTS = range(6)
ROWS_READ, KEYS_FULL, KEYS_CODED, VALUES_FULL, VALUES_CODED, KEYS_KEPT, VALUES_KEPT = range(7)
KEY_BITS, VALUE_BITS, META_BYTES, KEPT_KEY_BITS, KEPT_VALUE_BITS, KEPT_META_BYTES, NOMINAL_BITS, COUNTS = range(7, 15)
_LOW = np.float32(-1e30)


@njit(inline="always", nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def _weigh(e, rows, at, n, out):
    """out[j] = sum over k < n of e[k] * rows[at[k], j], four rows at a time so that `out` is touched less often."""
    for j in range(out.shape[0]):
        out[j] = np.float32(0)
    for k in range(0, n - 3, 4):
        a, b, c, d = e[k], e[k + 1], e[k + 2], e[k + 3]
        one, two, three, four = rows[at[k]], rows[at[k + 1]], rows[at[k + 2]], rows[at[k + 3]]
        for j in range(out.shape[0]):
            out[j] += a * one[j] + b * two[j] + c * three[j] + d * four[j]
    for k in range(n - n % 4, n):
        a, one = e[k], rows[at[k]]
        for j in range(out.shape[0]):
            out[j] += a * one[j]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def _total(e, n):
    """The float64 sum of e[:n]."""
    total = 0.0
    for k in range(n):
        total += np.float64(e[k])
    return total


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def _marked(e, mark, n):
    """The float64 sum of e[k] * mark[k]; of e[k] alone where marks are 0 and 1."""
    total = 0.0
    for k in range(n):
        total += np.float64(e[k] * mark[k])
    return total


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def attend(
    dots, blurred, values, blurred_values, pos, flags, marks, far, start, chosen, unit, cap, lse, sink, sums, out, exact, mixed
):
    """Softmax over the live slots of the chosen pages, per step and query head, and what it weighs.

    dots f32[n, R]: q·k (row r = step * G + head); blurred f32[n, R] the same with decoded keys, used where KEY_BLUR (pass `dots`
    when nothing is coded); values, blurred_values f32[T, dv], by position; marks u8[n]: 1 where evidence; far i64[nb, 2]: positions
    counted as far; start i64[P + 1]: pages over slots; chosen bool[nb, G, P]; unit, cap: logit in powers of 2 = unit * dot, soft-capped;
    lse f64[R]: the dense log2 denominator; sink f64[R]: learned sink logit in powers of 2, very low without.
    -> sums f64[R, SUMS]: dense mass on read tokens; of it far, on evidence, on coded keys; own mass on evidence; tokens read; the entropy,
       in powers of 2, of the own probabilities of the tokens read, a learned sink left out.
    -> out f64[R, dv] own output; exact: output of the same set with exact keys and values; mixed: with own keys and exact values
       (exact, mixed are filled only when they have R rows)."""
    nb, group, pages = chosen.shape
    rows, dim, split, width = nb * group, values.shape[1], exact.shape[0] > 0, 1
    for p in range(pages):
        width = max(width, start[p + 1] - start[p])
    own_e, true_e = np.empty((group, width), np.float32), np.empty((group, width), np.float32)
    live, at, above = np.empty(width, np.int64), np.empty(width, np.int64), np.empty(width, np.float32)
    is_far, is_evidence, is_coded = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    near, place, part = np.empty((width, dim), np.float32), np.arange(width), np.empty(dim, np.float32)
    total = np.zeros((3 if split else 1, rows, dim))
    own_top, true_top = np.full(rows, _LOW), np.full(rows, _LOW)
    own_z, true_z, lean = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    for p in range(pages):  # the columns of a page stay in the cache for all steps
        for i in range(nb):
            if not chosen[i, :, p].any():
                continue
            for s in range(start[p], start[p + 1]):
                if flags[i, s] & ALIVE:
                    for g in range(group):
                        if chosen[i, g, p]:
                            r = i * group + g
                            x = dots[s, r]
                            true_top[r] = max(true_top[r], x)
                            own_top[r] = max(own_top[r], blurred[s, r] if flags[i, s] & KEY_BLUR else x)
    for r in range(rows):
        own_top[r] = max(_bend(own_top[r], unit, cap), np.float32(sink[r]))
        true_top[r] = max(_bend(true_top[r], unit, cap), np.float32(sink[r]))
    for p in range(pages):
        for i in range(nb):
            if not chosen[i, :, p].any():
                continue
            n, seen = 0, 0
            some_evidence = False
            for s in range(start[p], start[p + 1]):
                f = flags[i, s]
                if f & ALIVE:
                    live[n], at[n] = s, pos[s]
                    is_far[n] = np.float32(far[i, 0] <= pos[s] < far[i, 1])
                    is_evidence[n] = np.float32(marks[s])
                    is_coded[n] = np.float32((f & KEY_CODED) > 0)
                    some_evidence |= marks[s] > 0
                    seen |= f
                    n += 1
            if seen & VALUE_BLUR:
                for k in range(n):
                    row = blurred_values[at[k]] if flags[i, live[k]] & VALUE_BLUR else values[at[k]]
                    for j in range(dim):
                        near[k, j] = row[j]
            for g in range(group):
                if not chosen[i, g, p]:
                    continue
                r = i * group + g
                own, true = own_e[g], true_e[g]
                for k in range(n):
                    own[k] = below(dots[live[k], r], unit, cap, own_top[r])
                if split:
                    for k in range(n):
                        true[k] = own[k] + (own_top[r] - true_top[r])
                if seen & KEY_BLUR:
                    for k in range(n):
                        if flags[i, live[k]] & KEY_BLUR:
                            own[k] = below(blurred[live[k], r], unit, cap, own_top[r])
                for k in range(n):
                    above[k] = own[k]
                    own[k] = exp2_32(own[k])
                lean[r] += _marked(own, above, n)
                if split:
                    for k in range(n):
                        true[k] = exp2_32(true[k])
                else:
                    true = own
                here = _total(true, n)
                own_z[r] += _total(own, n)
                true_z[r] += here
                sums[r, MASS] += here
                sums[r, FAR] += _marked(true, is_far, n)
                if some_evidence:
                    sums[r, EVIDENCE] += _marked(true, is_evidence, n)
                    sums[r, OWN_EVIDENCE] += _marked(own, is_evidence, n)
                if seen & KEY_CODED:
                    sums[r, CODED_MASS] += _marked(true, is_coded, n)
                sums[r, TOKENS] += n
                if seen & VALUE_BLUR:
                    _weigh(own, near, place, n, part)
                else:
                    _weigh(own, values, at, n, part)
                for j in range(dim):
                    total[0, r, j] += np.float64(part[j])
                if split:
                    _weigh(true, values, at, n, part)
                    for j in range(dim):
                        total[1, r, j] += np.float64(part[j])
                    _weigh(own, values, at, n, part)
                    for j in range(dim):
                        total[2, r, j] += np.float64(part[j])
    for r in range(rows):
        scale = exp2_64(np.float64(true_top[r] if split else own_top[r]) - lse[r])
        sums[r, MASS] *= scale
        sums[r, FAR] *= scale
        sums[r, EVIDENCE] *= scale
        sums[r, CODED_MASS] *= scale
        sums[r, ENTROPY] = max(0.0, np.log2(own_z[r]) - lean[r] / own_z[r]) if own_z[r] > 0.0 else np.nan
        own_z[r] += exp2_64(sink[r] - np.float64(own_top[r]))
        true_z[r] += exp2_64(sink[r] - np.float64(true_top[r]))
        if own_z[r] == 0.0:  # nothing was read: an output of zero
            own_z[r] = true_z[r] = 1.0
        sums[r, OWN_EVIDENCE] /= own_z[r]
        for j in range(dim):
            out[r, j] = total[0, r, j] / own_z[r]
        if split:
            for j in range(dim):
                exact[r, j] = total[1, r, j] / true_z[r]
                mixed[r, j] = total[2, r, j] / own_z[r]


@njit(inline="always", nogil=True, cache=True, error_model="numpy")
def _bend(x, unit, cap):
    """A dot product as a logit in powers of 2, soft-capped when cap > 0."""
    return x * unit if cap == np.float32(0) else cap * np.tanh(x * unit / cap)


@njit(nogil=True, cache=True, error_model="numpy")
def below(x, unit, cap, top):
    """The logit less `top`. A function of its own, without `contract`: fused with the product or not, as a compiler likes, its last bit
    would hang on the layout of the arrays beside it."""
    return _bend(x, unit, cap) - top


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def own_softmax(dots, at, row, live, read, unit, cap, sink, a):
    """One step's attention of every kv head over the slots it read, in float64.

    dots f64[Hkv, R, m]; row: the step's first row; at i64[Hkv, n]: the column of `dots` of every slot; live bool[Hkv, n];
    read bool[Hkv, G, n] (or [Hkv, 1, n]: all heads of the group); sink f64[Hkv, G] in powers of 2; n a multiple of 8, so that the sums
    do not depend on where the live slots end.
    -> a f64[Hkv, G, n], 0 where not read."""
    heads, group, n = a.shape
    hide = np.empty(n)
    for h in range(heads):
        column = at[h]
        for g in range(group):
            x, w = dots[h, row + g], a[h, g]
            if g < read.shape[1]:
                alive, mine = live[h], read[h, g]
                for s in range(n):
                    hide[s] = 0.0 if alive[s] & mine[s] else -1e300
            if cap == 0.0:
                for s in range(n):
                    w[s] = x[column[s]] * unit + hide[s]
            else:
                for s in range(n):
                    w[s] = cap * np.tanh(x[column[s]] * unit / cap) + hide[s]
            top = max(sink[h, g], -1e290)  # above what is not read, so that reading nothing weighs nothing
            for s in range(n):
                top = larger64(top, w[s])
            z = 0.0
            for s in range(n):
                e = exp2_64(w[s] - top)
                w[s] = e
                z += e
            z += exp2_64(sink[h, g] - top)
            z = z if z > 0.0 else 1.0
            for s in range(n):
                w[s] /= z


@njit(inline="always", nogil=True, cache=True, error_model="numpy")
def _billed(cost, s, i, paid, count, bits, meta):
    """Adds a coded row's bits and metadata; its group's once a step."""
    count[bits] += cost[BITS, s]
    count[meta] += cost[ROW_META, s]
    if paid[cost[GROUP, s]] != i:
        count[meta] += cost[GROUP_META, s]
        paid[cost[GROUP, s]] = i


@njit(nogil=True, cache=True, error_model="numpy")
def tally(flags, start, union, keys, values, counts):
    """What a bill needs to know of the live slots of the union's pages, per step.

    union bool[nb, P]; keys, values i64[COSTS, n], of every slot's coded form: the group it was encoded with (rows of one group share a
    number, 0 or more), bits of its codes, bytes of metadata of its own and of its group, nominal bits.
    -> counts i64[nb, COUNTS]: rows; keys full and coded; values full and coded; keys and values kept in codes beside exact rows; bits of
    coded keys, of coded values, bytes of their metadata; the same of what is kept beside; nominal bits of coded keys and values."""
    names = 1
    for s in range(keys.shape[1]):
        names = max(names, keys[GROUP, s] + 1, values[GROUP, s] + 1)
    paid = np.full((4, names), -1, np.int64)  # the last step that each group was paid in: keys, values, kept keys, kept values
    for i in range(flags.shape[0]):
        count = counts[i]
        for p in range(union.shape[1]):
            if not union[i, p]:
                continue
            for s in range(start[p], start[p + 1]):
                f = flags[i, s]
                if not f & ALIVE:
                    continue
                count[ROWS_READ] += 1
                if f & KEY_CODED:
                    count[KEYS_CODED] += 1
                    count[NOMINAL_BITS] += keys[NOMINAL, s]
                    _billed(keys, s, i, paid[0], count, KEY_BITS, META_BYTES)
                else:
                    count[KEYS_FULL] += 1
                if f & VALUE_CODED:
                    count[VALUES_CODED] += 1
                    count[NOMINAL_BITS] += values[NOMINAL, s]
                    _billed(values, s, i, paid[1], count, VALUE_BITS, META_BYTES)
                else:
                    count[VALUES_FULL] += 1
                if f & KEY_KEPT:
                    count[KEYS_KEPT] += 1
                    _billed(keys, s, i, paid[2], count, KEPT_KEY_BITS, KEPT_META_BYTES)
                if f & VALUE_KEPT:
                    count[VALUES_KEPT] += 1
                    _billed(values, s, i, paid[3], count, KEPT_VALUE_BITS, KEPT_META_BYTES)
