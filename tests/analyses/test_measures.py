"""The arithmetic of the questions on reading, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from analyses.layers.question import allotted, pages_for
from analyses.measures import at_bytes, billed, lost
from analyses.reading.question import ANCHORED, TURNED, aged, turned

AT = {"role": "answer", "policy": "quest", "request": 0, "layer": 0}
NOTHING = dict.fromkeys(("meta_bytes", "score_bytes", "host_read_bytes", "ssd_read_bytes"), 0)


class Given:
    """Tables by hand."""

    def __init__(self, **tables):
        self.tables = {n: pl.DataFrame(AT | t) for n, t in tables.items()}

    def __call__(self, table):
        return self.tables[table]

    def row_bytes(self):
        return {0: 10}


CURVE = {
    "q_head": 0,
    "pages": [1, 2],
    "read_bytes_mean": [20.0, 30.0],
    "mass_recall_mean": [0.5, 0.7],
    "rel_l2_mean": [0.4, 0.2],
}
LEDGER = {"visible_tokens": 10, "read_bytes": 30, "index_bytes": 10} | NOTHING


def test_policies_are_compared_where_rows_and_index_cost_the_same():
    """100 bytes in all, an index of 10: 20 bytes of rows are a share of 30%, half way between budgets it is the mean of both."""
    got = at_bytes(Given(curves=CURVE, ledger=LEDGER), [0.2, 0.3, 0.35, 0.4, 0.5])
    assert got["at"].to_list() == ["30%", "35%", "40%"]
    assert got["mass_recall"].to_list() == pytest.approx([0.5, 0.6, 0.7])
    assert got["rel_l2"].to_list() == pytest.approx([0.4, 0.3, 0.2])


def test_a_share_that_one_head_does_not_reach_is_left_out_of_all():
    both = pl.concat([pl.DataFrame(AT | CURVE), pl.DataFrame(AT | CURVE | {"q_head": 1, "read_bytes_mean": [24.0, 34.0]})])
    given = Given(ledger=LEDGER)
    given.tables["curves"] = both
    assert at_bytes(given, [0.3, 0.35, 0.4, 0.45])["at"].to_list() == ["35%", "40%"] * 2


def test_bytes_are_shares_of_the_full_cache():
    resident = {"resident_bytes": 50, "index_resident_bytes": 10, "meta_resident_bytes": 5}
    got = billed(Given(ledger=LEDGER | resident)).select("figure", "top", "below").rows()
    assert got == [("bytes read", 40.0, 100.0), ("bytes resident", 65.0, 100.0)]


def test_only_answers_have_evidence():
    heads = {"mass_recall": [0.5, 1.0], "rel_l2": 0.0, "evidence_dense": [0.2, 0.1], "evidence_read": [0.1, 0.1]}
    frame = pl.DataFrame(AT | heads).with_columns(role=pl.Series(["answer", "forced text"]))
    got = lost(frame).filter(pl.col("figure") == "evidence recall")
    assert got.select("role", "top", "below").rows() == [("answer", 0.1, 0.2)]


def test_ages_are_steps_since_the_last_ranking():
    steps = np.arange(40)
    rows = {"q_head": 0, "step": steps, "set_age": steps % 16, "rel_l2": 0.0, "read_tokens": 1, "mass_recall": steps / 100}
    got = aged(pl.DataFrame(AT | rows | {"evidence_dense": 0.1, "evidence_read": 0.1}))
    mass = got.filter(pl.col("figure") == "mass recall by age")
    assert mass["at"].to_list() == ["0", "1", "2", "4", "8"]
    of = [[s for s in steps if s % 16 in ages] for ages in ({0}, {1}, {2, 3}, range(4, 8), range(8, 16))]
    assert (mass["top"] / mass["below"]).to_list() == pytest.approx([np.mean(s) / 100 for s in of])


def test_pages_turn_over_between_steps():
    """Four pages are there at first. Page 1 is read at steps 0, 1 and 3; page 5 began after both steps that came before its own."""
    plans = {"q_head": 0, "step": [0, 1, 3], "pages": [[0, 1], [1, 2], [1, 5, 9]], "forced": [[], [], [9]]}
    trace = SimpleNamespace(requests=[SimpleNamespace(id=0, prompt=64)])
    got = turned(SimpleNamespace(trace=trace, replay=lambda policies, **how: Given(plans=plans)))
    found = {(r["figure"], r["at"]): (r["top"], r["below"]) for r in got.to_dicts()}
    assert found == {(TURNED, "1"): (1, 2), (TURNED, "2"): (0, 2), (ANCHORED, ""): (3, 6)}


def test_pages_needed_are_the_fewest_with_the_mass():
    ledger = {"visible_tokens": 60}  # four pages of 16
    curves = {"q_head": [0, 0, 0, 1, 1, 1], "pages": [1, 2, 3] * 2, "mass_recall_mean": [0.9, 0.96, 1.0, 0.1, 0.2, 0.3]}
    assert pages_for(Given(ledger=ledger, curves=curves))["part"].to_list() == [0.5, 1.0]


def test_budgets_of_their_own_cost_no_more_than_equal_ones():
    """One head has its mass on a page, the other over three: alike they need 3 pages each, apart 1 and 3."""
    curves = {"q_head": [0] * 3 + [1] * 3, "pages": [1, 2, 3] * 2, "mass_recall_mean": [1.0, 1.0, 1.0, 0.3, 0.6, 1.0]}
    run = Given(curves=curves | {"policy": "oracle"})
    found = {r["at"]: r["top"] for r in allotted(run).to_dicts()}
    assert found == {"every head alike": 3, "by layer": 3, "by head": 2}


def test_a_head_with_a_window_costs_no_more_pages_than_it_has():
    """One head sees a single page, the other needs three: alike 1 and 3 pages, a mean of 2."""
    curves = {"q_head": [0] + [1] * 3, "pages": [1, 1, 2, 3], "mass_recall_mean": [1.0, 0.3, 0.6, 1.0]}
    run = Given(curves=curves | {"policy": "oracle"})
    assert {r["at"]: r["top"] for r in allotted(run).to_dicts()} == {"every head alike": 2, "by layer": 2, "by head": 2}
