"""pools, random_keep, knorm, oracle_keep and h2o's norm: what each holds, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvsim import h2o, pools, tokens
from kvsim.errors import WrongUse
from kvsim.geometry import FUTURE, KEY_NORM, Span
from kvsim.policies import allocate
from kvsim.policies.language import known
from kvsim.policies.protocol import State
from tests.engine.lanes import chain, lane, placement, run
from tests.policies.test_keep import Prompt, left, seen

LANE = {"prompt": 40, "steps": 12, "kv_heads": 2}


def held(policy, source):
    """bool[Hkv, N, T]"""
    return placement(source, run(source, policy)["tiers"]) > 0


# ------------------------------------------------------------------------------------------------ pools
def test_an_overlap_is_counted_once_and_its_slot_goes_to_heavy_hitters():
    """Eight slots: 2 sinks, 3 recent, 2 pinned. Pins inside the sinks free their slots for the heaviest of the others."""
    acc = np.array([[0, 0, 5, 4, 3, 2, 9, 1, 0, 0, 0, 0]], float)
    for span, kept in (
        (Span("fact", 4, 6, "note"), [0, 1, 4, 5, 6, 9, 10, 11]),
        (Span("fact", 0, 2, "note"), [0, 1, 2, 3, 6, 9, 10, 11]),
    ):
        policy = pools(hold=tokens(8), sinks=2, recent=3, pinned="fact")
        prompt = Prompt(acc)
        prompt.spans = [span]
        now = seen(np.arange(12), 8, step=-1)
        assert left(policy.start(prompt, now)[1], now) == [kept]


def test_pools_hold_their_spans_to_the_end_and_never_more_than_the_total():
    source = lane(**LANE, evidence=((5, 9), (20, 23)))
    live = held('pools(hold=tokens(16), sinks=2, recent=3, pinned="s0, s1")', source)
    assert live[:, :, [0, 1, *range(5, 9), *range(20, 23)]].all()
    assert (live.sum(2) == 16).all()
    assert np.array_equal(live, held('pools(hold=tokens(16), sinks=2, recent=3, pinned="evidence")', source))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ('pools(hold=tokens(11), sinks=2, recent=3, pinned="s0, s1")', "that is 11 tokens in layer 3 of request 7, fewer than the 12 it protects"),
        ('pools(hold=tokens(11), sinks=2, recent=3, pinned="s0, s9")', "no span is called 's9'; the spans of the request are s0, s1"),
        ("pools(hold=tokens(11), sinks=2, recent=3, heavy=7)", "at least the 12 tokens that it protects"),
        ("pools(hold=tokens(11), recent=0)", "expected 1 tokens or more"),
    ],
)  # fmt: skip
def test_pools_that_do_not_fit_are_refused(policy, words):
    source = lane(**LANE, evidence=((5, 9), (20, 23)))
    with pytest.raises(WrongUse, match=words):
        allocate.hold_limit(chain(policy).part("keep"), 40, source.request, source.layer)


# ------------------------------------------------------------------------------------------------ random
def test_a_larger_draw_holds_all_that_a_smaller_one_does():
    source, live = lane(**LANE), None
    for n in (25, 12, 5, 1):
        small = held(f"random_keep(hold=tokens({n}))", source)
        assert (small.sum(2) == n).all()
        assert live is None or (live | ~small).all()
        live = small


def test_draws_differ_by_seed_head_layer_and_request():
    source = lane(**LANE)
    one = held("random_keep(hold=tokens(12))", source)
    layer = dataclasses.replace(source, layer=dataclasses.replace(source.layer, id=4))
    request = dataclasses.replace(source, request=dataclasses.replace(source.request, id=8))
    others = [
        held("random_keep(hold=tokens(12), seed=1)", source),
        one[::-1],
        held("random_keep(hold=tokens(12))", layer),
        held("random_keep(hold=tokens(12))", request),
    ]
    assert not any(np.array_equal(one, other) for other in others)


# ------------------------------------------------------------------------------------------------ norms and the future
def test_the_shortest_keys_stay():
    source = lane(**LANE)
    short = np.argsort(np.linalg.norm(source.k.astype(float), axis=2)[0, :39])[:9]
    live = held("knorm(hold=tokens(10))", source)
    assert set(np.flatnonzero(live[0, 0])) <= {*short, 39, 40}
    assert known()["knorm"](hold=tokens(9)).needs == {KEY_NORM}


def test_what_will_be_looked_at_most_is_lost_least():
    """At the first cut no other set of as many tokens keeps as much of what comes; later steps never look back for more."""
    source = lane(**LANE, size=4.0)
    policies = [
        "oracle_keep(hold=tokens(12))",
        "h2o(hold=tokens(12))",
        "tova(hold=tokens(12))",
        "knorm(hold=tokens(12))",
        "random_keep(hold=tokens(12))",
    ]
    oracle, *others = [run(source, p)["heads"]["mass_evicted"].mean() for p in policies]
    assert oracle < min(others)
    assert known()["oracle_keep"](hold=tokens(9)).needs == {FUTURE}


def test_a_token_counts_by_what_a_query_pays_it_not_by_its_age():
    """Totals 6, 5, 2 of 6, 5 and 1 queries: by the total the youngest goes, by the mean it is first."""
    prompt = Prompt([[6.0, 5.0, 2.0, 0.0]])
    prompt.queries = lambda: np.array([[6.0, 5.0, 1.0, 1.0]])
    now = seen(np.arange(4), 2, step=-1)
    assert left(h2o(hold=tokens(2), recent=0.5).start(prompt, now)[1], now) == [[0, 3]]
    state, ranking = h2o(hold=tokens(2), recent=0.5, norm="queries").start(prompt, now)
    assert left(ranking, now) == [[2, 3]]
    state = State({name: x.copy() for name, x in state.slots.items()})
    ranking = h2o(hold=tokens(2), decay=0.5, norm="queries").step(
        state, seen(np.arange(4), 2, np.array([[[0.1, 0.2, 0.3, 0.4]]]))
    )
    assert np.allclose(ranking.score, [[3.1 / 4, 2.7 / 3.5, 1.3 / 1.5, 0.4 / 1.5]])
