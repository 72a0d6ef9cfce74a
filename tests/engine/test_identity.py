"""What a read loses: o - o_C = eps (o_R - o_C) (card D4), both limits that follow from it, pages read for nothing, and how well pages are used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import naive
from tests.engine.lanes import lane, run

POLICIES = (
    "quest(read=pages(2), page=4)",
    'quest(read=pages(3), page=2, heads="share", refresh=3)',
    "recency(read=pages(1), page=8)",
    "h2o(hold=tokens(9)) >> quest(read=pages(1), page=4)",
)
lanes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "size": st.sampled_from([0.1, 1.0, 8.0]),
        "softcap": st.sampled_from([None, 3.0]),
        "sinks": st.booleans(),
        "window": st.sampled_from([None, 11]),
    }
)


def split(source, got):
    """Of every row of heads: its place; visible positions, their dense probabilities, which were read, values; the learned sink's part."""
    lay = source.layer
    plans = {(h, s): p for h, s, p in zip(got["plans"]["q_head"], got["plans"]["step"], got["plans"]["pages"], strict=True)}
    size, shared = got["plans"]["page_size"][0], (got["plans"]["q_head"] < 0).any()
    rows = zip(got["heads"]["q_head"], got["heads"]["step"], strict=True)
    for at, (h, s) in enumerate(rows):
        kv, t = int(h) // lay.group, source.t[s]
        pos = np.arange(lay.first_visible(int(t)), t + 1)
        x = naive.bent(source.rows("k", kv, pos) @ source.q[s, h].astype(float), source.unit, source.cap)
        sink = source.sinks[kv, h % lay.group]
        p = np.exp2(x - naive.log_sum(x, sink))
        pages = _of_head(got, kv, s) if shared else plans[(h, s)]
        yield at, pos, p, np.isin(pos // size, pages), source.rows("v", kv, pos), np.exp2(sink - naive.log_sum(x, sink))


def _of_head(got, kv, step):
    plans = got["plans"]
    [mine] = [p for p, h, s in zip(plans["pages"], plans["kv_head"], plans["step"], strict=True) if h == kv and s == step]
    return mine


@given(lanes, st.sampled_from(POLICIES[:3]))
@settings(deadline=None, max_examples=25)
def test_the_error_is_what_was_missed_times_how_it_differs(made, policy):
    source = lane(prompt=14, steps=5, value_dim=3, **made)
    got = run(source, policy, plans=True)
    heads = got["heads"]
    for at, _, p, read, v, sink in split(source, got):
        eps, kept = p[~read].sum(), p[read].sum() + sink
        whole, own = p @ v, p[read] @ v[read] / kept
        missed = p[~read] @ v[~read] / eps if eps > 0 else own
        assert np.allclose(whole - own, eps * (missed - own), atol=1e-9)
        assert heads["mass_evicted"][at] + heads["mass_unread"][at] == pytest.approx(eps, abs=2e-6)
        error = np.linalg.norm(whole - own)
        assert heads["rel_l2"][at] * np.linalg.norm(whole) == pytest.approx(error, abs=1e-5)
        for limit in ("out_bound", "out_bound_centred"):
            assert error <= heads[limit][at] + 1e-5


def test_the_centre_takes_off_what_all_values_share():
    """Values far from zero and close to one another: 2 eps Vmax says nothing, the centred limit does not see the shift."""
    source = lane(prompt=20, steps=4, seed=4)
    near = run(source, POLICIES[0])["heads"]
    source.v[:] += 1000
    source._one.clear()
    del source.__dict__["value_norms"], source.__dict__["value_strays"], source.__dict__["value_centre"]
    far = run(source, POLICIES[0])["heads"]
    assert far["out_bound_centred"] == pytest.approx(near["out_bound_centred"], rel=1e-3)
    assert (far["out_bound"] > 100 * near["out_bound"]).all()


def test_a_learned_sink_is_a_value_of_zero():
    """One head, sink far above all: o_C is almost zero, however far the values are from there."""
    source = lane(prompt=20, steps=3, sinks=True, seed=1)
    source.v[:] += 50
    source._one.clear()
    heads = run(source, POLICIES[0])["heads"]
    centre = np.linalg.norm(source.value_centre[0])
    eps = heads["mass_unread"]
    assert (heads["out_bound_centred"] >= 2 * eps * centre * 0.99).all()


# ------------------------------------------------------------------------------------------------ false positives
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_pages_that_an_oracle_would_not_read(policy):
    source = lane(prompt=30, steps=8, value_dim=3, dtype="float16", seed=3)
    got = run(source, policy, plans=True)
    heads, size = got["heads"], got["plans"]["page_size"][0]
    held = "h2o" in policy
    for at, pos, p, read, *_ in split(source, got):
        mass = np.bincount(pos // size, p)
        many = heads["read_pages"][at]
        best = np.lexsort((np.arange(len(mass)), -mass))[:many]
        wrong = read & ~np.isin(pos // size, best)
        limit = wrong.sum() * source.layer.row_bytes
        assert heads["false_read_bytes"][at] <= limit if held else heads["false_read_bytes"][at] == limit
        assert (heads["false_read_bytes"][at] == 0) == (heads["page_recall"][at] == 1)
    assert heads["false_read_bytes"].any()


def test_the_oracle_reads_nothing_for_nothing():
    heads = run(lane(prompt=30, steps=8), 'oracle(read=pages(3), page=4, by="mass")')["heads"]
    assert not heads["false_read_bytes"].any()


def test_coded_rows_are_billed_as_they_are_stored():
    source = lane(prompt=60, steps=8, key_dim=8, seed=2)
    plain, coded = (
        run(source, f"{store}quest(read=pages(3), page=4)")["heads"] for store in ("", "kivi(group=4, residual=4) >> ")
    )
    assert coded["false_read_bytes"].sum() < 0.7 * plain["false_read_bytes"].sum()


# ------------------------------------------------------------------------------------------------ page precision
@pytest.mark.parametrize("policy", POLICIES[:3])
def test_effective_tokens_per_page(policy):
    source = lane(prompt=30, steps=6, sinks=True, seed=5)
    got = run(source, policy, plans=True)
    for at, _, p, read, *_ in split(source, got):
        own = p[read] / p[read].sum()
        effective = np.exp(-(own * np.log(own)).sum())
        assert got["heads"]["page_precision"][at] == pytest.approx(effective / got["heads"]["read_pages"][at], rel=1e-4)


def test_precision_runs_from_one_token_to_all_of_a_page():
    flat = run(lane(prompt=32, steps=1, size=0.0), 'quest(read=pages(2), page=4, tail="free")')["heads"]
    assert flat["page_precision"] == pytest.approx(np.full(4, 4.0), rel=1e-5)
    sharp = run(lane(prompt=32, steps=1, size=1e4), "quest(read=pages(2), page=4)")["heads"]
    assert sharp["page_precision"] == pytest.approx(np.full(4, 0.5), rel=1e-5)
    everything = run(lane(prompt=32, steps=2), "quest(read=pages(99), page=4)")["heads"]
    assert np.isnan(everything["page_precision"]).all()  # no choice was made
