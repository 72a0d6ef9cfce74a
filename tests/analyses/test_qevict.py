"""What QEvict's rows rest on, by hand."""

from __future__ import annotations

import polars as pl

from analyses.contexts import identity
from analyses.qevict.question import AT, CODED, DEFAULT, FAMILIES, LINE, OPTIONS, asked, scales


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
