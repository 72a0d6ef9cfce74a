"""The coding kernel against its naive twin, and its fp16 against numpy's."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from kvsim.kernels import quantize
from kvsim.kernels.quantize import roundtrip
from tests import naive


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 5])
def test_groups_are_coded_as_the_naive_twin_does(bits, width):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((3, 7, width)) * np.array([1e-9, 1.0, 300.0])[:, None, None]
    x[1, :, width // 2] = 0.25  # a group of one value
    out = np.full_like(x, np.nan)
    assert roundtrip(x, 2.0**bits - 1, out)
    want = [[naive.minmax_roundtrip(x[a, :, b].tolist(), bits) for b in range(width)] for a in range(3)]
    assert np.array_equal(out, np.moveaxis(np.array(want), 2, 1))


def test_halves_go_to_even_and_codes_stay_inside():
    x = np.array([-0.0002, 0.5, 1.5, 2.5, 3.0002]).reshape(1, 5, 1)  # fp16 holds the step as 1
    out = np.empty_like(x)
    roundtrip(x, 3.0, out)
    zero = float(np.float16(-0.0002))
    assert out.ravel().tolist() == [zero, zero + 1, zero + 2, zero + 3, zero + 3]


def test_a_group_alone_is_coded_as_one_of_many():
    """Groups of one column have loops of their own."""
    x = np.random.default_rng(0).standard_normal((4, 9, 3))
    out = np.empty_like(x)
    roundtrip(x, 3.0, out)
    for b in range(3):
        one = np.ascontiguousarray(x[:, :, b : b + 1])
        alone = np.empty_like(one)
        roundtrip(one, 3.0, alone)
        assert np.array_equal(alone[:, :, 0], out[:, :, b])


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("low", "high", "fits"), [(0, 3 * 65519.0, True), (0, 3 * 65520.0, False), (-65519, 0, True), (-65520, 0, False)]
)
def test_a_zero_or_a_step_beyond_fp16_is_told(low, high, fits, width):
    x = np.zeros((2, 2, width))
    x[1, :, -1] = low, high
    assert roundtrip(x, 3.0, np.empty_like(x)) == fits


@numba.njit
def rounded(x, out):
    for i in range(len(x)):
        out[i] = quantize.fp16(x[i])


def test_fp16_is_the_nearest_to_every_number_between_two_neighbours():
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536  # where infinity begins
    middle = (halves[1:] + halves[:-1]) / 2
    near = np.concatenate([halves, middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9), np.nextafter(halves, 1e9)])
    x = np.concatenate([near, -near])
    out = np.empty_like(x)
    rounded(x, out)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).astype(np.float64)
    assert np.array_equal(out, np.where(np.isinf(want), np.copysign(65536, x), want))
