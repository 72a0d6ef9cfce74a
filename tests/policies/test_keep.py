"""Keeps on the worked examples of their papers, cut by a naive cut, and the laws they must hold at every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import h2o, streaming_llm, tokens, tova
from kvsim.geometry import ATTENTION, PREFILL_MASS, Window
from kvsim.policies.protocol import FULL, Ranking, Seen, State
from tests import naive


class Prompt:
    """A prefix of given attention: mass [Hq, n] and the last query's [Hq, n], `group` query heads per kv head."""

    def __init__(self, mass, group=1):
        self.attention, self.group = np.asarray(mass, float), group

    def mass(self):
        return self.attention

    def window(self, rows):
        return self.attention[None]

    def by_kv_head(self, x):
        return x.reshape(-1, self.group, x.shape[-1]).sum(axis=1)


def seen(pos, limit, a=None, step=0, t=None):
    pos = np.atleast_2d(pos)
    tier = np.full(pos.shape, FULL, np.uint8)
    limits = np.full(len(pos), limit)
    return Seen(step, int(pos.max()) if t is None else t, pos, pos >= 0, tier, tier, limits, a)


def left(ranking: Ranking, seen: Seen):
    """The positions that a cut leaves in every kv head; without a stage only the protected stay."""
    protect = np.zeros(ranking.score.shape, bool) if ranking.protect is None else ranking.protect
    n = [int(p.sum()) if not ranking.stages else int(limit) for p, limit in zip(protect, seen.limit, strict=False)]
    kept = [naive.survivors(s, p, k) for s, p, k in zip(ranking.score, protect, n, strict=True)]
    return [pos[k].tolist() for pos, k in zip(seen.pos, kept, strict=False)]


# ------------------------------------------------------------------------------------------------ H2O
def test_h2o_evicts_the_lightest_of_the_old():
    at = [1, 3, 5, 8, 9, 10, 11]
    state = State({"acc": np.array([[1.20, 0.75, 0.52, 0.30, 0.22, 0.16, 0]])})
    now = seen(at, 6, np.array([[[0.22, 0.10, 0.06, 0.08, 0.12, 0.15, 0.27]]]))
    ranking = h2o(hold=tokens(6), recent=0.5).step(state, now)
    assert np.allclose(state.slots["acc"], [[1.42, 0.85, 0.58, 0.38, 0.34, 0.31, 0.27]])
    assert left(ranking, now) == [[1, 3, 5, 9, 10, 11]]  # 9, 10 and 11 are lighter than 8, and protected


def test_h2o_sums_its_group_and_fades():
    state = State({"acc": np.array([[1.0, 2.0]])})
    h2o(hold=tokens(6), decay=0.5).step(state, seen([0, 1], 6, np.array([[[0.25, 0.75], [0.5, 0.5]]])))
    assert state.slots["acc"].tolist() == [[1.25, 2.25]]


def test_h2o_starts_from_the_prompt_or_from_zeros():
    prompt = Prompt([[0.5, 0.1, 3.0, 0.2], [0.25, 0.1, 0.0, 0.1]], group=2)
    policy, now = h2o(hold=tokens(2), recent=0.5), seen([0, 1, 2, 3], 2, step=-1)
    state, ranking = policy.start(prompt, now)
    assert np.allclose(state.slots["acc"], [[0.75, 0.2, 3.0, 0.3]])
    assert left(ranking, now) == [[2, 3]]
    state, ranking = h2o(hold=tokens(3), recent=0.4, prefill="zeros").start(prompt, seen([0, 1, 2, 3], 3, step=-1))
    assert not state.slots["acc"].any()
    assert left(ranking, seen([0, 1, 2, 3], 3, step=-1)) == [[0, 1, 3]]  # ties to the lower position
    assert h2o(hold=tokens(3)).needs == {ATTENTION, PREFILL_MASS}
    assert h2o(hold=tokens(3), prefill="zeros").needs == {ATTENTION}


@pytest.mark.parametrize(
    ("recent", "protected"),
    [(0.0, [0, 1, 11]), (0.29, [0, 1, *range(10, 12)]), (0.5, [0, 1, *range(8, 12)]), (0.75, [0, 1, *range(6, 12)])],
)
def test_h2o_protects_sinks_recent_and_the_newest(recent, protected):
    policy, now = h2o(hold=tokens(8), recent=recent, sinks=2), seen(np.arange(12), 8, step=-1)
    ranking = policy.start(Prompt(np.zeros((1, 12))), now)[1]
    assert now.pos[ranking.protect].tolist() == protected
    assert len(protected) == policy.protected(8)


def test_h2o_protects_nothing_in_empty_slots():
    now = seen([[0, 4], [4, -1]], 2, np.zeros((2, 1, 2)))
    ranking = h2o(hold=tokens(2), sinks=1).step(State({"acc": np.zeros((2, 2))}), now)
    assert ranking.protect.tolist() == [[True, True], [True, False]]


# ------------------------------------------------------------------------------------------------ StreamingLLM
def test_streaming_slides_behind_the_sinks():
    policy, held = streaming_llm(sinks=2, hold=tokens(5)), [0, 1, 2, 3, 4]
    for t, expected in ((5, [0, 1, 3, 4, 5]), (6, [0, 1, 4, 5, 6]), (7, [0, 1, 5, 6, 7])):
        now = seen([*held, t], 5)
        [held] = left(policy.step(State(), now), now)
        assert held == expected


def test_streaming_cuts_the_prompt():
    now = seen(np.arange(40), 8, step=-1)
    assert left(streaming_llm(hold=tokens(8)).start(Prompt(np.zeros((1, 40))), now)[1], now) == [[0, 1, 2, 3, 36, 37, 38, 39]]


def test_streaming_in_a_sliding_layer_holds_no_more_than_its_window():
    now = seen(np.arange(20, 40), 8)
    assert left(streaming_llm(hold=tokens(8)).step(State(), now), now) == [[36, 37, 38, 39]]


# ------------------------------------------------------------------------------------------------ TOVA
def test_tova_drops_the_lowest_mean_of_all_heads():
    weights = np.array([[0.40, 0.05, 0.10, 0.25, 0.20], [0.10, 0.30, 0.05, 0.15, 0.40]])
    for a in (weights[None], weights[:, None]):  # one kv head of two query heads, or two of one
        now = seen(np.tile(np.arange(5), (len(a), 1)), 4, a)
        ranking = tova(hold=tokens(4)).step(State(), now)
        assert np.allclose(ranking.score, [[0.25, 0.175, 0.075, 0.20, 0.30]])
        assert left(ranking, now)[0] == [0, 1, 3, 4]


def test_tova_cuts_the_prompt_by_its_last_query_and_does_not_spare_the_newest():
    now = seen([0, 1, 2], 2, step=-1)
    assert left(tova(hold=tokens(2)).start(Prompt([[0.5, 0.3, 0.2], [0.3, 0.6, 0.1]]), now)[1], now) == [[0, 1]]
    assert tova(hold=tokens(2)).needs == {ATTENTION, Window(1)}


# ------------------------------------------------------------------------------------------------ laws
@given(st.sampled_from(["h2o", "streaming_llm", "tova"]), st.integers(6, 12), st.integers(0, 3), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_capacity_is_never_exceeded_and_nothing_comes_back(name, limit, sinks, seed):
    policies = {"h2o": h2o, "streaming_llm": streaming_llm, "tova": tova}
    policy = policies[name](hold=tokens(limit), **({} if name == "tova" else {"sinks": sinks}))
    rng, prompt = np.random.default_rng(seed), 15
    state, ranking = policy.start(Prompt(rng.random((1, prompt))), now := seen(np.arange(prompt), limit, step=-1))
    for t in range(prompt, prompt + 20):
        [held] = left(ranking, now)
        assert len(held) <= limit
        if name != "tova":
            assert {*range(sinks), t - 1} <= {*held}
        where = np.searchsorted(now.pos[0], held)
        state.slots = {k: np.append(x[:, where], [[0.0]], axis=1) for k, x in state.slots.items()}
        now = seen([*held, t], limit, rng.dirichlet(np.ones(len(held) + 1))[None, None])
        ranking = policy.step(state, now)
