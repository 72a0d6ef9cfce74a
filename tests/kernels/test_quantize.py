"""The coding kernel against its naive twin."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.kernels.quantize import roundtrip
from tests import naive


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_groups_are_coded_as_the_naive_twin_does(bits):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((3, 7, 5)) * np.array([1e-9, 1.0, 300.0])[:, None, None]
    x[1, :, 2] = 0.25  # a group of one value
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
