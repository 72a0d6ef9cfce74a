"""One sort, and what is read off its order, against sorting and summing at every budget anew."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels.order import (
    ABSENT,
    FEW,
    FORCED,
    RANKED,
    accumulate,
    add_rows,
    changing,
    common,
    first_pages,
    live_rows,
    places,
    ranked,
    settled,
    top_growth,
    union_growth,
)
from tests import naive

DRAWS = {
    "plain": lambda rng, s: rng.standard_normal(s),
    "ties": lambda rng, s: rng.integers(-2, 3, s) / 2,
    "near": lambda rng, s: 1 + rng.integers(-3, 4, s) * 2.0**-40,  # equal in float32, apart in float64
    "zeros": lambda rng, s: rng.choice([-0.0, 0.0], s),
    "wide": lambda rng, s: rng.choice([-1e300, -1e38, -3.0, 0.0, 1e-45, 1e-300, 1e39, 1e300], s) * (1 + rng.integers(0, 2, s)),
    "crowded": lambda rng, s: np.where(rng.random(s) < 0.1, 1e9, rng.standard_normal(s)),
    "unbounded": lambda rng, s: rng.choice([-np.inf, 0.0, np.inf], s),
}


def read_first(orders, least):
    """The places of orders [N, G, P] with least [N] forced pages."""
    place = np.empty(orders.shape, np.int32)
    places(orders, least, place)
    return place


def pages(seed, rows, count, draw):
    rng = np.random.default_rng(seed)
    return rng, DRAWS[draw](rng, (rows, count)), rng.choice([FORCED, RANKED, RANKED, ABSENT], (rows, count)).astype(np.uint8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("draw", DRAWS)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 50))
@settings(deadline=None, max_examples=30)
def test_pages_by_kind_score_and_number(draw, seed, rows, count):
    _, score, kind = pages(seed, rows, count, draw)
    order = ranked(score, kind)
    assert order.tolist() == [naive.ranked(s, k) for s, k in zip(score.tolist(), kind.tolist(), strict=True)]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("count", [FEW, FEW + 1, 1023, 1024, 2048, 5000])
def test_many_pages_too(count, draw):
    _, score, kind = pages(count, 3, count, draw)
    assert ranked(score, kind).tolist() == [naive.ranked(s, k) for s, k in zip(score.tolist(), kind.tolist(), strict=True)]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.integers(1, 30), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_sums_at_every_budget(seed, steps, group, one, count, budgets):
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((steps, 1 if one else group, count)), axis=2).astype(np.int32)
    upto = np.sort(rng.integers(0, count + 1, (steps, budgets)), axis=1)
    part, out = rng.random((steps * group, count)), np.full((steps * group, budgets), 7, np.float32)
    accumulate(order, upto, part, out)
    for r, k in np.ndindex(out.shape):
        i, g = divmod(r, group)
        assert out[r, k] == np.float32(sum(part[r, p] for p in order[i, 0 if one else g, : upto[i, k]]))


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=20)
def test_a_sum_of_rows_does_not_hang_on_how_they_are_cut(seed, n, width):
    rows = np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)
    whole, cut = np.zeros(width), np.zeros(width)
    add_rows(rows, whole)
    for part in np.array_split(rows, 3):
        add_rows(part, cut)
    assert (whole == cut).all()
    assert (whole == [sum(map(float, column)) for column in rows.T]).all()


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 12), st.integers(1, 15), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_top_tokens_at_every_budget(seed, rows, count, budgets, tokens):
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((rows, count)), axis=1).astype(np.int32)
    least, many, most = rng.integers(0, count + 1, rows), rng.integers(1, tokens + 1, rows), np.array([1, 3, 9])
    best, of = rng.integers(0, 20, (rows, tokens)).astype(np.int32), rng.integers(0, count, 20)
    out = np.full((3, rows, budgets), 7, np.float32)
    top_growth(read_first(order[:, None], least)[:, 0], best, many, of, most, out)
    for m, r, k in np.ndindex(out.shape):
        top = of[best[r, : min(most[m], many[r])]].tolist()
        read = naive.read_at(order[r], least[r], k + 1)
        assert out[m, r, k] == np.float32(sum(p in read for p in top) / len(top))


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6), st.integers(1, 20), st.integers(1, 25))
@settings(deadline=None, max_examples=60)
def test_unions_at_every_budget(seed, steps, group, count, budgets):
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((steps, group, count)), axis=2).astype(np.int32)
    least, rows = rng.integers(0, min(count, 3) + 1, steps), rng.integers(0, 17, (steps, count))
    found, tokens = np.full((2, steps, budgets), 7)
    union_growth(read_first(order, least), rows, found, tokens)
    for i, k in np.ndindex(steps, budgets):
        union = set().union(*(naive.read_at(o, least[i], k + 1) for o in order[i]))
        assert (found[i, k], tokens[i, k]) == (len(union), sum(rows[i, p] for p in union))


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_pages_in_common(seed, rows, count):
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((rows, count)), axis=1).astype(np.int32)
    marked, many, hits = rng.random((rows, count)) < 0.5, rng.integers(0, count + 1, rows), np.full(rows, 7)
    common(order, marked, many, hits)
    assert hits.tolist() == [marked[r, order[r, : many[r]]].sum() for r in range(rows)]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_live_rows_of_pages(seed, steps, pages):
    rng = np.random.default_rng(seed)
    start = np.concatenate([[0], np.cumsum(rng.integers(1, 5, pages))])
    flags, out = rng.integers(0, 8, (steps, start[-1])).astype(np.uint8), np.full((steps, pages), 99)
    which = np.flatnonzero(rng.random(pages) < 0.7)
    live_rows(flags, start, which, 2, out)
    want = np.array([[sum(1 for f in row[a:b] if f & 2) for a, b in pairwise(start)] for row in flags])
    assert (out[:, which] == want[:, which]).all()
    assert (np.delete(out, which, 1) == 99).all()


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_bits_that_change(seed, steps, slots):
    flags, out = np.random.default_rng(seed).integers(0, 4, (steps, slots)).astype(np.uint8), np.zeros(slots, np.uint8)
    changing(flags, out)
    assert (out == np.bitwise_or.reduce(flags, 0) - np.bitwise_and.reduce(flags, 0)).all()


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_first_pages_of_an_order(seed, steps, heads, pages):
    rng = np.random.default_rng(seed)
    orders = rng.permuted(np.tile(np.arange(pages, dtype=np.int32), (steps, heads, 1)), axis=-1)
    count, chosen = rng.integers(0, pages + 2, steps), np.empty((steps, heads, pages), bool)
    first_pages(orders, count, chosen)
    for i in range(steps):
        for h in range(heads):
            assert set(np.flatnonzero(chosen[i, h])) == set(orders[i, h, : count[i]])


@pytest.mark.parametrize("nan", [None, (1, 0, 2), (1, 1, 3), (1, 1, 4)])
def test_settled_scores(nan):
    """Page 3 does not exist at step 1; page 0 has two states, pages 2 and 3 three; the last column is one that no step is in."""
    first = [[[0.0, -np.inf, np.inf, 2.5], [1e201, -1e201, -0.0, 1.0]]] * 2
    score = np.concatenate([first, [[[3.0, 4.0], [-5.0, np.inf]]] * 2, np.full((2, 2, 1), np.nan)], -1)
    exists = np.array([[True] * 4, [True, True, True, False]])
    moving, number = np.array([0, 2, 3]), np.array([[0, 2, 3], [4, 5, 1]])
    if nan:
        score[nan] = np.nan
    out = np.empty((2, 2, 4))
    assert settled(score, moving, number, exists, 1e200, out) == (nan in ((1, 0, 2), (1, 1, 4)))
    of = np.array([[0, 1, 2, 3], [4, 1, 5, 1]])
    want = np.take_along_axis(score, of[:, None], -1)
    want = np.where(exists[:, None], np.clip(want, -1e200, 1e200), -np.inf)
    there = ~np.isnan(want)
    assert np.array_equal(out[there], want[there])
