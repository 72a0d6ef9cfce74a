"""A run in a few lines, against plain Python over its rows."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import polars as pl
import pytest

from kvsim.cli import main
from kvsim.metrics.run import open_run
from kvsim.metrics.summary import arrivals, reached, summary
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize

QUEST, H2O = "quest(read=tokens(16), page=4)", "h2o(hold=share(0.3))"
HOST = "offload(device=pages(4)) >> quest(read=pages(2), page=4)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("summary")
    synthesize(path / "t", requests=2, layers=2, q_heads=4, kv_heads=2, prompt=160, steps=8, seed=3)
    replay(path / "t", [QUEST, H2O, HOST], path / "run", plans=True)
    return open_run(path / "run")


@pytest.mark.parametrize("by", [None, "layer", "role", "request"])
def test_a_row_is_a_mean_over_the_rows_of_its_group(run, by):
    found = summary(run, by)
    heads, ledger = run.heads.collect(), run.ledger.collect()
    roles = {(r["request"], r["step"]): r["role"] for r in heads.iter_rows(named=True)}
    moved, mass = defaultdict(list), defaultdict(list)
    for r in ledger.iter_rows(named=True):
        key = r["policy"], roles[r["request"], r["step"]] if by == "role" else r[by] if by else None
        moved[key].append(r["read_bytes"] + r["index_bytes"] + r["meta_bytes"] + r["score_bytes"])
    for r in heads.iter_rows(named=True):
        mass[r["policy"], r[by] if by else None].append(r["mass_recall"])
    assert found.height == len(moved)
    for row in found.iter_rows(named=True):
        key = row["policy"], row[by] if by else None
        assert row["read_bytes"] == pytest.approx(np.mean(moved[key]))
        assert row["mass_recall"] == pytest.approx(np.mean(mass[key]))
        assert row["mass_recall_p5"] == pytest.approx(np.percentile(mass[key], 5))


def test_policies_stand_as_they_were_asked_for_and_only_offload_reads_from_away(run):
    found = summary(run)
    assert found["policy"].to_list() == [p.id for p in run.policies if p.rows]
    assert [x > 0 for x in found["away_bytes"]] == ["offload" in p for p in found["policy"]]


@pytest.mark.parametrize(("measure", "x"), [("mass_recall", 0.7), ("far_recall", 0.8), ("rel_l2", 0.5)])
def test_a_budget_that_is_reached_is_the_first_after_the_last_that_falls_short(run, measure, x):
    curves = run.tables["curves"].filter(pl.col("role") == -1).collect()
    weight = run.heads.group_by("policy", "request", "layer", "q_head").agg(far=pl.col("far_mass").sum()).collect()
    curves = curves.join(weight, on=["policy", "request", "layer", "q_head"])
    found = reached(run, measure, x)
    assert set(found["policy"]) == set(curves["policy"])
    for row in found.iter_rows(named=True):
        mine = curves.filter(policy=row["policy"], layer=row["layer"])
        if measure == "far_recall":
            value = mine.group_by("pages").agg((pl.col("far_recall") * pl.col("far")).sum() / pl.col("far").sum())
        else:
            value = mine.drop_nulls(f"{measure}_mean").group_by("pages").agg(pl.col(f"{measure}_mean").mean().alias(measure))
        good = {p: v <= x if measure == "rel_l2" else v >= x for p, v in value.iter_rows()}
        short = max((p for p, ok in good.items() if not ok), default=0)
        assert row["pages"] == min((p for p in good if p > short), default=None)


def test_a_budget_that_none_reaches_is_null(run):
    assert reached(run, "rel_l2", 1e-12).filter(pl.col("pages").is_not_null()).is_empty()


def test_arrivals_are_the_first_step_that_reads_the_span(run):
    rows = run.tables["evidence"].collect()
    found = arrivals(run)
    assert found.height == rows.select("policy", "layer", "span").unique().height
    for row in found.iter_rows(named=True):
        mine = rows.filter(policy=row["policy"], layer=row["layer"], span=row["span"])
        assert row["step"] == mine.filter(pl.col("read") > 0)["step"].min()
        assert row["recall"] == pytest.approx(mine["read"].sum() / mine["dense"].sum(), rel=1e-6)
        assert row["dense"] == pytest.approx(mine["dense"].mean(), rel=1e-6)
        assert 0 <= row["steps"] <= 1


@pytest.mark.parametrize("words", [[], ["--by", "layer"], ["--by", "role"], ["-t", "far=0.8"], ["--evidence"]])
def test_the_command(run, words, capsys):
    assert main(["show", str(run.path), *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert main(["show", str(run.path), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert len({len(line) for line in lines}) == 1


def test_what_is_not_there_is_one_line(tmp_path, capsys):
    synthesize(tmp_path / "t", layers=1, q_heads=2, kv_heads=1, prompt=40, steps=2, needles=0)
    replay(tmp_path / "t", ["h2o(hold=share(0.3))"], tmp_path / "run")
    for words, said in (
        (["-t", "far=0.9"], "no read policy with curves"),
        (["--evidence"], "replay a trace with evidence spans"),
    ):
        assert main(["show", str(tmp_path / "run"), *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err
