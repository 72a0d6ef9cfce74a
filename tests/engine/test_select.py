"""Cuts and picks against doing them by hand, and what a policy gets told when its ranking is none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.select import cut, forced_pages, joint, page_order, pick, split_order
from kvsim.errors import WrongUse
from kvsim.policies.protocol import CODED, FULL, GONE, Forced, Keep, Ranking, Read, Stage, State, Store
from kvsim.units import pages, tokens
from tests import naive
from tests.engine.lanes import lane, run

seeds = st.integers(0, 2**32)


# ------------------------------------------------------------------------------------------------ cut
def slots(seed, heads, n):
    rng = np.random.default_rng(seed)
    valid = rng.random((heads, n)) < 0.8
    return rng, np.where(valid, np.arange(n), -1), valid


@given(seeds, st.integers(1, 4), st.integers(1, 25))
@settings(deadline=None, max_examples=60)
def test_a_plain_cut(seed, heads, n):
    rng, pos, valid = slots(seed, heads, n)
    score, protect, limit = rng.integers(0, 5, (heads, n)) / 4, rng.random((heads, n)) < 0.2, rng.integers(1, n + 1, heads)
    got = cut(Ranking(score, protect), pos, valid, limit, {FULL: 8.0})
    for h in range(heads):
        live = np.flatnonzero(valid[h])
        most = max(limit[h], protect[h, live].sum())
        want = live[naive.survivors(score[h, live], protect[h, live], most)]
        assert np.array_equal(np.flatnonzero(got[h] == FULL), want)
        assert (got[h][got[h] != FULL] == GONE).all()


def test_what_is_dead_cannot_be_ranked_back():
    valid = np.array([[True, False, True, True]])
    ranking = Ranking(np.array([[0.0, np.inf, 1.0, 2.0]]), protect=np.array([[False, True, False, False]]))
    assert cut(ranking, np.array([[0, -1, 2, 3]]), valid, np.array([2]), {FULL: 8.0}).tolist() == [[GONE, GONE, FULL, FULL]]
    units = dataclasses.replace(ranking, unit=np.array([[0, 1, 2, 3]]))
    assert cut(units, np.array([[0, -1, 2, 3]]), valid, np.array([2]), {FULL: 8.0}).tolist() == [[GONE, GONE, FULL, FULL]]


def test_one_decision_for_the_layer():
    ranking, pos, valid = Ranking(np.array([[3.0, 1.0, 2.0]])), np.tile(np.arange(3), (2, 1)), np.ones((2, 3), bool)
    assert cut(ranking, pos, valid, np.array([2, 2]), {FULL: 8.0}).tolist() == [[FULL, GONE, FULL]] * 2
    pos[1, 2], valid[1, 2] = -1, False
    with pytest.raises(WrongUse, match="kv heads that hold the same tokens"):
        cut(ranking, pos, valid, np.array([2, 2]), {FULL: 8.0})


def test_units_share_their_fate_and_stages_take_their_share_of_the_bytes():
    """Budget of 8 rows of 8 bytes, one protected: 56 bytes left. Half buys one unit of two full rows (16 bytes each), the rest of the
    share buys coded ones at 4 bytes a row."""
    unit = np.array([[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]])
    score = np.array([[1.0, 1, 5, 0, 0, 1, 3, 3, 0, 0]])  # sums: 2, 5, 1, 6, 0
    protect = np.arange(10)[None] == 9
    stages = (Stage(0.5, FULL), Stage(0.5, CODED))
    got = cut(
        Ranking(score, protect, unit, stages), np.arange(10)[None], np.ones((1, 10), bool), np.array([8]), {FULL: 8.0, CODED: 4.0}
    )
    # 28 // 16 = 1 unit full (3); 28 // 8 = 3 units coded (1, 0, 2); unit 4 keeps its protected row
    assert got.tolist() == [[CODED, CODED, CODED, CODED, CODED, CODED, FULL, FULL, GONE, FULL]]


def test_two_helpings_of_one_tier_round_together():
    stages = (Stage(0.5, FULL, np.array([[9.0, 1, 2, 3, 4]])), Stage(0.5))
    got = cut(Ranking(np.arange(5.0)[None], stages=stages), np.arange(5)[None], np.ones((1, 5), bool), np.array([3]), {FULL: 8.0})
    assert got.tolist() == [[FULL, GONE, GONE, FULL, FULL]]  # floor(1.5) = 1 by the first score, 3 in all


@given(seeds, st.integers(1, 4), st.integers(2, 20), st.sampled_from([0.0, 0.2, 0.5]))
@settings(deadline=None, max_examples=60)
def test_heads_that_share_a_budget_spend_it_where_the_best_rows_are(seed, heads, n, own):
    rng = np.random.default_rng(seed)
    score, limit = rng.random((heads, n)), int(rng.integers(1, n + 1))
    got = cut(
        Ranking(score, own=own), np.tile(np.arange(n), (heads, 1)), np.ones((heads, n), bool), np.full(heads, limit), {FULL: 8.0}
    )
    kept = (got == FULL).sum(1)
    assert kept.sum() == heads * limit
    won = np.bincount(np.argsort(-score, axis=None)[: heads * limit] // n, minlength=heads)
    assert (np.abs(kept - ((1 - own) * won + own * limit)) < 1).all()
    for h in range(heads):
        assert np.flatnonzero(got[h] == FULL).tolist() == naive.survivors(score[h], np.zeros(n, bool), kept[h])


@given(seeds, st.integers(1, 4), st.integers(1, 20), st.sampled_from([0.0, 0.2, 0.9]))
@settings(deadline=None, max_examples=100)
def test_a_shared_budget_is_spent_to_the_last_row_whatever_is_protected(seed, heads, n, own):
    rng, pos, valid = slots(seed, heads, n)
    protect, limit = (rng.random((heads, n)) < rng.random((heads, 1))) & valid, np.full(heads, int(rng.integers(1, n + 1)))
    got = cut(Ranking(rng.random((heads, n)), protect, own=own), pos, valid, limit, {FULL: 8.0}) == FULL
    assert got.sum() == min(valid.sum(), max(limit.sum(), protect.sum()))
    assert (got | ~protect).all()


def test_what_one_head_protects_beyond_its_limit_the_others_pay_for():
    """8 rows protected in one head and none in the other, a limit of 4 each: nothing is left to share."""
    protect = np.repeat([[True], [False]], 8, 1)
    for own in (0.0, 0.5):
        ranking = Ranking(np.ones((2, 8)), protect, own=own)
        got = cut(ranking, np.tile(np.arange(8), (2, 1)), np.ones((2, 8), bool), np.array([4, 4]), {FULL: 8.0})
        assert (got == FULL).sum(1).tolist() == [8, 0]


def test_a_head_with_few_rows_leaves_its_share_to_the_others():
    valid = np.array([[True, True, False, False, False, False], [True] * 6])
    ranking = Ranking(np.array([[9.0, 8, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]), own=0.9)
    got = cut(ranking, np.where(valid, np.arange(6), -1), valid, np.array([4, 4]), {FULL: 8.0})
    assert (got == FULL).sum(1).tolist() == [2, 6]


def test_a_stage_takes_only_what_is_among_its_own_and_passes_nothing_on():
    """Three of four places at full tier are for units 0 to 2, and one of them lies half outside; the last stage has one place."""
    unit = np.array([[0, 0, 1, 1, 2, 2, 3, 3]])
    among = np.array([[True, True, True, False, True, True, False, False]])
    stages = (Stage(0.75, FULL, among=among), Stage(0.25, FULL))
    ranking = Ranking(np.array([[1.0, 1, 9, 9, 2, 2, 5, 5]]), unit=unit, stages=stages)
    got = cut(ranking, np.arange(8)[None], np.ones((1, 8), bool), np.array([8]), {FULL: 8.0})
    assert got.tolist() == [[FULL, FULL, FULL, FULL, FULL, FULL, GONE, GONE]]  # 2 and 0, then 1: the third place stays empty


# ------------------------------------------------------------------------------------------------ pages
def test_forced_pages():
    ids, t = np.array([0, 1, 2, 3, 5]), np.array([11, 14, 20])
    assert not forced_pages(Forced(), ids, 4, t).any()
    assert forced_pages(Forced(tail=True), ids, 4, t).astype(int).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert forced_pages(Forced(sinks=5), ids, 4, t)[0].astype(int).tolist() == [1, 1, 0, 0, 0]
    assert forced_pages(Forced(sinks=4), ids, 4, t)[0].astype(int).tolist() == [1, 0, 0, 0, 0]
    assert forced_pages(Forced(recent=4), ids, 4, t).astype(int).tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_heads_decide_together():
    score, all_there = np.array([[[4.0, 1.0, 0.0], [0.0, 3.0, 0.0]]]), np.ones((1, 3), bool)
    assert joint("max", score, all_there, 1.0).tolist() == [[[4, 3, 0]]]
    assert joint("mean", score, all_there, 1.0).tolist() == [[[2, 2, 0]]]
    soft = np.exp2(score) / np.exp2(score).sum(-1, keepdims=True)
    assert np.allclose(joint("softmax_mean", score, all_there, 1.0), soft.mean(1, keepdims=True))
    assert joint("each", score, all_there, 1.0) is score
    unbounded = np.array([[[np.inf, 1.0, np.inf], [np.inf, 3.0, 0.0]]])
    assert page_order(joint("softmax_mean", unbounded, all_there, 1.0), all_there, ~all_there)[0, 0].tolist() == [0, 2, 1]


def test_the_first_pages_of_an_order():
    score, exists = np.array([[[1.0, 5.0, 3.0, 9.0]]]), np.array([[True, True, True, False]])
    forced = np.array([[True, False, False, False]])
    order = page_order(score, exists, forced)
    assert order.tolist() == [[[0, 1, 2, 3]]]
    chosen = lambda k: pick(order, exists, forced, np.array([k]), "each", 1)[0, 0].astype(int).tolist()  # noqa: E731
    assert [chosen(k) for k in (1, 2, 3, 9)] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert page_order(score, np.array([[True, True, False, True]]), np.array([[False, True, True, False]])).tolist() == [
        [[1, 3, 0, 2]]
    ]  # forced, but not there
    both = np.array([[True, True, False, False]])
    assert pick(page_order(score, exists, both), exists, both, np.array([1]), "each", 1)[0, 0].astype(int).tolist() == [
        1,
        1,
        0,
        0,
    ]


def test_private_pages_first_then_the_best_of_the_heads():
    """Card A9: heads of one group, page scores 9 8 1 0 5 and 0 7 6 2 5."""
    score, there, none = np.array([[[9.0, 8, 1, 0, 5], [0, 7, 6, 2, 5]]]), np.ones((1, 5), bool), np.zeros(5, bool)
    chosen = lambda k, private, forced=none: sorted(split_order(score, there, forced[None], private)[0, 0, :k].tolist())  # noqa: E731
    assert chosen(3, 1) == [0, 1, 2]  # 0 and 1 are private, then the best of what is left: 6 of page 2
    assert chosen(3, 0) == [0, 1, 2]
    assert chosen(1, 1) == [0]
    assert chosen(4, 2) == [0, 1, 2, 4]
    assert chosen(3, 1, np.arange(5) == 3) == [0, 1, 3]


# ------------------------------------------------------------------------------------------------ refusals
class Broken(Keep):
    hold = tokens(9)

    def start(self, prefix, seen):
        return State(), None


@dataclasses.dataclass(frozen=True)
class heavier(Ranking):
    bytes: int = 0


REFUSED = {
    "holds NaN": lambda self, state, seen: Ranking(np.full(seen.pos.shape, np.nan)),
    "expected .Hkv, n. = .2, 22., or": lambda self, state, seen: Ranking(np.zeros((2, 3))),
    "differ in shape: .2, 5. beside a score of .2, 22.": lambda self, state, seen: Ranking(
        np.zeros(seen.pos.shape), np.zeros((2, 5), bool)
    ),
    "returned heavier, expected a Ranking or None": lambda self, state, seen: heavier(np.zeros(seen.pos.shape)),
    "returned dict, expected a Ranking or None": lambda self, state, seen: {"score": 1},
    "codes rows, but the policy declares no codecs": lambda self, state, seen: Ranking(
        np.zeros(seen.pos.shape), stages=(Stage(1.0, CODED),)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_ranking_that_is_none_is_refused(words):
    keep = dataclasses.dataclass(frozen=True)(type("broken", (Broken,), {"step": REFUSED[words]}))()
    with pytest.raises(WrongUse, match=words):
        run(lane(), keep)


ASKED = {
    "mass": "prefill_mass",
    "window": r"window\(4\)",
    "wo_norm": "wo_norm",
    "key_norm": "key_norm",
    "keys": "keys",
    "values": "values",
    "future": "future",
}


@pytest.mark.parametrize("ask", ASKED)
def test_what_is_not_declared_is_refused(ask):
    def start(self, prefix, seen):
        prefix.window(4) if ask == "window" else getattr(prefix, ask)()
        return State(), None

    keep = dataclasses.dataclass(frozen=True)(type("broken", (Broken,), {"start": start, "step": lambda *a: None}))()
    with pytest.raises(WrongUse, match=f"broken looks at {ASKED[ask]} but does not declare it in needs"):
        run(lane(), keep)


def test_a_score_of_pages_that_is_none_is_refused():
    for words, score in {
        r"score returned \(3,\), expected an array \[N, Hkv, G, P\] = \(\d+, 1, 2, \d+\)": lambda self, view: np.zeros(3),
        "score returned list, expected": lambda self, view: [1],
        "returned NaN for a page that exists": lambda self, view: np.full((*view.q.shape[:3], view.page.shape[1]), np.nan),
    }.items():
        read = dataclasses.dataclass(frozen=True, kw_only=True)(type("broken", (Read,), {"score": score}))(read=pages(1))
        with pytest.raises(WrongUse, match=words):
            run(lane(), read)


def test_groups_must_be_whole():
    class half(Store):
        @property
        def codecs(self):
            from kvsim import kivi

            return kivi(group=4, residual=4).codecs

        def place(self, seen):
            return seen.valid & (seen.pos < 3), np.zeros(seen.valid.shape, bool)

    with pytest.raises(WrongUse, match="3 k rows of kv head 0 are to be coded in groups of 4: groups must be whole"):
        run(lane(), dataclasses.dataclass(frozen=True)(half)())
