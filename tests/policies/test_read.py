"""Reads rank pages from the query and the page alone."""

from __future__ import annotations

import numpy as np

from kvsim import boxes, everything, oracle, pages, quest, random_read, recency
from kvsim.policies.protocol import Forced, View


def view(steps, heads=2, group=3, count=40, where=(5, 7, 0), first=100, truth=None):
    page = np.tile(np.arange(count), (heads, 1))
    return View(np.arange(first, first + steps), np.zeros((steps, heads, group, 4)), page, {}, where, truth)


def test_recency_ranks_the_newest_first():
    score = recency(read=pages(1)).score(view(2))
    assert score.shape == (2, 2, 3, 40)
    assert (np.diff(score, axis=-1) > 0).all()


def test_oracle_shows_the_truth_it_is_asked_for():
    for by in ("mass", "logit"):
        assert oracle(read=pages(1), by=by).score(view(1, truth=lambda kind: np.array(kind))) == by
    assert oracle(read=pages(1)).by == "mass"


def test_quest_ranks_by_its_index():
    rng = np.random.default_rng(0)
    keys, q = rng.standard_normal((10, 4, 8)), rng.standard_normal((3, 1, 2, 8))
    policy = quest(read=pages(2), index=boxes(n=2))
    summary = {k: x[None] for k, x in policy.index.summarise(keys, np.ones((10, 4), bool), np.ones(10, bool)).items()}
    score = policy.score(View(np.arange(3), q, np.arange(10)[None], summary, (0, 0, 0)))
    assert np.array_equal(score, policy.index.score(q, summary))
    assert (score >= np.einsum("nhgd,psd->nhgps", q, keys).max(axis=-1) - 1e-12).all()


def test_forced_pages_are_the_engines_to_read():
    assert quest(read=pages(1)).forced == Forced(tail=True)
    assert oracle(read=pages(1)).forced == recency(read=pages(1)).forced == everything().forced == Forced()
    assert recency(read=pages(1), sinks=4, recent=40, tail="forced").forced == Forced(True, 4, 40)


def test_everything_ranks_nothing():
    assert (everything().read, everything().page, everything(page=8).page) == (None, None, 8)


# ------------------------------------------------------------------------------------------------ random_read
def drawn(seed=0, **of):
    return random_read(read=pages(1), seed=seed).score(view(**of))


def test_a_draw_does_not_depend_on_what_is_drawn_beside_it():
    whole = drawn(steps=8, heads=4)
    assert np.array_equal(drawn(steps=1, heads=4, first=103), whole[3:4])
    assert np.array_equal(drawn(steps=8, heads=2, where=(5, 7, 2)), whole[:, 2:])
    assert np.array_equal(drawn(steps=8, heads=4, count=9), whole[..., :9])


def test_every_query_and_page_is_drawn_anew():
    whole = drawn(steps=8, heads=4)
    others = [drawn(seed=1, steps=8, heads=4), drawn(steps=8, heads=4, where=(6, 7, 0)), drawn(steps=8, heads=4, where=(5, 8, 0))]
    assert len(np.unique([whole, *others])) == 4 * whole.size
    assert not np.array_equal(drawn(steps=2, where=(1, 2, 0)), drawn(steps=2, where=(2, 1, 0)))


def test_draws_are_uniform_and_independent():
    score = drawn(steps=50, heads=4, count=200)
    assert 0 <= score.min() <= score.max() < 1
    assert np.abs(np.histogram(score, 20, (0, 1))[0] / score.size - 0.05).max() < 0.003
    first = np.bincount(score.argmax(axis=-1).ravel(), minlength=200)
    assert first.max() < 6 * first.mean()
    for axis in range(4):
        a, b = (np.take(score, range(i, score.shape[axis] - 1 + i), axis).ravel() for i in (0, 1))
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
