"""Scores against the truth: every score that lies below its page's best logit is counted, with its size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine.bounds import against_truth, halves
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from tests import naive
from tests.engine.lanes import chain, lane


def judged(source, make, size):
    """(scores, how many are below, the sizes of these) per query head, page by page; make(keys) -> the score of a page for a query."""
    lay, out = source.layer, []
    for head in range(lay.q_heads):
        short, many = [], 0
        for i, t in enumerate(source.t.tolist()):
            q = source.q[i, head].astype(float)
            keys = source.rows("k", head // lay.group, np.arange(t + 1))
            for p in range(0, t + 1, size):
                gap = lay.scale * ((keys[p : p + size] @ q).max() - make(keys[p : p + size], q))
                short += [gap] if gap > 1e-9 else []
                many += 1
        out.append((many, len(short), np.mean(short or [0]), max(short, default=0)))
    return np.array(out).T


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
    got = against_truth(source, chain(f"quest(read=pages(3), page={page}, index={index})"))
    many, below, mean, most = judged(source, make, page)
    assert got["pages"].tolist() == many.tolist()
    assert (below > 5).all()
    assert np.abs(got["below"] - below).max() <= (0 if make is cast else 2)  # the digest's corners are rounded to float32
    assert got["below_mean"] == pytest.approx(mean, rel=0.05)
    assert got["below_max"] == pytest.approx(most, rel=1e-4)


def test_outward_rounding_leaves_nothing_below_and_nearest_does():
    source = lane(prompt=100, steps=10, key_dim=16, dtype="bfloat16", seed=1)
    for dtype in ("float16", "bfloat16", "fp8"):
        outward, nearest = (
            against_truth(source, chain(f'quest(read=pages(3), page=1, index=boxes(dtype="{dtype}", rounding="{r}"))'))
            for r in ("outward", "nearest")
        )
        assert outward["below"].sum() == 0
        assert (nearest["below"].sum() > 0) == (dtype == "fp8")  # keys of 8 bits of mantissa fit the others


def test_steps_add_up():
    source, policy = lane(prompt=30, steps=9, dtype="bfloat16"), chain("quest(read=pages(3), page=4, index=digest())")
    parts = [against_truth(source, policy, steps=s) for s in (range(4), range(4, 9))]
    whole = against_truth(source, policy)
    for column in ("pages", "below", "sets", "sets_changed"):
        assert (parts[0][column] + parts[1][column] == whole[column]).all()
    assert (np.maximum(parts[0]["below_max"], parts[1]["below_max"]) == whole["below_max"]).all()


def test_a_soft_cap_hides_no_shortfall():
    source = lane(prompt=40, steps=6, size=30.0, seed=2)
    capped = replace(source, layer=replace(source.layer, softcap=1.0), _one={})
    policy = chain("quest(read=pages(2), page=4, index=digest())")
    for column in ("below", "below_max"):
        assert np.array_equal(against_truth(source, policy)[column], against_truth(capped, policy)[column])


# ------------------------------------------------------------------------------------------------ half precision
def test_half_precision_is_what_a_cast_says():
    assert halves(np.array([1.0, 1 + 2.0**-11, 1 + 2.0**-10, 70000.0, -np.inf])).tolist() == [1, 1, 1 + 2.0**-10, np.inf, -np.inf]


def test_sets_change_where_half_precision_cannot_tell_pages_apart():
    """Two pages a float16 apart or less: rounded they tie, and the lower page wins."""
    keys = np.array([[2.0], [2.0005], [1.0]], np.float32)[None]
    source = one_key_pages(keys)
    got = against_truth(source, chain('quest(read=pages(1), page=1, tail="free")'))
    assert (got["sets"], got["sets_changed"], got["pages_changed"]) == ([1], [1], [1.0])
    assert against_truth(one_key_pages(keys[:, [1, 0, 2]]), chain('quest(read=pages(1), page=1, tail="free")'))[
        "sets_changed"
    ] == [0]
    got = against_truth(source, chain('quest(read=pages(2), page=1, tail="free")'))
    assert (got["sets_changed"], got["pages_changed"]) == ([0], [0.0])


def one_key_pages(keys):
    source = lane(prompt=2, steps=1, kv_heads=1, group=1, key_dim=1)
    layer = Layer(0, "full", 1, 1, 1, 1, 1.0, 8, "float32", among=(0,))
    return replace(source, layer=layer, k=keys, q=np.ones((1, 1, 1), np.float32), _one={})


def test_steps_that_read_everything_choose_no_set():
    got = against_truth(lane(prompt=10, steps=5), chain("quest(read=pages(99), page=4)"))
    assert (got["sets"] == 0).all()
    assert (got["pages_changed"] == 0).all()
    assert (got["pages"] > 0).all()


@pytest.mark.parametrize(
    "text", ["oracle(read=pages(2))", "quest(read=exact(r=2))", "h2o(hold=tokens(9)) >> quest(read=pages(2))", "full()"]
)
def test_refused(text):
    with pytest.raises(
        WrongUse, match="held against the truth for an index with a budget, after a keep that does not watch attention"
    ):
        against_truth(lane(), chain(text))
