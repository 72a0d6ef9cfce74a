"""boxes(): never below the best key of a page, in any dtype; split as the paper's examples say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvsim import boxes
from kvsim.policies.index.boxes import LARGEST, principal_order, rounded

A = [(3, -2), (1, 1), (0, 0)]
B = [(1, 2), (-1, 4)]


def bound(pages, q, closed=True, **of):
    """The score of each page, a list of keys, for one query."""
    size, dim = max(map(len, pages)), len(pages[0][0])
    keys, valid = np.zeros((len(pages), size, dim)), np.zeros((len(pages), size), bool)
    for i, page in enumerate(pages):
        keys[i, : len(page)], valid[i, : len(page)] = page, True
    index = boxes(**of)
    summary = index.summarise(keys, valid, np.full(len(pages), closed))
    return index.score(np.array(q, float).reshape(1, 1, 1, -1), {k: x[None] for k, x in summary.items()}).ravel().tolist()


# ------------------------------------------------------------------------------------------------ worked by hand
def test_the_two_pages_of_the_paper():
    assert bound([A, B], (2, -1)) == [8, 0]
    assert bound([A, B], (0, 1)) == [1, 4]
    assert bound([[*B, (-2, 5)]], (0, 1)) == [5]


def test_the_page_of_four():
    page = [(3, 4), (-1, -2), (2.5, 3.5), (-0.5, -1.5)]
    assert bound([page], (2, -1)) == [8]
    assert bound([page], (2, -1), n=2) == [8]  # neighbours: no gain
    assert bound([page], (2, -1), n=2, by="cluster") == [2.5]  # {0, 2} and {1, 3}
    assert bound([page], (2, -1), n=2, by="cluster", closed=False) == [8]  # the open tail is always by order
    assert bound([page], (2, -1), n=4) == [2]  # a box per key is the truth


def test_parts_differ_by_one_row_and_the_larger_come_first():
    assert bound([[(1,), (2,), (30,), (4,), (5,)]], (1,), n=2) == [30]
    assert bound([[(1,), (2,), (-30,), (4,), (5,)]], (-1,), n=2) == [30]
    index = boxes(n=2)
    made = index.summarise(np.arange(5.0).reshape(1, 5, 1), np.ones((1, 5), bool), np.ones(1, bool))
    assert [made["lo"].ravel().tolist(), made["hi"].ravel().tolist()] == [[0, 3], [2, 4]]


def test_holes_are_not_read():
    keys, valid = np.array([[[1.0], [99.0], [3.0]]]), np.array([[True, False, True]])
    made = boxes().summarise(keys, valid, np.array([True]))
    assert (made["lo"].item(), made["hi"].item()) == (1, 3)


def test_the_first_principal_component_orders_a_page():
    keys = np.array([(3, 4), (-1, -2), (2.5, 3.5), (-0.5, -1.5)])
    assert principal_order(keys).tolist() == [1, 3, 2, 0]
    assert principal_order(np.zeros((3, 2))).tolist() == [0, 1, 2]
    assert principal_order(-keys).tolist() == [0, 2, 3, 1]  # the sign belongs to the axis, not to the page


def test_numbers_stored():
    assert (boxes().numbers(128), boxes(n=4).numbers(64)) == (256, 512)


# ------------------------------------------------------------------------------------------------ a bound, always
@given(
    arrays(
        np.float64, st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5)), elements=st.floats(-100, 100, width=32)
    ),
    st.integers(1, 5),
    st.sampled_from(["order", "cluster"]),
    st.sampled_from(["kv", "float32", "float16", "bfloat16"]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_no_key_is_above_its_page(keys, n, by, dtype, seed):
    rng = np.random.default_rng(seed)
    valid = rng.random(keys.shape[:2]) < 0.7
    valid[:, 0] = True
    q = rng.standard_normal((2, 1, 2, keys.shape[2])) * 10
    index = boxes(n=n, by=by, dtype=dtype)
    summary = index.summarise(keys, valid, np.ones(len(keys), bool))
    score = index.score(q, {k: x[None] for k, x in summary.items()})
    truth = np.where(valid, np.einsum("nhgd,psd->nhgps", q, keys), -np.inf).max(axis=-1)
    slack = 1e-14 * (np.abs(q).sum(axis=-1, keepdims=True) * np.abs(keys).max())
    assert (score >= truth - slack).all()


@given(arrays(np.float64, (1, 8, 3), elements=st.floats(-9, 9, width=16)), st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_more_boxes_by_order_of_a_power_of_two_never_loosen(keys, seed):
    q = np.random.default_rng(seed).standard_normal(3)
    scores = [bound(keys.tolist(), q, n=n)[0] for n in (1, 2, 4, 8)]
    assert (np.diff(scores) <= 1e-9).all()


EVERY = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.sampled_from(
        [65504.0, 65519.9, 65520.0, -65520.0, 1e5, 3.4e38, 3.5e38, -3.5e38, 5e-324, -6e-8, 1e-45, 0.0, -0.0, 1.00048, -2.07]
    ),
)


PATTERNS = np.arange(2**16, dtype=np.uint16)
NUMBERS: dict[str, Any] = {"float16": PATTERNS.view(np.float16), "bfloat16": (PATTERNS.astype(np.uint32) << 16).view(np.float32)}


def enclosing(x, dtype):
    """The largest number of a 16-bit dtype that is not above x, and the smallest that is not below."""
    numbers = NUMBERS[dtype][np.isfinite(NUMBERS[dtype])].astype(float)
    return numbers[numbers <= x].max(initial=-LARGEST), numbers[numbers >= x].min(initial=LARGEST)


def corner(values, **of):
    keys = np.array(values).reshape(1, -1, 1)
    made = boxes(**of).summarise(keys, np.ones(keys.shape[:2], bool), np.array([True]))
    return made["lo"].item(), made["hi"].item()


@given(st.lists(EVERY, min_size=1, max_size=4), st.sampled_from(["float16", "bfloat16"]))
@settings(deadline=None, max_examples=200)
def test_outward_corners_are_the_nearest_numbers_that_enclose(values, dtype):
    assert corner(values, dtype=dtype) == (enclosing(min(values), dtype)[0], enclosing(max(values), dtype)[1])


@given(EVERY)
def test_float32_corners_are_one_number_apart_at_most(value):
    lo, hi = corner([value], dtype="float32")
    assert lo <= value <= hi
    if max(-lo, hi) < LARGEST:
        assert (np.float32(lo), np.float32(hi)) == (lo, hi)
        assert hi in (lo, np.nextafter(np.float32(lo), np.float32(np.inf)))
    else:
        assert abs(value) > float(np.finfo(np.float32).max)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_of_the_dtype_stay(dtype):
    x = np.unique(rounded(np.random.default_rng(0).standard_normal(500) * 100, dtype))
    made = boxes(dtype=dtype).summarise(x.reshape(-1, 1, 1), np.ones((len(x), 1), bool), np.ones(len(x), bool))
    assert np.array_equal([made["lo"].ravel(), made["hi"].ravel()], [x, x])


def test_rounding_by_hand():
    assert corner([1.00048], dtype="float16") == (1.0, 1.0009765625)
    assert corner([1.00048], dtype="float16", rounding="nearest") == (1.0, 1.0)
    assert corner([-2.07, 3.17], dtype="bfloat16") == (-2.078125, 3.171875)
    assert boxes().bound
    assert not boxes(rounding="nearest").bound


def test_bfloat16_rounds_halves_to_even():
    assert rounded(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8]), "bfloat16").tolist() == [1, 1 + 2.0**-6, -1]


def test_past_the_largest_number_a_page_is_always_a_candidate():
    [score] = bound([[(70000.0, 1.0)]], (1, 0), dtype="float16")
    assert score >= 70000
    [score] = bound([[(70000.0, 1.0)]], (0, 1), dtype="float16")
    assert score == 1
    [score] = bound([[(70000.0, 1.0)]], (-1, 0), dtype="float16")
    assert -70000 <= score == -65504
