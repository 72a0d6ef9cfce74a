"""Real bits per number against sums of the ledger, on a real replay and on one worked by hand."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.metrics.precision import precision
from kvsim.metrics.run import open_run
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize


def test_ratios_of_sums():
    ledger = pl.LazyFrame(
        {
            "policy": ["b", "a", "a", "c", "c"],
            "coded_numbers": [10, 100, 300, None, 0],
            "coded_nominal_bits": [80, 200, 1000, None, 0],
            "coded_bytes": [11, 50, 150, None, 0],
        }
    )
    found = precision(ledger).rows(named=True)
    assert found == [
        {"policy": "a", "nominal": 3.0, "real": 4.0, "overhead": pytest.approx(1 / 3)},
        {"policy": "b", "nominal": 8.0, "real": pytest.approx(8.8), "overhead": pytest.approx(0.1)},
    ]


def test_the_bits_of_kivi(tmp_path):
    """b + 32 / group: 2 bits in groups of 32 are 3, when both sides are grouped so."""
    trace = synthesize(tmp_path / "t", layers=1, prompt=64, steps=4, head_dim=64)
    run = replay(trace, ["kivi(bits=2, group=32, residual=32)", "full()"], tmp_path / "run", workers=1)
    [row] = precision(open_run(run.path).ledger).rows(named=True)
    assert row["policy"].startswith("full() >> kivi(")
    assert (row["nominal"], row["real"]) == pytest.approx((2, 3))
