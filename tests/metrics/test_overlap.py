"""Overlap of choices across layers against sets in plain Python."""

from __future__ import annotations

import random

import polars as pl
import pytest

from kvsim.metrics.overlap import across_layers

UNIT = {"policy": "p", "request": 0}


def rows_of(pages, layers=(0, 1), steps=400, heads=1, exists=100, forced=(), seed=1):
    """A plan per layer, head and step: the forced pages and what `pages` draws."""
    draw = random.Random(seed)
    return [
        UNIT | {"layer": layer, "kv_head": h, "q_head": h, "step": step, "page_size": 4, "exists": exists, "forced": list(forced)}
        | {"pages": sorted({*forced, *pages(draw)})}
        for layer in layers for h in range(heads) for step in range(steps)
    ]  # fmt: skip


def heads(dense=()):
    return pl.LazyFrame([UNIT | {"layer": layer, "dense": layer in dense} for layer in range(8)])


def alike(rows, dense=()):
    """The means over steps, layer by layer."""
    schema = {"exists": pl.Int32, "forced": pl.List(pl.Int32), "pages": pl.List(pl.Int32)}
    found = across_layers(pl.LazyFrame(rows, schema_overrides=schema), heads(dense))
    return found.group_by("layer", "distance").agg(pl.col("jaccard", "chance").mean()).sort("layer", "distance").collect()


def union(rows, layer, step):
    return {p for r in rows if (r["layer"], r["step"]) == (layer, step) for p in r["pages"]}


def test_jaccard_is_that_of_the_layers_unions_and_only_captured_pairs_count():
    rows = rows_of(lambda draw: draw.sample(range(12), 4), layers=(0, 1, 2, 5), steps=3, heads=2, exists=12)
    found = alike(rows)
    assert found.select("layer", "distance").rows() == [(0, 1), (0, 2), (1, 1), (1, 4)]
    for layer, distance, value in found.select("layer", "distance", "jaccard").rows():
        both = [(union(rows, layer, s), union(rows, layer + distance, s)) for s in range(3)]
        assert value == pytest.approx(sum(len(a & b) / len(a | b) for a, b in both) / 3)


def test_chance_is_among_the_pages_that_exist_and_not_among_those_below_the_last_read():
    """tail="free": what was read may end far below the context."""
    far = alike(rows_of(lambda draw: draw.sample(range(20), 4), exists=100))
    near = alike(rows_of(lambda draw: draw.sample(range(20), 4), exists=20))
    share = {"far": 4 * 4 / 100, "near": 4 * 4 / 20}
    assert far["chance"][0] == pytest.approx(share["far"] / (8 - share["far"]))
    assert near["chance"][0] == pytest.approx(share["near"] / (8 - share["near"]))
    assert near["jaccard"][0] == pytest.approx(near["chance"][0], rel=0.1)


def test_pages_read_by_rule_are_no_agreement():
    """4 random pages of 99 and the tail that all layers read: with the tail .131 against a chance of .026."""
    rows = rows_of(lambda draw: draw.sample(range(99), 4), forced=(99,))
    counted = [len(union(rows, 0, s) & union(rows, 1, s)) / len(union(rows, 0, s) | union(rows, 1, s)) for s in range(400)]
    assert sum(counted) / 400 == pytest.approx(0.131, abs=0.01)
    [(jaccard, chance)] = alike(rows).select("jaccard", "chance").rows()
    assert chance == pytest.approx((16 / 99) / (8 - 16 / 99))
    assert jaccard == pytest.approx(chance, abs=0.01)


def test_layers_read_whole_by_rule_do_not_count():
    rows = rows_of(lambda draw: draw.sample(range(100), 4), layers=(0, 1, 2), steps=3)
    assert alike(rows, dense=(0,)).select("layer", "distance").rows() == [(1, 1)]
    assert alike(rows, dense=(0, 1)).is_empty()


def test_the_worked_example_of_the_card():
    chosen = ({1, 4}, {2, 4}, {2, 3}, {3, 7}, {3, 9})
    rows = [r for i, pages in enumerate(chosen) for r in rows_of(lambda _, p=pages: p, layers=(i,), steps=1)]
    assert alike(rows).filter(distance=1)["jaccard"].to_list() == pytest.approx([1 / 3] * 4)


def test_where_nothing_is_chosen_there_is_nothing_to_compare():
    assert alike(rows_of(lambda draw: (), forced=(3, 9), steps=2)).is_empty()


def test_plans_that_do_not_say_what_was_forced_are_left_out():
    rows = [r | {"exists": None, "forced": None} for r in rows_of(lambda draw: (1, 2), steps=2)]
    assert alike(rows).is_empty()


def test_equal_layers_overlap_wholly():
    found = alike(
        [r | {"layer": layer} for layer in (3, 4) for r in rows_of(lambda draw: draw.sample(range(9), 4), layers=(0,), steps=2)]
    )
    assert found["jaccard"].to_list() == [1.0]


def test_random_sets_overlap_as_chance_says():
    [(jaccard, chance)] = alike(rows_of(lambda draw: draw.sample(range(100), 20))).select("jaccard", "chance").rows()
    assert jaccard == pytest.approx(chance, rel=0.05)
