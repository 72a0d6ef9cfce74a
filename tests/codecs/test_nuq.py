"""Learned levels and exact outliers: the row worked by hand, what k-means must be, the bits of a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvsim.codecs.nuq import coder as grid
from kvsim.codecs.nuq import learned, nearest, of_keys, of_values, thresholds
from kvsim.codecs.pipeline import pipeline


def coder(*given):
    return pipeline(grid=grid(*given))


ROW = np.array([-1, -0.6, -0.5, -0.1, 0, 0.2, 0.4, 0.5, 0.9, 8])
LEVEL = np.array([-1, -0.3, 0.2, 1])
BACK = [-1, -0.6, -0.6, -0.075, -0.075, 0.3, 0.3, 0.3, 0.9, 8]


def test_the_row_worked_by_hand():
    low, high = thresholds(ROW, 0.1, axis=0)
    assert (float(low[0]), float(high[0])) == pytest.approx((-0.82, 4.805))
    coded = coder(2, 0.1, LEVEL).encode(ROW.reshape(1, 1, 10))
    assert coded.values.ravel().tolist() == pytest.approx(BACK)
    assert coded.bits.tolist() == [[2 * 10 + 2 * 32]]  # two outliers: a number and an index of 16 bits each
    assert coded.row_meta.tolist() == [[4 + 4]]  # where its outliers begin; offset and range


def test_the_same_numbers_down_a_channel():
    edges = of_keys(ROW.reshape(1, 10, 1), 2, 0.1)["k.edges"][0]
    assert edges.ravel().tolist() == pytest.approx([-0.82, 4.805, 0.15, 0.75])
    coded = coder(2, 0.1, LEVEL, edges).encode(ROW.reshape(10, 1, 1))
    assert coded.values.ravel().tolist() == pytest.approx(BACK)
    assert coded.bits.ravel().tolist() == [34, *[2] * 8, 34]
    assert coded.row_meta.ravel().tolist() == [4] * 10


def test_a_number_on_a_threshold_is_an_outlier_of_its_row_and_none_of_its_channel():
    x, level = np.arange(5.0), np.linspace(-1, 1, 4)
    row = coder(2, 0.5, level).encode(x.reshape(1, 1, 5))
    assert row.bits.tolist() == [[2 * 5 + 4 * 32]]  # thresholds 1 and 3: all but 2
    edges = of_keys(x.reshape(1, 5, 1), 2, 0.5)["k.edges"][0]
    assert edges.ravel().tolist() == [1, 3, 2, 1]
    assert coder(2, 0.5, level, edges).encode(x.reshape(5, 1, 1)).bits.ravel().tolist() == [34, 2, 2, 2, 34]


def test_a_fixed_range_makes_outliers_of_what_it_does_not_know():
    edges = np.array([[-1.0], [1.0], [0.0], [1.0]])
    coded = coder(2, 0.01, LEVEL, edges).encode(np.array([-1.0, 1.0, 1.5, -7.0]).reshape(4, 1, 1))
    assert coded.values.ravel().tolist() == [-1, 1, 1.5, -7]
    assert coded.bits.ravel().tolist() == [2, 2, 34, 34]


def test_without_outliers_numbers_past_the_range_become_its_end():
    edges = np.array([[-1.0], [1.0], [0.0], [1.0]])
    coded = coder(2, 0.0, LEVEL, edges).encode(np.array([-3.0, 5.0]).reshape(2, 1, 1))
    assert coded.values.ravel().tolist() == [-1, 1]
    assert not coded.row_meta.any()


def test_three_bits_and_one_percent():
    """3 + .01 * (16 + 16) = 3.32 bits, and the pointer of a row beside them."""
    x = np.random.default_rng(0).standard_normal((1000, 1, 100))
    edges = np.stack([*(t[:, 0] for t in thresholds(x.swapaxes(0, 1), 0.01, axis=1)), np.zeros((1, 100)), np.ones((1, 100))])[
        :, 0
    ]
    coded = coder(3, 0.01, np.linspace(-1, 1, 8), edges).encode(x)
    assert coded.bits.sum() / x.size == pytest.approx(3.32, abs=1e-9)
    assert 8 * coded.row_meta.sum() / x.size == pytest.approx(0.32)


@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-1, 1)), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_every_level_is_the_mean_of_the_numbers_that_are_coded_by_it(x, bits):
    level = learned(x, bits)
    assert len(level) == 2**bits
    assert (np.diff(level) >= -1e-12).all()
    code = np.searchsorted((level[1:] + level[:-1]) / 2, x)
    for c in np.unique(code):
        assert level[c] == pytest.approx(x[code == c].mean(), abs=1e-9)


def test_learned_levels_beat_even_ones_on_what_is_not_even():
    x = np.random.default_rng(0).standard_normal((1, 500, 8)) ** 3
    for found in (of_keys(x, 3, 0.02)["k.level"], of_values(x, 3, 0.02)["v.level"]):
        assert len(found) == 8
        assert -1 <= found[0] < found[-1] <= 1
    y = np.clip(x.ravel(), -1, 1)
    loss = [((nearest(y, level) - y) ** 2).mean() for level in (learned(y, 3), np.linspace(-1, 1, 8))]
    assert loss[0] < loss[1] / 1.5


def test_a_channel_that_never_moved_is_coded_as_it_is():
    x = np.full((1, 5, 1), 0.7)
    found = of_keys(x, 2, 0.01)
    assert coder(2, 0.01, found["k.level"], found["k.edges"][0]).encode(x.reshape(5, 1, 1)).values.ravel().tolist() == [0.7] * 5
