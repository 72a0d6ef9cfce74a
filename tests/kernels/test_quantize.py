"""The coding kernel against its naive twin."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.kernels.quantize import extremes, roundtrip
from tests import naive


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_groups_are_coded_as_the_naive_twin_does(bits):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((3, 7, 5)) * np.array([1e-9, 1.0, 300.0])[:, None, None]
    x[1, :, 2] = 0.25  # a group of one value
    low, high = np.empty((2, 3, 5))
    extremes(x, low, high)
    assert np.array_equal(low, x.min(axis=1))
    assert np.array_equal(high, x.max(axis=1))
    zero = x.min(axis=1).astype(np.float16).astype(float)
    step = ((x.max(axis=1) - x.min(axis=1)) / (2**bits - 1)).astype(np.float16).astype(float)
    out = np.full_like(x, np.nan)
    roundtrip(x, zero, step, 2**bits - 1, out)
    want = [[naive.minmax_roundtrip(x[a, :, b].tolist(), bits) for b in range(5)] for a in range(3)]
    assert np.array_equal(out, np.moveaxis(np.array(want), 2, 1))


def test_halves_go_to_even_and_codes_stay_inside():
    x = np.array([-9.0, 0.5, 1.5, 2.5, 99.0]).reshape(1, 5, 1)
    out = np.empty_like(x)
    roundtrip(x, np.zeros((1, 1)), np.ones((1, 1)), 3, out)
    assert out.ravel().tolist() == [0, 0, 2, 2, 3]


def test_a_group_alone_is_coded_as_one_of_many():
    """Groups of one column have loops of their own."""
    x = np.random.default_rng(0).standard_normal((4, 9, 3))
    zero, step, out = np.round(x.min(axis=1), 1), np.round(np.ptp(x, axis=1) / 3, 1), np.empty_like(x)
    roundtrip(x, zero, step, 3.0, out)
    for b in range(3):
        one = np.ascontiguousarray(x[:, :, b : b + 1])
        alone, (low, high) = np.empty_like(one), np.empty((2, 4, 1))
        roundtrip(one, zero[:, b : b + 1].copy(), step[:, b : b + 1].copy(), 3.0, alone)
        extremes(one, low, high)
        assert np.array_equal(alone[:, :, 0], out[:, :, b])
        assert np.array_equal(low[:, 0], one.min(axis=(1, 2)))
        assert np.array_equal(high[:, 0], one.max(axis=(1, 2)))
