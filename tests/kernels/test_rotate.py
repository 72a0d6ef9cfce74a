"""Bases are orthogonal, and a turned row has the same bits whatever is turned beside it."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.kernels.rotate import BLOCK, drawn, hadamard, principal, turned
from tests import naive

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dim", [1, 2, 4, 16, 64, 128])
def test_bases_are_orthogonal(dim):
    for basis in (hadamard(dim), drawn(dim), principal(RNG.standard_normal((3, dim)).astype(np.float32))):
        assert np.abs(basis.T @ basis - np.eye(dim)).max() < 1e-14


def test_a_hadamard_basis_has_entries_of_one_size():
    assert np.abs(hadamard(2) * np.sqrt(2) - [[1, 1], [1, -1]]).max() < 1e-15
    assert np.ptp(np.abs(hadamard(64))) == 0


def test_drawn_bases_differ_by_seed_alone():
    assert np.array_equal(drawn(8), drawn.__wrapped__(8))
    assert not np.allclose(drawn(8), drawn(8, 1))
    spread = np.array([drawn.__wrapped__(3, seed)[0] for seed in range(400)])
    assert np.abs(spread.mean(axis=0)).max() < 0.1  # a row of a uniform rotation has no preferred side
    assert np.abs(spread.T @ spread / 400 - np.eye(3) / 3).max() < 0.05


def test_principal_directions_have_no_correlation_left():
    keys = RNG.standard_normal((BLOCK + 500, 6)) @ RNG.standard_normal((6, 6)) + 5
    spread = np.cov(turned(keys, principal(keys)).T)
    assert np.abs(spread - np.diag(np.diag(spread))).max() < 1e-9 * spread.max()
    assert (np.diff(np.diag(spread)) > 0).all()


@pytest.mark.parametrize("dim", [1, 3, 64])
def test_turned_is_the_plain_product_to_the_bit(dim):
    x, basis = RNG.standard_normal((2, 5, dim)), RNG.standard_normal((dim, dim))
    whole = turned(x, basis)
    for i, j in np.ndindex(2, 5):
        assert whole[i, j].tolist() == naive.turned(x[i, j], basis)
    assert np.array_equal(turned(x[1:, 2:4], basis), whole[1:, 2:4])
    assert turned(x.astype(np.float32)[..., ::1], basis).shape == x.shape
