"""Obvious twins of the kernels: plain numpy and loops, one section per module, slow on purpose."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from fractions import Fraction

import numpy as np


# ------------------------------------------------------------------------------------------------ policies, boxes, codecs
def box_corners(keys, n):
    """keys [rows, d] in the order they are split -> the min and the max of n parts, larger parts first, [n, d] each."""
    parts = [p if len(p) else keys[: -(-len(keys) // n)] for p in np.array_split(keys, n)]
    return np.array([p.min(axis=0) for p in parts]), np.array([p.max(axis=0) for p in parts])


def box_bound(q, lo, hi):
    """q [d], lo and hi [n, d] -> the largest of the boxes' sums of max(q lo, q hi), added up one dimension after the other, each product
    and sum rounded once."""
    best = -np.inf
    for low, high in zip(lo, hi, strict=True):
        total = 0.0
        for a, b, c in zip(q, low, high, strict=True):
            total = max(fused(a, b, total), fused(a, c, total))
        best = max(best, total)
    return best


def fused(a, b, c):
    """a b + c, rounded once."""
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def learned_score(q, w, k, relu):
    """q [H, d], w [H], k [d] -> the weighted sum over index heads, added up one number and one head after the other."""
    total = 0.0
    for query, weight in zip(q, w, strict=True):
        dot = 0.0
        for a, b in zip(query, k, strict=True):
            dot += a * b
        total += weight * (max(0.0, dot) if relu else dot)
    return total


def minmax_roundtrip(x, bits):
    """One group of numbers, coded in `bits` and back, with the zero and the step that fp16 can hold."""
    zero = float(np.float16(min(x)))
    step = float(np.float16((max(x) - min(x)) / (2**bits - 1)))
    codes = [0 if step == 0 else min(max(round((v - zero) / step), 0), 2**bits - 1) for v in x]
    return [zero + step * code for code in codes]


def nearest_e4m3(x):
    """The nearest 8-bit float, past the largest the largest; of two as near the one of even code."""
    numbers = [(e4m3(code), code) for code in range(128) if math.isfinite(e4m3(code))]
    return math.copysign(min(numbers, key=lambda n: (abs(n[0] - abs(x)), n[1] % 2))[0], x)


def oscar_row(row, basis, part, bits):
    """A row as OSCAR codes it, scales unrounded: turned, its largest numbers moved in, coded half up by step and zero point, turned back."""
    d = len(row)
    y = turned(row, basis)
    if part:
        most = sorted(abs(v) for v in y)[min(int(part * d), d - 1)]
        y = [max(-most, min(most, v)) for v in y]
    step = max(max(y) - min(y), 1e-8) / (2**bits - 1)
    point = -min(y) / step
    codes = [max(0, min(2**bits - 1, math.floor(v / step + point + 0.5))) for v in y]
    return turned([(c - point) * step for c in codes], basis.T), codes


def normal_levels(bits, many=200_000):
    """The levels of least squared error on the quantiles of a normal number: k-means on numbers in place of integrals."""
    normal = statistics.NormalDist()
    x = [normal.inv_cdf((i + 0.5) / many) for i in range(many)]
    level = [normal.inv_cdf((i + 0.5) / 2**bits) for i in range(2**bits)]
    for _ in range(60 * 2**bits):
        cut = [0, *(bisect.bisect(x, (a + b) / 2) for a, b in itertools.pairwise(level)), many]
        new = [sum(x[a:b]) / (b - a) for a, b in itertools.pairwise(cut)]
        if new == level:
            break
        level = new
    return level


def unit_key(row, level, renormalise):
    """A key as TurboQuant codes it: brought to norm 1, turned by Hadamard, every number to the nearest level, back; the norm as fp16 holds it."""
    d = len(row)
    norm = math.sqrt(sum(v * v for v in row))
    basis = np.array([[(-1) ** (i & j).bit_count() / math.sqrt(d) for j in range(d)] for i in range(d)])
    y = turned([v / (norm or 1) for v in row], basis)
    y = [min(reversed(level), key=lambda x: abs(x / math.sqrt(d) - v)) / math.sqrt(d) for v in y]
    if renormalise:
        size = math.sqrt(sum(v * v for v in y))
        y = [v / size for v in y]
    return [v * float(np.float16(norm)) for v in turned(y, basis)]


def turned(x, basis):
    """x [d] in the columns of basis [d, d], added up one dimension of x after the other."""
    out = []
    for column in basis.T:
        total = 0.0
        for a, b in zip(x, column, strict=True):
            total += a * b
        out.append(total)
    return out


def e4m3(code):
    """The number that 8 bits stand for: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, 1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def survivors(score, protect, limit):
    """One kv head: the slots that a cut to `limit` leaves; the protected first, then by score, ties to the lower slot."""
    order = sorted(range(len(score)), key=lambda i: (not protect[i], -score[i], i))
    return sorted(order[:limit])


# ------------------------------------------------------------------------------------------------ attention kernels
def bent(x, unit, cap):
    """A dot product as a logit in powers of two, soft-capped when cap > 0."""
    return cap * np.tanh(x * unit / cap) if cap else x * unit


def logits(dots, seen, unit, cap):
    """dots [n, R], seen bool[R, n] -> logits [R, n] in powers of two, -inf where a row does not see the token."""
    return np.where(seen, bent(np.float64(dots.T), unit, cap), -np.inf)


def log_sum(x, sink):
    """log2 of the sum of 2**x and 2**sink; 0 where there is nothing to sum."""
    top = max([sink, *x])
    return top + np.log2(sum(2.0 ** (np.array([sink, *x]) - top))) if top > -1e30 else 0.0


def page_stats(dots, seen, start, unit, cap):
    """Per page and row: the largest dot product (None: nothing seen) and the sum of 2**(logit - its logit)."""
    pages, rows = len(start) - 1, dots.shape[1]
    peak, mass = np.full((pages, rows), None), np.zeros((pages, rows))
    for p, r in np.ndindex(pages, rows):
        x = [float(dots[t, r]) for t in range(start[p], start[p + 1]) if seen[r, t]]
        if x:
            peak[p, r] = max(x)
            mass[p, r] = sum(2.0 ** (bent(np.array(x), unit, cap) - bent(max(x), unit, cap)))
    return peak, mass


def best_tokens(score, seen, many):
    """The positions of the highest scores of one row, ties to the lower position."""
    return sorted(np.flatnonzero(seen), key=lambda t: (-score[t], t))[:many]


def attend(true, own, values, own_values, lse, sink):
    """One row over the tokens it read: dense logits and its own, exact values and its own -> dense probabilities, own probabilities, and
    three outputs: all its own; exact logits and values; own logits and exact values."""
    dense, e, f = 2.0 ** (true - lse), 2.0 ** (own - log_sum(own, sink)), 2.0 ** (true - log_sum(true, sink))
    return dense, e, e @ own_values, f @ values, e @ values


def tally(flags, union, page_of, keys, values):
    """What one step's bill rests on, in the order of kernels.sparse. keys, values: per slot (group, bits, own metadata, the group's,
    nominal bits) of its coded form."""
    alive, key_coded, value_coded, key_kept, value_kept = 1, 2, 4, 32, 64
    slots = [s for s in range(len(flags)) if flags[s] & alive and union[page_of[s]]]

    def those(bit):
        return [s for s in slots if flags[s] & bit]

    def bits(of, cost):
        return sum(cost[s][1] for s in of)

    def meta(of, cost):
        return sum(cost[s][2] for s in of) + sum({cost[s][0]: cost[s][3] for s in of}.values())

    k, v, kk, vk = map(those, (key_coded, value_coded, key_kept, value_kept))
    return [
        len(slots), len(slots) - len(k), len(k), len(slots) - len(v), len(v), len(kk), len(vk),
        bits(k, keys), bits(v, values), meta(k, keys) + meta(v, values),
        bits(kk, keys), bits(vk, values), meta(kk, keys) + meta(vk, values),
        sum(keys[s][4] for s in k) + sum(values[s][4] for s in v),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ order
def ranked(score, kind):
    """Pages by kind, those of kind 1 by score descending, ties to the lower page."""
    return sorted(range(len(score)), key=lambda p: (kind[p], -score[p] if kind[p] == 1 else 0.0, p))


def read_at(order, forced, k):
    """The pages that a head reads at a budget of k, of an order whose first `forced` are read anyway."""
    return {int(p) for p in order[: max(k, forced)]}


# ------------------------------------------------------------------------------------------------ stopping rules
def whole_numbers(x):
    """Floats as exact whole numbers of 2**-200, an object array: sums and products of them are exact."""
    flat = [n * (2**200 // d) for n, d in (float(v).as_integer_ratio() for v in np.ravel(x))]
    assert all(int(n) == float(v) * 2.0**200 for n, v in zip(flat, np.ravel(x), strict=True))
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(np.shape(x))


def opened(proved, many, forced, batch, cap):
    """Pages in rounds of `batch` after the forced ones until proved(pages read) or the cap -> (pages, rounds, whether it is proved)."""
    pages, rounds, limit = forced, 0, max(forced, min(cap, many))
    while not proved(pages) and pages < limit:
        pages, rounds = min(pages + batch, limit), rounds + 1
    return pages, rounds, proved(pages)


def top_found(bound, tokens, r):
    """Pages in the order they are opened, with their bound and their tokens' scores: are the r best proved found after k pages?"""

    def proved(k):
        read = sorted((x for page in tokens[:k] for x in page), reverse=True)
        return k == len(bound) or (len(read) >= r and max(bound[k:]) < read[r - 1])

    return proved


def unread_bound(bound, rows, tokens, k):
    """The largest part of the softmax mass that the pages from the k-th on can have, by their bounds; scores in powers of 2."""

    def total(weighted):
        top = max(x for _, x in weighted)
        return top + math.log2(math.fsum(n * 2.0 ** (x - top) for n, x in weighted))

    if k in (0, len(bound)):
        return float(k == 0)
    read, unread = total([(1, x) for page in tokens[:k] for x in page]), total([*zip(rows[k:], bound[k:], strict=True)])
    return 1 / (1 + 2.0 ** min(read - unread, 1000))


def unread_share(tokens, k):
    """The part of the softmax mass that the pages from the k-th on have."""
    top = max(x for page in tokens for x in page)
    part = [math.fsum(2.0 ** (x - top) for page in pages for x in page) for pages in (tokens[k:], tokens)]
    return part[0] / part[1]


def estimated(bound, rows, k):
    """The part of the softmax over pages of u + log2(rows) that the first k have."""
    weight = [n * 2.0 ** (u - max(bound)) for n, u in zip(rows, bound, strict=True)]
    return math.fsum(weight[:k]) / math.fsum(weight)
