"""The share of heads and steps that read a position, counted one by one from the tables."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.profile import profile
from kvsim.metrics.run import open_run
from tests.report.runs import FULL, H2O, KIVI, QUEST, write_run

PROMPT, STEPS, Q, KV = 24, 6, 4, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("profile") / "run", contexts=2, prompt=PROMPT, steps=STEPS))


def counted(run, policy, selective):
    """Per position: (reads, chances) in query heads and steps of context 1."""
    reads, chances = np.zeros(PROMPT + STEPS), np.zeros(PROMPT + STEPS)
    plans = run.tables["plans"].filter(pl.col("policy") == policy, pl.col("request") == 1).collect()
    tiers = run.tables["tiers"].filter(pl.col("policy") == policy, pl.col("request") == 1).sort("step").collect()
    for layer in (0, 3):
        for head in range(Q):
            for step in range(STEPS):
                there = np.arange(PROMPT + STEPS) <= PROMPT + step
                chances += there
                if selective:
                    (row,) = plans.filter(layer=layer, q_head=head, step=step).iter_rows(named=True)
                    mine = np.isin(np.arange(PROMPT + STEPS) // row["page_size"], row["pages"])
                else:
                    mine = there.copy()
                    for row in tiers.filter(pl.col("layer") == layer, pl.col("kv_head") == head // (Q // KV)).iter_rows(
                        named=True
                    ):
                        for r in row["runs"]:
                            if row["step"] < step:
                                mine[r["start"] : r["stop"]] = r["tier"] & 3 != 0
                reads += mine & there if not selective else mine
    return reads, chances


@pytest.mark.parametrize("width", [1, 4, 5])
@pytest.mark.parametrize(("policy", "selective"), [(QUEST, True), (H2O, False), (KIVI, False), (FULL, False)])
def test_shares(run, policy, selective, width):
    found = profile(run.tables, policy, 1, width, selective)
    reads, chances = counted(run, policy, selective)
    cuts = np.arange(0, PROMPT + STEPS, width)
    expected = np.add.reduceat(reads, cuts) / np.add.reduceat(chances, cuts)
    assert found["start"].to_list() == cuts.tolist()
    assert found["stop"].to_list() == np.minimum(cuts + width, PROMPT + STEPS).tolist()
    assert found["share"].to_numpy() == pytest.approx(expected.clip(0, 1))
    assert len(set(found["share"])) > 1 or policy in (FULL, KIVI)


def test_one_set_for_the_group_counts_for_all_its_heads(run):
    group = run.tables["plans"].filter(pl.col("q_head") % (Q // KV) == 0).with_columns(q_head=pl.lit(-1, pl.Int16))
    found = profile(run.tables | {"plans": group}, QUEST, 1, 4, True)
    each = run.tables["plans"].filter(pl.col("q_head") % (Q // KV) == 0)
    both = pl.concat([each, each.with_columns(pl.col("q_head") + 1)])
    assert found.equals(profile(run.tables | {"plans": both}, QUEST, 1, 4, True))


def test_a_context_that_is_not_there_has_no_rows(run):
    assert profile(run.tables, QUEST, 7, 4, True).is_empty()
