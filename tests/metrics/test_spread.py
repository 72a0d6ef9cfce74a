"""Tails and worst heads against plain Python: a head is one query head of one layer in one context."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.quality import quality
from kvsim.metrics.run import open_run
from kvsim.metrics.spread import LOSSES, MEAN, SPREAD, TAIL, TELLING, WORST, by_statistic, spread, spread_of
from tests.report.runs import FULL, QUEST, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("spread") / "run", contexts=2, roles=(1, 3)))


def per_head(run, by):
    """{(policy, *by): [{measure: value of one head}]}"""
    rows = defaultdict(list)
    for r in run.heads.collect().iter_rows(named=True):
        rows[(r["policy"], *(r[n] for n in by)), r["request"], r["layer"], r["q_head"]].append(r)
    found = defaultdict(list)
    for (group, *_), mine in rows.items():
        far = [(r["far_recall"] * r["far_mass"], r["far_mass"]) for r in mine if r["far_recall"] is not None]
        evidence = [(r["evidence_read"], r["evidence_dense"]) for r in mine]
        head = {n: np.mean([r[n] for r in mine]) for n in ("mass_recall", "rel_l2", "mass_evicted", "mass_unread")}
        head["missed_mass"] = head["mass_evicted"] + head["mass_unread"]
        head["far_recall"] = ratio(far, np.mean([r["far_mass"] for r in mine]))
        head["evidence_recall"] = ratio(evidence, np.mean([r["evidence_dense"] for r in mine]))
        found[group].append(head)
    return found


def ratio(pairs, each):
    below = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) / below if below >= 1e-3 and each >= TELLING else None


@pytest.mark.parametrize("by", [(), ("role",), ("layer",), ("step",)])
def test_tails_and_worst_heads(run, by):
    naive, found = per_head(run, by), spread(run.heads, *by)
    means = quality(run.heads, *by)
    assert found.select(means.columns).equals(means)
    assert found.select("policy", *by).rows() == sorted(naive)
    for row in found.iter_rows(named=True):
        heads = naive[tuple(row[n] for n in ("policy", *by))]
        for measure in SPREAD:
            told = [h[measure] for h in heads if h[measure] is not None]
            share, worst = (95, max) if measure in LOSSES else (5, min)
            assert row[f"{measure}_tail"] == (pytest.approx(np.percentile(told, share), rel=1e-5, abs=1e-6) if told else None)
            assert row[f"{measure}_worst"] == (pytest.approx(worst(told), rel=1e-5, abs=1e-6) if told else None)


def test_a_head_that_hardly_looks_has_no_recall(run):
    faint = run.heads.with_columns(
        evidence_dense=pl.when(pl.col("q_head") == 0).then(TELLING / 2).otherwise(0.2),
        evidence_read=pl.when(pl.col("q_head") == 0).then(0.0).otherwise(0.1),
    )
    (row,) = spread(faint.filter(pl.col("policy") == QUEST)).iter_rows(named=True)
    assert row["evidence_recall_worst"] == pytest.approx(0.5)  # head 0 read nothing of what it hardly looks at
    assert row["evidence_recall"] == pytest.approx(0.3 / 0.605, rel=1e-6)


def test_columns_of_ones_choice(run):
    found = {r["policy"]: r for r in spread_of(run.heads, ["read_churn", "top1_recall"]).iter_rows(named=True)}
    assert found[FULL]["read_churn"] == found[FULL]["read_churn_worst"] == 0.25
    some = run.heads.with_columns(top1_recall=pl.col("q_head") / 10)
    row = spread_of(some, ["top1_recall"]).row(0, named=True)
    assert (row["top1_recall"], row["top1_recall_worst"]) == pytest.approx((0.15, 0.0))


def test_statistics_one_after_the_other(run):
    found = by_statistic(spread(run.heads), ("rel_l2",))
    assert found["statistic"].unique(maintain_order=True).to_list() == [MEAN, TAIL, WORST]
    wide = spread(run.heads)
    for name, column in ((MEAN, "rel_l2"), (TAIL, "rel_l2_tail"), (WORST, "rel_l2_worst")):
        assert found.filter(pl.col("statistic") == name)["rel_l2"].to_list() == wide[column].to_list()
    assert "rel_l2_tail" not in found.columns
    assert {"policy", "mass_recall"} <= set(found.columns)
