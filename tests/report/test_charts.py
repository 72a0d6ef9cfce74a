"""Every chart of every kind of run: valid, described, small, and never recall without output error."""

from __future__ import annotations

import json
import math

import pytest

from kvsim.report.html import Figure, specification
from kvsim.report.sections import sections
from kvsim.report.theme import ROW_CAP
from tests.report.conftest import CASES
from tests.report.runs import write_run


@pytest.fixture(scope="module")
def drawn(opened):
    """{case: {figure: specification}}; altair checks each against the Vega-Lite schema."""
    return {
        name: {b.name: specification(b.chart) for s in sections(run) for b in s.blocks if isinstance(b, Figure)}
        for name, run in opened.items()
    }


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
        assert sum(len(rows) for rows in spec["datasets"].values()) <= ROW_CAP
        values = [v for rows in spec["datasets"].values() for row in rows for v in row.values()]
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
    said = {t for spec in drawn[case].values() for axis in nodes(spec, "x") if isinstance(axis, dict) for t in [axis.get("title")] if t}
    assert any("tokens" in t for t in said)
    assert any("bytes" in t for t in said)


def test_policies_are_ordered_and_coloured_alike_in_every_chart(drawn):
    scales = [s for spec in drawn["plain"].values() for c in nodes(spec, "color") if isinstance(c, dict) and c.get("field") == "policy" for s in [c["scale"]]]
    assert len(scales) > 3
    assert all(s == scales[0] for s in scales)
    assert scales[0]["domain"] == ["quest 8", "h2o 12", "kivi", "full", "oracle 8", "random_read 8"]  # asked first


def test_a_run_too_large_to_draw_is_aggregated_and_says_so(tmp_path):
    from kvsim.metrics.run import open_run

    path = write_run(tmp_path / "large", layers=tuple(range(30)), q_heads=32, kv_heads=4, steps=4, without=("curves", "plans", "tiers"))
    found = {b.name: b for s in sections(open_run(path)) for b in s.blocks if isinstance(b, Figure)}
    assert all(sum(map(len, specification(f.chart)["datasets"].values())) <= ROW_CAP for f in found.values())
    assert "it has 5 of 6 policies; without random_read 8" in found["map"].caption


def test_too_many_steps_are_taken_together_and_say_so(tmp_path):
    from kvsim.metrics.run import open_run

    path = write_run(tmp_path / "long", layers=(0,), q_heads=1, kv_heads=1, steps=1_000, without=("curves", "plans"))
    found = {b.name: b for s in sections(open_run(path)) for b in s.blocks if isinstance(b, Figure)}
    assert "Each point is 3 steps together" in found["steps"].caption
    assert "of 1000" in found["raster"].caption
    assert all(sum(map(len, specification(f.chart)["datasets"].values())) <= ROW_CAP for f in found.values())


def test_the_same_run_gives_the_same_charts(opened, drawn):
    again = {b.name: specification(b.chart) for s in sections(opened["plain"]) for b in s.blocks if isinstance(b, Figure)}
    assert json.dumps(again) == json.dumps(drawn["plain"])
