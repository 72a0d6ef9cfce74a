"""Products of matrices whose elements hang on their own row and column alone: sums over the inner dimension, ascending, each product fused
with the sum before it and rounded once. BLAS rounds an element by the shape of the call, by its place there, and by who built it; these are
the same bits in blocks of any cut, on every machine. Nor are they slower than OpenBLAS (benchmarks/grid.py)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from kvsim.kernels.memory import CACHE_LINE, empty
from kvsim.kernels.numbers import brain_to_float, half_to_float

WIDE = binding.get_host_cpu_features().get("avx512f", False) and not numba.config.CPU_NAME  # else compiled for another CPU
DOWN, ACROSS = (8, 2) if WIDE else (4, 1)  # rows and vectors of a tile whose sums fit into the registers
GRID = 32  # rows and columns in multiples of this are never short of a tile

Array = NDArray[Any]


def strips(b: Array, rows: int | None = None, out: Array | None = None) -> Array:
    """[d, m] -> [S, d or rows, W]: its columns in strips of one tile's width, on cache lines, with zeros up to a multiple of GRID columns and
    to so many rows. b: float64, or raw numbers (kernels.numbers) that become float32; out: what it made of another of that shape, written
    over."""
    kind = np.dtype(np.float64 if b.dtype == np.float64 else np.float32)
    if out is None:
        width = ACROSS * CACHE_LINE // kind.itemsize
        out = empty((-(-b.shape[1] // GRID) * GRID // width, rows or len(b), width), kind)
    if b.dtype.itemsize == 2:
        pack_raw(b.view(np.uint16), b.dtype == np.float16, out)
    else:
        pack(b, out)
    return out


@numba.njit(nogil=True, cache=True, error_model="numpy")
def pack(b, out):
    """numpy's own copies, of pieces of a row, take twice as long."""
    many, _, width = out.shape
    for j in range(len(b)):
        for s in range(many):
            into, part = out[s, j], b[j, s * width : (s + 1) * width]
            for c in range(len(part)):
                into[c] = part[c]
            into[len(part) :] = 0
    out[:, len(b) :] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def pack_raw(b, half, out):
    """The same of 16-bit numbers."""
    many, _, width = out.shape
    for j in range(len(b)):
        for s in range(many):
            into, part = out[s, j], b[j, s * width : (s + 1) * width]
            if half:
                for c in range(len(part)):
                    into[c] = half_to_float(part[c])
            else:
                for c in range(len(part)):
                    into[c] = brain_to_float(part[c])
            into[len(part) :] = 0
    out[:, len(b) :] = 0


def times(a: Array, b: Array) -> Array:
    """a [n, d] times b [d, m], of one dtype and any shape."""
    n, m = len(a), b.shape[1]
    rows = np.zeros((-(-n // GRID) * GRID, a.shape[1]), a.dtype)
    rows[:n] = a
    out = np.empty((len(rows), -(-m // GRID) * GRID), a.dtype)
    product(rows, strips(b), out)
    return out[:n, :m]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def product(a: Array, b: Array, out: Array) -> None:
    """out [n, m] = a [n, d] times what `strips` made b of; n and m multiples of GRID. float32 or float64, all three alike."""
    width = b.shape[2]
    for s in range(out.shape[1] // width):
        strip, columns = b[s], out[:, s * width : (s + 1) * width]
        for i in range(0, len(a), DOWN):
            _tile(a[i : i + DOWN], strip, columns[i : i + DOWN])


@intrinsic
def _tile(typing, a, b, out):
    """out [DOWN, W] = a [DOWN, d] times b [d, W]. In vectors, because all of its sums then stay in registers."""
    number = ir.FloatType() if a.dtype == types.float32 else ir.DoubleType()
    bits, word, lanes = a.dtype.bitwidth, ir.IntType(64), CACHE_LINE * 8 // a.dtype.bitwidth
    vector, every = ir.VectorType(number, lanes), ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)

    def code(context, builder, sig, args):
        a, b, out = (make_array(kind)(context, builder, x) for kind, x in zip(sig.args, args, strict=True))
        dim, before = builder.extract_value(b.shape, 0), builder.block
        fma = builder.module.declare_intrinsic(f"llvm.fma.v{lanes}f{bits}", (), ir.FunctionType(vector, [vector] * 3))

        def whole(i):
            return ir.Constant(word, i)

        def row(array, i):
            """Where a row begins, in numbers."""
            return builder.mul(builder.sdiv(builder.extract_value(array.strides, 0), whole(bits // 8)), i)

        def at(array, place, kind=number):
            return builder.bitcast(builder.gep(array.data, [place]), kind.as_pointer())

        rows = [row(a, whole(r)) for r in range(DOWN)]
        apart = builder.sdiv(builder.extract_value(a.strides, 1), whole(bits // 8))
        loop, done = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        j = builder.phi(word)
        sums = [[builder.phi(vector) for _ in range(ACROSS)] for _ in range(DOWN)]
        right, left = row(b, j), builder.mul(j, apart)
        columns = [builder.load(at(b, builder.add(right, whole(c * lanes)), vector), align=CACHE_LINE) for c in range(ACROSS)]
        for first, mine in zip(rows, sums, strict=True):
            factor = builder.insert_element(
                ir.Constant(vector, ir.Undefined), builder.load(at(a, builder.add(first, left))), ir.IntType(32)(0)
            )
            factor = builder.shuffle_vector(factor, factor, every)
            for c, old in enumerate(mine):
                old.add_incoming(ir.Constant(vector, [0.0] * lanes), before)
                mine[c] = builder.call(fma, [factor, columns[c], old])
                old.add_incoming(mine[c], loop)
        after = builder.add(j, whole(1))
        j.add_incoming(whole(0), before)
        j.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, dim), loop, done)
        builder.position_at_end(done)
        for r, mine in enumerate(sums):
            for c, x in enumerate(mine):
                builder.store(x, at(out, builder.add(row(out, whole(r)), whole(c * lanes)), vector), align=bits // 8)
        return context.get_dummy_value()

    return types.void(a, b, out), code
