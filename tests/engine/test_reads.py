"""The read part in a run: budgets that do not fit, what an index is billed, summaries that say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.errors import WrongUse
from kvsim.policies.allocate import for_layer
from kvsim.policies.language import parse
from tests.engine.lanes import chain, lane, run


# ------------------------------------------------------------------------------------------------ budgets that do not fit
def test_a_budget_below_one_page_reads_one():
    tables = run(lane(prompt=60, steps=4), "quest(read=tokens(5), page=16)")
    assert (tables["heads"]["read_pages"] == 1).all()
    assert (tables["ledger"]["asked"] == 5).all()
    assert (tables["ledger"]["asked_unit"] == "tokens").all()


def test_a_page_larger_than_the_context_is_all_of_it():
    source = lane(prompt=60, steps=4)
    one, full = run(source, "quest(read=pages(1), page=4096)", "full()")
    assert (one["heads"]["read_pages"] == 1).all()
    assert (one["ledger"]["index_bytes"] == 0).all()  # nothing to choose from
    for column in ("mass_recall", "rel_l2", "read_tokens"):
        assert np.array_equal(one["heads"][column], full["heads"][column])
    assert run(source, "quest(read=exact(r=3), page=4096)")["heads"]["certified"].all()


def test_forced_pages_beyond_the_budget_are_read_and_the_budget_stays_as_asked():
    tables = run(lane(prompt=60, steps=4), "quest(read=pages(2), page=4, sinks=12, recent=12)")
    assert (tables["heads"]["read_pages"] >= 6).all()
    assert (tables["ledger"]["asked"] == 2).all()


@pytest.mark.parametrize("rule", ["exact(r=40, cap=pages(2))", "mass(eps=0.0001, cap=pages(2))"])
def test_forced_pages_beyond_a_cap_are_read_and_prove_nothing(rule):
    heads = run(lane(prompt=60, steps=4), f"quest(read={rule}, page=4, sinks=12, recent=12)")["heads"]
    assert (heads["read_pages"] >= 6).all()
    assert (heads["read_pages"] <= 7).all()
    assert (heads["rounds"] == 0).all()
    assert not heads["certified"].any()


def test_boxes_of_an_open_page_with_fewer_rows_are_billed_whole():
    """A page of 4 boxes costs 4 boxes, whatever it holds; its bound is that of its rows."""
    source = lane(prompt=16, steps=4, kv_heads=1, group=1)
    four = run(source, "quest(read=pages(1), page=4, index=boxes(n=4), tail='free')")
    assert (four["ledger"]["index_bytes"] == 5 * 4 * 2 * 4 * 4).all()
    assert np.abs(four["heads"]["slack_max"]).max() < 1e-6  # a box for every key


# ------------------------------------------------------------------------------------------------ bytes
def test_a_stored_basis_is_billed_once_per_kv_head_and_at_every_ranking():
    source, dim = lane(prompt=60, steps=6, key_dim=8), 8
    plain = run(source, "quest(read=pages(2), page=4, refresh=3)")["ledger"]
    for rotate, matrix in (("hadamard", 0), ("pca", dim * dim * 4), ("random", dim * dim * 4)):
        turned = run(source, f'quest(read=pages(2), page=4, refresh=3, index=boxes(rotate="{rotate}"))')["ledger"]
        assert (turned["index_resident_bytes"] - plain["index_resident_bytes"] == matrix).all()
        assert (turned["index_bytes"] - plain["index_bytes"] == matrix * (plain["index_bytes"] > 0)).all()
        assert (turned["write_bytes"] == plain["write_bytes"]).all()
    assert 0 < (plain["index_bytes"] > 0).mean() < 1


@pytest.mark.parametrize(
    ("index", "bytes_"),
    [("boxes(dtype='fp8')", 16), ("boxes(dtype='bfloat16', n=2)", 64), ("sphere()", 36), ("digest(dtype='float16')", 32)],
)
def test_a_summary_is_billed_in_its_own_dtype(index, bytes_):
    ledger = run(lane(prompt=60, steps=2, key_dim=8), f"quest(read=pages(2), page=4, index={index})")["ledger"]
    assert (ledger["index_bytes"] == 16 * bytes_).all()


# ------------------------------------------------------------------------------------------------ summaries without a bound
def test_pages_beyond_the_dtype_come_first_and_leave_no_proof():
    source = lane(prompt=60, steps=4, kv_heads=1, group=1, seed=1)
    source.k[0, 20:24] = 600.0
    heads = run(source, 'quest(read=pages(2), page=4, tail="free", index=boxes(dtype="fp8"))', plans=True)
    read = [5 in pages for pages in heads["plans"]["pages"]]
    looks = source.q[:, 0].max(axis=1) > 0  # a query with a channel on the unbounded side
    assert read == looks.tolist()
    assert (heads["heads"]["slack_max"][looks] > 1e100).all()  # infinite in the table
    capped = run(source, 'quest(read=mass(eps=0.3, cap=pages(1)), page=4, sinks=1, tail="free", index=boxes(dtype="fp8"))')[
        "heads"
    ]
    assert (capped["eps_hat"][looks] == 1).all()
    assert not capped["certified"][looks].any()


def test_a_hadamard_basis_for_other_dimensions_is_refused_before_any_work():
    with pytest.raises(WrongUse, match="keys have 6 dimensions, expected a power of two"):
        for_layer(chain('quest(read=pages(1), index=boxes(rotate="hadamard"))'), lane(key_dim=6).layer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("oracle(read=exact(r=10))", "a read budget is one of tokens(), pages(), share(), kib(), mib()"),
        ("recency(read=mass(eps=0.1))", "a read budget is one of tokens(), pages(), share(), kib(), mib()"),
        ("quest(read=gap(min=1, floor=pages(4), cap=pages(2)))", "gap(floor=pages(4)): expected at most cap=pages(2)"),
        ("quest(read=exact(r=0))", "exact(r=0): expected 1 token or more"),
        ("quest(read=mass(eps=1))", "mass(eps=1): expected a part of the softmax mass, above 0 and below 1"),
        ("quest(read=exact(r=1, cap=8))", "exact(cap=8): a cap budget is one of tokens()"),
        ("quest(read=exact(10))", "exact(10): its parameters are given by name, such as exact(r=...)"),
        ('quest(read=exact(r=1), heads="max")', 'quest(heads="max"): expected each or share with a stopping rule'),
        ("quest(read=exact(r=1), shards=shards(2))", "expected none with exact(), which stops on one order of all pages"),
        (
            'quest(read=pages(1), heads="split", shards=shards(2))',
            'quest(heads="split"): expected each, share, max, mean or softmax_mean',
        ),
        ("quest(read=pages(1), tile=0)", "quest(tile=0): expected 1 row or more"),
        ("quest(read=pages(1), shards=shards(0))", "shards(0): expected a whole number above 0"),
        ("quest(read=pages(1), shards=shards(2, budget='all'))", "shards(budget='all'): expected 'global', 'split' or 'each'"),
        ("quest(read=pages(1), shards=4)", "quest(shards=4): expected shards or None"),
    ],
)
def test_refused_in_one_line(text, says):
    with pytest.raises(WrongUse) as refused:
        parse(text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_engine_does_not_read_the_cap_where_the_floor_is_above_it():
    with pytest.raises(WrongUse, match="the floor is 2 pages and the cap 1; lower floor= or raise cap="):
        run(lane(), "quest(read=gap(min=1, floor=tokens(8), cap=pages(1)), page=4)")
