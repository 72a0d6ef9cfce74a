"""Curves aggregated over heads, layers and contexts against plain Python."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.budget import COLUMNS, LOWEST, STEPS, by_budget
from kvsim.metrics.roles import ALL_STEPS
from kvsim.metrics.run import open_run
from kvsim.metrics.spread import MEAN, TAIL, TELLING, WORST
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
    assert set(found["statistic"]) == {MEAN, TAIL, WORST, STEPS, LOWEST}
    found = found.filter(pl.col("statistic") == MEAN)
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


def test_tails_over_heads_and_over_steps(run):
    curves = run.tables["curves"].with_columns(
        mass_recall_mean=pl.col("mass_recall_mean") - pl.col("q_head") / 100,
        mass_recall_p5=pl.col("mass_recall_mean") / 2 - pl.col("q_head") / 100,
        mass_recall_min=pl.col("mass_recall_mean") / 4 - pl.col("q_head") / 100,
        rel_l2_mean=pl.col("rel_l2_mean") + pl.col("q_head") / 10,
    )
    heads = run.heads.with_columns(evidence_dense=pl.when(pl.col("q_head") == 0).then(TELLING / 2).otherwise(0.2))
    found = by_budget(curves, heads, run.ledger)
    whole = curves.collect()
    assert len(found)
    for row in found.filter(pl.col("policy") == QUEST, pl.col("role") == ALL_STEPS).iter_rows(named=True):
        group = whole.filter(pl.col("policy") == QUEST, pl.col("role") == ALL_STEPS, pl.col("pages") == row["pages"])
        recall, error = group["mass_recall_mean"].to_numpy(), group["rel_l2_mean"].to_numpy()
        told = group.filter(pl.col("q_head") > 0)["evidence_recall"].to_numpy()  # head 0 hardly looks at it
        expected = {
            TAIL: (np.percentile(recall, 5), np.percentile(error, 95), np.percentile(told, 5)),
            WORST: (recall.min(), error.max(), told.min()),
            STEPS: (group["mass_recall_p5"].mean(), group["rel_l2_p95"].mean(), None),
            LOWEST: (group["mass_recall_min"].min(), None, None),
        }
        if row["statistic"] != MEAN:
            for value, wanted in zip(
                (row["mass_recall"], row["rel_l2"], row["evidence_recall"]), expected[row["statistic"]], strict=True
            ):
                assert value == (None if wanted is None else pytest.approx(wanted, rel=1e-5))


def test_the_group_reads_at_least_what_one_head_reads(run):
    found = by_budget(run.tables["curves"], run.heads, run.ledger)
    assert (found["union_pages"] / found["pages"]).to_list() == pytest.approx([1.5] * len(found))


def test_a_budget_that_some_head_lacks_is_left_out(run):
    shorter = run.tables["curves"].filter((pl.col("layer") != 3) | (pl.col("pages") <= 4))
    assert by_budget(shorter, run.heads, run.ledger)["pages"].max() == 4


def test_thinning_keeps_the_ends_and_budgets_with_an_output_error(run):
    whole = by_budget(run.tables["curves"], run.heads, run.ledger)
    thin = by_budget(run.tables["curves"], run.heads, run.ledger, most=4)
    first = thin.filter(pl.col("policy") == QUEST, pl.col("role") == ALL_STEPS, pl.col("statistic") == MEAN)
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


def test_tokens_read_are_those_of_the_pages_that_a_head_reads(run):
    """A head that reads what its group picked reads more than it asked for."""
    curves = run.tables["curves"]
    double = by_budget(curves.with_columns(read_pages_mean=2.0 * pl.col("pages")), run.heads, run.ledger)
    assert (double["read_tokens"] == 2 * double["tokens"]).all()
    bare = by_budget(curves.with_columns(read_pages_mean=pl.lit(None, pl.Float64)), run.heads, run.ledger)
    assert (bare["read_tokens"] == bare["tokens"]).all()
