"""8-bit floats: the nearest of 253 numbers under a scale, saturation, sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvsim.codecs.floats import e4m3
from kvsim.codecs.pipeline import pipeline
from tests import naive

rows = arrays(np.float64, (2, 3, 5), elements=st.floats(-1000, 1000, width=32))


@given(rows, st.booleans())
@settings(deadline=None, max_examples=60)
def test_each_number_is_the_nearest_of_its_row_s_numbers(x, scaled):
    got = pipeline(grid=e4m3(scaled)).encode(x).values
    for m, r in np.ndindex(2, 3):
        scale = float(np.float32(np.abs(x[m, r]).max() / 448)) or 1.0 if scaled else 1.0
        assert got[m, r].tolist() == [naive.nearest_e4m3(v / scale) * scale for v in x[m, r]]


@given(rows)
@settings(deadline=None, max_examples=60)
def test_a_scaled_number_moves_by_a_sixteenth_or_by_half_the_smallest_step(x):
    top = np.abs(x).max(axis=-1, keepdims=True)
    error = np.abs(pipeline(grid=e4m3()).encode(x).values - x)
    assert (error <= np.maximum(np.abs(x) / 16, top / 448 * 2.0**-10) * (1 + 1e-6) + 1e-30).all()


def test_without_a_scale_what_is_too_large_becomes_the_largest():
    x = np.array([[[1000.0, -449, 448, 0.3, 0]]])
    assert pipeline(grid=e4m3(False)).encode(x).values.ravel().tolist() == [448, -448, 448, 0.3125, 0]


@pytest.mark.parametrize(("scaled", "meta"), [(True, 4), (False, 0)])
def test_sizes(scaled, meta):
    coded = pipeline(grid=e4m3(scaled)).encode(np.ones((2, 3, 128)))
    assert (coded.bits == 1024).all()
    assert (coded.row_meta == meta).all()
    assert not coded.group_meta.any()
