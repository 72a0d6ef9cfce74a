"""Vectors of 512 bits where a CPU has them. LLVM keeps to 256 on Intel CPUs, which once slowed down while the wider ones were in use;
BLAS has them in use anyway."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic


@intrinsic
def wide(typing):
    """First in a kernel: LLVM may vectorise its loops for 512 bits. For loops of arithmetic, such as exponentials; those that wait for
    memory gain nothing. Other CPUs take the widest they have, as without it."""

    def code(context, builder, sig, args):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite's own add knows none with a value
        return context.get_dummy_value()

    return types.void(), code
