"""Boxes: corners are mins and maxes of the parts, bounds are the same bits as a plain sum, whatever is scored beside them."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.kernels.boxes import TILE, bounds, corners, rows_of
from tests import naive


def scores(q, lo, hi):
    out = np.full((*q.shape[:3], lo.shape[1]), np.nan)
    bounds(q, lo, hi, out)
    return out


def scene(steps, heads, group, pages, n, d, seed=0):
    rng = np.random.default_rng(seed)
    lo = rng.standard_normal((heads, pages, n, d))
    return rng.standard_normal((steps, heads, group, d)), lo, lo + rng.random(lo.shape)


def test_rows_of_pages():
    valid = np.random.default_rng(0).random((50, 7)) < 0.5
    rows, count = rows_of(valid)
    assert [r[:c].tolist() for r, c in zip(rows, count, strict=True)] == [np.flatnonzero(x).tolist() for x in valid]


@pytest.mark.parametrize("n", [1, 2, 3, 16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 16])
def test_corners_are_the_naive_ones(n, rows):
    rng = np.random.default_rng(rows)
    keys, order = rng.standard_normal((2, 16, 5)), rng.permuted(np.tile(np.arange(16), (2, 1)), axis=1)
    lo, hi = np.full((2, 2, n, 5), np.nan)
    corners(keys, keys, order, np.full(2, rows), lo, hi)
    for i in range(2):
        split = keys[i, order[i, :rows]] if rows else np.zeros((1, 5))
        assert np.array_equal([lo[i], hi[i]], naive.box_corners(split, n))


@pytest.mark.parametrize("d", [1, 3, 4, 6, 64])
@pytest.mark.parametrize("pages", [1, TILE - 1, TILE, TILE + 1])
@pytest.mark.parametrize("n", [1, 3])
def test_bounds_are_the_naive_ones_to_the_bit(d, pages, n):
    q, lo, hi = scene(2, 2, 2, pages, n, d)
    got = scores(q, lo, hi)
    some = [0, pages // 2, pages - 1]
    want = [[naive.box_bound(q[s, h, g], lo[h, p], hi[h, p]) for p in some] for s, h, g in np.ndindex(q.shape[:3])]
    assert np.array_equal(got[..., some].reshape(-1, 3), want)


def test_a_score_depends_on_its_query_and_page_alone():
    q, lo, hi = scene(70, 2, 3, 300, 2, 24)
    whole = scores(q, lo, hi)
    assert np.array_equal(scores(q[5:6], lo, hi), whole[5:6])
    assert np.array_equal(scores(q, lo[:, 131:160], hi[:, 131:160]), whole[..., 131:160])
    turned = np.random.default_rng(1).permutation(300)
    assert np.array_equal(scores(q, lo[:, turned], hi[:, turned]), whole[..., turned])


def test_unbounded_corners_make_no_nan():
    huge = np.finfo(float).max
    q = np.array([[[[0.0, 2.0, -2.0, 1e-300]]]])
    lo, hi = np.array([[[[-huge, 1.0, 1.0, 0.0]]]]), np.array([[[[huge, huge, 1.0, 0.0]]]])
    assert scores(q, lo, hi)[0, 0, 0, 0] == np.inf
    assert scores(-q, lo, hi)[0, 0, 0, 0] == 0.0 - 2.0 + 2.0 - 0.0
