"""Dynamic against fixed depths, on rows made by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from kvsim.advise.dynamic import against_fixed


@dataclass
class Rows:
    heads: pl.LazyFrame
    path: str = "run"


def rows(request, policy, pages, recall, layer=0):
    return pl.DataFrame(
        {"layer": layer, "q_head": 0, "request": request, "policy": policy, "read_pages": pages, "mass_recall": recall}
    )


def run(contexts, gain=lambda i: 0.1):
    """Of fixed depths 2 and 4 every row has recall 0.2 and 0.6; the dynamic one reads 2 or 4, 3 in the mean, and has 0.4 + gain."""
    parts = []
    for i in range(contexts):
        parts += [rows(i, "two", [2] * 40, [0.2] * 40), rows(i, "four", [4] * 40, [0.6] * 40)]
        parts += [rows(i, "own", [2, 4] * 20, [0.4 + gain(i)] * 40)]
    return Rows(pl.concat(parts).lazy())


FIXED = {2: "two", 4: "four"}


def test_compared_at_equal_mean_pages():
    got = against_fixed([run(8)], "own", FIXED)
    assert (got.contexts, got.pages, got.pages_p99) == (8, 3, 4)
    assert got.recall_p5 == pytest.approx(0.5)
    assert got.fixed_p5 == pytest.approx(0.4)
    assert got.interval == pytest.approx((0.1, 0.1))
    assert got.needed == 0


def test_a_fixed_depth_gains_nothing_on_itself():
    assert against_fixed([run(2)], "four", FIXED).gain == pytest.approx(0)


def test_the_context_is_the_unit_whatever_run_it_is_in():
    gain = np.random.default_rng(0).normal(0.1, 0.05, 12)
    got = against_fixed([run(12, lambda i: gain[i])], "own", FIXED)
    assert got.interval[0] < got.gain < got.interval[1]
    half = 1.96 * gain.std(ddof=1) / 12**0.5
    assert np.ptp(got.interval) / 2 == pytest.approx(half, rel=0.2)
    assert got.needed == np.ceil((1.96 * gain.std(ddof=1) / 0.03) ** 2)
    split = [Rows(run(12, lambda i: gain[i]).heads.filter(pl.col("request") % 2 == side)) for side in (0, 1)]
    assert against_fixed(split, "own", FIXED).gain == pytest.approx(got.gain)


def test_too_few_contexts_have_no_interval():
    assert against_fixed([run(7)], "own", FIXED).interval is None
    assert against_fixed([run(1)], "own", FIXED).needed is None


def test_what_heads_differ_in_is_no_gain_by_head():
    """A depth that differs by layer alone, deep where it helps: all of its gain over one fixed depth is the layers'."""
    parts = []
    for layer, (low, high) in enumerate(((0.9, 0.9), (0.1, 0.7))):
        own = (2, low) if layer == 0 else (4, high)
        for policy, pages, recall in (("two", 2, low), ("four", 4, high), ("own", *own)):
            parts.append(rows(0, policy, [pages] * 20, [recall] * 20, layer))
    got = against_fixed([Rows(pl.concat(parts).lazy())], "own", FIXED)
    assert got.gain > 0.2
    assert got.gain_by_head == pytest.approx(0)
