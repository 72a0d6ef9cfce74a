"""Expected Attention: the closed form against drawn queries, the naive twin, and what a query's future place does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kvsim import check_policy, parse
from kvsim.engine.source import Prefix
from kvsim.errors import WrongUse
from kvsim.geometry import Layer, QueryStats
from kvsim.policies.keep.expected_attention import expected_attention
from kvsim.units import tokens
from tests.engine.lanes import lane, placement, run

ROPE = '{"kind": "default", "theta": 100.0, "rotary_dim": 4, "layout": "half", "scaling": null, "magnitude": 1.0}'


def source(seed=0, rope=ROPE, key_dim=6, **more):
    made = lane(prompt=24, steps=3, key_dim=key_dim, seed=seed, **more)
    rng, heads = np.random.default_rng(seed), made.layer.q_heads
    spread = rng.standard_normal((heads, key_dim, key_dim)).astype(np.float32)
    stats = QueryStats(rng.standard_normal((heads, key_dim)).astype(np.float32), spread @ spread.swapaxes(1, 2), 4, 20)
    return replace(made, layer=replace(made.layer, rope=rope), q_stats=stats)


def naive_scores(policy, src):
    """[Hkv][p]: number by number; the average of turned unit vectors is taken from RoPE's own pairs of numbers."""
    lay, prompt, d = src.layer, src.request.prompt, src.layer.key_dim
    turn = [[float(i == j) for j in range(d)] for i in range(d)]  # turn[i][j]: what number j gives to number i
    for i in range(2):
        angles = [p * 100.0 ** (-2 * i / 4) for p in range(prompt, prompt + policy.future)]
        c, s = sum(map(math.cos, angles)) / len(angles), sum(map(math.sin, angles)) / len(angles)
        turn[i][i], turn[i][i + 2], turn[i + 2][i], turn[i + 2][i + 2] = c, -s, s, c
    every, out = range(d), []
    for h in range(lay.kv_heads):
        total = [0.0] * prompt
        for head in range(h * lay.group, (h + 1) * lay.group):
            m, cov = src.q_stats.mean[head].tolist(), src.q_stats.covariance[head].tolist()
            mean = [sum(turn[i][j] * m[j] for j in every) for i in every]
            half = [[sum(turn[i][j] * cov[j][k] for j in every) for k in every] for i in every]
            c = [[sum(half[i][k] * turn[j][k] for k in every) for j in every] for i in every]
            e = {}
            for p in range(policy.sinks, prompt):
                k = src.k[h, p].tolist()
                square = sum(k[i] * c[i][j] * k[j] for i in every for j in every)
                e[p] = math.exp(lay.scale * sum(a * b for a, b in zip(mean, k, strict=True)) + lay.scale**2 * square / 2)
            for p, x in e.items():
                total[p] += x / sum(e.values()) / lay.group
        out.append(
            [(x + policy.epsilon) * math.hypot(*src.v[h, p].tolist()) if p >= policy.sinks else None for p, x in enumerate(total)]
        )
    return out


@pytest.mark.parametrize("policy", [{}, {"sinks": 0}, {"epsilon": 0.05, "future": 3}])
def test_the_score_is_that_of_the_twin(policy):
    src, keep = source(), expected_attention(hold=tokens(12), **policy)
    placed = placement(src, run(src, keep)["tiers"])[:, 0]
    for h, scores in enumerate(naive_scores(keep, src)):
        best = sorted((p for p in range(24) if scores[p] is not None), key=lambda p: (-scores[p], p))[: 12 - keep.sinks]
        assert set(np.flatnonzero(placed[h, :24]).tolist()) == {*range(keep.sinks), *best}


def test_the_closed_form_is_the_mean_over_drawn_queries():
    """E[exp(scale q.k)] of a Gaussian q; here one query head, no turning, values of length 1, scores up to their common factor."""
    src = source(rope=None, kv_heads=1, group=1, key_dim=3)
    src = replace(src, v=np.ones_like(src.v), q_stats=replace(src.q_stats, covariance=src.q_stats.covariance / 4))
    keep = expected_attention(hold=tokens(12), sinks=0)
    paid = keep._paid(Prefix(src, keep.needs, "x"), src.k[:, :24].astype(float), 24)[0]
    rng = np.random.default_rng(5)
    q = rng.multivariate_normal(src.q_stats.mean[0], src.q_stats.covariance[0], 400_000)
    drawn = np.exp(src.layer.scale * q @ src.k[0, :24].T.astype(float)).mean(axis=0)
    assert paid == pytest.approx(drawn / drawn.sum(), rel=0.03)


def test_the_average_of_turns_is_the_mean_of_turned_rows():
    lay = Layer(0, "full", 1, 1, 8, 8, 1.0, 32, "float32", rope=ROPE)
    x, pos = np.random.default_rng(2).standard_normal((5, 8)), np.array([3, 4, 9])
    expected = np.mean([lay.rotate(x, np.full(5, p)) for p in pos], axis=0)
    np.testing.assert_allclose(x @ lay.mean_turn(pos), expected, atol=1e-12)
    assert np.array_equal(replace(lay, rope=None).mean_turn(pos), np.eye(8))
    with pytest.raises(WrongUse, match="layout"):
        replace(lay, rope=ROPE.replace("half", "unknown")).mean_turn(pos)


def test_far_futures_forget_the_place_and_near_ones_do_not():
    """Quickly turning numbers average out over many positions, so the average matrix shrinks."""
    lay = Layer(0, "full", 1, 1, 4, 4, 1.0, 16, "float32", rope=ROPE)
    one, many = (np.linalg.norm(lay.mean_turn(np.arange(n))) for n in (1, 512))
    assert one == pytest.approx(2)
    assert many < 0.2


def test_a_long_value_stays_and_decode_tokens_do_too():
    src = source()
    values = np.array(src.v)
    values[:, 11] = 1e6
    src = replace(src, v=values)
    placed = placement(src, run(src, expected_attention(hold=tokens(9)))["tiers"])
    assert (placed[:, :, 11] > 0).all()
    assert (placed[:, -1, 24:] > 0).all()
    assert (placed[:, -1] > 0).sum(1).tolist() == [9 + 3] * 2


@pytest.mark.parametrize(
    "policy",
    ["expected_attention(hold=tokens(20))", "expected_attention(hold=share(0.5), sinks=1) >> quest(read=pages(2), page=4)"],
)
def test_it_keeps_the_laws(policy):
    assert check_policy(parse(policy)) == []


@pytest.mark.parametrize(
    "wrong", ["hold=tokens(3)", "hold=tokens(9), future=0", "hold=tokens(9), epsilon=-1.0", "hold=tokens(9), sinks=-1"]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(WrongUse, match="expected_attention"):
        parse(f"expected_attention({wrong})")
