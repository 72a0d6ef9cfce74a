"""The charts of the explorer, each from a polars frame alone, as a notebook would draw them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from kvsim.cli import main
from kvsim.errors import WrongUse
from kvsim.metrics.difference import by_layer, difference
from kvsim.metrics.quality import FATES, fates, quality
from kvsim.metrics.run import open_run
from kvsim.metrics.traffic import traffic
from kvsim.report.charts.difference import tokens_by_layer
from kvsim.report.charts.pareto import SAID, held_against_read, with_neighbours
from kvsim.report.charts.waterfall import FALLS, waterfall
from kvsim.report.theme import labelled, styles
from tests.report.runs import H2O, KIVI, QUEST

COLUMNS = dict(zip(FATES, ("exact", "coded", "host", "unread", "evicted", "sink"), strict=True))


@pytest.fixture(scope="module")
def run(runs):
    return open_run(runs["plain"])


def test_the_parts_of_a_waterfall_are_the_fates(run):
    parts = fates(run.heads.filter(policy=KIVI), "layer", "q_head").rename(COLUMNS)
    assert set(FALLS) == set(COLUMNS.values())
    assert parts.select(pl.sum_horizontal(*FALLS)).to_series().to_list() == pytest.approx([1] * parts.height, abs=1e-6)
    spec = waterfall(parts).to_dict()
    names = next(t["calculate"] for x in spec["layer"] for t in x["transform"] if t.get("as") == "part")
    assert "read, coded" in names
    assert "gone for good" not in names  # kivi evicts nothing


def test_a_waterfall_ends_where_nothing_is_left():
    """Drawn: each bar begins where the one before ends, and the last stands on 0."""
    frame = pl.DataFrame({"evicted": [0.25, 0.35], "unread": [0.2, 0.2], "exact": [0.55, 0.45]})
    marks = bars(waterfall(frame))
    assert [round(m["height"] / marks[0]["height"], 3) for m in marks] == [1.0, 0.3, 0.2, 0.5]
    tops = [m["y"] for m in marks]
    bottoms = [m["y"] + m["height"] for m in marks]
    assert tops[1] == pytest.approx(tops[0])
    assert tops[2:] == pytest.approx(bottoms[1:3])
    assert bottoms[3] == pytest.approx(bottoms[0])


def bars(chart):
    """The rectangles of the first layer, left to right."""
    import vl_convert

    scene = vl_convert.vegalite_to_scenegraph(chart.to_dict(), vl_version="6.4")["scenegraph"]
    found = [m for m in marks(scene) if m.get("marktype") == "rect" and m.get("role") == "mark"]
    return sorted(found[0]["items"], key=lambda item: item["x"])


def marks(node):
    yield node
    for item in node.get("items") or []:
        yield from marks(item)


def test_bars_by_layer_hold_what_diff_prints(run):
    found = by_layer(difference(run, QUEST, H2O))
    data = next(iter(tokens_by_layer(found).to_dict()["datasets"].values()))
    assert [row["both"] for row in data] == pytest.approx(found["both"].to_list(), rel=1e-4)


def test_the_front_goes_through_what_no_other_beats(run):
    moved = traffic(run.ledger, run.layers).select("policy", "resident_share", "read_share")
    look = styles(p.id for p in run.policies)
    points = labelled(quality(run.heads).join(moved, on="policy"), look)
    spec = held_against_read(points, look).to_dict()
    assert {p["name"] for p in spec["params"]} >= {"rel_l2_goal", "evidence_recall_goal"}
    line = spec["layer"][0]
    assert next(t for t in line["transform"] if "window" in t)["sort"][0]["field"] == "resident_share"


def test_marks_that_lie_on_one_another_are_all_seen():
    """The one on top is filled; those below are hollow and larger, each more than the one above, and every tooltip names them all."""
    told = pl.DataFrame({"policy": ["tova", "snapkv", "h2o", "quest"], "resident_share": [0.2, 0.2, 0.2, 1.0]}).with_columns(
        read_share=pl.lit(0.25), **{n: pl.lit(0.5) for n in SAID[2:]}
    )
    found = with_neighbours(told)
    assert found["above"].to_list() == [2, 1, 0, 0]
    assert found["also"].to_list() == ["h2o, snapkv", "h2o, tova", "snapkv, tova", "no other"]
    _, rings, dots = held_against_read(told, styles([f"{p}(x=1)" for p in told["policy"]])).to_dict()["layer"]
    assert (rings["mark"]["filled"], dots["mark"]["filled"]) == (False, True)
    assert {t["filter"] for layer in (rings, dots) for t in layer["transform"] if "filter" in t} == {
        "datum.above > 0",
        "datum.above === 0",
    }


def test_the_notebook_of_the_docs_draws(runs, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    block = text.split("```python")[1].split("```")[0]
    monkeypatch.chdir(runs["plain"].parent)
    names: dict[str, object] = {}
    exec(block.replace('"RUN"', repr(runs["plain"].name)), names)
    spec = names["chart"].to_dict()
    assert spec["config"]["axisY"]["titleAngle"] == 0
    assert max(map(len, spec["datasets"].values())) == 6 * 8


def test_a_million_rows_are_refused_with_what_to_do():
    frame = pl.DataFrame({"layer": range(1_000_000)}).with_columns(both=1.0, only_first=1.0, only_second=1.0)
    with pytest.raises(WrongUse, match=r"1,000,000 rows: .*aggregate first.*--layers"):
        tokens_by_layer(frame.with_columns(evidence_first=0.0, evidence_second=0.0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "99"], "no rows of layer 99; --layers takes some of 0, 3"),
        (["--policies", "quest 9"], "no policy 'quest 9' in this run; it has quest 8; h2o 12;"),
        (["--policies", "h2o(hold=tokens(7))"], "in this run; it has quest 8"),
    ],
)
def test_a_selection_that_is_empty_exits_2(runs, tmp_path, capsys, options, said):
    assert main(["report", str(runs["plain"]), "-o", str(tmp_path / "x.html"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_a_part_of_a_run_makes_a_page_of_that_part(runs, tmp_path):
    out = tmp_path / "x.html"
    assert main(["report", str(runs["plain"]), "-o", str(out), "--layers", "3", "--policies", "h2o 12", "full"]) == 0
    text = out.read_text()
    assert "Layers replayed</dt><dd>3 (1 of 4)" in text
    assert "kivi" not in text.split("<script")[0]
