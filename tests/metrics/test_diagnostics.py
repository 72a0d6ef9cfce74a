"""Diagnostics are means that anyone can take from heads, explain and evidence."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.metrics.diagnostics import diagnostics, write

UNIT = {"policy": "p", "request": 0, "layer": 2}


def rows(**columns):
    return pl.DataFrame({**{k: [v] * 2 for k, v in UNIT.items()}, "q_head": [0, 1], "step": [0, 0], **columns}).lazy()


HEADS = rows(
    mass_evicted_prefill=[0.1, 0.3], mass_evicted=[0.2, 0.4], read_churn=[None, 0.5], learned_sink_mass=[0.0, 0.0],
    oracle_recall=[0.8, 0.6], oracle_held_recall=[0.7, 0.5], mass_recall=[0.6, 0.5],
)  # fmt: skip
EXPLAIN = rows(
    score_gap=[1.0, None], k_needed=[3, 5], **{f"exact_pages_r{r}": [r, r] for r in (1, 10, 64)},
    **{f"mass_pages_{e}": [None, None] for e in ("001", "005", "01", "02")},
)  # fmt: skip


def value(frame, metric):
    [found] = frame.filter(pl.col("metric") == metric)["value"].to_list()
    return found


def test_losses_are_the_steps_between_the_levels():
    found = diagnostics(HEADS)
    assert value(found, "loss_budget") == pytest.approx(0.3)
    assert value(found, "loss_evict") == pytest.approx(0.1)
    assert value(found, "loss_index") == pytest.approx(0.05)
    levels = sum(value(found, f"loss_{x}") for x in ("budget", "evict", "index"))
    assert levels == pytest.approx(1 - 0.55)  # together: all that was not read
    assert value(found, "fmm_prefill") == pytest.approx(0.2)
    assert value(found, "fmm_running") == pytest.approx(0.3)
    assert value(found, "churn_read") == 0.5  # null where there is no step before


def test_depths_have_mean_p95_and_max_and_what_was_not_measured_is_absent():
    found = diagnostics(HEADS, explain=EXPLAIN)
    assert value(found, "k_needed_mean") == 4
    assert value(found, "k_needed_max") == 5
    assert value(found, "score_gap") == 1.0
    assert not found.filter(pl.col("metric").str.starts_with("mass_pages"))["metric"].to_list()


def test_all_spans_are_read_only_where_every_one_is():
    evidence = pl.DataFrame(
        {**{k: [v] * 4 for k, v in UNIT.items()}, "q_head": [0, 0, 1, 1], "step": [0] * 4, "span": ["a", "b"] * 2, "dense": [0.5] * 4, "read": [0.5, 0.0, 0.1, 0.2]}
    ).lazy()  # fmt: skip
    found = diagnostics(HEADS, evidence=evidence)
    assert value(found, "all_spans_read") == 0.5
    assert value(found, "any_span_read") == 1.0


def test_write_puts_it_beside_the_tables(tmp_path):
    HEADS.collect().write_parquet(tmp_path / "heads.parquet")
    write(tmp_path)
    assert pl.read_parquet(tmp_path / "diagnostics.parquet").equals(diagnostics(HEADS))


def test_windows_are_totals_over_cuts_and_churn_their_mean():
    events = pl.DataFrame(
        {**{k: [v] * 6 for k, v in UNIT.items()}, "kv_head": [0, 0, 0, 1, 1, 1], "step": [-1, 0, 1] * 2,
         "windows_promoted": [0, None, 2, 0, None, 1], "windows_demoted": [3, None, 1, 3, None, 1], "windows_evicted": [4, None, 0, 4, None, 2],
         "windows_aged_in": [9, None, 1, 9, None, 1], "churn_full": [None, None, 0.5, None, None, 0.25]}
    ).lazy()  # fmt: skip
    found = diagnostics(HEADS, events=events)
    assert [value(found, f"windows_{x}") for x in ("promoted", "demoted", "evicted", "aged_in")] == [1.5, 4, 5, 10]
    assert value(found, "churn_full") == 0.375
    assert not {"churn_full", "windows_promoted"} & {*diagnostics(HEADS)["metric"]}
