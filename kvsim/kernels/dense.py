"""Dense attention in blocks of about ROWS query rows.

Layout: `dots` is [n tokens, R rows], so that page maxima and sums run down the tokens and vectorise over the rows.
Row r of a block belongs to step r // G and query head r % G of the kv head; rows beyond the last step are padding."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.exp import exp2_32, exp2_64, larger32, larger64
from kvsim.kernels.memory import empty
from kvsim.kernels.numbers import brains, halves
from kvsim.kernels.order import FEW
from kvsim.kernels.product import GRID, pack, pack_raw, product, strips
from kvsim.kernels.wide import wide

ROWS = 256  # 64 rows reach three quarters of their speed, 1 024 little more (benchmarks/grid.py), for four times the memory
TILE = 512
NEAR = 128  # tokens whose statistics are made while their products are near: 128 KB for ROWS; four times as many took 5 to 10 % longer
LOG2E = 1.4426950408889634
PAGE = 16  # tokens whose sums make the denominator of dense attention; divides TILE
NONE = -1e30  # below every logit; -inf would make inf - inf on empty pages
ALIVE = 1
STRIP = 64  # pages that are turned together
CANDIDATES = 8  # of a row before the best of them are found, times the tokens asked for; a row of 32 768 has five times
HALVINGS = 12  # of the range of a row's candidates; then hardly more are left than were asked for


def padded(n: int, multiple: int) -> int:
    """The next multiple at or above n."""
    return -(-n // multiple) * multiple


def visible(first: np.ndarray, last: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(u8[N, tokens], u8[tokens]): 1 where first <= position <= last, at each step and at all of them."""
    flags, every = np.empty((len(last), tokens), np.uint8), np.zeros(tokens, np.uint8)
    _mark(first, last, flags)
    every[first.max() : last.min() + 1] = ALIVE
    return flags, every


@njit(nogil=True, cache=True, error_model="numpy")
def _mark(first, last, flags):
    for i in range(len(flags)):
        flags[i, : first[i]] = 0
        flags[i, first[i] : last[i] + 1] = ALIVE
        flags[i, last[i] + 1 :] = 0


def products(keys: np.ndarray, queries: np.ndarray, out: np.ndarray) -> np.ndarray:
    """keys [n, d], queries [R, d], n and R multiples of GRID -> out [n, R], plain dot products."""
    product(keys, strips(queries.T), out)
    return out


def block(rows: np.ndarray, least: int = 1) -> np.ndarray:
    """Query rows f32[m, d] padded with zero rows to a multiple of GRID, at or above `least`."""
    out = np.zeros((padded(max(least, len(rows)), GRID), rows.shape[1]), np.float32)
    out[: len(rows)] = rows
    return out


def scan(keys, queries, flags, every, group, unit, cap, dots, peak, mass) -> None:
    """Products and the statistics of pages of PAGE tokens, while they are in the cache: dots f32[n, R] of keys
    [n, d] and queries f32[R, d], or f32[NEAR, R] where they are not kept; peak, mass f32[n / PAGE, R] as page_stats32 has them.

    keys: float32 and padded, or raw numbers (kernels.numbers), which become float32 as they are looked at."""
    start, near = np.arange(0, NEAR + 1, PAGE), np.empty((NEAR, keys.shape[1]), np.float32)
    given = strips(queries.T), flags, every, start, group, np.float32(unit), np.float32(cap), dots, peak, mass
    if keys.dtype.itemsize == 2:
        _scan_raw(keys.view(np.uint16), keys.dtype == np.float16, near, *given)
    else:
        _scan_float(keys, near, *given)


@njit(nogil=True, cache=True, error_model="numpy")
def _scan_raw(keys, half, near, turned, flags, every, start, group, unit, cap, dots, peak, mass):
    for t in range(0, len(peak) * PAGE, NEAR):
        rows = keys[t : t + NEAR]
        if half:
            halves(rows, near)
        else:
            brains(rows, near)
        near[len(rows) :] = 0
        _scan_tile(near, t, turned, flags, every, start, group, unit, cap, dots, peak, mass)


@njit(nogil=True, cache=True, error_model="numpy")
def _scan_float(keys, near, turned, flags, every, start, group, unit, cap, dots, peak, mass):
    for t in range(0, len(peak) * PAGE, NEAR):
        rows = keys[t : t + NEAR]
        if len(rows) < NEAR:
            near[: len(rows)] = rows
            near[len(rows) :] = 0
            rows = near
        _scan_tile(rows, t, turned, flags, every, start, group, unit, cap, dots, peak, mass)


@njit(nogil=True, cache=True, error_model="numpy")
def _scan_tile(keys, t, turned, flags, every, start, group, unit, cap, dots, peak, mass):
    """keys f32[NEAR, d] of the tokens from t on."""
    out = dots[t : t + NEAR] if len(dots) == len(peak) * PAGE else dots
    first, stop = t // PAGE, (t + NEAR) // PAGE
    product(keys, turned, out)
    page_stats32(out, flags[:, t : t + NEAR], every[t : t + NEAR], start, group, unit, cap, peak[first:stop], mass[first:stop])


def bend(dots, unit, cap):
    """Dot products -> logits in powers of 2, soft-capped when cap > 0."""
    return cap * np.tanh(dots * unit / cap) if cap else dots * unit


def output(dots, values, flags, every, group, unit, cap, lse, beside=None) -> np.ndarray:
    """Attention output f64[R, dv] over values [n, dv], float32 and padded or raw numbers as in `scan`; tile sums in float32, their total in
    float64. beside: the Strongest of pages of PAGE tokens, who look at every tile that is seen while its products are near."""
    rows, dim = dots.shape[1], values.shape[1]
    half, top = None, lse.astype(np.float32)
    if values.dtype.itemsize == 2:
        half, values = values.dtype == np.float16, values.view(np.uint16)
    total, w, part = np.zeros((rows, dim)), empty((TILE, rows)), np.empty((rows, padded(dim, GRID)), np.float32)
    there, looking = strips(np.zeros((1, dim), np.float32), TILE), None if beside is None else beside.given
    _output(dots, values, half, flags, every, group, np.float32(unit), np.float32(cap), top, there, w, part, total, looking)
    return total * np.exp2(top - lse)[:, None]  # the weights were taken against the rounded denominator


@njit(nogil=True, cache=True, error_model="numpy")
def _output(dots, values, half, flags, every, group, unit, cap, top, there, w, part, total, looking):
    """total f64[R, dv] += weights of dots [n, R], made in w a tile at a time, times values in strips, made `there`, in part f32[R, dv or
    more]. half: whether raw values are float16; None: they are float32."""
    for t in range(0, len(dots), TILE):
        near, seen, all_ = dots[t : t + TILE], flags[:, t : t + TILE], every[t : t + TILE]
        if not (all_.any() or seen.any()):
            continue
        if half is None:
            pack(values[t : t + TILE], there)
        else:
            pack_raw(values[t : t + TILE], half, there)
        weights(near, seen, all_, group, unit, cap, top, w)
        product(w.T, there, part)
        for i in range(total.shape[0]):
            into, row = total[i], part[i]
            for j in range(len(into)):
                into[j] += np.float64(row[j])
        if looking is not None:
            _look(t // PAGE, (t + TILE) // PAGE, *looking)


@njit(nogil=True, cache=True, error_model="numpy")
def _turn(x, out):
    """out [m, n] = x [n, m] the other way, a cache line of it at a time: numpy's takes four times as long."""
    for first in range(0, x.shape[0], 16):
        for j in range(x.shape[1]):
            into = out[j]
            for i in range(first, min(first + 16, x.shape[0])):
                into[i] = x[i, j]


class Strongest:
    """The `many` tokens of highest logits of every row, ties to the lower slot, from pages that are looked at while they are near.

    dots [n, R], flags, every: of the slots, start i64[P + 1] of pages over these, peak f32[P, R] the largest product of each; keys [n, d],
    queries [R, d]; longest: the largest L2 norm of a key, which bounds the error of a float32 product. Candidates are tokens whose product is
    at least `floors`; those that are nearer to each other than that error are compared in float64."""

    def __init__(self, dots, flags, every, start, peak, keys, queries, group, longest, many):
        rows = len(queries)
        error = (keys.shape[1] + 2) * 2.0**-24 * np.linalg.norm(queries, axis=1) * longest
        slots = dots, flags, every, start, peak, floors(peak, many, error.astype(np.float32)), group
        self.exact = error, keys, queries, many
        room = rows, CANDIDATES * many + int(np.diff(start).max(initial=0))
        self.waiting = np.zeros(room, np.int32), np.empty(room, np.float32), np.zeros(rows, np.int64)
        self.given = *slots, *self.exact, *self.waiting

    def look(self, first: int, stop: int) -> None:
        """At pages first ... stop; all once, in order."""
        _look(first, stop, *self.given)

    def told(self) -> tuple[np.ndarray, np.ndarray]:
        """(slots i32[R, many], how many of them i64[R]), once all pages were looked at."""
        _settle_all(*self.exact, *self.waiting)
        found, _, count = self.waiting
        return found[:, : self.exact[-1]], count


def best_tokens(dots, flags, every, start, peak, keys, queries, group, longest, many) -> tuple[np.ndarray, np.ndarray]:
    """What `Strongest` tells of all pages."""
    strongest = Strongest(dots, flags, every, start, peak, keys, queries, group, longest, many)
    strongest.look(0, len(peak))
    return strongest.told()


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def _whole_page(x, unit, top, total):
    """A page of page_stats32 of 16 tokens, f32[16, R], that are all alive: every number is loaded once, which takes a fifth of the time
    away. The sum is made token by token, as there: whether a page is alive at all steps depends on which steps are looked at together."""
    wide()
    a, b, c, d, e, f, g, h = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    i, j, k, m, n, o, p, q = x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]
    for r in range(len(top)):
        y = larger32(larger32(larger32(a[r], b[r]), larger32(c[r], d[r])), larger32(larger32(e[r], f[r]), larger32(g[r], h[r])))
        z = larger32(larger32(larger32(i[r], j[r]), larger32(k[r], m[r])), larger32(larger32(n[r], o[r]), larger32(p[r], q[r])))
        most = larger32(y, z)
        mass = exp2_32((a[r] - most) * unit)
        mass += exp2_32((b[r] - most) * unit)
        mass += exp2_32((c[r] - most) * unit)
        mass += exp2_32((d[r] - most) * unit)
        mass += exp2_32((e[r] - most) * unit)
        mass += exp2_32((f[r] - most) * unit)
        mass += exp2_32((g[r] - most) * unit)
        mass += exp2_32((h[r] - most) * unit)
        mass += exp2_32((i[r] - most) * unit)
        mass += exp2_32((j[r] - most) * unit)
        mass += exp2_32((k[r] - most) * unit)
        mass += exp2_32((m[r] - most) * unit)
        mass += exp2_32((n[r] - most) * unit)
        mass += exp2_32((o[r] - most) * unit)
        mass += exp2_32((p[r] - most) * unit)
        mass += exp2_32((q[r] - most) * unit)
        top[r], total[r] = most, mass


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def page_stats32(dots, flags, every, start, group, unit, cap, peak, mass):
    """Per page and row over its live tokens: peak [P, R], the largest dot product (NONE: no live token), and
    mass [P, R] = sum of 2**(u(dot) - u(peak)), u(x) = unit * x, soft-capped at `cap` when cap > 0.

    flags u8[nb, n]: bit ALIVE where the token can be seen at the step; every u8[n]: alive at all steps; start i64[P + 1]."""
    wide()
    rows = dots.shape[1]
    low, seen = np.float32(NONE), np.zeros(rows, np.bool_)
    for p in range(len(start) - 1):
        top, total = peak[p], mass[p]
        if cap == 0 and start[p + 1] - start[p] == 16 and every[start[p] : start[p + 1]].all():
            _whole_page(dots[start[p] : start[p + 1]], unit, top, total)
            continue
        for r in range(rows):
            top[r] = low
            total[r] = np.float32(0)
        for t in range(start[p], start[p + 1]):
            x = dots[t]
            if every[t]:
                for r in range(rows):
                    top[r] = larger32(x[r], top[r])
            else:
                _seeing(flags[:, t], group, seen)
                for r in range(rows):
                    top[r] = larger32(x[r] if seen[r] else low, top[r])
        for t in range(start[p], start[p + 1]):
            x = dots[t]
            if cap > 0:
                for r in range(rows):
                    if every[t] or (r // group < flags.shape[0] and flags[r // group, t] & ALIVE):
                        total[r] += exp2_32(cap * np.tanh(x[r] * unit / cap) - cap * np.tanh(top[r] * unit / cap))
            elif every[t]:
                for r in range(rows):
                    total[r] += exp2_32((x[r] - top[r]) * unit)
            else:
                _seeing(flags[:, t], group, seen)
                for r in range(rows):
                    total[r] += exp2_32((x[r] - top[r]) * unit) if seen[r] else np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _seeing(flags, group, out):
    """out bool[R]: whose step has a token alive, flags u8[N] of it."""
    for i in range(len(flags)):
        for r in range(i * group, min((i + 1) * group, len(out))):
            out[r] = (flags[i] & ALIVE) != 0


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def page_stats64(dots, flags, every, start, group, unit, cap, peak, mass):
    """page_stats32 in float64, for rankings that need the truth."""
    rows = dots.shape[1]
    for p in range(len(start) - 1):
        top, total = peak[p], mass[p]
        for r in range(rows):
            top[r] = NONE
            total[r] = 0.0
        for t in range(start[p], start[p + 1]):
            x = dots[t]
            for r in range(rows):
                if every[t] or (r // group < flags.shape[0] and flags[r // group, t] & ALIVE):
                    top[r] = larger64(x[r], top[r])
        for t in range(start[p], start[p + 1]):
            x = dots[t]
            for r in range(rows):
                if every[t] or (r // group < flags.shape[0] and flags[r // group, t] & ALIVE):
                    if cap > 0:
                        total[r] += exp2_64(cap * np.tanh(x[r] * unit / cap) - cap * np.tanh(top[r] * unit / cap))
                    else:
                        total[r] += exp2_64((x[r] - top[r]) * unit)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def denominator(peak, mass, sink, unit, cap, lse):
    """lse f64[R] in powers of 2 from page statistics [P, R] and learned sinks f64[R] (very low: none); 0 where nothing is seen."""
    wide()
    pages, rows = peak.shape
    low, zero, top, z = np.float32(NONE), np.float32(0), np.empty(rows, np.float32), np.zeros(rows, np.float64)
    for r in range(rows):
        top[r] = np.float32(max(sink[r], NONE))
    for p in range(pages):
        for r in range(rows):
            x = peak[p, r] * unit if cap == 0 else cap * np.tanh(peak[p, r] * unit / cap)
            top[r] = larger32(x if peak[p, r] > low else low, top[r])
    for p in range(pages):
        for r in range(rows):
            x = peak[p, r] * unit if cap == 0 else cap * np.tanh(peak[p, r] * unit / cap)
            part = mass[p, r] * exp2_32(x - top[r])
            z[r] += np.float64(part if peak[p, r] > low else zero)
    for r in range(rows):
        z[r] += exp2_64(sink[r] - np.float64(top[r]))
        lse[r] = np.float64(top[r]) + np.log2(z[r]) if z[r] > 0 else 0.0


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def probability(peak, mass, lse, unit, cap, logit, out):
    """Page statistics [P, R] -> logit f32[P, R'], the largest natural logit (-inf: no live token), and out f32[P, R'], dense probability
    of the page. lse f64[R]: the denominator in powers of 2."""
    rows, natural = out.shape[1], np.float32(1 / LOG2E)
    near, rest = np.empty(rows, np.float32), np.empty(rows, np.float32)
    for r in range(rows):
        near[r] = lse[r]
        rest[r] = exp2_64(np.float64(near[r]) - lse[r])  # what rounding the denominator took away, the same for all pages
    for p in range(len(peak)):
        top, total, u, c = peak[p], mass[p], logit[p], out[p]
        for r in range(rows):
            u[r] = top[r] * unit if cap == 0 else cap * np.tanh(top[r] * unit / cap)
        for r in range(rows):  # a loop of its own: fused with the product above or not, its last bit would hang on the row
            c[r] = total[r] * exp2_32(u[r] - near[r]) * rest[r]
            u[r] *= natural
        for r in range(rows):
            if top[r] <= np.float32(NONE):
                u[r], c[r] = np.float32(-np.inf), np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def probability_by_row(peak, mass, lse, unit, cap, out):
    """out [R', P]: `probability`, a row of pages for every query row; a strip of pages at a time, because every row lies on memory of its
    own, and to go there takes as long as a few numbers."""
    rows, pages = out.shape
    logit, chance = np.empty((STRIP, rows), np.float32), np.empty((STRIP, rows), np.float32)
    for p0 in range(0, pages, STRIP):
        stop = min(STRIP, pages - p0)
        probability(peak[p0 : p0 + stop], mass[p0 : p0 + stop], lse, unit, cap, logit, chance)
        for r in range(rows):
            for p in range(stop):
                out[r, p0 + p] = chance[p, r]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def weights(dots, flags, every, group, unit, cap, top, out):
    """out f32[n, R] = 2**(u(dot) - top), 0 where not alive; top f32[R] in the units of u."""
    wide()
    n, rows = dots.shape
    zero = np.float32(0)
    for t in range(n):
        x, w = dots[t], out[t]
        if cap > 0:
            for r in range(rows):
                w[r] = exp2_32(cap * np.tanh(x[r] * unit / cap) - top[r])
        else:
            for r in range(rows):
                w[r] = exp2_32(x[r] * unit - top[r])
        if not every[t]:
            for r in range(rows):
                if r // group >= flags.shape[0] or not flags[r // group, t] & ALIVE:
                    w[r] = zero


@njit(nogil=True, cache=True, error_model="numpy")
def _look(first, stop, dots, flags, every, start, peak, floor, group, error, keys, queries, limit, found, near, many):
    """A page at a time, so that its columns are read while they are near. Rows and tokens are noted first and counted if they are among
    them: a branch that goes either way would take twice as long."""
    rows, most = min(len(many), flags.shape[0] * group), found.shape[1]
    reach = np.empty(rows, np.int64)
    for p in range(first, stop):
        a, b, top, n = start[p], start[p + 1], peak[p], 0
        for r in range(rows):
            reach[n] = r
            n += top[r] >= floor[r]
        alive = n > 0 and every[a:b].all()
        for r in reach[:n]:
            if many[r] + b - a > most:
                many[r] = _settle(found[r, : many[r]], near[r, : many[r]], error[r], keys, queries[r], limit)
            step, low, at = r // group, floor[r], many[r]
            for t in range(a, b):
                x = dots[t, r]
                found[r, at], near[r, at] = t, x
                at += (x >= low) & (alive or (flags[step, t] & ALIVE) != 0)
            many[r] = at


@njit(nogil=True, cache=True, error_model="numpy")
def _settle_all(error, keys, queries, limit, found, near, many):
    for r in range(len(many)):
        n = many[r]
        many[r] = _settle(found[r, :n], near[r, :n], error[r], keys, queries[r], limit)


@njit(nogil=True, cache=True, error_model="numpy")
def _settle(found, near, error, keys, query, limit):
    """The candidates i32[n], near f32[n] their products, with the best `limit` of them first, in order -> how many these are.

    Products more than two errors apart are in their true order; only the others are looked at in float64."""
    n = len(found)
    if n > limit:
        low, n = _reached(near, limit) - 2 * error, 0
        for i in range(len(found)):
            found[n], near[n] = found[i], near[i]
            n += near[i] >= low
    for i in range(1, n):
        t, x, at = found[i], near[i], i
        while at > 0 and near[at - 1] < x:
            found[at], near[at] = found[at - 1], near[at - 1]
            at -= 1
        found[at], near[at] = t, x
    first = 0
    while first < min(n, limit):
        stop = first + 1
        while stop < n and np.float64(near[stop - 1]) - np.float64(near[stop]) <= 2 * error:
            stop += 1
        if stop - first > 1:
            _by_truth(found[first:stop], near[first:stop], keys, query, limit - first)
        first = stop
    return min(n, limit)


@njit(nogil=True, cache=True, error_model="numpy")
def _reached(x, limit):
    """A number that at least `limit` of f32[n] reach, and few more."""
    low, high = x.min(), x.max()
    for _ in range(HALVINGS):
        middle, many = low + (high - low) / 2, np.int32(0)
        for i in range(len(x)):
            many += np.int32(x[i] >= middle)
        if many >= limit:
            low = middle
        else:
            high = middle
    return np.float64(low)


@njit(nogil=True, cache=True, error_model="numpy")
def _by_truth(found, near, keys, query, limit):
    """The best `limit` first, in order of their products in float64, ties to the lower slot."""
    true = np.empty(len(found))
    for i in range(len(found)):
        t, x, at = found[i], near[i], min(i, limit)
        s = _dot64(keys[t], query)
        while at > 0 and (true[at - 1] < s or (true[at - 1] == s and found[at - 1] > t)):
            found[at], near[at], true[at] = found[at - 1], near[at - 1], true[at - 1]
            at -= 1
        found[at], near[at], true[at] = t, x, s


@njit(nogil=True, cache=True, error_model="numpy")
def true_dots(keys, queries, slots):
    """f64[R, m]: dot products of queries [R, d] with the keys [n, d] of slots i32[R, m]."""
    out = np.empty(slots.shape)
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[r, i] = _dot64(keys[slots[r, i]], queries[r])
    return out


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def _dot64(a, b):
    total = 0.0
    for j in range(len(a)):
        total += np.float64(a[j]) * np.float64(b[j])
    return total


def floors(peak: np.ndarray, keep: int, error: np.ndarray) -> np.ndarray:
    """f32[R]: no token below it can be among the `keep` best of its row; error f32[R] bounds |float32 product - true|.

    At least `keep` tokens reach the keep-th largest maximum of a page, so the true keep-th best lies at most 2 * error below it. Of many pages
    some neighbours count as one: the floor is a little lower, and found in a tenth of the time."""
    pages, rows = peak.shape
    fold = max(1, pages // max(FEW, 8 * keep))
    if pages // fold <= keep:
        return np.full(rows, np.float32(NONE / 2))
    if fold > 1:
        peak = peak[: pages // fold * fold].reshape(-1, fold, rows).max(1)
    by_row = np.empty(peak.shape[::-1], np.float32)
    _turn(peak, by_row)
    by_row.sort(axis=1)
    return np.maximum(by_row[:, -keep] - 2 * error, np.float32(NONE / 2)).astype(np.float32)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def range_mass(dots, mass, page, low, high, group, unit, cap, lse, out):
    """out f64[R] += dense probability on positions low[i] <= pos < high[i] of row i * group + g.

    mass [R, P]: dense probability of whole pages of `page` positions; only the edges are summed token by token."""
    for i in range(len(low)):
        for p in range(low[i] // page, (max(low[i], high[i]) + page - 1) // page):
            first, stop = max(low[i], p * page), min(high[i], (p + 1) * page)
            if stop - first == page:
                for r in range(i * group, (i + 1) * group):
                    out[r] += mass[r, p]
                continue
            for t in range(first, stop):
                for r in range(i * group, (i + 1) * group):
                    x = np.float64(dots[t, r]) * unit
                    if cap > 0:
                        x = cap * np.tanh(x / cap)
                    out[r] += exp2_64(x - lse[r])
