"""Every chart of every kind of run: valid, described, small, and never recall without output error."""

from __future__ import annotations

import json
import math

import pytest

from kvsim.metrics.run import open_run
from kvsim.report import sections as composing
from kvsim.report import theme
from kvsim.report.html import Figure, specification
from kvsim.report.sections import sections
from kvsim.report.theme import ROW_CAP
from tests.report.conftest import CASES
from tests.report.runs import FULL, H2O, write_run


def specifications(parts):
    """{figure: specification}; altair checks each against the Vega-Lite schema."""
    return {b.name: specification(b.chart) for s in parts for b in s.blocks if isinstance(b, Figure)}


@pytest.fixture(scope="module")
def drawn(composed):
    return {name: specifications(parts) for name, parts in composed.items()}


def rows(spec):
    return sum(len(data) for data in spec["datasets"].values())


def nodes(spec, key):
    """Every value of `key` anywhere in a specification, its data left out."""
    if isinstance(spec, dict):
        for name, value in spec.items():
            if name == key:
                yield value
            if name != "datasets":
                yield from nodes(value, key)
    elif isinstance(spec, list):
        for value in spec:
            yield from nodes(value, key)


def units(spec):
    """The unit views and layers at the leaves of a concatenation: what has a size of its own."""
    for key in ("hconcat", "vconcat", "concat"):
        if key in spec:
            for child in spec[key]:
                yield from units(child)
            return
    yield spec


@pytest.mark.parametrize("case", CASES)
def test_charts_are_described_sized_and_unconfigured(drawn, case):
    assert {"quality-tokens", "quality-bytes", "fate", "map", "raster"} <= drawn[case].keys()
    assert ("steps" in drawn[case]) == (case != "bare")  # no evidence, no such chart
    for spec in drawn[case].values():
        assert len(spec["description"]) > 30
        assert "config" not in spec
        assert all(isinstance(u["width"], (int, float)) and isinstance(u["height"], (int, float)) for u in units(spec))


@pytest.mark.parametrize("case", CASES)
def test_charts_are_small_and_hold_no_nan(drawn, case):
    for spec in drawn[case].values():
        assert rows(spec) <= ROW_CAP
        values = [v for data in spec["datasets"].values() for row in data for v in row.values()]
        assert all(v is None or isinstance(v, (str, bool, int)) or math.isfinite(v) for v in values)
        assert not any(isinstance(url, str) for url in nodes(spec, "url"))


@pytest.mark.parametrize("case", CASES)
def test_recall_never_stands_alone(drawn, case):
    for spec in drawn[case].values():
        fields = {f for f in nodes(spec, "field") if isinstance(f, str)}
        if fields & {"mass_recall", "far_recall", "evidence_recall", "mass"}:
            assert "error" in fields


@pytest.mark.parametrize("case", CASES)
def test_quantities_on_axes_have_units(drawn, case):
    said = {
        t
        for spec in drawn[case].values()
        for axis in nodes(spec, "x")
        if isinstance(axis, dict)
        for t in [axis.get("title")]
        if t
    }
    assert any("tokens" in t for t in said)
    assert any("bytes" in t for t in said)


def test_policies_are_ordered_and_coloured_alike_in_every_chart(drawn):
    colours = [
        c for spec in drawn["plain"].values() for c in nodes(spec, "color") if isinstance(c, dict) and c.get("field") == "policy"
    ]
    assert len(colours) > 3
    assert all(c["scale"] == colours[0]["scale"] for c in colours)
    assert colours[0]["scale"]["domain"] == ["quest 8", "h2o 12", "kivi", "full", "oracle 8", "random_read 8"]  # asked first


def captions(parts):
    return {b.name: b.caption for s in parts for b in s.blocks if isinstance(b, Figure)}


@pytest.fixture
def cap(monkeypatch):
    """Lowers the row cap, so that a small run is too large to draw."""

    def lower(rows):
        monkeypatch.setattr(theme, "ROW_CAP", rows)
        monkeypatch.setattr(composing, "ROW_CAP", rows)

    return lower


def test_a_run_too_large_to_draw_is_aggregated_and_says_so(runs, cap):
    cap(72)
    parts = sections(open_run(runs["plain"]))
    assert all(0 < rows(spec) <= 72 for spec in specifications(parts).values())
    cap(40)
    said = captions(sections(open_run(runs["plain"])))
    assert "it has 5 of 6 policies; without random_read 8" in said["map"]
    assert "Each point is 2 steps together" in said["steps"]


def test_too_many_heads_are_taken_together_and_say_so(tmp_path, cap):
    path = write_run(tmp_path / "wide", policies=(FULL,))
    cap(7)
    parts = sections(open_run(path))
    assert "Query heads are taken 2 by 2" in captions(parts)["map"]
    assert rows(specifications(parts)["map"]) == 4


def test_too_many_steps_are_sampled_and_say_so(tmp_path):
    path = write_run(tmp_path / "long", policies=(H2O,), layers=(0,), q_heads=1, kv_heads=1, steps=200)
    assert "decode steps down (50 of 200)" in captions(sections(open_run(path)))["raster"]


def test_the_same_run_gives_the_same_charts(runs, drawn):
    assert json.dumps(specifications(sections(open_run(runs["plain"])))) == json.dumps(drawn["plain"])
