"""One decode step of one layer on a CPU, as engines do it on a GPU: what `kvsim cost measure --device cpu` times.

Float32, one thread, memory read once. q [B, H, G, d]: G query heads share each of H kv heads; k, v [B, H, P, S, d]: P pages of S
tokens. The results are right (tests/kernels/test_decode.py), or the times would be of something else."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvsim.kernels.exp import exp2_32

LOG2E = 1.4426950408889634


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def dot(a, b):
    total = np.float32(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def attend(q, k, v, table, out):
    """Softmax attention over the pages that table i32[B, H, K] names -> out [B, H, G, dv]; a page at a time, rescaled when the peak grows."""
    group, d = q.shape[2:]
    size, wide = v.shape[3:]
    unit = np.float32(LOG2E / np.sqrt(d))
    w = np.empty((group, size), np.float32)
    peak, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            acc = out[b, h]
            acc[:] = np.float32(0)
            peak[:] = np.float32(-1e30)
            total[:] = np.float32(0)
            for i in range(table.shape[2]):
                p = table[b, h, i]
                for s in range(size):
                    for g in range(group):
                        w[g, s] = dot(q[b, h, g], k[b, h, p, s]) * unit
                for g in range(group):
                    top = peak[g]
                    for s in range(size):
                        top = max(top, w[g, s])
                    shrink = exp2_32(peak[g] - top)
                    if shrink != np.float32(1):
                        total[g] *= shrink
                        for j in range(wide):
                            acc[g, j] *= shrink
                    peak[g] = top
                    for s in range(size):
                        w[g, s] = exp2_32(w[g, s] - top)
                        total[g] += w[g, s]
                for s in range(size):
                    for g in range(group):
                        for j in range(wide):
                            acc[g, j] += w[g, s] * v[b, h, p, s, j]
            for g in range(group):
                for j in range(wide):
                    acc[g, j] /= total[g]


@njit(nogil=True, cache=True, error_model="numpy")
def copy_pages(k, v, table, k_out, v_out):
    """The pages that table i32[B, H, K] names, one after the other -> k_out, v_out [B, H, K, S, d]."""
    for b in range(table.shape[0]):
        for h in range(table.shape[1]):
            for i in range(table.shape[2]):
                k_out[b, h, i] = k[b, h, table[b, h, i]]
                v_out[b, h, i] = v[b, h, table[b, h, i]]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def scan(q, summary, out):
    """Upper bounds of q·k of every page from its smallest and largest keys, summary [B, H, P, 2, d] -> out [B, H, G, P]."""
    group, d = q.shape[2:]
    below, above = np.empty((group, d), np.float32), np.empty((group, d), np.float32)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for g in range(group):
                for j in range(d):
                    below[g, j] = min(q[b, h, g, j], np.float32(0))
                    above[g, j] = max(q[b, h, g, j], np.float32(0))
            for p in range(summary.shape[2]):
                for g in range(group):
                    out[b, h, g, p] = dot(below[g], summary[b, h, p, 0]) + dot(above[g], summary[b, h, p, 1])


@njit(nogil=True, cache=True, error_model="numpy")
def best(bounds, out):
    """Pages of the highest bounds [B, H, G, P] -> out i64[B, H, K], ascending, ties to the lower page; a group's best query head decides.

    Four passes over the bits, a byte each, from the highest: the time does not depend on the numbers."""
    pages = bounds.shape[3]
    w, key, count = np.empty(pages, np.float32), np.empty(pages, np.int64), np.empty(256, np.int64)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            w[:] = bounds[b, h, 0]
            for g in range(1, bounds.shape[2]):
                for p in range(pages):
                    w[p] = max(w[p], bounds[b, h, g, p])
            bits = w.view(np.int32)
            for p in range(pages):
                key[p] = np.int64(bits[p] if bits[p] >= 0 else bits[p] ^ np.int32(0x7FFFFFFF)) + (1 << 31)
            least, left = 0, out.shape[2]  # the key of the last page taken, and how many of that key
            for shift in (24, 16, 8, 0):
                count[:] = 0
                for p in range(pages):
                    if key[p] >> (shift + 8) == least:
                        count[(key[p] >> shift) & 255] += 1
                digit = 255
                while count[digit] < left:
                    left -= count[digit]
                    digit -= 1
                least = (least << 8) | digit
            n = 0
            for p in range(pages):
                if key[p] > least or (key[p] == least and left > 0):
                    left -= key[p] == least
                    out[b, h, n] = p
                    n += 1


@njit(nogil=True, cache=True, error_model="numpy")
def update(summary, key, page):
    """A new key [B, H, d] enters the smallest and largest of its page, summary [B, H, P, 2, d]."""
    for b in range(key.shape[0]):
        for h in range(key.shape[1]):
            for j in range(key.shape[2]):
                x = key[b, h, j]
                summary[b, h, page, 0, j] = min(summary[b, h, page, 0, j], x)
                summary[b, h, page, 1, j] = max(summary[b, h, page, 1, j], x)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def unpack(codes, step, zero, out):
    """codes u8[m, n / 2], two of four bits each, low before high; step, zero [m]: of each group -> out [m, n]."""
    half = codes.shape[1]
    for i in range(codes.shape[0]):
        for j in range(half):
            out[i, j] = np.float32(codes[i, j] & 15) * step[i] + zero[i]
            out[i, half + j] = np.float32(codes[i, j] >> 4) * step[i] + zero[i]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def probabilities(q, k, out):
    """Softmax over all tokens, k [B, H, T, d] -> out [B, H, G, T], written, read and written again."""
    unit = np.float32(LOG2E / np.sqrt(q.shape[3]))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(k.shape[2]):
                for g in range(q.shape[2]):
                    out[b, h, g, t] = dot(q[b, h, g], k[b, h, t]) * unit
            for g in range(q.shape[2]):
                row = out[b, h, g]
                top = row.max()
                total = np.float32(0)
                for t in range(len(row)):
                    row[t] = exp2_32(row[t] - top)
                    total += row[t]
                for t in range(len(row)):
                    row[t] /= total


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def read(x):
    """The sum of x [n], so that every number is read and nothing is written."""
    total = np.float32(0)
    for j in range(len(x)):
        total += x[j]
    return total
