"""Every index: a bound where it says so, in every dtype and basis, and its cards' examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import block_mean, boxes, digest, sphere
from kvsim.errors import WrongUse
from kvsim.policies.language import parse
from tests import naive

PAGE = np.array([[(1.0, 4), (3, -2), (-1, 1)]])
DTYPES = ["kv", "float32", "float16", "bfloat16", "fp8"]
INDEXES: list[Any] = [
    *(boxes(n=n, by=by, dtype=d) for n, by in ((1, "order"), (3, "order"), (2, "cluster")) for d in DTYPES),
    *(boxes(rotate=r, dtype=d, n=n) for r in ("hadamard", "pca", "random") for d, n in (("kv", 1), ("bfloat16", 2), ("fp8", 1))),
    *(sphere(dtype=d) for d in DTYPES),
]


def scores(index: Any, keys: Any, q: Any, valid: Any = None, closed: bool = True) -> Any:
    """[queries, m] of pages [m, S, d]; a basis is fitted to all their keys."""
    valid = np.ones(keys.shape[:2], bool) if valid is None else valid
    fit = getattr(index, "fit", None)
    fitted = fit(keys.reshape(-1, keys.shape[2])) if fit else {}
    summary = index.summarise(keys, valid, np.full(len(keys), closed), **fitted) | fitted
    return index.score(q[:, None, None], {name: x[None] for name, x in summary.items()})[:, 0, 0]


def keys_of(rng: Any) -> Any:
    """Pages [m, S, d] of float32 numbers, d a power of two."""
    shape = int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 8]))
    match rng.integers(5):
        case 0:
            keys = rng.integers(-3, 4, shape)
        case 1:
            keys = rng.standard_normal(shape) * 4.0 ** rng.integers(-6, 7, shape[2])
        case 2:
            keys = np.repeat(rng.standard_normal((shape[0], 1, shape[2])), shape[1], 1)
        case 3:
            keys = rng.standard_normal(shape) * 1000  # beyond fp8
        case _:
            keys = rng.standard_normal(shape)
    return keys.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_no_page_scores_below_its_best_key(index):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        keys = keys_of(rng)
        q = rng.standard_normal((3, keys.shape[2])).astype(np.float32).astype(float) * rng.choice([1e-3, 1, 1e3])
        valid = rng.random(keys.shape[:2]) < 0.8
        valid[:, 0] = True
        got = scores(index, keys, q, valid, closed=bool(rng.integers(2)))
        exact_q, exact_keys = naive.whole_numbers(q), naive.whole_numbers(keys)
        for i, p in np.ndindex(got.shape):
            best = max((exact_q[i] * exact_keys[p, s]).sum() for s in np.flatnonzero(valid[p]))
            doubt = int(1e-12 * np.linalg.norm(q[i]) * np.linalg.norm(keys[p], axis=1).max() * 2.0**60) << 340
            assert got[i, p] > 1e300 or int(got[i, p] * 2**60) << 340 >= best - doubt - (1 << 341), (seed, i, p)


@given(st.integers(0, 2**32), st.sampled_from(["order", "cluster"]), st.sampled_from(DTYPES), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_no_box_is_below_a_key_summed_in_the_same_order(seed, by, dtype, n):
    """Rounding keeps order: with sums in one order even the last bit of a bound is a bound."""
    rng = np.random.default_rng(seed)
    keys = keys_of(rng)
    q = rng.standard_normal((2, keys.shape[2]))
    got = scores(boxes(n=n, by=by, dtype=dtype), keys, q)
    for s in range(keys.shape[1]):
        assert (got >= scores(boxes(dtype="kv"), keys[:, s : s + 1], q)).all()


@pytest.mark.parametrize(
    "index",
    [*INDEXES, block_mean(), block_mean(dtype="fp8"), digest(), digest(dtype="fp8"), boxes(rounding="nearest", dtype="fp8")],
    ids=str,
)
def test_a_score_depends_on_its_query_and_page_alone(index):
    rng = np.random.default_rng(0)
    keys, q, heads = rng.standard_normal((9, 5, 8)), rng.standard_normal((4, 2, 3, 8)), 2
    fit = getattr(index, "fit", None)
    fitted = fit(keys.reshape(-1, 8)) if fit else {}
    mask = np.ones((9, 5), bool), np.ones(9, bool)
    whole = index.summarise(keys, *mask, **fitted)
    one = index.summarise(keys[4:5], mask[0][4:5], mask[1][4:5], **fitted)
    assert all(np.array_equal(whole[name][4:5], one[name]) for name in whole)
    shown = {name: np.stack([x] * heads) for name, x in (whole | fitted).items()}
    score = index.score(q, shown)
    assert score.shape == (4, 2, 3, 9)
    few = {name: x[1:, 4:5] if name not in fitted else x[1:] for name, x in shown.items()}
    assert np.array_equal(index.score(q[2:3, 1:, 1:2], few), score[2:3, 1:, 1:2, 4:5])


# ------------------------------------------------------------------------------------------------ sphere and digest
def test_the_page_of_the_digest_card():
    q = np.array([[2.0, -1]])
    assert scores(boxes(), PAGE, q) == 8 == (PAGE[0] @ q[0]).max()
    assert scores(sphere(), PAGE, q) == pytest.approx(9.062, abs=1e-3)
    assert scores(digest(), PAGE, q) == pytest.approx(5.667, abs=1e-3)


def test_a_sphere_around_one_key_is_the_key():
    keys, q = np.random.default_rng(0).standard_normal((6, 1, 4)), np.random.default_rng(1).standard_normal((3, 4))
    assert np.array_equal(scores(sphere(), keys, q), scores(boxes(), keys, q))
    assert np.array_equal(scores(digest(), keys, q), scores(boxes(), keys, q))


def test_a_mean_scores_the_mean_of_the_logits_and_loses_a_needle_in_a_page():
    rng = np.random.default_rng(1)
    keys, q = rng.standard_normal((40, 16, 8)), rng.standard_normal((5, 8))
    assert scores(block_mean(), keys, q) == pytest.approx((keys @ q.T).mean(axis=1).T)
    keys[7] = 0.0
    keys[7, 3] = 6 * q[0]  # the largest logit by far, among zeros
    assert scores(boxes(), keys, q)[0].argmax() == 7 == scores(block_mean(), keys, q)[0].argmax()
    keys[7, 4:9] = -2 * q[0]
    assert scores(boxes(), keys, q)[0].argmax() == 7 != scores(block_mean(), keys, q)[0].argmax()


def test_a_digest_is_often_below_the_best_key():
    rng = np.random.default_rng(2)
    keys, q = rng.standard_normal((50, 16, 8)), rng.standard_normal((20, 8))
    short = (keys @ q.T).max(axis=1).T - scores(digest(), keys, q)
    assert 0.05 < (short > 0).mean() < 1


def test_holes_count_neither_for_the_sphere_nor_for_the_digest():
    keys = np.array([[(1.0, 4), (99, 99), (3, -2), (-1, 1)]])
    valid = np.array([[True, False, True, True]])
    q = np.array([[2.0, -1], [0.3, 0.4]])
    for index in (sphere(), digest(), block_mean(), boxes()):
        assert np.array_equal(scores(index, keys, q, valid), scores(index, PAGE, q))


def test_a_radius_is_measured_from_the_stored_centre():
    keys = np.array([[(1.0, 449.0), (1.07, 460.0)]])
    made = sphere(dtype="fp8").summarise(keys, np.ones((1, 2), bool), np.ones(1, bool))
    assert made["centre"].tolist() == [[1.0, 448.0]]  # towards zero, never past the largest
    assert made["radius"].tolist() == [13.0]  # the next above 12.0002


def test_numbers_and_which_are_bounds():
    assert [i.numbers(64) for i in (boxes(n=2), sphere(), digest(), block_mean())] == [256, 65, 128, 64]
    assert [i.bound for i in (boxes(), boxes(rounding="nearest"), sphere(), digest())] == [True, False, True, False]


@pytest.mark.parametrize("index", ["digest()", "block_mean()", 'boxes(rounding="nearest")'])
def test_only_bounds_can_prove(index):
    assert parse(f'quest(read=pages(4), index={index}, heads="mean")').part("read").index.bound is False
    assert parse(f"quest(read=top_p(p=0.9), index={index})")
    for rule in ("exact(r=3)", "mass(eps=0.1)"):
        with pytest.raises(
            WrongUse, match=rf"expected an index that is a bound, because {rule[:4]}\w*\(\) proves by it what it may leave out"
        ):
            parse(f"quest(read={rule}, index={index})")


def test_more_boxes_than_tokens_of_a_page_are_refused():
    assert parse("quest(read=pages(1), page=4, index=boxes(n=4))")
    with pytest.raises(WrongUse, match=r"quest\(index=boxes\(n=5, .*\)\): expected at most one box per token of page=4"):
        parse("quest(read=pages(1), page=4, index=boxes(n=5))")
