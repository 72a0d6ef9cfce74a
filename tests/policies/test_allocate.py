"""Budgets to whole tokens and pages: rounded down, never below one, never past what is protected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import WrongUse
from kvsim.geometry import Layer, Request
from kvsim.policies.allocate import for_layer, hold_limit, largest_remainder, to_pages, to_tokens
from kvsim.policies.language import parse
from kvsim.units import kib, mib, pages, share, tokens

REQUEST = Request(0, 80, 120, "greedy", np.zeros(120, np.int8))


def layer(index=3, row_bytes=512, dtype="bfloat16"):
    return Layer(index, "full", 4, 2, 64, 64, 0.125, row_bytes, dtype)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (tokens(7), 7),
        (share(0.29), 29),  # 28.999999999999996 in float64
        (share(0.2, of="prompt"), 16),
        (share(0.2, of="total"), 24),
        (share(0.001), 0),
        (kib(1.5), 3),
        (mib(1), 2048),
    ],
)
def test_tokens(budget, expected):
    assert to_tokens(budget, 100, REQUEST, layer()) == expected


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**6))
def test_a_share_is_rounded_down(x, visible):
    n = to_tokens(share(x), visible, REQUEST, layer())
    assert 0 <= n <= visible
    assert n <= x * visible + 1e-9 < n + 1 + 1e-9


@pytest.mark.parametrize(
    ("budget", "expected"), [(tokens(100), 6), (tokens(15), 1), (pages(9), 9), (share(0.5), 3), (kib(0.1), 1)]
)
def test_pages_are_whole_and_at_least_one(budget, expected):
    assert to_pages(budget, 16, 100, REQUEST, layer()) == expected


def test_pages_have_no_tokens_of_their_own():
    with pytest.raises(WrongUse, match=r"pages\(3\): a page size is needed"):
        to_tokens(pages(3), 100, REQUEST, layer())


def held(text, visible=100, **of):
    return hold_limit(parse(text).part("keep"), visible, REQUEST, layer(**of))


def test_a_hold_limit_is_at_least_one_token():
    assert held("tova(hold=share(0.001))") == 1
    assert held("tova(hold=share(0.2))") == 20
    assert held("tova(hold=kib(1))", row_bytes=1024) == 1
    assert held("full()") == 100


@pytest.mark.parametrize(
    ("text", "limit", "protected"),
    [("streaming_llm(hold=share(0.04))", 4, 5), ("h2o(hold=share(0.1), sinks=8)", 10, 13), ("h2o(hold=kib(1), sinks=2)", 2, 3)],
)
def test_more_protected_than_held_is_refused(text, limit, protected):
    with pytest.raises(WrongUse, match=f"that is {limit} tokens in layer 3 of request 0, fewer than the {protected} it protects"):
        held(text)


def test_dense_layers_are_read_whole_and_keep_their_page_size():
    chain = parse("h2o(hold=tokens(8)) >> quest(read=tokens(64), page=8, dense_layers=2)")
    assert for_layer(chain, layer(1)) == parse("h2o(hold=tokens(8)) >> everything(page=8)")
    assert for_layer(chain, layer(2)).part("read").read == tokens(64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_index_in_the_kv_dtype_is_in_the_billed_one(dtype):
    resolved = for_layer(parse("quest(read=tokens(64))"), layer(dtype=dtype))
    assert resolved == parse(f'quest(read=tokens(64), index=boxes(dtype="{dtype}"))')
    assert for_layer(resolved, layer(dtype="float16")) == resolved


def test_other_chains_stay_as_they_are():
    for text in ("full()", "tova(hold=tokens(9)) >> kivi()", "recency(read=tokens(64))"):
        assert for_layer(parse(text), layer()) == parse(text)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=9))
def test_the_largest_remainders_make_the_total(weights):
    total = 1 + int(sum(weights))
    raw = np.array(weights) / max(sum(weights), 1e-300) * total if sum(weights) else np.full(len(weights), total / len(weights))
    parts = largest_remainder(raw, total)
    assert parts.sum() == total
    assert (np.abs(parts - raw) < 1 + 1e-6).all()


def test_no_part_is_larger_than_what_there_is():
    assert largest_remainder([6.4, 1.6, 2.0], 10, np.array([3, 9, 9])).tolist() == [3, 3, 4]  # 4 left over, by remainder in turn
    assert largest_remainder([4.0, 0.0], 4, np.array([1, 3])).tolist() == [1, 3]


def test_ties_of_remainders_go_to_the_lower_index():
    assert largest_remainder([1.5, 1.5, 1.0], 4).tolist() == [2, 1, 1]
    assert largest_remainder([0.25, 0.5, 0.25], 1).tolist() == [0, 1, 0]
    assert largest_remainder([0.29 * 100, 71.0], 100).tolist() == [29, 71]
