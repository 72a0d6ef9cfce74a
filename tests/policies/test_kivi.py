"""KIVI: which rows are coded, over the rows still held, and with which codecs."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import kivi
from kvsim.codecs.minmax import minmax
from kvsim.policies.protocol import CODED, FULL, Seen


def placed(policy, k, v, valid=None):
    """Tiers after place(): coded rows stay coded, as the engine applies it."""
    valid = np.ones(k.shape, bool) if valid is None else valid
    pos = np.where(valid, np.arange(k.shape[1]), -1)
    keys, values = policy.place(Seen(0, k.shape[1] - 1, pos, valid, k, v, np.full(len(k), k.shape[1])))
    assert not ((keys | values) & ~valid).any()
    return np.where(keys, CODED, FULL).astype(np.uint8), np.where(values, CODED, FULL).astype(np.uint8)


def full(n, heads=1):
    return np.full((heads, n), FULL, np.uint8)


@pytest.mark.parametrize(("n", "keys", "values"), [(70, 64, 38), (64, 64, 32), (32, 32, 0), (31, 0, 0), (97, 96, 65)])
def test_after_prefill(n, keys, values):
    k, v = placed(kivi(group=32, residual=32), full(n), full(n))
    assert (k[0] == CODED).tolist() == [i < keys for i in range(n)]
    assert (v[0] == CODED).tolist() == [i < values for i in range(n)]


def test_keys_are_coded_in_blocks_and_values_one_by_one():
    policy, k, v = kivi(group=4, residual=8), full(10), full(10)
    counts = []
    for _ in range(9):
        k, v = placed(policy, k, v)
        counts.append((int((k == CODED).sum()), int((v == CODED).sum())))
        k, v = np.append(k, full(1), axis=1), np.append(v, full(1), axis=1)
    assert counts == [(8, 2), (8, 3), (8, 4), (8, 5), (8, 6), (8, 7), (16, 8), (16, 9), (16, 10)]


def test_groups_are_whole_and_counted_over_the_rows_held():
    valid = np.ones((2, 12), bool)
    valid[1, 10:] = False
    k, v = full(12, 2), full(12, 2)
    k[0, :4] = v[0, :3] = CODED
    k, v = placed(kivi(group=4, residual=4), k, v, valid)
    assert (k[0] == CODED).all()  # eight rows wait: two blocks
    assert (k[1] == CODED).tolist() == [i < 8 for i in range(12)]  # ten rows: two blocks, two wait
    assert (v == CODED).sum(axis=1).tolist() == [8, 6]


def test_what_is_coded_stays_coded_when_newer_rows_are_evicted():
    k, v = full(3), full(3)
    k[0, 0] = v[0, 0] = CODED
    k, v = placed(kivi(group=2, residual=4), k, v)
    assert (k[0, 0], v[0, 0]) == (CODED, CODED)


def test_bits_per_side_and_exact_ones():
    assert (kivi(bits=4).codecs.k, kivi(bits=4).codecs.v) == (minmax(4, "tokens", 32), minmax(4, "channels", 32))
    assert (kivi().codecs.keys, kivi().codecs.ledger) == ("post", False)
    exact = kivi(k_bits=16, residual=32)
    assert (exact.codecs.k, exact.codecs.v) == (None, minmax(2, "channels", 32))
    k, v = placed(exact, full(70), full(70))
    assert ((k == CODED).sum(), (v == CODED).sum()) == (0, 38)
