"""The chart of foretold risks, drawn by what draws the page."""

from __future__ import annotations

import polars as pl

from kvsim.report.charts.reliability import foretold_against_observed
from tools.dynamic import chart

FOUND = pl.DataFrame({"bin": [0, 9], "foretold": [0.03, 0.97], "observed": [0.06, 0.9], "total": [1000, 20]})


def test_every_bin_is_a_point_beside_the_diagonal():
    spec = foretold_against_observed(FOUND).to_dict()
    given = [*spec.get("datasets", {}).values(), *(x["data"]["values"] for x in spec["layer"] if "values" in x.get("data", {}))]
    bins, same = sorted(given, key=lambda rows: "total" not in rows[0])[:2]
    told = sorted(bins, key=lambda row: row["foretold"])
    assert [{k: row[k] for k in ("foretold", "observed", "total")} for row in told] == FOUND.drop("bin").to_dicts()
    assert same == [{"foretold": 0, "observed": 0}, {"foretold": 1, "observed": 1}]
    for axis in ("x", "y"):
        assert {tuple(layer["encoding"][axis]["scale"]["domain"]) for layer in spec["layer"]} == {(0, 1)}


def test_the_figure_can_be_drawn(tmp_path):
    from kvsim.report.export import write_png

    write_png([chart(FOUND)], tmp_path)
    assert (tmp_path / "reliability.png").read_bytes()[:4] == b"\x89PNG"
