"""Stored bits to float32: numba has no half type on the CPU, and numpy's own cast is six times slower than the instruction."""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, njit
from numba.core import types
from numba.extending import intrinsic


def has_halves() -> bool:
    """Whether the CPU that numba compiles for turns halves into float32 itself. For an x86 that does not (before 2012, some small ones since,
    emulators) LLVM calls a function that nothing links, which ends the process."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    asked: str | None = config.CPU_FEATURES
    return bool(get_host_cpu_features().get("f16c")) if asked is None else "+f16c" in asked.split(",")


@intrinsic
def half_to_float(typing, x):
    def code(context, builder, sig, args):
        if has_halves():
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)  # the exponent's bias is 112 less: a factor of 2 ** 112, for subnormal numbers, too
        bits = builder.zext(args[0], word)
        size = builder.and_(bits, word(0x7FFF))
        moved = builder.bitcast(builder.shl(size, word(13)), ir.FloatType())
        positive = builder.bitcast(builder.fmul(moved, ir.Constant(ir.FloatType(), 2.0**112)), word)
        endless = builder.icmp_unsigned(">=", size, word(0x7C00))  # infinity and NaN
        positive = builder.select(endless, builder.or_(positive, word(0x7F800000)), positive)
        sign = builder.shl(builder.and_(bits, word(0x8000)), word(16))
        return builder.bitcast(builder.or_(positive, sign), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def brain_to_float(typing, x):
    def code(context, builder, sig, args):
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.uint16), code


@njit(nogil=True, cache=True, error_model="numpy")
def halves(bits, out):
    """out f32[n or more, d] = float16 bits [n, d]."""
    for t in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[t, j] = half_to_float(bits[t, j])


@njit(nogil=True, cache=True, error_model="numpy")
def brains(bits, out):
    """The same of bfloat16."""
    for t in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[t, j] = brain_to_float(bits[t, j])


def to_float32(x: np.ndarray, rows: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
    """Raw numbers [n, d] (float32, float16, or bfloat16 bits as uint16) -> float32 [rows or n, d] or `out`, zeros beyond n. Exact."""
    if out is None:
        out = np.zeros((rows or len(x), x.shape[1]), np.float32)
    else:
        out[len(x) :] = 0
    if x.dtype == np.float16:
        halves(x.view(np.uint16), out)
    elif x.dtype == np.uint16:
        brains(x, out)
    else:
        out[: len(x)] = x
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _some_halves(bits, rows, out):
    near = np.empty(bits.shape[1], np.float32)
    for i in range(len(rows)):
        row, into = bits[rows[i]], out[i]
        for j in range(len(near)):
            near[j] = half_to_float(row[j])
        for j in range(len(near)):  # a loop of its own: from half to double there is no instruction
            into[j] = near[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _some_brains(bits, rows, out):
    for i in range(len(rows)):
        row, into = bits[rows[i]], out[i]
        for j in range(len(row)):
            into[j] = brain_to_float(row[j])


def to_float64(x: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Some rows i64[m] of raw numbers [n, d] (as in to_float32) -> float64 [m, d], into `out` where it is given. Exact."""
    out = np.empty((len(rows), x.shape[1])) if out is None else out
    if x.dtype == np.float16:
        _some_halves(x.view(np.uint16), rows, out)
    elif x.dtype == np.uint16:
        _some_brains(x, rows, out)
    else:
        out[:] = x[rows]
    return out
