"""A decode step on a CPU against the same in float64, the obvious way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels import decode

BATCH, HEADS, GROUP, DIM, WIDE, PAGES, SIZE = 2, 3, 4, 16, 8, 7, 4
RNG = np.random.default_rng(0)


def drawn(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


Q, K, V = drawn(BATCH, HEADS, GROUP, DIM), drawn(BATCH, HEADS, PAGES, SIZE, DIM), drawn(BATCH, HEADS, PAGES, SIZE, WIDE)


def attention(q, k, v):
    """One kv head: q [G, d], k [T, d], v [T, dv] in float64."""
    w = np.exp(q.astype(float) @ k.T.astype(float) / np.sqrt(k.shape[1]))
    return w / w.sum(1, keepdims=True) @ v


def of_pages(table):
    """Attention over the pages of a table, a kv head at a time."""
    out = [
        attention(Q[b, h], K[b, h, table[b, h]].reshape(-1, DIM), V[b, h, table[b, h]].reshape(-1, WIDE))
        for b in range(BATCH)
        for h in range(HEADS)
    ]
    return np.array(out).reshape(BATCH, HEADS, GROUP, WIDE)


@pytest.mark.parametrize("pages", [1, 3, PAGES])
def test_attention_over_pages_is_attention_over_their_tokens(pages):
    table = np.array([[RNG.permutation(PAGES)[:pages] for _ in range(HEADS)] for _ in range(BATCH)])
    out = np.empty((BATCH, HEADS, GROUP, WIDE), np.float32)
    decode.attend(Q, K, V, table, out)
    assert out == pytest.approx(of_pages(table), abs=1e-6)
    k_copy, v_copy = (
        np.empty((BATCH, HEADS, pages, SIZE, DIM), np.float32),
        np.empty((BATCH, HEADS, pages, SIZE, WIDE), np.float32),
    )
    decode.copy_pages(K, V, table, k_copy, v_copy)
    again = np.empty_like(out)
    decode.attend(Q, k_copy, v_copy, np.tile(np.arange(pages), (BATCH, HEADS, 1)), again)
    assert (again == out).all()


def test_bounds_of_pages_hold_and_are_those_of_their_corners():
    summary = np.stack([K.min(3), K.max(3)], 3)
    out = np.empty((BATCH, HEADS, GROUP, PAGES), np.float32)
    decode.scan(Q, summary, out)
    corners = np.maximum(Q[:, :, :, None] * summary[:, :, None, :, 0], Q[:, :, :, None] * summary[:, :, None, :, 1]).sum(-1)
    assert out == pytest.approx(corners, abs=1e-5)
    logits = np.einsum("bhgd,bhpsd->bhgps", Q, K).max(-1)
    assert (out >= logits - 1e-5).all()


@given(st.lists(st.integers(-3, 3), min_size=12, max_size=12), st.integers(1, 6), st.sampled_from([1.0, 1e-30, -0.0]))
@settings(max_examples=100, deadline=None)
def test_the_best_pages_are_those_of_a_stable_sort(numbers, count, unit):
    bounds = (np.array(numbers, np.float32) * np.float32(unit) + np.float32(0)).reshape(1, 1, 2, 6)
    out = np.empty((1, 1, count), np.int64)
    decode.best(bounds, out)
    assert out[0, 0].tolist() == sorted(np.argsort(-bounds[0, 0].max(0), kind="stable")[:count].tolist())


def test_a_new_key_widens_its_page_only():
    summary, key = np.stack([K.min(3), K.max(3)], 3), drawn(BATCH, HEADS, DIM) * 9
    before = summary.copy()
    decode.update(summary, key, 2)
    assert (summary[:, :, 2, 0] == np.minimum(before[:, :, 2, 0], key)).all()
    assert (summary[:, :, 2, 1] == np.maximum(before[:, :, 2, 1], key)).all()
    others = [p for p in range(PAGES) if p != 2]
    assert (summary[:, :, others] == before[:, :, others]).all()


def test_codes_become_numbers():
    codes, step, zero = RNG.integers(0, 256, (5, 4)).astype(np.uint8), drawn(5), drawn(5)
    out = np.empty((5, 8), np.float32)
    decode.unpack(codes, step, zero, out)
    assert out == pytest.approx(np.hstack([codes % 16, codes // 16]) * step[:, None] + zero[:, None], abs=1e-5)


def test_probabilities_are_a_softmax():
    k, out = K.reshape(BATCH, HEADS, -1, DIM), np.empty((BATCH, HEADS, GROUP, PAGES * SIZE), np.float32)
    decode.probabilities(Q, k, out)
    every = np.eye(PAGES * SIZE)
    assert out[1, 2] == pytest.approx(attention(Q[1, 2], k[1, 2], every), abs=1e-6)


def test_read_reads_everything():
    assert decode.read(np.arange(101, dtype=np.float32)) == 5050
