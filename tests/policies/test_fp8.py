"""fp8: which rows are coded, what they cost in a run, and which widths do not exist."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import fp8
from kvsim.codecs.floats import e4m3
from kvsim.codecs.pipeline import pipeline
from kvsim.conformance import check_policy
from kvsim.errors import WrongUse
from tests.engine.lanes import by_step, lane, run
from tests.policies.test_kivi import full, placed


def test_all_but_the_newest_are_coded():
    k, v = placed(fp8(residual=3), full(8), full(8))
    assert k.tolist() == v.tolist() == [[1] * 5 + [2] * 3]
    k, v = placed(fp8(k_bits=16), full(4), full(4))
    assert (k.tolist(), v.tolist()) == ([[2] * 4], [[1] * 4])


def test_codecs():
    assert (fp8().codecs.k, fp8(scale="none", v_bits=16).codecs.k, fp8(v_bits=16).codecs.v) == (
        pipeline(grid=e4m3(True)),
        pipeline(grid=e4m3(False)),
        None,
    )


def test_half_the_bytes_of_sixteen_bits():
    source = lane(prompt=30, steps=4, key_dim=8, dtype="bfloat16")
    got = {
        c: by_step(run(source, 'fp8(scale="none")')["ledger"], c)
        for c in ("resident_bytes", "meta_resident_bytes", "held_tokens")
    }
    assert np.array_equal(got["resident_bytes"], got["held_tokens"] * 16)
    assert not got["meta_resident_bytes"].any()
    assert np.array_equal(by_step(run(source, "fp8()")["ledger"], "meta_resident_bytes"), got["held_tokens"] * 8)


def test_laws():
    assert check_policy(fp8()) == []


@pytest.mark.parametrize(
    ("given", "words"), [({"bits": 4}, "fp8(k_bits=4): expected 8, or 16"), ({"residual": -1}, "0 tokens or more")]
)
def test_refused(given, words):
    with pytest.raises(WrongUse) as refused:
        fp8(**given)
    assert words in str(refused.value)
