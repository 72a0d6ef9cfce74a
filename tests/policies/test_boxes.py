"""boxes(): never below the best key of a page, in any dtype; split as the paper's examples say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvsim import boxes
from kvsim.errors import WrongUse
from kvsim.policies.index.boxes import principal_order

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
@given(arrays(np.float64, (1, 8, 3), elements=st.floats(-9, 9, width=16)), st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_more_boxes_by_order_of_a_power_of_two_never_loosen(keys, seed):
    q = np.random.default_rng(seed).standard_normal(3)
    scores = [bound(keys.tolist(), q, n=n)[0] for n in (1, 2, 4, 8)]
    assert (np.diff(scores) <= 1e-9).all()


def test_only_nearest_is_no_bound():
    assert boxes().bound
    assert not boxes(rounding="nearest").bound
    made = {
        r: boxes(dtype="float16", rounding=r).summarise(np.full((1, 1, 1), 1.00048), *TRUE)["hi"].item()
        for r in ("nearest", "outward")
    }
    assert made == {"nearest": 1.0, "outward": 1.0009765625}


TRUE = np.ones((1, 1), bool), np.ones(1, bool)


def test_past_the_largest_number_a_page_is_always_a_candidate():
    [score] = bound([[(70000.0, 1.0)]], (1, 0), dtype="float16")
    assert score >= 70000
    [score] = bound([[(70000.0, 1.0)]], (0, 1), dtype="float16")
    assert score == 1
    [score] = bound([[(70000.0, 1.0)]], (-1, 0), dtype="float16")
    assert -70000 <= score == -65504


def test_fp8_corners_past_448_are_unbounded_on_their_side_alone():
    page = [[(500.0, 1.0), (-3.0, 2.0)]]
    assert bound(page, (1, 0), dtype="fp8")[0] >= 500
    assert bound(page, (-1, 0), dtype="fp8") == [3]
    assert bound(page, (0, 1), dtype="fp8") == [2]


# ------------------------------------------------------------------------------------------------ bases
def test_a_basis_changes_the_box_and_not_the_truth():
    assert bound([[(2, 2), (-2, -2), (1, 1)]], (1, -1)) == [4]
    assert bound([[(2, 2), (-2, -2), (1, 1)]], (1, -1), rotate="hadamard") == pytest.approx([0], abs=1e-15)
    assert bound([[(3, 0), (-3, 0)]], (0, 1)) == [0]
    assert bound([[(3, 0), (-3, 0)]], (0, 1), rotate="hadamard") == pytest.approx([3])


def test_the_principal_basis_hugs_keys_that_lie_on_a_line():
    line = np.random.default_rng(0).standard_normal((200, 1)) * [1.0, 2, -3, 0.5]
    pages, q = line.reshape(25, 8, 4), np.array([0.0, 3, 2, 0])  # q is at right angles to the line
    loose, tight = (against(boxes(rotate=r), pages, q, line) for r in ("none", "pca"))
    assert loose.min() > 1
    assert np.abs(tight).max() < 1e-12


def test_parts_are_those_of_the_unturned_keys():
    rng = np.random.default_rng(1)
    page, q = rng.standard_normal((1, 7, 4)), rng.standard_normal(4)
    for by in ("order", "cluster"):
        one = against(boxes(n=7, by=by, rotate="hadamard"), page, q)  # a box per key
        assert one == pytest.approx([(page[0] @ q).max()])
    order = principal_order(page[0])
    parts = [page[0][order[:4]], page[0][order[4:]]]
    want = max(against(boxes(rotate="hadamard"), part[None], q)[0] for part in parts)
    assert against(boxes(n=2, by="cluster", rotate="hadamard"), page, q)[0] == want


def against(index, pages, q, prompt=None):
    """Scores [m] of pages [m, S, d] for one query; a basis is fitted to `prompt`."""
    fitted = index.fit(prompt) if index.fit else {}
    summary = index.summarise(pages, np.ones(pages.shape[:2], bool), np.ones(len(pages), bool), **fitted)
    return index.score(q.reshape(1, 1, 1, -1), {k: x[None] for k, x in (summary | fitted).items()}).ravel()


def test_a_hadamard_basis_needs_a_power_of_two():
    boxes(rotate="hadamard").check(64)
    boxes(rotate="pca").check(80)
    with pytest.raises(
        WrongUse, match=r'boxes\(rotate="hadamard"\): keys have 80 dimensions, expected a power of two; "pca" and "random"'
    ):
        boxes(rotate="hadamard").check(80)


def test_a_matrix_that_must_be_stored_is_counted_once():
    assert [boxes(rotate=r).once(64) for r in ("none", "hadamard", "pca", "random")] == [0, 0, 4096, 4096]
    assert {boxes(rotate=r).numbers(64) for r in ("none", "hadamard", "pca", "random")} == {128}


# ------------------------------------------------------------------------------------------------ keys that may lie elsewhere
def test_boxes_are_widened_by_the_error_of_each_key():
    keys, error = np.array([[[1.0, 5.0], [3.0, -2.0]]]), np.array([[[0.5, 0.0], [0.25, 1.0]]])
    made = boxes(keys="expanded").summarise(keys, np.ones((1, 2), bool), np.ones(1, bool), error=error)
    assert (made["lo"].ravel().tolist(), made["hi"].ravel().tolist()) == ([0.5, -3.0], [3.25, 5.0])


@given(st.integers(0, 2**32), st.sampled_from(["none", "hadamard", "random", "pca"]), st.sampled_from(["kv", "bfloat16", "fp8"]))
@settings(deadline=None, max_examples=60)
def test_widened_boxes_hold_wherever_the_keys_lie(seed, rotate, dtype):
    rng = np.random.default_rng(seed)
    keys, error, q = rng.standard_normal((5, 6, 8)), rng.random((5, 6, 8)), rng.standard_normal(8)
    index = boxes(keys="expanded", rotate=rotate, dtype=dtype, n=2)
    fitted = index.fit(keys.reshape(-1, 8)) if index.fit else {}
    summary = index.summarise(keys, np.ones((5, 6), bool), np.ones(5, bool), error=error, **fitted)
    score = index.score(q.reshape(1, 1, 1, -1), {k: x[None] for k, x in (summary | fitted).items()}).ravel()
    worst = (keys @ q + error @ np.abs(q)).max(axis=1)  # every key at its worst corner
    assert (score >= worst - 1e-12).all()
