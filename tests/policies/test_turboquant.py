"""TurboQuant: keys written out, vLLM's slots to the byte, and the layers that stay exact."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from kvsim import turboquant
from kvsim.codecs.lloyd_max import levels
from kvsim.conformance import check_policy
from kvsim.errors import WrongUse
from kvsim.policies import allocate
from kvsim.policies.language import complete, parse
from tests import naive
from tests.engine.lanes import by_step, lane, run

SLOTS = {"k8v4": 196, "4bit_nc": 134, "k3v4_nc": 118, "3bit_nc": 102}


@pytest.mark.parametrize(("preset", "slot"), SLOTS.items())
def test_slots_of_vllm(preset, slot):
    """Bytes of a key and a value of 128 numbers; in a run of 8 of them, the same sum."""
    codecs = turboquant(preset=preset).codecs
    layouts = [codec.layout(128) for codec in (codecs.k, codecs.v)]
    assert sum(bits // 8 + meta for bits, meta in layouts) == slot
    source = lane(prompt=30, steps=4, key_dim=8, dtype="bfloat16")
    got = run(source, turboquant(preset=preset))["ledger"]
    each = sum(bits // 8 + meta for bits, meta in (codec.layout(8) for codec in (codecs.k, codecs.v)))
    assert np.array_equal(
        by_step(got, "resident_bytes") + by_step(got, "meta_resident_bytes"), by_step(got, "held_tokens") * each
    )


@pytest.mark.parametrize(("bits", "renormalise"), [(3, True), (4, True), (2, False)])
def test_a_key_written_out(bits, renormalise):
    x = np.random.default_rng(bits).standard_normal((1, 5, 16)) * 3
    x[0, 4] = 0
    got = turboquant(k_bits=bits, renormalise=renormalise).codecs.k.roundtrip(x)
    for row, want in zip(got[0], x[0], strict=True):
        assert row == pytest.approx(naive.unit_key(want.tolist(), levels(bits).tolist(), renormalise), abs=1e-9)


def test_norm_correction_keeps_the_norm():
    x = np.random.default_rng(0).standard_normal((1, 200, 64)) * np.geomspace(0.1, 50, 200)[:, None]
    size = np.linalg.norm(x, axis=-1)
    kept, free = (np.linalg.norm(turboquant(k_bits=3, renormalise=n).codecs.k.roundtrip(x), axis=-1) for n in (True, False))
    assert kept == pytest.approx(size, rel=2.0**-10)
    assert np.abs(free / size - 1).max() > 0.005


def test_more_bits_lose_less():
    x = np.random.default_rng(0).standard_normal((1, 100, 64))
    loss = [((turboquant(k_bits=b).codecs.k.roundtrip(x) - x) ** 2).mean() for b in (1, 2, 3, 4, 5, 6, 7)]
    assert all(a > 2.5 * b for a, b in pairwise(loss))


def test_ends_of_the_model_stay_exact():
    """First and last two of 8 layers; never more than half at each end; a lone layer is both ends and is coded."""
    chain = complete(turboquant())
    layer = lane(key_dim=8).layer

    def coded(layers, many):
        policy = complete(turboquant(exact_layers=many))
        mine = (dataclasses.replace(layer, id=i, among=tuple(layers)) for i in layers)
        return [x.id for x in mine if allocate.for_layer(policy, x).part("store") is not None]

    assert coded(range(8), 2) == [2, 3, 4, 5]
    assert coded((1, 4, 7, 10, 13), 2) == [7]
    assert coded(range(4), 9) == []
    assert coded((3,), 2) == [3]
    assert allocate.for_layer(chain, layer) == chain


def test_an_exact_layer_loses_nothing():
    source = lane(prompt=30, steps=3, key_dim=8)
    ends = dataclasses.replace(source, layer=dataclasses.replace(source.layer, among=(3, 4, 5, 6, 7)))
    assert by_step(run(source, "turboquant()")["ledger"], "quant_tokens").all()
    got = run(ends, "turboquant()")
    assert not by_step(got["ledger"], "quant_tokens").any()
    assert np.abs(got["heads"]["rel_l2"]).max() < 1e-5
    behind = 'turboquant() >> quest(read=pages(2), index=boxes(keys="recon"))'  # of rows that nothing coded
    assert not by_step(run(ends, behind)["ledger"], "meta_bytes").any()


def test_laws():
    for preset in SLOTS:
        assert check_policy(turboquant(preset=preset)) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"k_bits": 9}, "turboquant(k_bits=9): expected 1 to 7 bits, 8 for e4m3"),
        ({"v_bits": 0}, "turboquant(v_bits=0)"),
        ({"exact_layers": -1}, "0 layers or more"),
        ({"residual": -1}, "0 tokens or more"),
    ],
)
def test_refused(given, words):
    with pytest.raises(WrongUse) as refused:
        turboquant(**given)
    assert words in str(refused.value)


def test_rows_that_hadamard_cannot_turn_are_refused_before_any_work():
    with pytest.raises(WrongUse, match="rows of 12 numbers have no Hadamard matrix"):
        allocate.for_layer(parse("turboquant()"), lane(key_dim=12).layer)
