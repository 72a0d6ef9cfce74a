"""One sort of the pages of every row, and everything read off its order."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from kvsim.kernels.exp import larger64, smaller64

FORCED, RANKED, ABSENT = np.uint8(0), np.uint8(1), np.uint8(2)
SORTED = 32  # rows at a time, so that their keys stay in the cache
FEW = 512  # keys that numpy sorts within registers, faster than by digits; on a Zen 4 it takes three times as long for 2 048, six for 8 192


@intrinsic
def _bits(typing, x):
    """The float32 nearest to a float64, as u32; past float32 an infinity."""

    def code(context, builder, sig, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.FloatType()), ir.IntType(32))

    return types.uint32(types.float64), code


@njit(nogil=True, cache=True, error_model="numpy")
def settled(score, moving, number, exists, most, out):
    """out f64[N, H, P] = score f64[N, H, V], but not beyond `most` on either side, and -inf where exists bool[N, P] is not; pages have the
    score of their place, those at moving i64[M] the one with the number i64[N, M]. -> whether one is NaN that exists."""
    bad = False
    for i in range(out.shape[0]):
        here = exists[i]
        for h in range(out.shape[1]):
            row, into = score[i, h], out[i, h]
            for p in range(len(here)):
                bad |= here[p] and row[p] != row[p]
                into[p] = smaller64(larger64(row[p], -most), most) if here[p] else -np.inf
            for m in range(len(moving)):
                p, x = moving[m], row[number[i, m]]
                bad |= here[p] and x != x
                into[p] = smaller64(larger64(x, -most), most) if here[p] else -np.inf
    return bad


@njit(nogil=True, cache=True, error_model="numpy")
def page_states(pos, valid, blurred, closed, out):
    """out u8[V, S + 1], zero before: what is at every position of a page (1: a row, 3: one that is read decoded), and whether the page is
    closed. pos i64[V, S], valid, blurred bool[V, S], closed bool[V]."""
    size = out.shape[1] - 1
    for v in range(len(closed)):
        for s in range(valid.shape[1]):
            if valid[v, s]:
                out[v, pos[v, s] % size] = 3 if blurred[v, s] else 1
        out[v, size] = closed[v]


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_bits(score, kind, out):
    """u64 keys that sort by (kind, score descending, page ascending), from the bits of the float32 nearest to the score: numpy sorts
    integers three times faster than it argsorts floats. Only the score of RANKED pages counts."""
    sign = np.uint32(0x80000000)
    for r in range(score.shape[0]):
        for p in range(score.shape[1]):
            b = _bits(score[r, p])
            if kind[r, p] != RANKED or b == sign:  # -0.0 ties with 0.0
                b = np.uint32(0)
            falling = b if b & sign else ~(b | sign)
            out[r, p] = (np.uint64(kind[r, p]) << np.uint64(62)) | (np.uint64(np.uint32(falling)) << np.uint64(30)) | np.uint64(p)


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_steps(score, kind, bits, out):
    """u32 keys for the same, which numpy sorts twice as fast: between the highest and the lowest score of its row a score counts as the
    equal step it falls on. The last `bits` are the page. -> False where the scores have no such steps."""
    last = (1 << (32 - bits)) - 1
    for r in range(score.shape[0]):
        row, sort, into = score[r], kind[r], out[r]
        most, least = -np.inf, np.inf
        for p in range(len(row)):
            most = larger64(most, row[p] if sort[p] == RANKED else -np.inf)
            least = smaller64(least, row[p] if sort[p] == RANKED else np.inf)
        scale = (last - 2) / (most - least) if most > least else 0.0
        if most - least == np.inf or scale == np.inf:
            return False
        for p in range(len(row)):
            step = np.uint32(np.int32((most - row[p]) * scale) + 1)
            step = step if sort[p] == RANKED else np.uint32(0 if sort[p] == FORCED else last)
            into[p] = (step << np.uint32(bits)) | np.uint32(p)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def _unpack(keys, bits, score, kind, most, order):
    """Page numbers, the last `bits`, out of sorted keys; ranked pages whose keys are alike but for these are put right by (float64 score,
    page). -> False if that takes more than `most` moves."""
    page, moves = (np.uint64(1) << bits) - np.uint64(1), 0
    for r in range(keys.shape[0]):
        key, row, sort, into = keys[r], score[r], kind[r], order[r]
        for i in range(len(key)):
            p, at = np.int64(key[i] & page), i
            if i > 0 and key[i - 1] >> bits == key[i] >> bits and sort[p] == RANKED:
                while at > 0 and key[at - 1] >> bits == key[i] >> bits and row[into[at - 1]] < row[p]:
                    into[at] = into[at - 1]
                    at -= 1
                moves += i - at
                if moves > most:
                    return False
            into[at] = p
    return True


def ranked(score: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """order i32[R, P]: pages by kind (FORCED, RANKED, ABSENT u8[R, P]), the ranked ones by score f64[R, P] descending; ties go to the
    lower page. Exactly lexsort((page, -score, kind))."""
    order, bits = np.empty(score.shape, np.int32), score.shape[1].bit_length()
    for r in range(0, len(score), SORTED):
        some = slice(r, r + SORTED)
        if not _by_steps(score[some], kind[some], bits, order[some]):  # scores of very different sizes share a step
            keys = np.empty(score[some].shape, np.uint64)
            _pack_bits(score[some], kind[some], keys)  # past float32 scores tie at infinity, until float64 tells them apart
            keys.sort(axis=1)
            _unpack(keys, np.uint64(30), score[some], kind[some], keys.size**2, order[some])
    return order


def _by_steps(score: np.ndarray, kind: np.ndarray, bits: int, order: np.ndarray) -> bool:
    keys = np.empty(score.shape, np.uint32)
    if not _pack_steps(score, kind, bits, keys):
        return False
    if score.shape[1] > FEW:
        _by_digits(keys, bits)
    else:
        keys.sort(axis=1)
    return bool(_unpack(keys, np.uint64(bits), score, kind, keys.size, order))


@njit(nogil=True, cache=True, error_model="numpy")
def _by_digits(keys, bits):
    """Sorts rows of keys u32[R, P] whose last `bits` are already ascending: by the lower half of the others, then by the upper."""
    half = np.uint32((33 - bits) // 2)
    low, high, last = np.uint32(bits), np.uint32(bits) + half, np.uint32((1 << half) - 1)
    lower, upper = np.empty((2, 1 << half), np.int32)  # how many keys have a digit, then where the next one of it goes
    room = np.empty(keys.shape[1], np.uint32)
    for row in keys:
        lower[:], upper[:] = 0, 0
        for key in row:
            lower[(key >> low) & last] += 1
            upper[key >> high] += 1
        a = b = 0
        for digit in range(len(lower)):
            lower[digit], a = a, a + lower[digit]
            upper[digit], b = b, b + upper[digit]
        for key in row:
            digit = (key >> low) & last
            room[np.uint32(lower[digit])] = key
            lower[digit] += 1
        for key in room:
            digit = key >> high
            row[np.uint32(upper[digit])] = key
            upper[digit] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def changing(flags, out):
    """out u8[n], zero before: the bits of flags u8[N, n] that are not at every step what they are at the first."""
    first = flags[0]
    for i in range(1, flags.shape[0]):
        row = flags[i]
        for s in range(len(out)):
            out[s] |= row[s] ^ first[s]


@njit(nogil=True, cache=True, error_model="numpy")
def live_rows(flags, start, which, alive, out):
    """out i64[nb, P] of some pages p: slots start[p] ... start[p + 1] of flags u8[nb, n] that have the bits `alive`."""
    for i in range(flags.shape[0]):
        for p in which:
            n = 0
            for s in range(start[p], start[p + 1]):
                n += (flags[i, s] & alive) != 0
            out[i, p] = n


@njit(nogil=True, cache=True, error_model="numpy")
def state_changes(flags, bits, start, which, full, out):
    """out bool[N - 1, m]: whether a slot of page which[m] has other `bits` in flags u8[N, n] than at the step before, or full bool[N, m]
    is another."""
    for i in range(out.shape[0]):
        before, now = flags[i], flags[i + 1]
        for m in range(len(which)):
            differ = full[i + 1, m] != full[i, m]
            for s in range(start[which[m]], start[which[m] + 1]):
                differ |= ((now[s] ^ before[s]) & bits) != 0
            out[i, m] = differ


@njit(nogil=True, cache=True, error_model="numpy")
def state_slots(flags, alive, blur, start, page, step, slot, valid, blurred):
    """slot i64[V, S] of page[v] (0: it has no more), valid, blurred bool[V, S]: those that have the bit `alive` at step[v], and `blur` too."""
    for v in range(len(page)):
        a, b = start[page[v]], start[page[v] + 1]
        for s in range(slot.shape[1]):
            there = a + s < b
            slot[v, s] = a + s if there else 0
            now = flags[step[v], slot[v, s]] if there else 0
            valid[v, s] = (now & alive) != 0
            blurred[v, s] = valid[v, s] and (now & blur) != 0


@njit(nogil=True, cache=True, error_model="numpy")
def first_pages(order, count, chosen):
    """chosen bool[nb, H, P]: the first count[nb] pages of every order i32[nb, H, P]."""
    for i in range(order.shape[0]):
        for h in range(order.shape[1]):
            row, into = order[i, h], chosen[i, h]
            into[:] = False
            for at in range(min(count[i], len(row))):
                into[row[at]] = True


@njit(nogil=True, cache=True, error_model="numpy")
def places(order, least, place):
    """place i32[nb, H, P] of every page in the orders i32[nb, H, P]: a budget of more pages than that reads it. The least[i] pages that
    are forced are at 0, whatever the budget."""
    for i in range(order.shape[0]):
        for h in range(order.shape[1]):
            row, into = order[i, h], place[i, h]
            for at in range(least[i]):
                into[row[at]] = 0
            for at in range(least[i], len(row)):
                into[row[at]] = at


@njit(nogil=True, cache=True, error_model="numpy")
def top_growth(place, best, count, of, most, out):
    """out f32[M, R, K]: of the first most[m] tokens of best i32[R, B], or all count[r] if fewer, the part that lies on the pages at a
    place below k in place i32[R, P], k = 1 ... K. of: position -> page."""
    gain = np.zeros(out.shape[2], np.int64)
    for r in range(place.shape[0]):
        for m in range(len(most)):
            many = min(most[m], count[r])
            for i in range(many):
                at = place[r, of[best[r, i]]]
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
def accumulate(order, upto, part, out):
    """out f32[R, K]: the sum of part [R, P] over the first upto[i, k] pages of an order i32[N, H, P], upto i64[N, K] ascending; row
    r = i * G + g has the order of its head, or the one of all heads; float64 sums.

    A sum waits for the one before it, so those of four heads grow together."""
    steps, heads = order.shape[:2]
    group = len(part) // steps
    for i in range(steps):
        for g in range(0, group, 4):
            w, x, y, z = g, min(g + 1, group - 1), min(g + 2, group - 1), min(g + 3, group - 1)
            ow, ox, oy, oz = order[i, w % heads], order[i, x % heads], order[i, y % heads], order[i, z % heads]
            w, x, y, z = i * group + w, i * group + x, i * group + y, i * group + z
            pw, px, py, pz, kw, kx, ky, kz = part[w], part[x], part[y], part[z], out[w], out[x], out[y], out[z]
            a = b = c = d = 0.0
            done = 0
            for k in range(out.shape[1]):
                for at in range(done, upto[i, k]):
                    a += pw[np.uint32(ow[at])]  # unsigned: nobody asks whether a place is below 0
                    b += px[np.uint32(ox[at])]
                    c += py[np.uint32(oy[at])]
                    d += pz[np.uint32(oz[at])]
                done = upto[i, k]
                kw[k], kx[k], ky[k], kz[k] = a, b, c, d


@njit(nogil=True, cache=True, error_model="numpy")
def add_rows(rows, total):
    """total f64[M] += every row of [n, M], one after the other: so the sum is the same however rows are cut into blocks."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(len(total)):
            total[j] += np.float64(row[j])


@njit(nogil=True, cache=True, error_model="numpy")
def union_growth(place, rows, pages, tokens):
    """How what the G heads of a group read together grows with the budget: pages, tokens i32[nb, K] at k = 1 ... K.

    place i32[nb, G, P]: a head reads the pages at a place below k; rows i64[nb, P]: valid rows of a page."""
    nb, group, width = place.shape
    budgets = pages.shape[1]
    for i in range(nb):
        pages[i] = 0
        tokens[i] = 0
        for p in range(width):
            first = place[i, 0, p]
            for g in range(1, group):
                first = min(first, place[i, g, p])
            if first < budgets:
                pages[i, first] += 1
                tokens[i, first] += rows[i, p]
        for k in range(1, budgets):
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
