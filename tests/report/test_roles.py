"""Numbers of different roles of the query's token are not averaged: figures of diagnostics, explain and bounds show one and say so."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.metrics.loss import blame, bounds, depths
from kvsim.metrics.run import open_run
from kvsim.report.html import Table
from kvsim.report.sections import heads, index, loss, traffic
from kvsim.report.view import View
from tests.report.runs import FULL, QUEST, write_run

SAYS = "Over steps of one role alone: forced answer."


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    return View.of(open_run(write_run(tmp_path_factory.mktemp("roles") / "run", layers=(0, 1), roles=(2, 1))))


@pytest.fixture(scope="module")
def blocks(view):
    """{name or caption of a table: figure or table} of the sections concerned."""
    parts = [s.section(view).blocks for s in (heads, index, loss, traffic)]
    return {b.caption if isinstance(b, Table) else b.name: b for part in parts for b in part}


def table(blocks, words):
    [found] = [b for name, b in blocks.items() if words in name]
    return found


def test_figures_show_the_last_role_and_say_so(blocks):
    for name in ("blame", "slack", "promised", "depth", "alike"):
        assert SAYS in blocks[name].caption
    assert all(SAYS not in blocks[name].caption for name in ("fate", "scattered"))  # of all steps, as their text says


def test_the_numbers_are_those_of_that_role(view, blocks):
    run = view.run
    want = {
        "blame": view.labelled(blame(view.diagnostics, 2)),
        "slack": view.labelled(bounds(run.heads).filter(role=2).select("policy", "layer", "slack_mean")),
        "depth": view.labelled(depths(run.tables["explain"], run.heads).filter(role=2).drop("role")),
    }
    for name, frame in want.items():
        assert blocks[name].data.select(frame.columns).equals(frame)
    close = view.diagnostics.filter(pl.col("policy") == QUEST, metric="jaccard_1")
    by_role = dict(close.group_by("role").agg(pl.col("value").mean()).rows())
    assert blocks["alike"].data.filter(policy=view.look[0].label, distance=1)["jaccard"].item() == pytest.approx(by_role[2])
    assert by_role[2] != pytest.approx(by_role[-1])
    mine = run.heads.filter(pl.col("role") == 2, pl.col("policy") == QUEST).collect()
    read = blocks["blame"].data.filter(pl.col("part") == "read", pl.col("policy") == view.look[0].label)["mass"].item()
    assert read == pytest.approx(mine["mass_recall"].cast(pl.Float64).mean())


def test_depth_and_evidence_stand_in_tables(view, blocks):
    deep = table(blocks, "How deep")
    assert [row[0] for row in deep.rows] == [s.label for s in view.look if "read=tokens" in s.policy]
    assert deep.rows[0][1:] == ["2.0", "2.0", "2.0", "0.0", "0.0", "0.0", "—", "0.0 %"]
    seen = table(blocks, "Through which layers")
    assert seen.rows[0][1:] == ["any span", "1.0", "1.0", "2", "0.0 %"]  # layer 0 reads none
    assert SAYS in deep.notes
    assert SAYS in seen.notes


def test_one_role_needs_no_sentence(tmp_path):
    view = View.of(open_run(write_run(tmp_path / "run", policies=(QUEST, FULL))))
    assert view.alone == []
    assert view.answer == 3
