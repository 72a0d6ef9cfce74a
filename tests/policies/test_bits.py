"""Bits per number by formula: the cards' numbers beside what was published, and the same from a run's ledger."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import cli
from kvsim.errors import WrongUse
from kvsim.policies.bits import bits_of
from kvsim.policies.language import parse
from tests.engine.lanes import by_step, lane, run


@pytest.mark.parametrize(
    ("policy", "held", "claim"),
    [
        ('oscar_cov(preset="readme", rotate="hadamard")', 2.284, "2.28 bits"),
        ('oscar_cov(preset="shipped", rotate="hadamard")', 2.533, "2.28 bits"),
        ("oscar_cov(scales=16, sinks=0, recent=0, rotate='hadamard')", 2.25, None),
        ("fp8()", 8.25, None),
        ("int4(group=None)", 4.25, None),
    ],
)
def test_a_cache_of_128k(policy, held, claim):
    found = bits_of(parse(policy), 131072)
    assert found.held == pytest.approx(held, abs=5e-4)
    assert found.model == found.held
    assert found.claim == claim


@pytest.mark.parametrize(
    ("preset", "coded", "model", "claim"),
    [
        ("k8v4", 2.61, 2.17, "2.6x"),
        ("4bit_nc", 3.82, 2.82, "3.8x"),
        ("k3v4_nc", 4.34, 3.06, "~3.5x"),
        ("3bit_nc", 5.02, 3.34, "4.9x"),
    ],
)
def test_a_model_of_32_layers(preset, coded, model, claim):
    """vLLM leaves four of them exact; its ~3.5x for k3v4_nc is neither."""
    found = bits_of(parse(f'turboquant(preset="{preset}")'), 1000)
    assert 16 / found.coded == pytest.approx(coded, abs=0.005)
    assert 16 / found.model == pytest.approx(model, abs=0.005)
    assert found.claim == claim
    assert bits_of(parse(f'turboquant(preset="{preset}", exact_layers=0)'), 1000).model == found.coded


@pytest.mark.parametrize("policy", ["kivi(group=8, residual=8)", "oscar_ots(group=8, residual=8)", "int4(group=4, residual=3)"])
def test_the_ledger_says_the_same(policy):
    """After the first step, of 41 tokens."""
    got = run(lane(prompt=40, steps=1, key_dim=8, dtype="bfloat16"), policy)["ledger"]
    found = bits_of(parse(policy), 41, dim=8)
    stored = by_step(got, "resident_bytes") + by_step(got, "meta_resident_bytes")
    assert 8 * stored / (41 * 16) == pytest.approx(np.full(stored.shape, found.held))
    coded = 8 * by_step(got, "coded_bytes") / by_step(got, "coded_numbers")
    wanted = (found.keys * 40 + found.values * 33) / 73 if "int4" not in policy else found.coded
    assert coded == pytest.approx(np.full(coded.shape, wanted))


def test_the_command(capsys):
    assert cli.main(["bits", "kivi()", 'turboquant(preset="k3v4_nc")', "--tokens", "1024"]) == 0
    above, head, first, second = capsys.readouterr().out.splitlines()
    assert above.strip() == "bits a number; x: 16 over that"
    assert above.index("bits") == head.index("keys")
    assert head.split() == ["keys", "values", "coded", "held", "model", "coded", "x", "model", "x", "published"]
    assert first.split() == ["kivi()", "3.000", "3.000", "3.000", "3.812", "3.812", "5.333", "4.197", "—"]
    assert second.split()[1:] == ["3.125", "4.250", "3.688", "3.688", "5.227", "4.339", "3.061", "~3.5x"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("h2o(hold=share(0.5))", "expected a store that codes rows"),
        ("h2o(hold=share(0.5)) >> kivi()", "expected a store alone"),
        ("zipcache()", "what zipcache stores depends on what is in the rows"),
    ],
)
def test_refused(policy, words):
    with pytest.raises(WrongUse, match=r"^bits: ") as e:
        bits_of(parse(policy), 100)
    assert words in str(e.value)
