"""Rules and fixed budgets at as many pages, by hand."""

from __future__ import annotations

import polars as pl
import pytest

from analyses import contexts
from analyses.depths.question import ALL, BEYOND, GAP, HEADS, RULE, equal, ordered
from kvsim.codecs.calibration import load


def test_pairs_by_hand():
    assert ordered([1, 2], [2, 3]) == (3.5, 4)  # 1<2, 1<3, 2=2 counts half, 2<3
    assert ordered([], [1.0]) == (0, 0)


def test_equal_pages_by_hand():
    """Two heads whose curves are straight: one gains .1 a page, the other .2; the rule reads 1 and 3 pages, 2 on average."""
    each = {"policy": "r", "role": "answer", "layer": 0, "q_head": [0, 1], "read_pages": [1, 3], "mass_recall": [0.2, 0.7]}
    curves = [
        {"policy": "quest", "role": "answer", "layer": 0, "q_head": h, "pages": p, "mass_recall_mean": (0.1, 0.2)[h] * p}
        for h in (0, 1)
        for p in (1, 2, 3, 4)
    ]
    made = equal(pl.DataFrame(each), pl.DataFrame(curves)).to_dicts()
    read = {r["line"]: r["top"] / r["below"] for r in made if r["figure"] == "mass read"}
    assert read == pytest.approx({RULE: 0.45, HEADS: (0.1 + 0.6) / 2, ALL: (0.2 + 0.4) / 2})
    more = {r["line"]: r["top"] / r["below"] for r in made if r["figure"] == BEYOND}
    assert more == pytest.approx({RULE: 0.15, HEADS: 0.05})


def test_a_gap_is_learned_from_other_contexts_than_it_is_judged_on(monkeypatch, tmp_path):
    monkeypatch.setattr(contexts, "RUNS", tmp_path)
    mine = contexts.small()
    file = mine.calibrated(GAP, [18])
    about = load(str(file)).about
    assert [t["id"] for t in about["traces"]] == ["smollm2-reversal"]
    assert mine.trace.requests[0].digest not in about["contexts"]
    assert mine.calibrated(GAP, [18]) == file  # kept
