"""The numbers of analyses/closed_loop and the report's line under rankings are what the tables beside it give, and the findings hold."""

from __future__ import annotations

import json

import polars as pl
import pytest

from analyses.closed_loop import run
from kvsim.metrics import closed_loop
from kvsim.metrics.closed_loop import FULL
from kvsim.report import facts

STUDIES = run.studies()
README = run.README.read_text("utf-8")


def test_every_number_of_the_readme_is_computed_again_and_there_is_no_other():
    assert README.split(run.BEGIN)[1].split(run.END)[0].strip().splitlines() == "\n".join(run.told()).strip().splitlines()


def test_the_report_says_what_the_study_found():
    found = json.loads(run.TOLD.read_text("utf-8"))
    assert found == run.foretold(STUDIES["512"])
    rho = found["rank_correlation_with_kl"]["needle"]["evidence"][0]
    assert f"evidence recall {rho:.2f}" in facts.FORETOLD
    assert found["model"] in facts.FORETOLD
    assert facts.FORETOLD in run.DEFINITIONS.read_text("utf-8").split(run.LINE)[1].split(run.END)[0]


def test_the_tables_are_small():
    assert sum(x.stat().st_size for x in run.TABLES.rglob("*") if x.is_file()) < 2**20


@pytest.mark.parametrize("name", list(STUDIES))
def test_full_attention_is_full_attention_and_more_budget_is_nearer_to_it(name):
    scores = closed_loop.scores(STUDIES[name]).filter(pl.col("mode") == "forced")
    assert (scores.filter(pl.col("policy") == FULL)["kl"] == 0).all()
    kin = scores.with_columns(
        family=pl.col("policy").map_elements(closed_loop.family, return_dtype=pl.String),
        budget=pl.col("policy").str.extract(r"share\(([\d.]+)").cast(pl.Float64),
    )
    for (task, family), mine in kin.filter(pl.col("policy") != FULL).group_by("task", "family"):
        kl = mine.sort("budget", "policy")["kl"]
        assert (kl.diff().drop_nulls() < 0).all(), (name, task, family)


def test_within_a_family_open_loop_numbers_order_budgets_as_the_model_does():
    told = closed_loop.foretold(STUDIES["512"]).with_columns(
        budget=pl.col("policy").str.extract(r"share\(([\d.]+)").cast(pl.Float64)
    )
    for _, mine in told.drop_nulls("budget").sort("budget").group_by("task", "family"):
        for name in ("open_mass_recall", "open_evidence", "open_rel_l2"):
            better = closed_loop.BETTER[name] * mine[name].diff().drop_nulls()
            assert (better > 0).all(), (mine["family"][0], name)


def test_where_a_fact_has_to_be_found_layers_15_to_24_tell_most():
    groups = closed_loop.by_layers(STUDIES["512"]).filter(pl.col("task") != "plain").sort("first_layer")
    for (task, name), mine in groups.group_by("task", "predictor"):
        late = mine["layers"].is_in(["15-19", "20-24"])
        assert mine.filter(late)["rho"].min() > mine.filter(~late)["rho"].max() - 0.03, (task, name)


def test_what_the_docs_conclude_of_needles_and_text():
    rho = {
        (r["task"], r["predictor"]): r["rho"]
        for r in closed_loop.correlations(STUDIES["512"]).filter(pl.col("outcome") == "kl").iter_rows(named=True)
    }
    for task in ("needle", "multi-key"):
        assert rho[task, "open_evidence"] > rho[task, "open_mass_recall"] + 0.1
        assert rho[task, "open_evidence"] > rho[task, "open_rel_l2"] + 0.1
    assert rho["plain", "open_rel_l2"] > rho["plain", "open_mass_recall"] > rho["needle", "open_mass_recall"]
