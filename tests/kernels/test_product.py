"""Products whose elements hang on their own row and column alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels.numbers import to_float32
from kvsim.kernels.product import GRID, product, strips, times

KINDS = [np.float32, np.float64]


def fused(row, column):
    """The sum of products, ascending, each fused with the sum before it and rounded once."""
    total = row.dtype.type(0)
    for x, y in zip(row, column, strict=True):
        total = nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(total)), row.dtype.type)
    return total


def nearest(exact, kind):
    """The number of a kind next to a fraction, the even one of two."""
    near = kind(float(exact))
    around = [np.nextafter(near, kind(-np.inf)), near, np.nextafter(near, kind(np.inf))]
    integer = f"i{near.itemsize}"
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(integer)) & 1))


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 20), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_every_element_is_a_fused_sum(kind, seed, n, d, m):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(s).astype(kind) * 2.0 ** rng.integers(-8, 9, s).astype(kind) for s in ((n, d), (d, m)))
    found = times(a, b)
    for i, j in np.ndindex(n, m):
        assert found[i, j] == fused(a[i], b[:, j])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 64, 66, 128, 512])
def test_the_same_bits_whatever_stands_beside_it_and_where(kind, d):
    rng = np.random.default_rng(d)
    a, b = rng.standard_normal((300, d)).astype(kind), rng.standard_normal((d, 260)).astype(kind)
    whole = times(a, b)
    assert np.allclose(whole, a.astype(float) @ b.astype(float), atol=d * np.finfo(kind).eps * 40)
    of, to = rng.permutation(300)[:77], rng.permutation(260)[:7]
    assert np.array_equal(times(a[of], b[:, to]), whole[of][:, to])
    assert np.array_equal(times(a[[5] * 40], b[:, [9] * 70]), np.full((40, 70), whole[5, 9]))
    assert np.array_equal(times(np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)), whole.T)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_to_fill_a_tile_is_zero(kind):
    for m in (1, GRID - 1, GRID, GRID + 1):
        b = strips(np.ones((3, m), kind))
        assert b.size == 3 * (m + -m % GRID)
        assert b.sum() == 3 * m
    assert times(np.ones((0, 3), kind), np.ones((3, 2), kind)).shape == (0, 2)
    assert times(np.ones((2, 3), kind), np.ones((3, 0), kind)).shape == (2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_lie_apart(kind):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((50, 2 * GRID)).astype(kind), rng.standard_normal((50, 40)).astype(kind)
    there, out = np.ascontiguousarray(a.T), np.empty((2, 2 * GRID, 2 * GRID), kind)
    product(a.T, strips(b), out[0])
    product(there, strips(b), out[1])
    assert np.array_equal(out[0], out[1])
    wide = np.zeros((2 * GRID, 4 * GRID), kind)
    product(there, strips(b), wide[:, GRID : 3 * GRID])
    assert np.array_equal(wide[:, GRID : 3 * GRID], out[1])
    assert not wide[:, :GRID].any()
    assert not wide[:, 3 * GRID :].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_raw_numbers_are_packed_as_float32(dtype):
    bits = np.random.default_rng(1).integers(0, 2**16, (50, 45)).astype(np.uint16)
    raw = bits.view(np.float16) if dtype == "float16" else bits
    want, found = strips(to_float32(raw, 60)), strips(raw, 60)
    assert np.array_equal(found, want, equal_nan=True)
    found[:] = 7
    assert np.array_equal(strips(raw, 60, found), want, equal_nan=True)


def test_what_is_no_number_stays_with_its_row_and_column():
    a, b = np.ones((40, 3), np.float32), np.ones((3, 40), np.float32)
    a[1, 0], b[2, 5] = np.nan, np.inf
    found = times(a, b)
    assert np.isnan(found[1]).all()
    assert np.isinf(np.delete(found[:, 5], 1)).all()
    assert (np.delete(np.delete(found, 1, 0), 5, 1) == 3).all()
