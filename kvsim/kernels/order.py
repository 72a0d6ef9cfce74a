"""One sort of the pages of every row, and everything read off its order."""

from __future__ import annotations

import numpy as np
from numba import njit

FORCED, RANKED, ABSENT = 0, 1, 2


@njit(nogil=True, cache=True, error_model="numpy")
def _pack(bits, kind, out):
    """u64 keys that sort by (kind, score descending, page ascending), from the bits of the float32 scores: numpy sorts integers
    three times faster than it argsorts floats."""
    sign = np.uint32(0x80000000)
    for r in range(bits.shape[0]):
        for p in range(bits.shape[1]):
            b = bits[r, p]
            falling = b if b & sign else ~(b | sign)
            out[r, p] = (np.uint64(kind[r, p]) << np.uint64(62)) | (np.uint64(np.uint32(falling)) << np.uint64(30)) | np.uint64(p)


@njit(nogil=True, cache=True, error_model="numpy")
def _unpack(keys, score, order):
    """Page numbers out of sorted keys; pages whose float32 scores are equal are put right by (float64 score, page)."""
    same = np.uint64(0xFFFFFFFFC0000000)
    for r in range(keys.shape[0]):
        for i in range(keys.shape[1]):
            p = np.int64(keys[r, i] & np.uint64(0x3FFFFFFF))
            at = i
            while at > 0 and (keys[r, at - 1] & same) == (keys[r, i] & same) and score[r, order[r, at - 1]] < score[r, p]:
                order[r, at] = order[r, at - 1]
                at -= 1
            order[r, at] = p


def ranked(score: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """order i32[R, P]: pages by kind (FORCED, RANKED, ABSENT u8[R, P]), the ranked ones by score f64[R, P] descending; ties go to the
    lower page. Exactly lexsort((page, -score, kind))."""
    keys = np.empty(score.shape, np.uint64)
    score = np.where(kind == RANKED, score + 0.0, 0.0)
    with np.errstate(over="ignore"):  # past float32 scores tie at infinity, until float64 tells them apart
        near = score.astype(np.float32)
    _pack(near.view(np.uint32), kind, keys)
    keys.sort(axis=1)
    order = np.empty(score.shape, np.int32)
    _unpack(keys, score, order)
    return order


@njit(nogil=True, cache=True, error_model="numpy")
def live_rows(flags, start, alive, out):
    """out i64[nb, P]: slots start[p] ... start[p + 1] of flags u8[nb, n] that have the bits `alive`."""
    for i in range(flags.shape[0]):
        for p in range(len(start) - 1):
            n = 0
            for s in range(start[p], start[p + 1]):
                n += (flags[i, s] & alive) != 0
            out[i, p] = n


@njit(nogil=True, cache=True, error_model="numpy")
def first_pages(order, count, chosen):
    """chosen bool[nb, H, P]: the first count[nb] pages of every order i32[nb, H, P]."""
    for i in range(order.shape[0]):
        for h in range(order.shape[1]):
            for at in range(order.shape[2]):
                chosen[i, h, order[i, h, at]] = at < count[i]


@njit(nogil=True, cache=True, error_model="numpy")
def accumulate(order, part, least, out):
    """out f32[R, K]: the sum of part [R, P] over the first max(k, least[r]) pages of the order, k = 1 ... K; float64 sums."""
    for r in range(order.shape[0]):
        total = 0.0
        for i in range(max(out.shape[1], least[r])):
            if i < order.shape[1]:
                total += part[r, order[r, i]]
            if i >= least[r] - 1 and i < out.shape[1]:
                out[r, i] = total
        for i in range(min(least[r] - 1, out.shape[1])):
            forced = 0.0
            for j in range(least[r]):
                forced += part[r, order[r, j]]
            out[r, i] = forced


@njit(nogil=True, cache=True, error_model="numpy")
def top_growth(order, least, best, count, of, most, out):
    """out f32[M, R, K]: of the first most[m] tokens of best i32[R, B], or all count[r] if fewer, the part that lies on the first
    max(k, least[r]) pages of the order, k = 1 ... K. of: position -> page."""
    rows, width = order.shape
    place, gain = np.empty(width, np.int64), np.zeros(out.shape[2], np.int64)
    for r in range(rows):
        for i in range(width):
            place[order[r, i]] = 0 if i < least[r] else i
        for m in range(len(most)):
            many = min(most[m], count[r])
            for i in range(many):
                at = place[of[best[r, i]]]
                if at < len(gain):
                    gain[at] += 1
            got, share = 0, 0.0
            for k in range(len(gain)):
                if gain[k]:  # few budgets find another token: a division at each would cost more than all the rest
                    got += gain[k]
                    share = got / many
                    gain[k] = 0
                out[m, r, k] = share


@njit(nogil=True, cache=True, error_model="numpy")
def union_growth(order, least, rows, pages, tokens):
    """How the union over the G heads of a group grows with the budget: pages, tokens i64[nb, K] at k = 1 ... K pages a head.

    order i32[nb, G, P]; least i64[nb]: forced pages; rows i64[nb, P]: valid rows of a page."""
    nb, group, width = order.shape
    seen = np.empty(width, np.int64)
    for i in range(nb):
        for p in range(width):
            seen[p] = width
        for g in range(group):
            for at in range(width):
                p = order[i, g, at]
                seen[p] = min(seen[p], 0 if at < least[i] else at)
        for k in range(pages.shape[1]):
            pages[i, k] = 0
            tokens[i, k] = 0
        for p in range(width):
            if seen[p] < pages.shape[1]:
                pages[i, seen[p]] += 1
                tokens[i, seen[p]] += rows[i, p]
        for k in range(1, pages.shape[1]):
            pages[i, k] += pages[i, k - 1]
            tokens[i, k] += tokens[i, k - 1]


@njit(nogil=True, cache=True, error_model="numpy")
def common(order, best, count, hits):
    """hits i64[R]: how many of the first count[r] pages of `order` are marked in best bool[R, P]."""
    for r in range(order.shape[0]):
        n = 0
        for i in range(count[r]):
            n += best[r, order[r, i]]
        hits[r] = n
