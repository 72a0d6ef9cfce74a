"""What QEvict's rows rest on, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

import kvsim
from analyses.contexts import identity
from analyses.qevict.question import (
    AT,
    CODED,
    DEFAULT,
    FAMILIES,
    GRID,
    LINE,
    OPTIONS,
    PERIODS,
    SCHEMES,
    TWO,
    WINDOWS,
    _turn,
    asked,
    scales,
)


def test_scales_of_a_window_by_hand():
    """8 tokens of 128 channels: a pair of 4 bytes for each channel of the keys, and one for each token's values: 544 for 8 rows."""
    assert scales(128, 128) == 544 / 8


def test_names_are_lines_and_places():
    named = pl.DataFrame({"policy": list(asked())}).select("policy", line=LINE, at=AT)
    found = {r["policy"]: (r["line"], r["at"]) for r in named.to_dicts()}
    assert found[DEFAULT] == ("3 tiers", "8")
    assert found["eviction, QEvict's scores, 5 %"] == ("eviction, QEvict's scores", "5 %")
    assert found["2 bits of everything, KIVI, 20 %"] == ("2 bits of everything, KIVI", "20 %")
    assert {line for line, at in found.values() if at} >= {*FAMILIES, *CODED}
    assert all(found[x] == (x, "") for x in OPTIONS)


def test_no_policy_is_asked_twice():
    ids = [identity(p) for p in asked().values()]
    assert len(set(ids)) == len(ids)


def test_the_grid_is_all_that_is_not_silly():
    """Two tiers have no codes to vary; of single tokens only the defaults are coded."""
    there = {(c.scheme, c.window, c.period) for c in GRID}
    assert len(there) == len(GRID) == 9 + 1 + len(CODED) * 2 * 3
    assert {(TWO, n, p) for n in WINDOWS for p in PERIODS} <= there
    assert {x for x in there if x[1] == 1 and x[0] != TWO} == {("3 tiers", 1, 8)}
    assert {SCHEMES[name] for name in CODED} == {(bits, part) for bits in (2, 4) for part in (0.3, 0.7, 0.9)}


def test_a_corner_stands_where_its_line_says():
    named = asked()
    for c in GRID:
        policy = named[f"{c.line}, {c.window}"]
        assert (policy.window, policy.period, (policy.bits, policy.quant_share)) == (c.window, c.period, SCHEMES[c.scheme])
    assert identity(named[DEFAULT]) == identity(kvsim.qevict(hold=kvsim.share(0.2)))


def turned(roles):
    """A run whose missed mass is the step's number."""
    steps = np.arange(len(roles))
    heads = pl.DataFrame(
        {"request": 0, "policy": DEFAULT, "step": steps, "role": roles, "mass_evicted": steps * 1.0, "rel_l2": 0.0}
    )
    request = SimpleNamespace(id=0, prompt=3, roles=np.array([0] * 3 + roles))
    return SimpleNamespace(
        trace=SimpleNamespace(requests=[request]), run=SimpleNamespace(scan=lambda name: heads.lazy()), named=lambda frame: frame
    )


def test_a_turn_is_where_the_question_follows_text():
    """100 steps of text, 4 of the question, 16 of the answer: the means of steps 36–99, 100–107, 108–115 and 116–119."""
    found = _turn(turned([2] * 100 + [1] * 4 + [3] * 16)).filter(pl.col("figure") == "missed around the turn")
    told = {r["at"]: r["top"] / r["below"] for r in found.to_dicts()}
    assert told == pytest.approx({"before": 67.5, "first 8": 103.5, "next 8": 111.5, "later": 117.5})
    assert found["role"].unique().to_list() == ["answer"]


def test_without_a_question_in_between_nothing_turns():
    assert _turn(turned([2] * 100)).is_empty()
    assert _turn(turned([1] * 4 + [3] * 100)).is_empty()
