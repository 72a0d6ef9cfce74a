"""int4: which rows are coded, in which groups, and what they cost in a run."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import int4
from kvsim.codecs.minmax import minmax
from kvsim.conformance import check_policy
from kvsim.errors import WrongUse
from tests.engine.lanes import by_step, lane, run
from tests.policies.test_kivi import full, placed


def test_all_but_the_newest_are_coded():
    k, v = placed(int4(residual=3), full(8), full(8))
    assert k.tolist() == v.tolist() == [[1] * 5 + [2] * 3]
    k, v = placed(int4(k_bits=16), full(4), full(4))
    assert (k.tolist(), v.tolist()) == ([[2] * 4], [[1] * 4])


def test_codecs():
    assert int4().codecs.k == int4().codecs.v == minmax(4, "channels", 32)
    assert (int4(group=None).codecs.k, int4(bits=16).codecs.v) == (minmax(4, "channels"), None)


def test_half_a_byte_a_number_and_four_bytes_a_group():
    got = run(lane(prompt=30, steps=4, key_dim=8, dtype="bfloat16"), "int4(group=4)")["ledger"]
    assert np.array_equal(by_step(got, "resident_bytes"), by_step(got, "held_tokens") * 8)
    assert np.array_equal(by_step(got, "meta_resident_bytes"), by_step(got, "held_tokens") * 2 * 2 * 4)


def test_laws():
    assert check_policy(int4()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bits": 3}, "int4(k_bits=3): expected 4, or 16"),
        ({"group": 0}, "int4(group=0): expected 1 channel or more"),
        ({"residual": -1}, "0 tokens or more"),
    ],
)
def test_refused(given, words):
    with pytest.raises(WrongUse) as refused:
        int4(**given)
    assert words in str(refused.value)
