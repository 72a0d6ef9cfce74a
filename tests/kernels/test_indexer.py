"""The scores of a learned indexer against their naive twin, and that nothing beside a score moves it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels.indexer import TILE, weighted
from tests import naive


def scores(q, w, k, relu=True):
    out = np.full((len(q), len(k)), np.nan)
    weighted(q, w, k, relu, out)
    return out


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2 * TILE + 1), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_it_is_the_naive_sum(steps, heads, d, tokens, relu, seed):
    rng = np.random.default_rng(seed)
    q, w, k = rng.standard_normal((steps, heads, d)), rng.standard_normal((steps, heads)), rng.standard_normal((tokens, d))
    found = scores(q, w, k, relu)
    for n in range(steps):
        for p in range(0, tokens, 7):
            assert found[n, p] == pytest.approx(naive.learned_score(q[n], w[n], k[p], relu), rel=1e-12, abs=1e-12)


def test_a_score_has_the_same_bits_whatever_is_scored_beside_it():
    rng = np.random.default_rng(1)
    q, w, k = rng.standard_normal((4, 5, 33)), rng.standard_normal((4, 5)), rng.standard_normal((3 * TILE + 5, 33))
    whole = scores(q, w, k)
    some = rng.permutation(len(k))[: TILE + 3]
    assert np.array_equal(scores(q[2:3], w[2:3], k[some])[0], whole[2, some])


def test_the_worked_example():
    w, q = np.array([[0.6, 0.4]]), np.eye(2)[None]
    k = np.array([(1, 0.5), (-1, 2), (0.2, 0.1), (0.5, -1)])
    assert scores(q, w, k)[0] == pytest.approx([0.8, 0.8, 0.16, 0.3])
    assert scores(q, w, k, relu=False)[0] == pytest.approx([0.8, 0.2, 0.16, -0.1])
