"""A kernel may use the widest vectors of a CPU."""

from __future__ import annotations

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

from kvsim.kernels.wide import wide


@numba.njit
def scaled(x, out):
    """Twice every number."""
    wide()
    for i in range(len(x)):
        out[i] = 2 * x[i]


def assembly() -> str:
    x, out = np.arange(100.0), np.empty(100)
    scaled(x, out)
    assert out.tolist() == (2 * x).tolist()
    return next(iter(scaled.inspect_asm().values()))


def test_a_kernel_computes_what_it_did():
    assembly()


FEATURES = numba.config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()


@pytest.mark.skipif("+avx512f" not in FEATURES, reason="a CPU without registers of 512 bits")
def test_a_kernel_uses_registers_of_512_bits():
    assert "zmm" in assembly()
