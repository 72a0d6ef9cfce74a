"""Sums of values by the bucket that a page is in: what every budget of a curve has read, from one pass over the values."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kvsim.kernels.exp import exp2_32
from kvsim.kernels.sparse import below
from kvsim.kernels.wide import wide

NEAR = 256  # slots whose weights and values stay in the cache for all rows
VECTOR = 16  # numbers of a 512-bit register; narrower machines split it
STRIP, TOGETHER = 2 * VECTOR, 3  # columns of values, and rows, whose sums stay in registers: six vectors, twelve on AVX2


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def bucket_values(dots, values, first, last, start, bucket, unit, cap, lse, sums, weight):
    """Value sums of every page over the positions first[i] ... last[i], gathered by the bucket that the page is in.

    dots f32[T, R], values f32[T, dv], start i64[P + 1], bucket i32[nb, G, P]; sums f64[R, B, dv] += p v, weight f64[R, B] += p, with p
    the dense probability. What a few pages need stays in the cache for all rows: that and sums in registers halve the time."""
    wide()
    nb, group, pages = bucket.shape
    rows, dim, width = nb * group, values.shape[1], max(NEAR, np.diff(start).max())
    e, total = np.zeros((width, rows + -rows % TOGETHER), np.float32), np.empty((NEAR, rows))
    shift = lse.astype(np.float32)
    near = np.zeros((-(-dim // STRIP), width, STRIP), np.float32)
    part = np.empty((TOGETHER, near.shape[0] * STRIP), np.float32)
    stop = 0
    while stop < pages:
        p0, stop = stop, _stop(start, stop)
        begin = start[p0]
        for c in range(near.shape[0]):
            for s in range(begin, start[stop]):
                for j in range(min(STRIP, dim - c * STRIP)):
                    near[c, s - begin, j] = values[s, c * STRIP + j]
        for p in range(p0, stop):
            page = e[start[p] - begin : start[p + 1] - begin]
            _probabilities(dots, first, last, start[p], group, unit, cap, shift, page, total[p - p0])
        for r0 in range(0, rows, TOGETHER):
            for p in range(p0, stop):
                if start[p] == start[p + 1]:
                    continue
                _value_sums(e, r0, start[p] - begin, start[p + 1] - begin, near, part)
                for r in range(r0, min(r0 + TOGETHER, rows)):
                    b = bucket[r // group, r % group, p]
                    weight[r, b] += total[p - p0, r]
                    into, mine = sums[r, b], part[r - r0]
                    for j in range(dim):
                        into[j] += np.float64(mine[j])


@njit(nogil=True, cache=True, error_model="numpy")
def _stop(start, first):
    """The page after those from `first` on that stand on NEAR slots; one of them at least."""
    stop = first + 1
    while stop + 1 < len(start) and stop - first < NEAR and start[stop + 1] - start[first] <= NEAR:
        stop += 1
    return stop


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def _probabilities(dots, first, last, start, group, unit, cap, shift, out, total):
    """out f32[n, R'] = dense probability of the slots start ... start + n - 1, 0 where a step does not see one; total f64[R]: their sum.
    shift f32[R]: the denominator in powers of 2."""
    wide()
    rows, seen_from, seen_to = len(total), first.max(), last.min()
    for r in range(rows):
        total[r] = 0.0
    for k in range(out.shape[0]):
        s, x, w = start + k, dots[start + k], out[k]
        for r in range(rows):
            w[r] = below(x[r], unit, cap, shift[r])
        for r in range(rows):
            w[r] = exp2_32(w[r])
        if not seen_from <= s <= seen_to:
            for r in range(rows):
                if not first[r // group] <= s <= last[r // group]:
                    w[r] = np.float32(0)
        for r in range(rows):
            total[r] += np.float64(w[r])


@intrinsic
def _value_sums(typing, e, r, start, stop, near, part):
    """part f32[TOGETHER, dv padded]: the sums over k of e[k, r ... r + TOGETHER - 1] times near[:, k], start <= k < stop, ascending, each
    product and sum rounded once. e f32[n, R'], near f32[dv padded / STRIP, n, STRIP].

    Written in vectors because the sums then stay in registers, and a value is loaded once for several rows."""
    vector, word = ir.VectorType(ir.FloatType(), VECTOR), ir.IntType(64)
    every, zero = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR), ir.Constant(vector, [0.0] * VECTOR)

    def code(context, builder, sig, args):
        e, near, part = (make_array(sig.args[i])(context, builder, args[i]) for i in (0, 4, 5))
        (r, start, stop), before = args[1:4], builder.block
        fma = builder.module.declare_intrinsic(f"llvm.fma.v{VECTOR}f32", (), ir.FunctionType(vector, [vector] * 3))
        (slots, rows), dim = (builder.extract_value(e.shape, i) for i in (0, 1)), builder.extract_value(part.shape, 1)

        def at(array, row, width, column, kind=None):
            place = builder.gep(array.data, [builder.add(builder.mul(row, width), column)])
            return place if kind is None else builder.bitcast(place, kind.as_pointer())

        def number(i):
            return ir.Constant(word, i)

        strip, loop, last, done = (builder.append_basic_block() for _ in range(4))
        builder.branch(strip)
        builder.position_at_end(strip)
        c = builder.phi(word)
        above = builder.mul(c, slots)
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(word)
        sums = [[builder.phi(vector) for _ in range(0, STRIP, VECTOR)] for _ in range(TOGETHER)]
        row = builder.add(above, k)
        found = [builder.load(at(near, row, number(STRIP), number(v), vector), align=4) for v in range(0, STRIP, VECTOR)]
        for i, mine in enumerate(sums):
            one = builder.load(at(e, k, rows, builder.add(r, number(i))))
            factor = builder.insert_element(ir.Constant(vector, ir.Undefined), one, ir.IntType(32)(0))
            factor = builder.shuffle_vector(factor, factor, every)
            for v, old in enumerate(mine):
                mine[v] = builder.call(fma, [factor, found[v], old])
                old.add_incoming(zero, strip)
                old.add_incoming(mine[v], loop)
        after = builder.add(k, number(1))
        k.add_incoming(start, strip)
        k.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, stop), loop, last)
        builder.position_at_end(last)
        for i, mine in enumerate(sums):
            for v, x in enumerate(mine):
                column = builder.add(builder.mul(c, number(STRIP)), number(v * VECTOR))
                builder.store(x, at(part, number(i), dim, column, vector), align=4)
        beyond = builder.add(c, number(1))
        c.add_incoming(number(0), before)
        c.add_incoming(beyond, last)
        builder.cbranch(builder.icmp_signed("<", builder.mul(beyond, number(STRIP)), dim), strip, done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(e, r, start, stop, near, part), code
