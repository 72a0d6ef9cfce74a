"""What page sizes cost by place and batch, and which pages are displaced, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from analyses.boxes.question import best, displaced
from analyses.boxes.time import BATCHES, BEHIND, DEVICE, FULL, HOST, gpu, times, weights
from analyses.contexts import small
from analyses.measures import doubling

LAYERS, KV_HEADS, WHOLE = 30, 3, 1400 * 256


@pytest.fixture(scope="module")
def needle():
    return small().trace


@pytest.fixture(scope="module")
def us(needle):
    """Two layers that need 20 and 40 % of their rows, an eighth of them scanned."""
    needed = {"role": "answer", "policy": "16", "layer": [4, 18], "rows": [0.2, 0.4], "index": 0.125, "whole": float(WHOLE)}
    return {(r["batch"], r["where"]): r["us"] for r in times(needle, pl.DataFrame(needed)).to_dicts()}


def test_weights_are_those_of_the_model(needle):
    """135 M parameters in 16 bits, norms apart; a configuration without these numbers has none."""
    assert weights(needle) == pytest.approx(2 * 134.5e6, rel=1e-3)
    bare = SimpleNamespace(manifest={"source": {}}, captured_layers=needle.captured_layers)
    assert weights(bare) is None


def test_a_step_is_bytes_over_bandwidths(us, needle):
    """GB/s are bytes per µs, times 1000."""
    cache = LAYERS * KV_HEADS * WHOLE
    memory, link, rest = gpu().bandwidth_gbps * 1e3, gpu().pcie_gbps * 1e3, weights(needle)
    for n in BATCHES:
        device = (rest + n * cache * (0.125 + 0.3)) / memory
        fetch = n * cache * 0.3 / link
        assert us[n, DEVICE] == pytest.approx(device)
        assert us[n, HOST] == pytest.approx(device + fetch)
        assert us[n, BEHIND] == pytest.approx(max(device, fetch))
        assert us[n, FULL] == pytest.approx((rest + n * cache) / memory)


def test_the_best_page_size_is_that_of_the_shortest_step():
    us = {4: [3.0, 1.0], 8: [2.0, 2.0], 16: [2.5, 3.0], 32: [9.0, 9.0], 64: [9.0, 9.0]}

    def f(figure, line, at):
        assert (figure, line) == ("step, batch 8", "here")
        return np.array(us[at])

    assert best("here", 8)(f).tolist() == [8, 4]


def test_ages_double():
    ages = pl.DataFrame({"age": [0, 1, 2, 3, 4, 7, 8, 1023, 1024]})
    assert ages.select(x=doubling(pl.col("age")))["x"].to_list() == [0, 1, 2, 2, 4, 4, 8, 512, 1024]


def test_displaced_pages_by_age_by_hand():
    """Pages of 16 at position 100: page 5 (80–95) ended 5 tokens ago, page 0 (0–15) 85, page 1 69. The open page is read by both."""
    plan = {"request": 0, "layer": 0, "kv_head": 0, "q_head": 0, "step": 0, "role": "answer"}
    plans = [
        plan | {"policy": "quest", "pages": [0, 5, 6], "forced": [6]},
        plan | {"policy": "oracle", "pages": [1, 5, 6], "forced": [6]},
    ]
    trace = SimpleNamespace(requests=[SimpleNamespace(id=0, prompt=100)])
    found = displaced(SimpleNamespace(trace=trace, replay=lambda *_, **__: lambda table: pl.DataFrame(plans)))
    told = {(r["figure"], r["at"]): (r["top"], r["below"]) for r in found.to_dicts()}
    assert told["left by key age", "64"] == (1, 1)
    assert told["left by key age", "4"] == (0, 1)
    assert told["in their place by key age", "64"] == (1, 1)
    assert told["in their place by key age", "4"] == (0, 1)


def test_as_many_pages_are_left_as_stand_in_their_place():
    """Both read as many: over all ages what one lacks the other has too much, and older and younger pages make up the difference."""
    found = displaced(small())
    sums = {name: part["top"].sum() for (name,), part in found.group_by("figure")}
    reads = {name: part["below"].sum() for (name,), part in found.group_by("figure")}
    assert sums["left by key age"] == sums["in their place by key age"] > 0
    assert reads["left by key age"] == reads["in their place by key age"]
