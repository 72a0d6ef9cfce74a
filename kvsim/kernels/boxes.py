"""Min-max boxes of pages, and their upper bounds of q·k.

Both are sums and comparisons of float64 in a fixed order; every product is fused with the sum before it, on every machine, so a score
has the same bits whatever else is scored beside it. Pages are turned, a tile at a time, to lie side by side in the vector lanes.

Kernels that inline numbers of another file are cached here: after an edit there, touch this one."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from kvsim.kernels.exp import larger64, smaller64
from kvsim.kernels.product import WIDE

Floats = NDArray[np.float64]
TILE, QUERIES = (32, 4) if WIDE else (16, 3)  # pages and queries whose sums stay in registers: sums wait for the ones before them
VECTOR = 8  # numbers of a 512-bit register; narrower machines split it


@numba.njit(nogil=True, cache=True, error_model="numpy")
def rows_of(valid):
    """valid bool[m, S] -> rows i64[m, S], count i64[m]: the first count[m] are the places of a page's rows, ascending."""
    rows, count = np.zeros(valid.shape, np.int64), np.zeros(len(valid), np.int64)
    for i in range(len(valid)):
        for s in range(valid.shape[1]):
            if valid[i, s]:
                rows[i, count[i]] = s
                count[i] += 1
    return rows, count


@numba.njit(nogil=True, cache=True, error_model="numpy")
def corners(low: Floats, high: Floats, rows: NDArray[np.int64], count: NDArray[np.int64], lo: Floats, hi: Floats) -> None:
    """low, high [m, S, d]: where each key lies, the same array twice when it is known; rows [m, S]: the first count[m] are the page's
    rows in the order they are split; lo, hi [m, n, d].

    n parts of sizes that differ by at most one, larger first; a part without rows repeats the first box."""
    m, _, d = low.shape
    n = lo.shape[1]
    for i in range(m):
        start = 0
        for b in range(n):
            size = count[i] // n + (1 if b < count[i] % n else 0)
            if size == 0:
                for j in range(d):
                    lo[i, b, j] = lo[i, 0, j] if b else 0.0
                    hi[i, b, j] = hi[i, 0, j] if b else 0.0
                continue
            _extremes(low[i], high[i], rows[i, start : start + size], lo[i, b], hi[i, b])
            start += size


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _extremes(low, high, rows, lo, hi):
    """lo, hi [d] of low, high [S, d] at `rows`, four rows a pass."""
    d, last = len(lo), len(rows) - 1
    for s in range(0, len(rows), 4):
        at = rows[s], rows[min(s + 1, last)], rows[min(s + 2, last)], rows[min(s + 3, last)]
        a, b, c, e = low[at[0]], low[at[1]], low[at[2]], low[at[3]]
        for j in range(d):
            least = smaller64(smaller64(a[j], b[j]), smaller64(c[j], e[j]))
            lo[j] = least if s == 0 else smaller64(lo[j], least)
        a, b, c, e = high[at[0]], high[at[1]], high[at[2]], high[at[3]]
        for j in range(d):
            most = larger64(larger64(a[j], b[j]), larger64(c[j], e[j]))
            hi[j] = most if s == 0 else larger64(hi[j], most)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def bounds(q: Floats, lo: Floats, hi: Floats, out: Floats) -> None:
    """q [N, H, G, d], lo, hi [H, P, n, d], out [N, H, G, P]: the largest q·k in a page's boxes, summed over d ascending."""
    steps, heads, group, d = q.shape
    pages, n = lo.shape[1:3]
    rows = steps * group
    most = rows + -rows % QUERIES
    query, side = np.zeros((most, d)), np.zeros((most, d), np.uint32)  # both pass by once a tile
    room = np.zeros(2 * d * TILE + VECTOR)
    start = -(room.ctypes.data // 8) % VECTOR  # on a cache line: a load across two costs twice
    box, total = room[start : start + 2 * d * TILE].reshape((2, d, TILE)), np.empty((QUERIES, TILE))
    for h in range(heads):
        for r in range(rows):
            for j in range(d):
                query[r, j] = q[r // group, h, r % group, j]
                side[r, j] = d * TILE if query[r, j] > 0.0 else 0
        for first in range(0, pages, TILE):
            width = min(TILE, pages - first)
            for b in range(n):
                for p in range(width):
                    for j in range(d):
                        box[0, j, p] = lo[h, first + p, b, j]
                        box[1, j, p] = hi[h, first + p, b, j]
                for r in range(0, rows, QUERIES):
                    _reach(query[r : r + QUERIES], side[r : r + QUERIES], box, total)
                    for k in range(min(QUERIES, rows - r)):
                        into = out[(r + k) // group, h, (r + k) % group, first : first + width]
                        for p in range(width):
                            into[p] = total[k, p] if b == 0 else larger64(into[p], total[k, p])


@intrinsic
def _reach(typing, q, side, box, total):
    """q [QUERIES, d], box [2, d, TILE] (low and high corners), side u32 [QUERIES, d]: where in `box` the corners of q_j's side begin, total
    [QUERIES, TILE]: the sums over j of q_j times the corner on its side, ascending, each product and sum rounded once.

    Written in vectors because the sums then stay in registers: LLVM makes twice the time of the plain loops."""
    vector, word = ir.VectorType(ir.DoubleType(), VECTOR), ir.IntType(64)
    every = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR)

    def code(context, builder, sig, args):
        q, side, box, total = (make_array(kind)(context, builder, x) for kind, x in zip(sig.args, args, strict=True))
        dim, before = builder.extract_value(q.shape, 1), builder.block
        fma = builder.module.declare_intrinsic(f"llvm.fma.v{VECTOR}f64", (), ir.FunctionType(vector, [vector] * 3))

        def at(array, i, kind=None):
            place = builder.gep(array.data, [i])
            return place if kind is None else builder.bitcast(place, kind.as_pointer())

        def number(i):
            return ir.Constant(word, i)

        loop, done = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        j = builder.phi(word)
        sums = [[builder.phi(vector) for _ in range(0, TILE, VECTOR)] for _ in range(QUERIES)]
        for r, mine in enumerate(sums):
            place = builder.add(builder.mul(dim, number(r)), j)
            factor = builder.insert_element(ir.Constant(vector, ir.Undefined), builder.load(at(q, place)), ir.IntType(32)(0))
            factor = builder.shuffle_vector(factor, factor, every)
            corner = builder.add(builder.zext(builder.load(at(side, place)), word), builder.mul(j, number(TILE)))
            for i, old in enumerate(mine):
                corners = builder.load(at(box, builder.add(corner, number(i * VECTOR)), vector), align=8)
                old.add_incoming(ir.Constant(vector, [0.0] * VECTOR), before)
                mine[i] = builder.call(fma, [factor, corners, old])
                old.add_incoming(mine[i], loop)
        after = builder.add(j, number(1))
        j.add_incoming(number(0), before)
        j.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, dim), loop, done)
        builder.position_at_end(done)
        for r, mine in enumerate(sums):
            for i, x in enumerate(mine):
                builder.store(x, at(total, number(r * TILE + i * VECTOR), vector), align=8)
        return context.get_dummy_value()

    return types.void(q, side, box, total), code
