"""Overlap of reads across layers against sets in plain Python."""

from __future__ import annotations

import random

import polars as pl
import pytest

from kvsim.metrics.overlap import across_layers


def plans(seed=0):
    draw = random.Random(seed)
    return [
        {"policy": "p", "request": 0, "layer": layer, "kv_head": h, "q_head": h, "step": step, "page_size": 4, "pages": sorted(draw.sample(range(12), 4))}
        for layer in (0, 1, 2, 5)
        for h in (0, 1)
        for step in range(3)
    ]  # fmt: skip


def union(rows, layer, step):
    return {p for r in rows if (r["layer"], r["step"]) == (layer, step) for p in r["pages"]}


def test_jaccard_is_that_of_the_layers_unions_and_only_captured_pairs_count():
    rows = plans()
    found = across_layers(pl.DataFrame(rows).lazy())
    assert found.select("layer", "distance").rows() == [(0, 1), (0, 2), (1, 1), (1, 4)]
    for layer, distance, value in found.select("layer", "distance", "jaccard").rows():
        both = [(union(rows, layer, s), union(rows, layer + distance, s)) for s in range(3)]
        assert value == pytest.approx(sum(len(a & b) / len(a | b) for a, b in both) / 3)


def test_random_sets_overlap_as_chance_says():
    draw = random.Random(1)
    rows = [
        {"policy": "p", "request": 0, "layer": layer, "kv_head": 0, "q_head": 0, "step": step, "page_size": 4, "pages": sorted(draw.sample(range(100), 20))}
        for layer in (0, 1)
        for step in range(400)
    ]  # fmt: skip
    [(jaccard, chance)] = across_layers(pl.DataFrame(rows).lazy()).select("jaccard", "chance").rows()
    assert jaccard == pytest.approx(chance, rel=0.05)


def test_equal_layers_overlap_wholly():
    rows = [r | {"layer": layer} for layer in (3, 4) for r in plans() if r["layer"] == 0]
    assert across_layers(pl.DataFrame(rows).lazy())["jaccard"].to_list() == [1.0]
