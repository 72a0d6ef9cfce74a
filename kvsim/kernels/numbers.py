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


@njit(nogil=True, cache=True, error_model="numpy")
def _halves(bits, out):
    for t in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[t, j] = _half(bits[t, j])


def to_float32(x: np.ndarray, rows: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
    """Raw numbers [n, d] (float32, float16, or bfloat16 bits as uint16) -> float32 [rows or n, d] or `out`, zeros beyond n. Exact."""
    if out is None:
        out = np.zeros((rows or len(x), x.shape[1]), np.float32)
    else:
        out[len(x) :] = 0
    if x.dtype == np.float16:
        _halves(x.view(np.uint16), out)
    elif x.dtype == np.uint16:
        np.left_shift(x, 16, out=out.view(np.uint32)[: len(x)], dtype=np.uint32, casting="unsafe")
    else:
        out[: len(x)] = x
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _some_halves(bits, rows, out):
    near = np.empty(bits.shape[1], np.float32)
    for i in range(len(rows)):
        row, into = bits[rows[i]], out[i]
        for j in range(len(near)):
            near[j] = _half(row[j])
        for j in range(len(near)):  # a loop of its own: from half to double there is no instruction
            into[j] = near[j]


def to_float64(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Some rows i64[m] of raw numbers [n, d] -> float64 [m, d]. Exact."""
    if x.dtype != np.float16:
        return to_float32(np.ascontiguousarray(x[rows])).astype(np.float64)
    out = np.empty((len(rows), x.shape[1]))
    _some_halves(x.view(np.uint16), rows, out)
    return out
