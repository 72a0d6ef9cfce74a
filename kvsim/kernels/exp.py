"""2**x as a polynomial that LLVM vectorises; libm's exp, one number at a time, is ten times slower inside a kernel.

Kernels that inline these are cached with them: after an edit here, touch the files that import it (numba does not see the change)."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic


def _bitcast(source, target, llvm):
    @intrinsic
    def cast(typing, x):
        return target(source), lambda context, builder, sig, args: builder.bitcast(args[0], llvm)

    return cast


def _to_int(source, target, llvm):
    @intrinsic
    def convert(typing, x):
        return target(source), lambda context, builder, sig, args: builder.fptosi(args[0], llvm)

    return convert


@intrinsic
def _int_float(typing, x):
    return types.float32(types.int32), lambda context, builder, sig, args: builder.sitofp(args[0], ir.FloatType())


def _nearest(kind, llvm):
    @intrinsic
    def rint(typing, x):
        def code(context, builder, sig, args):
            return builder.call(builder.module.declare_intrinsic("llvm.rint", [llvm]), [args[0]])

        return kind(kind), code

    return rint


def _extreme(kind, llvm, name):
    @intrinsic
    def extreme(typing, x, y):
        """The larger or smaller of two numbers, neither NaN, and of 0 and -0 either: max() with its NaN rules does not vectorise, nor does
        the largest of a row where zeros have an order; a compare and select becomes a masked store, four times the maximum on Zen 3."""

        def code(context, builder, sig, args):
            instruction = builder.module.declare_intrinsic(name, [llvm], ir.FunctionType(llvm, [llvm, llvm]))
            return builder.call(instruction, args, fastmath=("nnan", "nsz"))

        return kind(kind, kind), code

    return extreme


_float_bits, _bits_float = (
    _bitcast(types.float32, types.int32, ir.IntType(32)),
    _bitcast(types.int32, types.float32, ir.FloatType()),
)
_double_bits, _bits_double = (
    _bitcast(types.float64, types.int64, ir.IntType(64)),
    _bitcast(types.int64, types.float64, ir.DoubleType()),
)
_double_int = _to_int(types.float64, types.int64, ir.IntType(64))
_rint64 = _nearest(types.float64, ir.DoubleType())
larger32, larger64 = (
    _extreme(kind, llvm, "llvm.maxnum") for kind, llvm in ((types.float32, ir.FloatType()), (types.float64, ir.DoubleType()))
)
smaller64 = _extreme(types.float64, ir.DoubleType(), "llvm.minnum")

# The polynomial of degree 5 nearest to 2**x on [-1/2, 1/2], 1 at 0: largest relative error 1.1e-7 before rounding (a linear program).
_F1, _F2, _F3, _F4, _F5 = (np.float32(c) for c in (0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647273))
_D = [float(np.log(2) ** k / float(np.prod(np.arange(1, k + 1, dtype=float)))) for k in range(14)]
_D1, _D2, _D3, _D4, _D5, _D6, _D7, _D8, _D9, _D10, _D11, _D12, _D13 = _D[1:]
_ONE = np.float32(1.0)
_SHIFT = np.float32(1.5 * 2**23)
_SHIFT_BITS = _SHIFT.view(np.int32)
_LOW32, _LOW64 = np.float32(-126.0), -1022.0
_ZERO32 = np.float32(0.0)


@njit(inline="always", nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def exp2_32(x):
    """2**x for float32 x <= 127; 0 below -126; largest relative error 2.3e-7."""
    y = larger32(x, _LOW32)
    whole = _float_bits(y + _SHIFT)  # its low bits are y to the nearest integer: cheaper than rounding and converting
    f = y - _int_float(whole - _SHIFT_BITS)
    p = _F4 + f * _F5
    p = _F3 + f * p
    p = _F2 + f * p
    p = _F1 + f * p
    p = _ONE + f * p
    power = _bits_float(_float_bits(p) + (whole << np.int32(23)))
    return power if x >= _LOW32 else _ZERO32


@njit(inline="always", nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def exp2_64(x):
    """2**x for float64 x <= 1023; 0 below -1022; largest relative error 4e-16."""
    y = larger64(x, _LOW64)
    near = _rint64(y)
    f = y - near
    p = _D12 + f * _D13
    p = _D11 + f * p
    p = _D10 + f * p
    p = _D9 + f * p
    p = _D8 + f * p
    p = _D7 + f * p
    p = _D6 + f * p
    p = _D5 + f * p
    p = _D4 + f * p
    p = _D3 + f * p
    p = _D2 + f * p
    p = _D1 + f * p
    p = 1.0 + f * p
    power = _bits_double(_double_bits(p) + (_double_int(near) << np.int64(52)))
    return power if x >= _LOW64 else 0.0
