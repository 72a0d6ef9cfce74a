"""Fetches behind the layer before: the worked example, the formula against a schedule played out, and what a bill says."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cost.launches import Launch, table
from kvsim.cost.overlap import layers_of, next_layer, step_time
from kvsim.cost.plain import Fixed, step
from kvsim.cost.price import parts, steps
from tests.cost.test_price import LLAMA3, linear, made, priced, rest

TIMES = st.floats(0, 100)


def played(fetch, compute):
    """The link starts the fetch of a layer when the layer before begins to compute; a layer computes when its own fetch and the layer before
    have ended."""
    arrived, free = fetch[0], fetch[0]
    for i, work in enumerate(compute):
        begins = max(free, arrived)
        free = begins + work
        arrived = begins + fetch[i + 1] if i + 1 < len(fetch) else arrived
    return free


def test_the_worked_example():
    """32 layers that read 96 blocks of 64 tokens in 2 kv heads, a fifth of them missing, at 25 GB/s, and compute 60 µs each."""
    missed = 96 * 64 * 2 * 2 * 128 * 2 * 0.2
    assert missed / 1024 == pytest.approx(1229, abs=0.5)
    fetch = missed / 25e3
    assert fetch == pytest.approx(50.3, abs=0.05)
    times = np.full(32, fetch), np.full(32, 60.0)
    assert step_time(*times) / 1e3 == pytest.approx(3.53, abs=5e-3)
    assert step_time(*times, "next_layer") / 1e3 == pytest.approx(1.97, abs=5e-3)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=12))
def test_it_is_the_schedule_played_out_and_lies_between_the_ends(layers):
    fetch, compute = np.array(layers).T
    found, serial = step_time(fetch, compute, "next_layer"), step_time(fetch, compute)
    assert found == pytest.approx(played(fetch, compute))
    assert max(fetch.sum(), compute.sum()) - 1e-9 <= found <= serial + 1e-9


@given(TIMES, TIMES, st.integers(1, 40))
def test_layers_alike_need_their_sums_only(fetch, compute, layers):
    row = pl.DataFrame({"f": [fetch * layers], "c": [compute * layers], "n": [layers]})
    found = row.select(next_layer(pl.col("f"), pl.col("c"), pl.col("n"))).item()
    assert found == pytest.approx(step_time(np.full(layers, fetch), np.full(layers, compute), "next_layer"))


def test_a_step_is_priced_so():
    copies = ("host_fetch", "memcpy", [(None, None, size, 2 + size / 20e3) for size in (2**12, 2**16, 2**20, 2**24)])
    model = made(linear("dense_attn", 10, 3000), (*copies, {"q_heads": None, "kv_heads": None, "head_dim": None}), rest(100))
    launches = table([[*step(Fixed(), LLAMA3, [2048]), Launch("host_fetch", 8 * 2**20, 32, 32, 1, 2048)]], LLAMA3)
    found = parts(priced(model), launches)
    fetched = found.filter(pl.col("class") == "host_fetch")["us"].sum()
    serial, ahead = (steps(found, x).row(0, named=True) for x in (None, layers_of(launches)))
    assert layers_of(launches)["layers"].to_list() == [32]
    layer = np.full(32, 1 / 32)
    assert ahead["step_us"] == pytest.approx(step_time(layer * fetched, layer * (serial["step_us"] - fetched), "next_layer"))
    assert serial["overlap_us"] <= ahead["step_us"] <= serial["step_us"]
    assert {k: v for k, v in ahead.items() if k != "step_us"} == {k: v for k, v in serial.items() if k != "step_us"}


def test_nothing_to_fetch_costs_the_same():
    model = made(linear("dense_attn", 10, 3000), rest(100))
    launches = table([step(Fixed(), LLAMA3, [2048])], LLAMA3)
    found = parts(priced(model), launches)
    assert steps(found, layers_of(launches))["step_us"].item() == pytest.approx(steps(found)["step_us"].item())
