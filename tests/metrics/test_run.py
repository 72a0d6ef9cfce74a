"""A run directory is read as it was written, or refused by name."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest

from kvsim import tables
from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.run import open_run, part
from tests.report.runs import H2O, QUEST, edit, write_run


@pytest.fixture
def path(tmp_path):
    return write_run(tmp_path / "run", policies=(QUEST, H2O), steps=2, layers=(1,))


def test_what_was_written_comes_back(path):
    run = open_run(path)
    assert [(p.id, p.role, p.rows) for p in run.policies] == [(QUEST, "asked", True), (H2O, "asked", True)]
    assert run.heads.collect()["policy"].to_list() == [QUEST] * 8 + [H2O] * 8
    assert run.layers.collect().rows() == [(0, 64), (1, 64)]
    for name, schema in tables.RUN_TABLES.items():
        assert run.tables[name].collect_schema().names() == [f.name for f in schema]


def test_a_table_that_was_not_written_is_empty(tmp_path):
    run = open_run(write_run(tmp_path / "run", policies=(H2O,), without=("tiers", "events")))
    assert run.tables["tiers"].collect().is_empty()
    assert run.tables["curves"].collect().is_empty()


def test_nan_and_infinity_are_null(path):
    heads = pl.read_parquet(path / "heads.parquet")
    odd = pl.Series("rel_l2", [np.nan, np.inf, -np.inf] + [0.5] * (heads.height - 3), pl.Float32)
    heads.with_columns(odd).write_parquet(path / "heads.parquet")
    assert open_run(path).heads.collect()["rel_l2"].to_list()[:4] == [None, None, None, 0.5]


def test_unknown_columns_are_ignored_and_absent_optional_ones_are_null(path):
    heads = pl.read_parquet(path / "heads.parquet")
    heads.drop("evidence_dense").with_columns(novel=pl.lit(1)).write_parquet(path / "heads.parquet")
    read = open_run(path).heads.collect()
    assert "novel" not in read.columns
    assert read["evidence_dense"].is_null().all()


def test_a_policy_without_rows_and_rows_without_a_policy_are_both_told(path):
    edit(path, policies=[{"id": "planned"}, {"id": QUEST, "role": "asked"}])
    assert [(p.id, p.role, p.rows) for p in open_run(path).policies] == [
        ("planned", "not recorded", False),
        (QUEST, "asked", True),
        (H2O, "not recorded", True),
    ]


def test_what_is_no_finished_run_is_refused_by_name(path, tmp_path):
    with pytest.raises(BadTrace, match=r"nowhere: no run\.json, so not a finished run"):
        open_run(tmp_path / "nowhere")
    edit(path, schema="kvsim.run/2")
    with pytest.raises(BadTrace, match=r"schema 'kvsim\.run/2', expected 'kvsim\.run/1'"):
        open_run(path)
    (path / "run.json").write_text("{")
    with pytest.raises(BadTrace, match="not JSON"):
        open_run(path)


def test_a_lost_table_or_column_or_all_rows_are_refused_by_name(path):
    heads = pl.read_parquet(path / "heads.parquet")
    heads.drop("rel_l2", "cosine").write_parquet(path / "heads.parquet")
    with pytest.raises(BadTrace, match=r"heads\.parquet: no column rel_l2, cosine"):
        open_run(path)
    heads.clear().write_parquet(path / "heads.parquet")
    with pytest.raises(BadTrace, match=r"heads\.parquet: no rows"):
        open_run(path)
    (path / "ledger.parquet").unlink()
    with pytest.raises(BadTrace, match=r"ledger\.parquet: missing"):
        open_run(path)


# ---------------------------------------------------------------------------------------------- a part of a run
def test_a_part_has_the_rows_asked_for_and_no_others(tmp_path):
    run = open_run(write_run(tmp_path / "run", contexts=2, floor=0.02))
    mine = part(run, policies=[QUEST], layers=[3], requests=[1])
    assert [p.id for p in mine.policies] == [QUEST]
    for name in ("ledger", "heads", "curves", "plans", "evidence"):
        whole, found = run.tables[name].collect(), mine.tables[name].collect()
        assert found.equals(whole.filter(policy=QUEST, layer=3, request=1))
        assert found.height
    assert [(r["request"], r["layer"]) for r in mine.about["noise_floor"]] == [(1, 3)]
    assert [r["request"] for r in mine.requests] == [1]
    assert part(run) is run


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layers": [99]}, "no rows of layer 99; --layers takes some of 0, 3"),
        ({"layers": [0, 7, 8]}, "no rows of layer 7, 8; --layers"),
        ({"requests": [5]}, "no rows of request 5; --requests takes some of 0"),
        ({"policies": ["none"]}, "no rows of policy none; --policies"),
        ({"layers": []}, "--layers takes some of 0, 3"),
    ],
)
def test_a_part_that_is_empty_is_refused(tmp_path, asked, said):
    with pytest.raises(WrongUse, match=re.escape(said)):
        part(open_run(write_run(tmp_path / "run")), **asked)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("policies", True, "policies is True, expected a list"),
        ("policies", ["full()"], "policies[0] is 'full()', expected an object"),
        ("policies", [{"id": ["full()"]}], "policies[0].id is ['full()'], expected a text"),
        ("policies", [{"form": "full()"}], "policies[0].id is missing"),
        ("layers", [{"layer": 0, "row_bytes": "64"}], "layers[0].row_bytes is '64', expected a whole number"),
        ("layers", [{"layer": 2**40}], "layers[0].layer is 1099511627776, expected a whole number"),
        ("requests", [{"request": 0, "spans": [{"start": 1}]}], "requests[0].spans[0].stop is missing"),
        ("trace", "t", "trace is 't', expected an object"),
        ("trace", {"source": {"model": 7}}, "trace.source.model is 7, expected a text"),
        ("noise_floor", [{"median": True}], "noise_floor[0].median is True, expected a number"),
        ("kv_dtype", "x" * 10**6, None),
        ("created", {"x" * 10**6: 0}, "created is {'xxx"),
        ("tables", {"x" * 300: {}}, "missing, though run.json tells of it"),
    ],
)
def test_what_run_json_says_is_of_its_type_or_refused(path, key, value, said):
    edit(path, **{key: value})
    if said is None:
        assert open_run(path).about[key] == value
        return
    with pytest.raises(BadTrace) as e:
        open_run(path)
    assert said in str(e.value)
    assert len(str(e.value)) < 1200


def test_what_it_does_not_say_is_unknown(path):
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({"schema": about["schema"], "policies": None, "something": "new"}))
    assert open_run(path).requests == []
