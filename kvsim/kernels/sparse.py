"""Attention over the rows a policy read, and the counts of what it read and holds.

Slots are the live tokens of one kv head in ascending order of position. flags u8[nb, n] says what a slot is at each step of a
block: ALIVE, key or value stored coded (KEY_CODED, VALUE_CODED), attention sees decoded numbers (KEY_BLUR, VALUE_BLUR), codes are
kept beside an exact row (KEY_KEPT, VALUE_KEPT)."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.exp import exp2_32, exp2_64

ALIVE, KEY_CODED, VALUE_CODED, KEY_BLUR, VALUE_BLUR, KEY_KEPT, VALUE_KEPT = 1, 2, 4, 8, 16, 32, 64
MASS, FAR, EVIDENCE, CODED_MASS, OWN_EVIDENCE, TOKENS, ENTROPY, SUMS = range(8)
GROUP, BITS, ROW_META, GROUP_META, NOMINAL, COSTS = range(6)
ROWS_READ, KEYS_FULL, KEYS_CODED, VALUES_FULL, VALUES_CODED, KEYS_KEPT, VALUES_KEPT = range(7)
KEY_BITS, VALUE_BITS, META_BYTES, KEPT_KEY_BITS, KEPT_VALUE_BITS, KEPT_META_BYTES, NOMINAL_BITS, COUNTS = range(7, 15)
NEAR_PAGES = 16
_LOW = np.float32(-1e30)


@njit(inline="always", nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def _weigh(e, rows, n, out):
    """out[j] = sum over the first n rows of e[k] * rows[k, j], four rows at a time so that `out` is touched less often."""
    for j in range(out.shape[0]):
        out[j] = np.float32(0)
    for k in range(0, n - 3, 4):
        a, b, c, d = e[k], e[k + 1], e[k + 2], e[k + 3]
        for j in range(out.shape[0]):
            out[j] += a * rows[k, j] + b * rows[k + 1, j] + c * rows[k + 2, j] + d * rows[k + 3, j]
    for k in range(n - n % 4, n):
        a = e[k]
        for j in range(out.shape[0]):
            out[j] += a * rows[k, j]


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
    width, dim, split = 1, values.shape[1], exact.shape[0] > 0
    for p in range(pages):
        width = max(width, start[p + 1] - start[p])
    own_e, true_e = np.empty((group, width), np.float32), np.empty((group, width), np.float32)
    live, above = np.empty(width, np.int64), np.empty(width, np.float32)
    is_far, is_evidence, is_coded = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    near, true_near = np.empty((width, dim), np.float32), np.empty((width, dim), np.float32)
    part = np.empty(dim, np.float32)
    total = np.empty((3, group, dim), np.float64)
    own_top, true_top = np.empty(group, np.float32), np.empty(group, np.float32)
    own_z, true_z, lean = np.empty(group, np.float64), np.empty(group, np.float64), np.empty(group, np.float64)
    wanted = np.empty(pages, np.bool_)
    kinds = 3 if split else 1
    for i in range(nb):
        for g in range(group):
            own_top[g] = true_top[g] = _LOW
            own_z[g] = true_z[g] = lean[g] = 0.0
            for j in range(dim):
                for kind in range(kinds):
                    total[kind, g, j] = 0.0
        for p in range(pages):
            wanted[p] = False
            for g in range(group):
                wanted[p] |= chosen[i, g, p]
            if wanted[p]:
                for s in range(start[p], start[p + 1]):
                    if flags[i, s] & ALIVE:
                        for g in range(group):
                            if chosen[i, g, p]:
                                true_top[g] = max(true_top[g], dots[s, i * group + g])
                                x = blurred[s, i * group + g] if flags[i, s] & KEY_BLUR else dots[s, i * group + g]
                                own_top[g] = max(own_top[g], x)
        for g in range(group):
            own_top[g] = max(_bend(own_top[g], unit, cap), np.float32(sink[i * group + g]))
            true_top[g] = max(_bend(true_top[g], unit, cap), np.float32(sink[i * group + g]))
        for p in range(pages):
            if not wanted[p]:
                continue
            n, some_evidence, some_coded, some_blur = 0, False, False, False
            for s in range(start[p], start[p + 1]):
                f = flags[i, s]
                if f & ALIVE:
                    live[n] = s
                    is_far[n] = np.float32(far[i, 0] <= pos[s] < far[i, 1])
                    is_evidence[n] = np.float32(marks[s])
                    is_coded[n] = np.float32((f & KEY_CODED) > 0)
                    some_evidence |= marks[s] > 0
                    some_coded |= (f & KEY_CODED) > 0
                    some_blur |= (f & KEY_BLUR) > 0
                    n += 1
            for g in range(group):
                if not chosen[i, g, p]:
                    continue
                r = i * group + g
                own, true = own_e[g], true_e[g]
                for k in range(n):
                    own[k] = _below(dots[live[k], r], unit, cap, own_top[g])
                if split:
                    for k in range(n):
                        true[k] = own[k] + (own_top[g] - true_top[g])
                if some_blur:
                    for k in range(n):
                        if flags[i, live[k]] & KEY_BLUR:
                            own[k] = _below(blurred[live[k], r], unit, cap, own_top[g])
                for k in range(n):
                    above[k] = own[k]
                    own[k] = exp2_32(own[k])
                lean[g] += _marked(own, above, n)
                if split:
                    for k in range(n):
                        true[k] = exp2_32(true[k])
                else:
                    true = own
                here = _total(true, n)
                own_z[g] += _total(own, n)
                true_z[g] += here
                sums[r, MASS] += here
                sums[r, FAR] += _marked(true, is_far, n)
                if some_evidence:
                    sums[r, EVIDENCE] += _marked(true, is_evidence, n)
                    sums[r, OWN_EVIDENCE] += _marked(own, is_evidence, n)
                if some_coded:
                    sums[r, CODED_MASS] += _marked(true, is_coded, n)
                sums[r, TOKENS] += n
            for k in range(n):
                s = live[k]
                for j in range(dim):
                    near[k, j] = values[pos[s], j]
                if split:
                    for j in range(dim):
                        true_near[k, j] = near[k, j]
                    if flags[i, s] & VALUE_BLUR:
                        for j in range(dim):
                            near[k, j] = blurred_values[pos[s], j]
            for g in range(group):
                if not chosen[i, g, p]:
                    continue
                _weigh(own_e[g], near, n, part)
                for j in range(dim):
                    total[0, g, j] += np.float64(part[j])
                if split:
                    _weigh(true_e[g], true_near, n, part)
                    for j in range(dim):
                        total[1, g, j] += np.float64(part[j])
                    _weigh(own_e[g], true_near, n, part)
                    for j in range(dim):
                        total[2, g, j] += np.float64(part[j])
        for g in range(group):
            r = i * group + g
            scale = exp2_64(np.float64(true_top[g] if split else own_top[g]) - lse[r])
            sums[r, MASS] *= scale
            sums[r, FAR] *= scale
            sums[r, EVIDENCE] *= scale
            sums[r, CODED_MASS] *= scale
            sums[r, ENTROPY] = max(0.0, np.log2(own_z[g]) - lean[g] / own_z[g]) if own_z[g] > 0.0 else np.nan
            own_z[g] += exp2_64(sink[r] - np.float64(own_top[g]))
            true_z[g] += exp2_64(sink[r] - np.float64(true_top[g]))
            if own_z[g] == 0.0:  # nothing was read: an output of zero
                own_z[g] = true_z[g] = 1.0
            sums[r, OWN_EVIDENCE] /= own_z[g]
            for j in range(dim):
                out[r, j] = total[0, g, j] / own_z[g]
            if split:
                for j in range(dim):
                    exact[r, j] = total[1, g, j] / true_z[g]
                    mixed[r, j] = total[2, g, j] / own_z[g]


@njit(inline="always", nogil=True, cache=True, error_model="numpy")
def _bend(x, unit, cap):
    """A dot product as a logit in powers of 2, soft-capped when cap > 0."""
    return x * unit if cap == np.float32(0) else cap * np.tanh(x * unit / cap)


@njit(nogil=True, cache=True, error_model="numpy")
def _below(x, unit, cap, top):
    """The logit less `top`. A function of its own, without `contract`: fused with the product or not, as a compiler likes, its last bit
    would hang on the layout of the arrays beside it."""
    return _bend(x, unit, cap) - top


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def own_softmax(dots, row, live, read, unit, cap, sink, a):
    """One step's attention of every kv head over the slots it read, in float64.

    dots f64[Hkv, R, n]; row: the step's first row; live bool[Hkv, n]; read bool[Hkv, G, n] (or [Hkv, 1, n]: all heads of the group);
    sink f64[Hkv, G] in powers of 2; n a multiple of 8, so that the sums do not depend on where the live slots end.
    -> a f64[Hkv, G, n], 0 where not read."""
    heads, group, n = a.shape
    for h in range(heads):
        for g in range(group):
            x, w, mine = dots[h, row + g], a[h, g], read[h, min(g, read.shape[1] - 1)]
            top = max(sink[h, g], -1e290)  # above what is not read, so that reading nothing weighs nothing
            for s in range(n):
                keep = live[h, s] and mine[s]
                w[s] = (x[s] * unit if cap == 0 else cap * np.tanh(x[s] * unit / cap)) if keep else -1e300
            for s in range(n):
                top = max(top, w[s])
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def bucket_values(dots, values, first, last, start, bucket, unit, cap, lse, sums, weight):
    """Value sums of every page over the positions first[i] ... last[i], gathered by the bucket that the page is in.

    dots f32[T, R], values f32[T, dv], start i64[P + 1], bucket i32[nb, G, P]; sums f64[R, B, dv] += p v, weight f64[R, B] += p, with p
    the dense probability."""
    nb, group, pages = bucket.shape
    width = 1
    for p in range(pages):
        width = max(width, start[p + 1] - start[p])
    e, part = np.empty(width, np.float32), np.empty(values.shape[1], np.float32)
    for near in range(0, pages, NEAR_PAGES):  # the columns of a few pages stay in the cache for all steps
        for i in range(nb):
            for p in range(near, min(near + NEAR_PAGES, pages)):
                a, n = max(start[p], first[i]), min(start[p + 1], last[i] + 1) - max(start[p], first[i])
                if n <= 0:
                    continue
                rows = values[a : a + n]
                for g in range(group):
                    r, b = i * group + g, bucket[i, g, p]
                    shift = np.float32(lse[r])
                    if cap == 0:
                        for k in range(n):
                            e[k] = dots[a + k, r] * unit - shift
                    else:
                        for k in range(n):
                            e[k] = cap * np.tanh(dots[a + k, r] * unit / cap) - shift
                    for k in range(n):
                        e[k] = exp2_32(e[k])
                    total = 0.0
                    for k in range(n):
                        total += np.float64(e[k])
                    weight[r, b] += total
                    _weigh(e, rows, n, part)
                    into = sums[r, b]
                    for j in range(part.shape[0]):
                        into[j] += np.float64(part[j])
