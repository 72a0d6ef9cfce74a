"""Tokens along the steps: what is held adds up to what is visible, budgets are compared in tokens."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.metrics.run import open_run
from kvsim.metrics.tokens import TIERS, asked_and_got, changes_by_step, held_by_step
from tests.report.runs import H2O, KIVI, POLICIES, QUEST, write_run

PROMPT, STEPS = 24, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("tokens") / "run", contexts=2, prompt=PROMPT, steps=STEPS))


def test_what_is_held_adds_up_to_what_is_visible(run):
    found = held_by_step(run.ledger)
    sums = found.group_by("policy", "step").agg(pl.col("tokens").sum()).sort("policy", "step")
    assert sums["tokens"].to_list() == [PROMPT + 1 + s for _ in POLICIES for s in range(STEPS)]
    by = {(p, s, part): n for p, s, part, n in found.select("policy", "step", "part", "tokens").iter_rows()}
    assert by[H2O, 3, "gone for good"] == PROMPT + 4 - 12
    assert (by[KIVI, 3, "held, full precision"], by[KIVI, 3, "held, coded"]) == (8, PROMPT + 4 - 8)
    assert by[QUEST, 3, "held, full precision"] == PROMPT + 4
    assert found["part"].unique(maintain_order=True).to_list() == list(TIERS)


def test_layers_apart_mean_to_all_together(run):
    each, whole = held_by_step(run.ledger, 1, "layer"), held_by_step(run.ledger)
    assert each["layer"].n_unique() == 2
    assert (
        each.group_by("policy", "step", "part", "order")
        .agg(pl.col("tokens").mean())
        .sort("policy", "step", "order")
        .equals(whole.select("policy", "step", "part", "order", "tokens"))
    )
    changes = changes_by_step(run.tables["events"], 1, "layer")
    assert (
        changes.group_by("policy", "step", "change")
        .agg(pl.col("tokens").mean())
        .sort("policy", "step")
        .equals(changes_by_step(run.tables["events"]))
    )


def test_host_only_is_what_is_neither_held_nor_gone(run):
    away = run.ledger.with_columns(pl.col("held_tokens") - 5, pl.col("full_tokens") - 5)
    found = held_by_step(away).filter(pl.col("part") == "only on the host")
    assert set(found["tokens"]) == {5.0}


def test_steps_taken_together_are_means(run):
    found = held_by_step(run.ledger, 3).filter(pl.col("policy") == H2O, pl.col("part") == "gone for good")
    assert found.select("step", "tokens").rows() == [(0, PROMPT + 2 - 12), (3, PROMPT + 5 - 12)]


def test_changes_are_per_kv_head_and_the_cut_is_apart(run):
    found = changes_by_step(run.tables["events"])
    assert found.rows() == [(H2O, -1, "evicted", PROMPT - 12)] + [(H2O, s, "evicted", 1.0) for s in range(STEPS)]
    together = changes_by_step(run.tables["events"], 4)
    assert together.select("step", "tokens").rows() == [(-1, PROMPT - 12), (0, 4.0), (4, 2.0)]


def test_asked_and_got(run):
    found = {
        (r["policy"], r["side"]): r for r in asked_and_got(run.ledger, run.heads, run.tables["events"]).iter_rows(named=True)
    }
    quest, h2o = found[QUEST, "read"], found[H2O, "hold"]
    assert (quest["asked"], quest["got"], quest["union"]) == (8, 8, 8)
    assert (h2o["asked"], h2o["got"], h2o["union"]) == (12, 12, None)
    assert (KIVI, "read") not in found
    assert (H2O, "read") not in found


@pytest.mark.parametrize(
    ("unit", "asked", "tokens"), [("share", 0.5, 0.5 * (PROMPT + 3.5)), ("pages", 3.0, 12.0), ("mib", 1.0, None)]
)
def test_budgets_are_compared_in_tokens(run, unit, asked, tokens):
    """A page of the run is 4 tokens: 2 pages of 8 rows. Budgets in bytes are not turned into tokens."""
    ledger = run.ledger.with_columns(
        asked=pl.when(pl.col("asked").is_not_null()).then(asked),
        asked_unit=pl.when(pl.col("asked").is_not_null()).then(pl.lit(unit)),
    )
    found = asked_and_got(ledger, run.heads, run.tables["events"]).filter(pl.col("side") == "read")
    assert found["asked"].to_list() == ([] if tokens is None else pytest.approx([tokens] * found.height))
    assert (found.height > 0) == (tokens is not None)


def test_dense_layers_do_not_count_as_got(run):
    heads = run.heads.with_columns(dense=pl.col("layer") == 0, read_tokens=pl.when(pl.col("layer") == 0).then(999).otherwise(8))
    found = asked_and_got(run.ledger, heads, run.tables["events"]).filter(pl.col("policy") == QUEST)
    assert found["got"].to_list() == [8.0]
