"""2**x of the kernels, alone and inside a vectorised loop, against numpy's in more bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsim.kernels.dense import page_stats64, weights
from kvsim.kernels.exp import exp2_32, exp2_64, larger32, larger64


def vector32(x):
    """exp2_32 of many numbers, as a kernel computes it."""
    out, every = np.empty((1, len(x)), np.float32), np.ones(1, np.uint8)
    weights(np.float32(x)[None], every[None], every, len(x), np.float32(1), np.float32(0), np.zeros(len(x), np.float32), out)
    return out[0]


def vector64(x):
    """1 + exp2_64 of many numbers below 0: the mass of pages whose largest logit is 0."""
    dots, every, stats = np.stack([np.zeros(len(x)), x]), np.ones(2, np.uint8), np.empty((2, 1, len(x)))
    page_stats64(dots, every[None], every, np.array([0, 2]), len(x), 1.0, 0.0, *stats)
    return stats[1, 0]


def test_float32_is_right_to_a_few_units_in_the_last_place():
    x = np.concatenate([np.linspace(-126, 127, 200_001), np.linspace(-1, 1, 50_001)]).astype(np.float32)
    assert np.abs(vector32(x) / np.exp2(x.astype(np.float64)) - 1).max() < 2.3e-7
    assert (np.diff(vector32(np.arange(-126, 128).astype(np.float32))) > 0).all()


def test_float64_is_right_to_a_few_units_in_the_last_place():
    x = np.linspace(-1000, 1000, 20_001)
    exact = np.exp2(x.astype(np.longdouble))
    assert max(abs(exp2_64(a) / b - 1) for a, b in zip(x.tolist(), exact, strict=True)) < 4e-16
    below = np.linspace(-60, 0, 10_001)
    assert np.abs(vector64(below) - (1 + np.exp2(below))).max() < 4.5e-16


@given(st.floats(-130, 127, width=32))
def test_a_vector_lane_has_the_bits_of_a_single_number(x):
    lanes = vector32(np.full(37, x, np.float32))
    assert (lanes == np.float32(exp2_32(np.float32(x)))).all()


def test_powers_are_exact_and_what_is_too_small_is_zero():
    assert [exp2_32(np.float32(n)) for n in (-126, -1, 0, 1, 127)] == [2.0**-126, 0.5, 1, 2, 2.0**127]
    assert [exp2_64(float(n)) for n in (-1022, -1, 0, 1, 1023)] == [2.0**-1022, 0.5, 1, 2, 2.0**1023]
    assert [exp2_32(np.float32(x)) for x in (-126.00001, -1e30, -np.inf)] == [0, 0, 0]
    assert [exp2_64(x) for x in (-1022.0001, -1e300, -np.inf)] == [0, 0, 0]
    assert not vector32([-126.00001, -1e30, -np.inf]).any()


def test_the_larger_of_two():
    for larger, kind in ((larger32, np.float32), (larger64, np.float64)):
        for a, b in ((1, 2), (2, 1), (-1, -2), (0, 0), (-1e30, 5)):
            assert call(larger, kind(a), kind(b)) == max(a, b)


def call(larger, a, b):
    """An intrinsic, from outside a kernel."""
    from numba import njit

    return njit(lambda x, y: larger(x, y))(a, b)
