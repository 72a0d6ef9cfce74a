"""A run directory is opened as frames, or refused by name."""

from __future__ import annotations

import json
import shutil

import polars as pl
import pytest

import kvsim
from kvsim.errors import BadTrace
from kvsim.tables import RUN_TABLES


def test_tables_are_frames_with_the_columns_of_the_schema(run):
    again = kvsim.Run.open(run.path)
    for name, schema in RUN_TABLES.items():
        frame = getattr(again, name)
        assert isinstance(frame, pl.DataFrame)
        assert frame.columns == schema.names
        assert again.scan(name).collect().equals(frame)
    assert again.path == run.path
    assert again.info["schema"] == "kvsim.run/1"
    assert "6 policies on trace small" in repr(again)
    assert {*RUN_TABLES} <= {*dir(again)}
    with pytest.raises(AttributeError, match="a run has no 'tabel'; its tables are ledger, heads"):
        again.tabel  # noqa: B018


def test_a_table_without_rows_is_an_empty_frame(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "r")
    (tmp_path / "r" / "plans.parquet").unlink()
    plans = kvsim.Run(tmp_path / "r").plans
    assert plans.is_empty()
    assert plans.columns == RUN_TABLES["plans"].names


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "not a run; kvsim replay TRACE"),
        ({"begun.json": "{}"}, "begun and not finished: repeat its replay"),
        ({"run.json": "{"}, "run.json: not JSON"),
        ({"run.json": "[]"}, "schema is None"),
        ({"run.json": json.dumps({"schema": "kvsim.run/2"})}, "schema is 'kvsim.run/2', this kvsim reads 'kvsim.run/1'"),
    ],
)
def test_what_is_no_finished_run_is_refused(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(BadTrace) as refused:
        kvsim.Run.open(tmp_path)
    assert told in str(refused.value)
    assert str(tmp_path) in str(refused.value)
