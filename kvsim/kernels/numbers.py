"""Stored bits to float32: numba has no half type on the CPU, and numpy's own cast is six times slower than the instruction."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic


@intrinsic
def _half(typing, x):
    def code(context, builder, sig, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def _brain(typing, x):
    def code(context, builder, sig, args):
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.uint16), code


@njit(nogil=True, cache=True, error_model="numpy")
def _halves(bits, out):
    for t in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[t, j] = _half(bits[t, j])


def to_float32(x: np.ndarray, rows: int | None = None) -> np.ndarray:
    """Raw numbers [n, d] (float32, float16, or bfloat16 bits as uint16) -> float32 [rows or n, d], zeros beyond n. Exact."""
    out = np.zeros((rows or len(x), x.shape[1]), np.float32)
    if x.dtype == np.float16:
        _halves(x.view(np.uint16), out)
    elif x.dtype == np.uint16:
        np.left_shift(x, 16, out=out.view(np.uint32)[: len(x)], dtype=np.uint32, casting="unsafe")
    else:
        out[: len(x)] = x
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _rows_of_halves(bits, at, out):
    for i in range(len(at)):
        row, to = bits[at[i]], out[i]
        for j in range(len(row)):
            to[j] = _half(row[j])


@njit(nogil=True, cache=True, error_model="numpy")
def _rows_of_brains(bits, at, out):
    for i in range(len(at)):
        row, to = bits[at[i]], out[i]
        for j in range(len(row)):
            to[j] = _brain(row[j])


def rows64(x: np.ndarray, at: np.ndarray, out: np.ndarray) -> None:
    """Rows `at` i64[n] of raw numbers [T, d] (as in to_float32) -> out f64[n, d]. Exact."""
    if x.dtype == np.float16:
        _rows_of_halves(x.view(np.uint16), at, out)
    elif x.dtype == np.uint16:
        _rows_of_brains(x, at, out)
    else:
        out[:] = x[at]
