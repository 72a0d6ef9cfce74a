"""Blame, depths, bounds, stages of coding and tails against plain numpy."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.diagnostics import diagnostics
from kvsim.metrics.floor import Floor, floor, floors
from kvsim.metrics.loss import DEPTHS, LOSSES, blame, bounds, coding, depths, rankings
from kvsim.metrics.run import open_run
from kvsim.metrics.spread import TELLING
from kvsim.metrics.tails import GRID, tails
from tests.report.runs import FULL, H2O, KIVI, ORACLE, POLICIES, QUEST, RANDOM, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("loss") / "run", contexts=2, floor=0.02))


def column(run, policy, name, **where):
    return run.heads.filter(pl.col("policy") == policy, **where).collect()[name].to_numpy().astype(float)


def test_the_parts_of_the_blame_sum_to_one_and_only_pages_have_them(run):
    found = blame(diagnostics(run.heads))
    assert set(found["policy"]) == {QUEST, ORACLE, RANDOM}
    assert found.group_by("policy").agg(pl.col("mass").sum())["mass"].to_list() == pytest.approx([1.0] * 3)
    mine = dict(found.filter(pl.col("policy") == QUEST).select("part", "mass").rows())
    assert list(mine) == list(LOSSES.values())
    recall = column(run, QUEST, "mass_recall").mean()
    assert mine["lost: the budget is too small"] == pytest.approx(0.02, abs=1e-6)
    assert mine["lost: evicted before"] == pytest.approx(0.01, abs=1e-6)
    assert mine["lost: the index chose other pages"] == pytest.approx(0.97 - recall, abs=1e-6)
    assert mine["read"] == pytest.approx(recall, abs=1e-6)


def test_a_difference_below_zero_is_no_gain(run):
    better = run.heads.with_columns(oracle_held_recall=pl.col("oracle_recall") + 1e-7)
    found = blame(diagnostics(better)).filter(pl.col("part") == "lost: evicted before")
    assert found["mass"].to_list() == [0.0] * 3


def test_depths(run):
    found = depths(run.tables["explain"], run.heads).filter(role=-1)
    assert set(found["policy"]) == {QUEST}
    assert found["wanted"].to_list() == list(DEPTHS.values())
    for name, row in zip(DEPTHS, found.iter_rows(named=True), strict=True):
        pages = run.tables["explain"].collect()[name].to_numpy()
        told = [np.median(pages), pages.mean(), np.percentile(pages, 95), pages.max()]
        assert [row["p50"], row["mean"], row["p95"], row["most"]] == pytest.approx(told)


def test_a_guarantee_that_no_row_has_is_left_out(run):
    bare = run.tables["explain"].with_columns(exact_pages_r1=pl.lit(None, pl.Int32))
    assert "proof of the best token" not in depths(bare, run.heads)["wanted"]
    assert depths(run.tables["explain"].clear(), run.heads).is_empty()


def test_rankings_are_sums_and_means_of_explain(run):
    explain = run.tables["explain"].collect()
    row, same = rankings(run.tables["explain"], run.heads).iter_rows(named=True)
    assert {**row, "role": same["role"]} == same  # of one role
    assert row["policy"] == QUEST
    assert row["below_share"] == pytest.approx(explain["below"].sum() / explain["pages"].sum())
    assert row["below_max"] == 0.5
    assert row["fp16_changed"] == pytest.approx(explain["fp16_changed"].mean())
    assert (row["regret"], row["recovered_4"], row["recovered_16"]) == (1.5, 0.5, None)
    assert rankings(run.tables["explain"].clear(), run.heads).is_empty()


def test_bounds(run):
    evicted = pl.when(pl.col("policy") == QUEST).then(0.2).otherwise("mass_evicted")
    found = bounds(run.heads.with_columns(mass_evicted=evicted, mass_unread=pl.col("mass_unread") / 2)).filter(role=-1)
    assert found.select("policy", "layer").rows() == [(QUEST, 0), (QUEST, 3)]
    row = found.row(1, named=True)
    slack = column(run, QUEST, "slack_mean", layer=3)
    missed = column(run, QUEST, "mass_unread", layer=3) / 2 / (1 - 0.2)
    assert (row["slack_mean"], row["slack_mean_p95"]) == pytest.approx((slack.mean(), np.percentile(slack, 95)), rel=1e-5)
    assert (row["missed"], row["missed_p95"]) == pytest.approx((missed.mean(), np.percentile(missed, 95)), rel=1e-5)
    assert row["promised"] == pytest.approx(0.9)


def test_stages_of_coding(run):
    found = coding(run.heads)
    assert set(found["policy"]) == {KIVI}
    assert found["stage"].to_list() == ["exact rows", "coded keys", "coded keys and values"] * 2
    last = found.row(-1, named=True)
    error = column(run, KIVI, "err_v", layer=3)
    assert (last["error"], last["p95"]) == pytest.approx((error.mean(), np.percentile(error, 95)), rel=1e-5)


def test_tails_are_quantiles(run):
    found = tails(run.heads)
    assert found["policy"].unique(maintain_order=True).to_list() == sorted(POLICIES)
    mine = found.filter(pl.col("policy") == H2O)
    assert mine["part"].to_list() == GRID.tolist()
    assert mine["rel_l2"].to_list() == pytest.approx(np.percentile(column(run, H2O, "rel_l2"), 100 * GRID).tolist(), rel=1e-5)
    dense, read = column(run, H2O, "evidence_dense"), column(run, H2O, "evidence_read")
    recall = (read / np.where(dense > 0, dense, 1))[dense >= TELLING]
    assert mine["evidence_recall"].to_list() == pytest.approx(np.percentile(recall, 100 * GRID).tolist(), rel=1e-5)
    assert found.filter(pl.col("policy") == FULL)["rel_l2"].to_list() == [0.0] * len(GRID)


def test_tails_without_evidence(run):
    assert tails(run.heads.with_columns(evidence_dense=pl.lit(None, pl.Float32)))["evidence_recall"].is_null().all()


def test_the_floor_is_the_mean_over_contexts_and_layers(run):
    assert floors(run.about).select("request", "layer").rows() == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert floor(run.about) == Floor(pytest.approx(0.01), pytest.approx(0.02))
    two = [{"request": 0, "layer": n, "median": 0.1 * n, "p95": n} for n in (1, 3)]
    assert floor({"noise_floor": two}) == Floor(pytest.approx(0.2), 2.0)


@pytest.mark.parametrize("about", [{}, {"noise_floor": []}, {"noise_floor": None}, {"noise_floor": [{"layer": 1}, "text"]}])
def test_no_floor_where_none_was_recorded(about):
    assert floor(about) is None
    assert floors(about).is_empty()
