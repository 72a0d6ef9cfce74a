"""Curves aggregated over heads, layers and contexts against plain Python."""

from __future__ import annotations

from collections import defaultdict

import polars as pl
import pytest

from kvsim.metrics.budget import ALL_STEPS, COLUMNS, by_budget
from kvsim.metrics.run import open_run
from tests.report.runs import ORACLE, QUEST, RANDOM, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("budget") / "run", contexts=2, roles=(1, 3), prompt=40))


def test_means_and_ratios_of_sums(run):
    weight: defaultdict[tuple, float] = defaultdict(float)
    for r in run.heads.collect().iter_rows(named=True):
        for role in (ALL_STEPS, r["role"]):
            key = r["policy"], r["request"], r["layer"], r["q_head"], role
            weight[(*key, "far_recall")] += r["far_mass"]
            weight[(*key, "evidence_recall")] += r["evidence_dense"]
    side = run.ledger.filter(pl.col("policy") == QUEST).collect()["index_bytes"].mean()
    groups = defaultdict(list)
    for r in run.tables["curves"].collect().iter_rows(named=True):
        groups[r["policy"], r["role"], r["pages"]].append(r)
    found = by_budget(run.tables["curves"], run.heads, run.ledger)
    assert found.columns == list(COLUMNS)
    assert found.select("policy", "role", "pages").rows() == sorted(groups)
    assert set(found["policy"]) == {QUEST, ORACLE, RANDOM}
    for row in found.iter_rows(named=True):
        group = groups[row["policy"], row["role"], row["pages"]]
        assert row["tokens"] == row["pages"] * 4
        assert row["mass_recall"] == pytest.approx(sum(r["mass_recall_mean"] for r in group) / len(group))
        assert row["rel_l2"] == pytest.approx(sum(r["rel_l2_mean"] for r in group) / len(group))
        bytes_ = sum(r["read_bytes_mean"] for r in group) / len(group) + (side if row["policy"] == QUEST else 0)
        assert row["bytes"] == pytest.approx(bytes_)
        for measure in ("far_recall", "evidence_recall"):
            w = [weight[r["policy"], r["request"], r["layer"], r["q_head"], r["role"], measure] for r in group]
            assert row[measure] == pytest.approx(sum(x * r[measure] for x, r in zip(w, group, strict=True)) / sum(w), rel=1e-6)


def test_a_budget_that_some_head_lacks_is_left_out(run):
    shorter = run.tables["curves"].filter((pl.col("layer") != 3) | (pl.col("pages") <= 4))
    assert by_budget(shorter, run.heads, run.ledger)["pages"].max() == 4


def test_thinning_keeps_the_ends_and_budgets_with_an_output_error(run):
    whole = by_budget(run.tables["curves"], run.heads, run.ledger)
    thin = by_budget(run.tables["curves"], run.heads, run.ledger, most=4)
    first = thin.filter(pl.col("policy") == QUEST, pl.col("role") == ALL_STEPS)
    assert 3 <= len(first) <= 5
    assert (first["pages"].min(), first["pages"].max()) == (1, 10)
    assert set(thin.rows()) < set(whole.rows())
    grid = run.tables["curves"].with_columns(rel_l2_mean=pl.when(pl.col("pages").is_in([1, 3, 10])).then("rel_l2_mean"))
    assert set(by_budget(grid, run.heads, run.ledger)["pages"]) == {1, 3, 10}


def test_without_output_errors_every_budget_may_be_shown(run):
    bare = run.tables["curves"].with_columns(rel_l2_mean=pl.lit(None, pl.Float32))
    assert by_budget(bare, run.heads, run.ledger)["pages"].n_unique() == 10


def test_no_curves_no_rows(run):
    assert by_budget(run.tables["curves"].clear(), run.heads, run.ledger).is_empty()
