"""R-KV: the worked example, the naive twin, and what repetition means for who stays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import check_policy, parse
from kvsim.errors import WrongUse
from kvsim.policies.keep.r_kv import r_kv, redundancy
from kvsim.units import tokens
from tests.engine.lanes import lane, placement, run

EXAMPLE = np.array([(1, 0), (0.98, 0.1), (0, 1), (0.99, 0.05), (0.1, 0.95), (0.7, 0.7)])


# ------------------------------------------------------------------------------------------------ the twin, number by number
def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) + 1e-8) / (math.hypot(*b) + 1e-8)


def soft(xs):
    e = [math.exp(x - max(xs)) for x in xs]
    return [x / sum(e) for x in e]


def naive_redundancy(keys, similar=0.5):
    n, table = len(keys), []
    for i in range(n):
        row = [0.0 if i == j else cosine(keys[i], keys[j]) for j in range(n)]
        row[max((j for j in range(n) if row[j] > similar), default=0)] = 0.0
        table.append(row)
    return soft([sum(row[j] for row in table) / n for j in range(n)])


def bent(lay, dot):
    return lay.scale * dot if lay.softcap is None else lay.softcap * math.tanh(lay.scale * dot / lay.softcap)


def naive_scores(policy, source, head, live, t):
    """{position: score} of what lies before the window; the queries are those of the newest `window` positions."""
    lay, prompt = source.layer, source.request.prompt
    past = [p for p in live if p <= t - policy.window]
    if not past:
        return {}
    rows = [
        source.window_q[len(source.window_q) + p - prompt] if p < prompt else source.q[p - prompt]
        for p in range(max(0, t + 1 - policy.window), t + 1)
    ]
    mean = [0.0] * len(past)
    for row in rows:
        mine = row[head * lay.group : (head + 1) * lay.group].astype(float)
        logits = [max(bent(lay, float(q @ source.k[head, p].astype(float))) for q in mine) for p in past]
        mean = [m + x / len(rows) for m, x in zip(mean, soft(logits), strict=True)]
    half = policy.kernel // 2
    wide = [max(mean[max(0, i - half) : i + half + 1]) for i in range(len(past))]
    red = dict(zip(live, naive_redundancy([source.k[head, p].astype(float) for p in live], policy.similar), strict=True))
    return {p: policy.mix * a - (1 - policy.mix) * red[p] for p, a in zip(past, wide, strict=True)}


def naive_held(policy, source):
    """[Hkv][N]: the positions held after every step."""
    prompt, out = source.request.prompt, []
    for h in range(source.layer.kv_heads):
        live, steps = list(range(prompt)), []
        for i in range(-1, len(source.steps)):
            t = prompt + i
            if i >= 0:
                live.append(t)
            if (i + 1) % policy.period == 0 and len(live) > policy.hold.n:
                scores = naive_scores(policy, source, h, live, t)
                best = sorted(scores, key=lambda p: (-scores[p], p))[: policy.hold.n - policy.window]
                live = sorted([*best, *(p for p in live if p > t - policy.window)])
            if i >= 0:
                steps.append(set(live))
        out.append(steps)
    return out


# ------------------------------------------------------------------------------------------------ the score
def test_the_worked_example():
    """With no window and no smoothing; the order is nearly that of redundancy alone, and not that of attention."""
    attention, found = np.array([0.3, 0.25, 0.2, 0.1, 0.1, 0.05]), redundancy(EXAMPLE)
    assert found == pytest.approx([0.187, 0.196, 0.160, 0.191, 0.149, 0.117], abs=5e-4)
    policy = r_kv(hold=tokens(9), kernel=1)
    score = policy.score(np.log(attention)[None, None], found)
    assert np.argsort(-score).tolist() == [5, 4, 2, 0, 1, 3]
    assert np.argsort(-score).tolist() != np.argsort(-attention).tolist() == [0, 1, 2, 3, 4, 5]


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_redundancy_is_that_of_the_twin(n, d, seed, similar):
    keys = np.random.default_rng(seed).standard_normal((n, d))
    found = redundancy(keys, similar)
    assert found == pytest.approx(naive_redundancy(keys, similar), rel=1e-9)
    assert found.sum() == pytest.approx(1)


def test_blocks_of_rows_are_one_matrix(monkeypatch):
    keys = np.random.default_rng(3).standard_normal((37, 4))
    whole = redundancy(keys)
    monkeypatch.setattr("kvsim.policies.keep.r_kv.ROWS", 5)
    assert redundancy(keys) == pytest.approx(whole, rel=1e-12)


def test_a_keys_length_does_not_count_and_a_missing_key_repeats_nothing():
    size = np.array([1.0, 100, 0.01, 5, 2, 3])[:, None]
    assert redundancy(EXAMPLE * size) == pytest.approx(redundancy(EXAMPLE), rel=1e-5)
    assert np.isfinite(redundancy(np.zeros((4, 3)))).all()


def test_of_repetitions_the_last_is_not_held_against_itself():
    """Three copies of one key among keys at right angles: the first is held against itself by both others, the second by the first alone."""
    found = redundancy(np.eye(6)[[0, 0, 0, 1, 2, 3]])
    once = np.exp(1 / 6)
    assert found[:3] / found[3] == pytest.approx([once**2, once, 1.0])


def test_logits_are_pooled_over_the_group_before_the_softmax():
    """The trap: a head whose logits are large speaks for the group, although its own attention is as flat."""
    policy = r_kv(hold=tokens(9), kernel=1, mix=1.0)
    loud, quiet = np.array([10.0, 10, 10, 9]), np.array([0.0, 0, 0, 8])
    assert policy.score(np.array([[loud, quiet]]), np.zeros(4)).argmin() == 3
    assert policy.score(np.array([[loud - 10, quiet]]), np.zeros(4)).argmax() == 3


# ------------------------------------------------------------------------------------------------ who stays
@pytest.mark.parametrize("dim", [3, 24])  # also more numbers in a key than tokens held
@pytest.mark.parametrize(("mix", "softcap"), [(0.07, None), (0.9, None), (0.9, 0.7)])
def test_who_stays_is_what_the_twin_says(dim, mix, softcap):
    source = lane(prompt=30, steps=17, group=3, key_dim=dim, softcap=softcap)
    policy = r_kv(hold=tokens(12), window=3, kernel=3, mix=mix, period=5)
    placed = placement(source, run(source, policy)["tiers"])
    for h, steps in enumerate(naive_held(policy, source)):
        for i, held in enumerate(steps):
            assert set(np.flatnonzero(placed[h, i]).tolist()) == held


def test_what_is_held_grows_to_the_next_cut():
    source = lane(prompt=30, steps=12)
    held = run(source, r_kv(hold=tokens(14), window=2, period=4))["ledger"]["held_tokens"]
    assert held[:12].tolist() == [15, 16, 17, 14] * 3


def test_a_chain_of_thought_that_repeats_itself_loses_the_repetitions():
    source = lane(prompt=40, steps=1, kv_heads=1, group=1, key_dim=32)
    keys = np.array(source.k)
    keys[:, 5:15] = keys[:, 5:6]
    source = replace(source, k=keys)
    placed = placement(source, run(source, r_kv(hold=tokens(31), window=4, period=4, mix=0))["tiers"])[0, 0]
    assert (placed[5:14] == 0).all()
    assert placed[14] > 0
    assert placed[15:36].all()


@pytest.mark.parametrize(
    "policy",
    ["r_kv(hold=tokens(20), window=4, period=6)", "r_kv(hold=share(0.5), window=2, period=3) >> quest(read=pages(2), page=4)"],
)
def test_it_keeps_the_laws(policy):
    assert check_policy(parse(policy)) == []


@pytest.mark.parametrize(
    "wrong", ["hold=tokens(4)", "hold=tokens(99), kernel=4", "hold=tokens(99), mix=2.0", "hold=tokens(99), window=9, period=8"]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(WrongUse, match="r_kv"):
        parse(f"r_kv({wrong})")
