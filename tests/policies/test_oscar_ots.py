"""OScaR: the four keys of its card in all four corners, what its norms are for, and its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import kivi, oscar_ots
from kvsim.conformance import check_policy
from tests import naive
from tests.engine.lanes import lane
from tests.policies.test_kivi import full, placed

KEYS = np.array([[0.1, -0.1, 0.05, 0.15], [4, 1, -0.5, 0.5], [3.6, -1, 0.5, -0.5], [4.4, 0.8, 0.3, 0.2]])[None]


def keys(rotate, norm, group=4):
    return oscar_ots(group=group, residual=group, rotate=rotate, norm=norm).codecs.k


@pytest.mark.parametrize(
    ("rotate", "norm", "mse", "smallest"),
    [
        ("none", "none", 0.04302, 1.232),
        ("hadamard", "none", 0.02757, 0.0),
        ("none", "token", 0.02481, 0.0),
        ("hadamard", "token", 0.01848, 0.0318),
    ],
)
def test_the_four_keys_of_the_card(rotate, norm, mse, smallest):
    """Its numbers are of scales that nothing rounds, ours of fp16 ones: alike in three digits."""
    back = keys(rotate, norm).roundtrip(KEYS)
    assert ((back - KEYS) ** 2).mean() == pytest.approx(mse, rel=4e-3)
    off = np.linalg.norm(back - KEYS, axis=-1) / np.linalg.norm(KEYS, axis=-1)
    assert off[0, 0] == pytest.approx(smallest, abs=1e-3)


def test_without_both_it_is_kivi():
    plain = oscar_ots(rotate="none", norm="none")
    assert plain.codecs == kivi().codecs
    k, v = placed(oscar_ots(residual=32), full(70), full(70))
    assert [x.tolist() for x in (k, v)] == [x.tolist() for x in placed(kivi(residual=32), full(70), full(70))]


def test_a_group_written_out():
    """Rotated, every token to norm 1, channel by channel in its own steps, and back by the norm as fp16 holds it."""
    x = np.random.default_rng(0).standard_normal((1, 8, 4)) * np.geomspace(0.01, 10, 8)[:, None]
    basis = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    turned = [np.array(naive.turned(row, basis)) for row in x[0]]
    norms = [float(np.sqrt((y * y).sum())) for y in turned]
    unit = np.array([y / n for y, n in zip(turned, norms, strict=True)])
    back = np.array([naive.minmax_roundtrip(column.tolist(), 2) for column in unit.T]).T
    want = [naive.turned(row * float(np.float16(n)), basis) for row, n in zip(back, norms, strict=True)]
    assert keys("hadamard", "token", 8).roundtrip(x)[0] == pytest.approx(np.array(want), abs=1e-9)


def test_norms_spare_a_small_token_the_steps_of_large_ones():
    """The paper's diagnosis, on rows made to have it."""
    x = np.random.default_rng(0).standard_normal((50, 32, 64))
    x[:, 3] /= 10
    small = [np.linalg.norm((keys("hadamard", n, 32).roundtrip(x) - x)[:, 3], axis=-1).mean() for n in ("none", "token")]
    assert small[1] < small[0] / 5


def test_bytes_of_the_card():
    """d = 128: keys 2 + 32/32 + 16/128 = 3.125 bits, values 3."""
    codecs = oscar_ots().codecs
    assert (codecs.k.tokens, codecs.v.tokens) == (32, 1)
    assert codecs.k.layout(128) == (256, 32 * 2 + 128 * 4)
    assert codecs.v.layout(128) == (256, 4 * 4)
    bits = [(c.tokens * c.layout(128)[0] + 8 * c.layout(128)[1]) / c.tokens / 128 for c in (codecs.k, codecs.v)]
    assert bits == [3.125, 3.0]
    assert 32 / sum(bits) == pytest.approx(5.22, abs=0.005)


def test_queries_meet_the_rows_of_the_model(monkeypatch):
    """Decoded keys stand in the model's own coordinates: near what was captured, not near its rotation."""
    source = lane(prompt=64, steps=2, key_dim=8)
    codec = oscar_ots(bits=8, group=32, residual=32).codecs.k
    x = source.k[0, :64].astype(float).reshape(2, 32, 8)
    assert np.abs(codec.roundtrip(x) - x).max() < 0.05


@pytest.mark.parametrize("corner", [{}, {"rotate": "none"}, {"norm": "none"}])
def test_laws(corner):
    assert check_policy(oscar_ots(group=4, residual=8, **corner)) == []
