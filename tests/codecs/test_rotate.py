"""Rotations: norms and q·k stay, there and back is nothing, a basis is stored once for all heads that share it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim.codecs.calibration import Calibration
from kvsim.codecs.rotate import basis, calibrated, hadamard
from kvsim.errors import WrongUse
from kvsim.kernels.rotate import drawn
from tests.engine.lanes import lane

LAYER = lane(key_dim=8).layer


@pytest.mark.parametrize("rotation", [hadamard(), basis(drawn(16, 3))])
def test_norms_and_logits_stay(rotation):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 50, 16))
    assert np.allclose(np.linalg.norm(rotation.turn(k), axis=-1), np.linalg.norm(k, axis=-1))
    assert np.allclose((rotation.turn(q) * rotation.turn(k)).sum(-1), (q * k).sum(-1))
    assert np.allclose(rotation.back(rotation.turn(k)), k)
    assert not np.allclose(rotation.turn(k), k)


def test_hadamard_of_four():
    assert hadamard().turn(np.array([1.0, 0, 0, 0]).reshape(1, 1, 4)).ravel().tolist() == [0.5] * 4
    assert hadamard().turn(np.array([1.0, 2, 3, 4]).reshape(1, 1, 4)).ravel().tolist() == [5, -1, -2, 0]


def test_a_basis_is_stored_once_and_its_bytes_are_shared():
    assert basis(drawn(64)).once(64) == 64 * 64 * 4
    assert 3 * basis(drawn(64), 3).once(64) - 64 * 64 * 4 == 2  # rounded up for each of three heads


def file(matrix):
    return Calibration("c.npz", "0" * 12, {}, {"3.k.rotation": np.asarray(matrix, float)})


def test_the_basis_of_a_layer_is_that_of_the_file():
    found = calibrated("k", file(drawn(8))).at(LAYER, 1)
    assert np.array_equal(found.matrix, drawn(8))
    assert found.sharers == LAYER.kv_heads


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hadamard().check(LAYER, 12), "layer 3: rows of 12 numbers have no Hadamard matrix"),
        (lambda: calibrated("k", file(drawn(8))).check(LAYER, 16), "is 8 x 8, here rows have 16 numbers"),
        (lambda: calibrated("k", file(np.ones((8, 8)))).check(LAYER, 8), "is not orthogonal"),
        (lambda: calibrated("v", file(drawn(8))).check(LAYER, 8), "nothing for layer 3"),
        (lambda: calibrated("k", file(drawn(8))).check(replace(LAYER, id=4), 8), "nothing for layer 4"),
    ],
)
def test_refused(make, words):
    with pytest.raises(WrongUse) as e:
        make()
    assert words in str(e.value)
