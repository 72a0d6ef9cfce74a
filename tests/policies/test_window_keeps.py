"""AdaKV, CriticalKV and DefensiveKV on the cards' worked examples, and where their authors' code differs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvsim import adakv, criticalkv, defensivekv, tokens
from kvsim.engine.select import cut
from kvsim.errors import WrongUse
from kvsim.geometry import ALL_LAYERS, WO_NORM, Window
from kvsim.policies.keep.defensivekv import worst
from kvsim.policies.protocol import FULL, Seen


class Prompt:
    """attention [rows, Hq, n] of the last prompt queries, norm [Hq, n]."""

    def __init__(self, attention, norm, group=1):
        self.attention, self.norm, self.group = np.asarray(attention, float), np.asarray(norm, float), group
        self.layer = SimpleNamespace(group=group)

    def window(self, rows):
        return self.attention.copy()

    def wo_norm(self):
        return self.norm

    def by_kv_head(self, x):
        return x.reshape(-1, self.group, x.shape[-1]).sum(axis=1)


def left(policy, prompt, limit):
    """The positions that the first cut leaves in every kv head."""
    n, heads = prompt.norm.shape[1], len(prompt.norm) // prompt.group
    pos, tier = np.tile(np.arange(n), (heads, 1)), np.full((heads, n), FULL, np.uint8)
    seen = Seen(-1, n - 1, pos, pos >= 0, tier, tier, np.full(heads, limit))
    ranking = policy.start(prompt, seen)[1]
    return [np.flatnonzero(row).tolist() for row in cut(ranking, pos, pos >= 0, seen.limit, {FULL: 8.0}) == FULL]


# ------------------------------------------------------------------------------------------------ AdaKV
EVEN, FLAT = [0.50, 0.20, 0.10, 0.05, 0.04, 0.03, 0], [0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0]  # and a window of one query
RICH, POOR = [0.9, 0.8, 0.7, 0.6, 0.5, 0], [0.04, 0.03, 0.02, 0.01, 0.01, 0]


@pytest.mark.parametrize(
    ("ada_mode", "alpha", "scores", "kept"),
    [
        # Card B5, B = 3, alpha = .2: 2.2 and 3.8 rows; kvpress makes a head sure of none and takes the six best.
        ("mix", 0.2, (EVEN, FLAT), [[0, 1, 6], [0, 1, 2, 3, 6]]),
        ("safeguard", 0.2, (EVEN, FLAT), [[0, 1, 6], [0, 1, 2, 3, 6]]),
        # B = 3, alpha = .5: 5 (1 - .5) + 1.5 = 4 rows and 1 (1 - .5) + 1.5 = 2; or two rows for certain, the window's own one of them.
        ("mix", 0.5, (RICH, POOR), [[0, 1, 2, 3, 5], [0, 1, 5]]),
        ("safeguard", 0.5, (RICH, POOR), [[0, 1, 2, 3, 4, 5], [0, 5]]),
        ("safeguard", 1.0, (RICH, POOR), [[0, 1, 2, 5], [0, 1, 2, 5]]),  # all is sure: an equal share
    ],
)
def test_ada_shares_the_budget_of_the_layer(ada_mode, alpha, scores, kept):
    policy, prompt = adakv(hold=tokens(4), window=1, kernel=1, alpha=alpha, ada_mode=ada_mode), np.array(scores)
    assert left(policy, Prompt(prompt[None], np.ones(prompt.shape)), 4) == kept
    assert sum(map(len, kept)) == 2 * 4


# ------------------------------------------------------------------------------------------------ CriticalKV
SCORE, NORM = [0.40, 0.20, 0.15, 0.10, 0.09, 0.06, 0.0], [1, 1, 0.5, 3, 1, 4, 1]  # and a window of one query


def test_critical_fills_up_by_the_norm_of_the_value():
    """Card B6: stage 1 {0, 1}, then .3003 of 3 and .2404 of 5; plain attention would keep {0, 1, 2, 3}."""
    policy = criticalkv(hold=tokens(5), window=1, kernel=1)
    assert left(policy, Prompt([[SCORE]], [NORM]), 5) == [[0, 1, 3, 5, 6]]
    assert left(criticalkv(hold=tokens(5), window=1, kernel=1, first=1.0), Prompt([[SCORE]], [NORM]), 5) == [[0, 1, 2, 3, 6]]


@pytest.mark.parametrize("rows", [1, 2])
def test_critical_averages_the_window_so_that_epsilon_has_a_scale(rows):
    """(0 + 1e-4) 2.9 of 1 against (1.5e-4 + 1e-4) 1 of 2, however many queries say so."""
    attention = [[[0.4, 0.0, 1.5e-4, *[0.0] * rows]]] * rows
    policy = criticalkv(hold=tokens(2 + rows), window=rows, kernel=1)
    assert left(policy, Prompt(attention, [[1, 2.9, 1, *[1] * rows]]), 2 + rows) == [[0, 1, *range(3, 3 + rows)]]


def test_critical_as_its_authors_code_it_may_lose_a_recent_token():
    """Card B6, trap: three window tokens at 1.3, two of them in stage 1; the newest has a norm of .05 and leaves. Here it is protected."""
    prompt = Prompt([[[0.3, 0.2, 0.1, 0, 0, 0]]] * 3, [[1, 1, 1, 1, 1, 0.05]])
    assert left(criticalkv(hold=tokens(4), window=3, kernel=1, compat=True), prompt, 4) == [[0, 1, 3, 4]]
    assert left(criticalkv(hold=tokens(4), window=3, kernel=1), prompt, 4) == [[0, 3, 4, 5]]


def test_critical_ada_shares_the_budget_before_the_stages():
    """Scores of card B5, B = 3, alpha = .2: heads of 2 and 4 rows by largest remainder; every value weighs alike but one."""
    score = np.array([[0.50, 0.20, 0.10, 0.05, 0.04, 0.03, 0], [0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0]])
    norm = np.ones((2, 7))
    norm[1, 5] = 9
    policy = criticalkv(hold=tokens(4), base="adakv", window=1, kernel=1)
    assert left(policy, Prompt(score[None], norm), 4) == [[0, 1, 6], [0, 1, 2, 5, 6]]
    assert criticalkv(hold=tokens(64), base="adakv").joint
    assert not criticalkv(hold=tokens(64)).joint


def test_critical_ada_as_its_authors_code_it_is_sure_of_whole_rows():
    """B = 4 with the window, alpha = .5: two rows for certain, of which the window's own is one; the other four go to the best of the layer."""
    score = np.array([[0.9, 0.8, 0.7, 0.6, 0.5, 0], [0.04, 0.03, 0.02, 0.01, 0.01, 0]])
    policy = criticalkv(hold=tokens(4), base="adakv", window=1, kernel=1, alpha=0.5, compat=True)
    assert left(policy, Prompt(score[None], np.ones((2, 6))), 4) == [[0, 1, 2, 3, 4, 5], [0, 5]]


# ------------------------------------------------------------------------------------------------ DefensiveKV
ROWS = [[(0.6, 0.1, 0.1, 0.2), (0.5, 0.2, 0.2, 0.1)], [(0.1, 0.1, 0.7, 0.1), (0.4, 0.2, 0.3, 0.1)]]  # [query][head of the group]


def test_the_worst_case_is_the_largest_of_the_group_and_never_below_the_mean():
    """Card B7: largest (.6, .2, .7, .2), floor .425."""
    assert np.allclose(worst(np.array(ROWS), 1), [0.6, 0.425, 0.7, 0.425])


def test_pooling_leaves_the_sum_of_a_query_as_it_was():
    a = np.array([[[0.5, 0.0, 0.0, 0.3]]])
    smooth = np.array([0.5, 0.5, 0.3, 0.3]) / 3
    assert np.allclose(worst(a, 3), np.maximum(0.8 * smooth / smooth.sum(), 0.2))


def with_window(rows, window):
    """Attention before the window, and what each window query pays to the window's first token."""
    rows = np.asarray(rows, float)
    inside = np.zeros((*rows.shape[:2], window))
    inside[..., 0] = 1 - rows.sum(-1)
    return np.concatenate([rows, inside], -1)


def first(policy, prompt, limit, heads=1):
    """The positions before the window that come first."""
    n = prompt.norm.shape[1]
    pos = np.tile(np.arange(n), (heads, 1))
    seen = Seen(-1, n - 1, pos, pos >= 0, pos, pos, np.full(heads, limit))
    past = pos[0] <= n - 1 - policy.window
    a = prompt.attention.reshape(len(prompt.attention), heads, -1, n)
    return [np.flatnonzero(row).tolist() for row in policy._first(a, past, seen)]


MEAN = [[(0.5, 0.3, 0.15, 0.05)]]


def test_the_row_that_reaches_the_cover_belongs_to_it():
    """Card B7, trap b: of .5, .8, .95, 1 the third reaches .9; the authors' code stops one before."""
    prompt = Prompt(with_window(MEAN, 1), np.ones((1, 5)))
    assert first(defensivekv(hold=tokens(5), window=1), prompt, 5) == [[0, 1, 2]]
    beside = Prompt(
        np.concatenate([np.array(MEAN), np.zeros((1, 1, 2))], -1), np.ones((1, 6))
    )  # trap a: columns before the window hold 0
    assert first(defensivekv(hold=tokens(6), window=1, compat=True), beside, 6) == [[0, 1]]


def test_the_windows_mass_is_that_inside_the_window():
    """Card B7, trap a: half of the attention falls on the window, so .4 of the rest is enough; the authors' code takes the column before it."""
    attention = with_window([[(0.30, 0.1, 0.05, 0.05)]], 1)
    assert first(defensivekv(hold=tokens(5), window=1), Prompt(attention, np.ones((1, 5))), 5) == [[0]]
    assert first(defensivekv(hold=tokens(5), window=1, compat=True), Prompt(attention, np.ones((1, 5))), 5) == [
        [0, 1]
    ]  # .9 - .05 at the third


def test_a_budget_below_the_window_lets_nothing_come_first_here_and_almost_all_there():
    """Card B7, trap e: int(8 · 2/12 − 4) = −2, and a slice up to −2."""
    prompt = Prompt(with_window([[[0.2, 0.18, 0.16, 0.14, 0.12, 0.1, 0.06, 0.04]]] * 4, 4), np.ones((1, 12)))
    assert first(defensivekv(hold=tokens(4), window=4), prompt, 2) == [[]]
    assert first(defensivekv(hold=tokens(2), window=4, cover=1.0, compat=True), prompt, 2) == [[0, 1, 2, 3, 4, 5]]


def test_defensive_spends_the_layers_budget_where_values_weigh_most():
    """Two kv heads that attend alike: the second one's values are nine times as long, so nine tenths of every score is its own."""
    attention = with_window([[(0.4, 0.3, 0.2, 0.1)] * 2], 1)
    policy = defensivekv(hold=tokens(3), window=1, kernel=1, cover=0.0)
    assert left(policy, Prompt(attention, np.ones((2, 5)) * [[1], [9]]), 3) == [[4], [0, 1, 2, 3, 4]]


def test_defensive_protects_its_window_and_the_authors_code_does_not():
    """All of one head comes first and ties with the window: the lower head and position win."""
    attention = np.zeros((2, 2, 6))
    attention[:, 0, :4], attention[:, 1, 0] = 0.25, 1.0
    norm = np.ones((2, 6))
    policy = defensivekv(hold=tokens(2), window=2, kernel=1)
    assert left(policy, Prompt(attention, norm), 2) == [[4, 5], [4, 5]]
    there = left(defensivekv(hold=tokens(2), window=2, kernel=1, compat=True), Prompt(attention, norm), 2)
    assert sum(map(len, there)) == 4
    assert 5 not in there[1]


@pytest.mark.parametrize("policy", [criticalkv, defensivekv])
def test_needs(policy):
    assert policy(hold=tokens(64)).needs == {Window(32), WO_NORM}
    assert defensivekv(hold=tokens(64), scope="model").needs == {Window(32), WO_NORM, ALL_LAYERS}
    with pytest.raises(WrongUse, match="at least the 32 tokens that it protects"):
        policy(hold=tokens(31))
    assert policy(hold=tokens(31), compat=True).protected(31) == 0
