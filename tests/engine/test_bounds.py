"""Scores against the truth: every score that lies below its page's best logit is counted, with its size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine.bounds import halves
from kvsim.geometry import Layer
from kvsim.policies.read.quest import quest
from tests import naive
from tests.engine.lanes import lane, run


def against_truth(source, policy):
    return run(source, policy, explain=True)["explain"]


def judged(source, make, size):
    """(scores, how many are below, the largest size of these) per row of explain, page by page; make(keys) -> a page's score for a query."""
    lay, out = source.layer, {}
    for i, t in enumerate(source.t.tolist()):
        for head in range(lay.q_heads):
            q = source.q[i, head].astype(float)
            keys = source.rows("k", head // lay.group, np.arange(t + 1))
            parts = [keys[p : p + size] for p in range(0, t + 1, size)]
            gaps = np.array([lay.scale * ((x @ q).max() - make(x, q)) for x in parts])
            short = gaps[gaps > 1e-9]
            out[head, int(source.steps[i])] = len(gaps), len(short), short.max(initial=0)
    return out


def digested(keys, q):
    middle = (keys.min(axis=0) + keys.max(axis=0)) / 2
    stray = np.abs(keys - middle).mean(axis=0)
    return naive.box_bound(q, [middle - stray], [middle + stray])


def cast(keys, q):
    return naive.box_bound(q, *(np.float64(np.float16(x))[None] for x in (keys.min(axis=0), keys.max(axis=0))))


@pytest.mark.parametrize(
    ("index", "make", "page"), [("digest()", digested, 4), ('boxes(dtype="float16", rounding="nearest")', cast, 1)]
)
def test_what_lies_below_is_counted(index, make, page):
    source = lane(prompt=60, steps=12, key_dim=8, seed=3)
    got = against_truth(source, f"quest(read=pages(3), page={page}, index={index})")
    wanted = judged(source, make, page)
    pages, below, most = np.array([wanted[h, s] for h, s in zip(got["q_head"], got["step"], strict=True)]).T
    assert got["pages"].tolist() == pages.tolist()
    assert below.sum() > 20
    assert np.abs(got["below"] - below).sum() <= (0 if make is cast else 4)  # the digest's corners are rounded to float32
    assert got["below_max"] == pytest.approx(most, rel=1e-4, abs=1e-6)


def test_outward_rounding_leaves_nothing_below_and_nearest_does():
    source = lane(prompt=100, steps=10, key_dim=16, dtype="bfloat16", seed=1)
    for dtype in ("float16", "bfloat16", "fp8"):
        outward, nearest = (
            against_truth(source, f'quest(read=pages(3), page=1, index=boxes(dtype="{dtype}", rounding="{r}"))')
            for r in ("outward", "nearest")
        )
        assert outward["below"].sum() == 0
        assert outward["below_max"].max() == 0
        assert (nearest["below"].sum() > 0) == (dtype == "fp8")  # keys of 8 bits of mantissa fit the others


def test_a_soft_cap_hides_no_shortfall():
    source = lane(prompt=40, steps=6, size=30.0, seed=2)
    capped = replace(source, layer=replace(source.layer, softcap=1.0), _one={})
    policy = "quest(read=pages(2), page=4, index=digest())"
    for column in ("below", "below_max"):
        assert np.array_equal(against_truth(source, policy)[column], against_truth(capped, policy)[column])


# ------------------------------------------------------------------------------------------------ half precision
def test_half_precision_is_what_a_cast_says():
    assert halves(np.array([1.0, 1 + 2.0**-11, 1 + 2.0**-10, 70000.0, -np.inf])).tolist() == [1, 1, 1 + 2.0**-10, np.inf, -np.inf]


def test_sets_change_where_half_precision_cannot_tell_pages_apart():
    """Two pages a float16 apart or less: rounded they tie, and the lower page wins."""
    keys = np.array([[2.0], [2.0005], [1.0]], np.float32)[None]
    one, two = ('quest(read=pages(1), page=1, tail="free")', 'quest(read=pages(2), page=1, tail="free")')
    assert against_truth(one_key_pages(keys), one)["fp16_changed"] == [1]
    assert against_truth(one_key_pages(keys[:, [1, 0, 2]]), one)["fp16_changed"] == [0]
    assert against_truth(one_key_pages(keys), two)["fp16_changed"] == [0]


@pytest.mark.parametrize("heads", ["each", "share", "max", "split"])
def test_sets_that_change_are_those_of_a_read_with_rounded_scores(heads, monkeypatch):
    """The twin rounds the scores of the index itself."""
    source, policy = lane(prompt=200, steps=12, seed=4), f'quest(read=pages(9), page=2, heads="{heads}")'
    source.k[:] = 8 + source.k / 8  # scores that lie close together, for their size
    fine = run(source, policy, explain=True, plans=True)
    exact = quest.score
    monkeypatch.setattr(quest, "score", lambda self, view: halves(exact(self, view)))
    coarse = run(source, policy, plans=True)
    columns = ("kv_head", "q_head", "step", "pages")
    rows = zip(*(x["plans"][c] for x in (fine, coarse) for c in columns), strict=True)
    changed = {(h, g, s): a != b for h, g, s, a, *_, b in rows}
    at = zip(fine["explain"]["q_head"].tolist(), fine["explain"]["step"].tolist(), strict=True)
    wanted = [changed[h // 2, h if heads == "each" else -1, s] for h, s in at]
    assert fine["explain"]["fp16_changed"].tolist() == wanted
    assert any(wanted)
    assert not all(wanted)


def one_key_pages(keys):
    source = lane(prompt=2, steps=1, kv_heads=1, group=1, key_dim=1)
    layer = Layer(0, "full", 1, 1, 1, 1, 1.0, 8, "float32", among=(0,))
    return replace(source, layer=layer, k=keys, q=np.ones((1, 1, 1), np.float32), _one={})


def test_where_everything_is_read_and_under_rules_no_set_can_change():
    for policy in ("quest(read=pages(99), page=4)", "quest(read=exact(r=2), page=4)"):
        got = against_truth(lane(prompt=10, steps=5), policy)
        assert np.isnan(got["fp16_changed"].astype(float)).all()
        assert (got["pages"] > 0).all()
