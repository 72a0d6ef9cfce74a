"""What the diagnosis' rows rest on, by hand."""

from __future__ import annotations

import polars as pl
import pytest

import kvsim
from analyses.contexts import identity
from analyses.diagnosis.question import (
    CROSSED,
    FULL,
    HELD,
    R1,
    R2,
    R3,
    R4,
    UNREAD,
    _again,
    _classes,
    _missed,
    _moves,
    _over_time,
    published,
)
from analyses.qevict.question import THREE, TWO
from kvsim.metrics.keeping import WHOSE


def run(tables):
    return lambda name: tables[name]


def test_the_notes_runs_are_what_they_are_called():
    named = {name: (p.window, p.quant_share, p.period, p.sinks) for name, p in CROSSED.items()}
    assert [named[x] for x in (R1, R2, R3, R4)] == [(1, 0.0, 8, 5), (8, 0.0, 8, 5), (8, 0.7, 8, 5), (32, 0.7, 8, 5)]
    assert len(CROSSED) == 6
    assert identity(CROSSED[R3]) == identity(kvsim.qevict(hold=kvsim.share(0.2)))


def test_classes_are_parts_of_what_is_neither_sink_nor_recent():
    """Two steps with .6 and .2 on sinks and recent tokens: full (.1 + .2) / 1.2, coded (.1 + .3) / 1.2, evicted (.2 + .3) / 1.2."""
    at = {"policy": R3, "request": 0, "layer": 3, "q_head": 1, "role": "forced text"}
    held = [{"held_sinks": 0.4, "held_recent": 0.2, "held_full": 0.1, "held_coded": 0.1}]
    held += [{"held_sinks": 0.1, "held_recent": 0.1, "held_full": 0.2, "held_coded": 0.3}]
    by_tier = pl.DataFrame([{**at, "step": i, **x} for i, x in enumerate(held)])
    heads = pl.DataFrame([{**at, "step": i, "mass_evicted": x} for i, x in enumerate((0.2, 0.3))])
    found = _classes(run({"by_tier": by_tier, "heads": heads}))
    told = {(r["figure"], r["at"]): r["top"] / r["below"] for r in found.to_dicts()}
    parts = {("of the history", f"8, {c}"): x / 1.2 for c, x in (("full", 0.3), ("coded", 0.4), ("evicted", 0.5))}
    assert told == pytest.approx(parts | {("protected", "8"): 0.4})


def test_missed_mass_over_time_is_of_32_steps_and_what_codes_add():
    """Steps 0, 31 and 32: the first two stand at 16, the third at 48."""
    heads = pl.DataFrame(
        {
            "policy": R3,
            "role": "forced text",
            "step": [0, 31, 32],
            "mass_evicted": [0.1, 0.3, 0.5],
            "mass_quant": [0.2, 0.2, None],
        }
    )
    found = _over_time(run({"heads": heads}), run({"heads": heads.with_columns(policy=pl.lit("oracle of eviction"))}))
    told = {(r["line"], r["at"]): r["top"] / r["below"] for r in found.filter(pl.col("figure") == "missed by step").to_dicts()}
    assert (told[R3, "16"], told[R3, "48"]) == pytest.approx((0.2, 0.5))
    assert (told[UNREAD, "16"], told[UNREAD, "48"]) == pytest.approx((0.4, 0.5))


def test_without_codes_a_coded_token_is_missed():
    heads = {"policy": R3, "role": "x", "mass_evicted": [0.1, 0.3], "mass_quant": [None, 0.2]}
    found = _missed(run({"heads": pl.DataFrame(heads)}))
    told = {r["figure"]: r["top"] / r["below"] for r in found.to_dicts()}
    assert told == pytest.approx({"missed": 0.2, "missed without codes": 0.3})


def test_moves_are_of_the_deployed_set_and_events_count_once():
    """Of two kv heads, whose cuts are one; a set's churn is that of its next cut, dormancy 1."""
    cuts = {"policy": R1, "set": ["deployed", "deployed", "deployed", "oracle"], "dormancy": [1, 1, 2, 1]}
    cuts |= {"role": "x", "churn_held": [0.1, 0.3, 9.0, 9.0], "churn_full": [0.2, 0.4, 9.0, 9.0]}
    events = {"policy": [R3, R3, R3, R1], "kv_head": [0, 0, 1, 0], "role": "x"}
    events |= {"windows_promoted": [2, 3, 7, 7], "windows_demoted": [1, 3, 7, 7]}
    found = _moves(run({"recurrence": pl.DataFrame(cuts), "events": pl.DataFrame(events)}))
    told = {(r["figure"], r["line"], r["at"]): r["top"] / r["below"] for r in found.to_dicts()}
    assert told == pytest.approx({(HELD, TWO, "1"): 0.2, (FULL, TWO, "1"): 0.3, ("demoted for one promoted", THREE, "8"): 0.8})


def test_recurrence_is_of_three_tiers_and_pairs_count_alike():
    cuts = {"policy": [R3, R3, R3, R1], "set": "deployed", "dormancy": [1, 1, 2, 1], "role": "x"}
    cuts |= {"returns": [1, 3, 2, 9], "pairs": [10, 10, 8, 9], "score_cosine": [0.5, 0.7, 9.0, 9.0]}
    found = _again(run({"recurrence": pl.DataFrame(cuts)}))
    told = {(r["figure"], r["line"], r["at"]): r["top"] / r["below"] for r in found.to_dicts()}
    line = WHOSE["deployed"]
    assert told == pytest.approx(
        {
            ("recurrence", line, "1"): 0.2,
            ("recurrence", line, "2"): 0.25,
            ("returns", line, "1"): 2,
            ("returns", line, "2"): 2,
            ("score cosine", line, ""): 0.6,
        }
    )


def test_published_numbers_stand_in_every_cell_without_an_interval():
    ours = pl.DataFrame({"cell": ["a", "b"], "contexts": [8, 9], "figure": "x", "line": TWO, "at": "1", "value": 1.0, "low": 0.5})
    both = published(ours, "x", {(TWO, "8"): 0.25})
    theirs = both.filter(pl.col("line") == f"{TWO}, published")
    assert theirs.select("cell", "contexts", "at", "value", "low").rows() == [
        ("a", 8, "8", 0.25, None),
        ("b", 9, "8", 0.25, None),
    ]
