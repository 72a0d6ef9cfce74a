"""Every chart of every kind of run: valid, described, small, and never recall without output error."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import polars as pl
import pytest

from kvsim.metrics.run import open_run
from kvsim.metrics.run import part as part_of
from kvsim.report import theme
from kvsim.report.contents import sections
from kvsim.report.html import Figure
from kvsim.report.sections import explore, heads, index, keeping, loss, one_head, steps, traffic, trust
from kvsim.report.theme import ROW_CAP
from kvsim.report.view import View
from tests.report.conftest import CASES
from tests.report.runs import FULL, H2O, KIVI, QUEST, write_run

ALWAYS = {
    "quality-tokens",
    "quality-bytes",
    "memory",
    "pareto",
    "fate",
    "often",
    "found",
    "layers",
    "explore",
    "miss",
    "drift",
    "bytes",
    "dearer",
}
ALWAYS |= {"resident", "raster"}
RECALLS = {"mass_recall", "far_recall", "evidence_recall", "mass", "top1_recall", "page_recall", "evidence_read"}


def figures(parts):
    return {b.name: b for s in parts for b in s.blocks if isinstance(b, Figure)}


def specifications(parts):
    """{figure: specification}; altair checks each against the Vega-Lite schema."""
    return {name: f.spec for name, f in figures(parts).items()}


@pytest.fixture(scope="module")
def drawn(composed):
    return {name: specifications(parts) for name, parts in composed.items()}


def rows(spec):
    """The rows of its largest dataset."""
    return max(len(data) for data in spec["datasets"].values())


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
    for spec in drawn[case].values():
        assert len(spec["description"]) > 30
        assert "config" not in spec
        assert all(isinstance(u["width"], (int, float)) and isinstance(u["height"], (int, float)) for u in units(spec))


def test_a_run_has_every_chart_that_its_tables_can_draw(drawn):
    assert all(drawn[case].keys() >= ALWAYS for case in CASES if case != "nothing said")
    assert ALWAYS - drawn["nothing said"].keys() == {"memory", "pareto"}  # nobody said how many bytes a row has
    assert len(drawn["plain"]) >= 29
    assert drawn["plain"].keys() - drawn["bare"].keys() == {
        *("contexts", "below", "asked", "shared", "blame", "coding", "bits", "evidence", "steps", "held", "changes", "scattered"),
        *("slack", "slack-age", "promised", "depth", "profile", "alike"),
        *("tier-mass", "lags", "returns", "without", "compaction"),
    } - {"alike", "held", "profile"}
    assert drawn["roles, no plans"].keys() - drawn["plain"].keys() == {"roles"}
    assert "depth" not in drawn["roles, no plans"]  # no explain table
    assert [case for case in CASES if "age" in drawn[case]] == ["ranked now and then"]


@pytest.mark.parametrize("case", CASES)
def test_every_title_asks_and_every_figure_says_how_to_read_it(composed, case):
    for f in figures(composed[case]).values():
        assert f.title.endswith("?")
        assert len(f.how) > 60
        assert f.how.endswith(".")
        assert f.data.height


@pytest.mark.parametrize("case", CASES)
def test_charts_are_small_and_hold_no_nan(drawn, case):
    for spec in drawn[case].values():
        assert rows(spec) <= ROW_CAP
        values = [v for data in spec["datasets"].values() for row in data for v in row.values()]
        assert all(v is None or isinstance(v, (str, bool, int)) or math.isfinite(v) for v in values)
        assert not any(isinstance(url, str) for url in nodes(spec, "url"))


def shown(spec):
    """The columns on the axes and the colours of a chart."""
    found = set()
    for channel in ("x", "y", "y2", "x2"):
        found |= {c["field"] for c in nodes(spec, channel) if isinstance(c, dict) and "field" in c}
    return found


@pytest.mark.parametrize("case", CASES)
def test_recall_never_stands_alone(drawn, case):
    for spec in drawn[case].values():
        assert not shown(spec) & RECALLS or {"rel_l2", "error"} & shown(spec)


@pytest.mark.parametrize("case", CASES)
def test_quantities_on_axes_have_units(drawn, case):
    said = {
        t for spec in drawn[case].values() for axis in nodes(spec, "x") if isinstance(axis, dict) and (t := axis.get("title"))
    }
    assert any("tokens" in t for t in said)
    assert any("bytes" in t for t in said)


def test_policies_are_ordered_and_coloured_alike_in_every_chart(drawn):
    colours = [
        c["scale"]
        for spec in drawn["plain"].values()
        for c in nodes(spec, "color")
        if isinstance(c, dict) and c.get("field") == "policy"
    ]
    assert len(colours) > 30
    order = ["quest 8", "h2o 12", "kivi", "full", "oracle 8", "random_read 8"]  # asked first
    known = dict(zip(order, max(colours, key=lambda c: len(c["domain"]))["range"], strict=True))
    for scale in colours:
        assert scale["domain"] == [p for p in order if p in scale["domain"]]
        assert scale["range"] == [known[p] for p in scale["domain"]]


def test_every_colour_has_a_dark_one(drawn):
    for case in CASES:
        for spec in drawn[case].values():
            text = json.dumps({k: v for k, v in spec.items() if k != "datasets"})
            used = {part[:7] for part in text.split('"') if part.startswith("#") and len(part) == 7}
            assert used <= set(theme.SWAP)


# ---------------------------------------------------------------------------------------------- what is said
def test_the_docs_have_an_entry_for_every_figure_and_for_no_other(composed):
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text().split("## Figures")[1]
    entries = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    source = "".join(p.read_text() for p in (Path(sections.__code__.co_filename).parent / "sections").glob("*.py"))
    named = set(re.findall(r'view\.figure\(\s*"([a-z-]+)"', source)) | {"quality-tokens", "quality-bytes"}
    assert entries == named
    assert {n for parts in composed.values() for n in figures(parts)} <= entries
    for part in composed["plain"]:
        assert f"### {part.title}" in text


def captions(section):
    return {b.name: b.caption for b in section.blocks if isinstance(b, Figure)}


def test_what_is_not_drawn_is_named(composed):
    said = {name: f.caption for name, f in figures(composed["plain"]).items()}
    assert "Not in this run: recency" in said["quality-tokens"]
    assert "Not drawn, because it codes nothing: quest 8, h2o 12, full, oracle 8, random_read 8." in said["coding"]
    assert "Not drawn, because it holds everything in full precision at every step: quest 8, full" in said["held"]
    assert "the cut after the prompt (h2o 12: 12 evicted)" in said["changes"]
    assert "no budget in tokens, pages or a share was asked: kivi, full." in said["asked"]
    assert "Only tokens are drawn, because it reads no pages" in said["found"]


def test_what_keeping_costs_says_what_explain_would_add(composed, drawn):
    [said] = [p for p in composed["roles, no plans"] if p.title == "What keeping and storing costs"]
    assert "The run was written without --explain" in said.text[1]
    assert len(said.blocks) == 3
    [whole] = [p for p in composed["plain"] if p.title == said.title]
    assert len(whole.text) == 1
    assert "Not drawn, because it evicts and codes nothing: quest 8, full, oracle 8, random_read 8." in captions(whole)["lags"]
    assert "h2o 12: 4 sinks, 64 recent" in captions(whole)["tier-mass"]
    parts = [set(row["part"] for row in data) for data in drawn["plain"]["tier-mass"]["datasets"].values() if "part" in data[0]]
    assert parts == [{"sinks", "recent window", "history, full precision", "coded", "gone for good"}] * 2


def test_the_noise_floor_lies_behind_every_error_or_is_said_to_be_unknown(composed, drawn):
    def floors(spec):
        return [n for n in nodes(spec, "text") if isinstance(n, dict) and n.get("value") == "rounding (p95)"]

    def errors(spec):
        titles = [*nodes(spec, "x"), *nodes(spec, "y")]
        return {axis["title"] for axis in titles if isinstance(axis, dict) and "output error" in str(axis.get("title"))}

    for name, spec in drawn["roles, no plans"].items():
        assert bool(floors(spec)) == bool(errors(spec)) or name == "layers"  # which has each layer's own
        assert not floors(drawn["plain"].get(name, {}))
    own = [data for data in drawn["roles, no plans"]["layers"]["datasets"].values() if "p95" in data[0]]
    assert own == [[{"layer": n, "p95": 0.02, "low": theme.LEAST_ERROR} for n in (0, 3)]]
    assert "Noise floor: the outputs that the capture recorded differ" in composed["roles, no plans"][0].text[2]
    assert "0.01 (median) and 0.02 (p95, relative L2)" in composed["roles, no plans"][0].text[2]
    assert "so the model's own rounding is not known and no noise floor is drawn" in composed["plain"][0].text[2]


def test_roles_are_named_above_the_steps(drawn):
    def named(spec):
        return [[row["role"] for row in data] for data in spec["datasets"].values() if {"left", "right"} <= data[0].keys()]

    assert named(drawn["roles, no plans"]["steps"]) == [["question", "forced answer", "free answer"]]
    assert named(drawn["plain"]["steps"]) == []  # a single role


def test_a_floor_too_small_to_see_is_said(tmp_path):
    run = open_run(write_run(tmp_path / "run", policies=(H2O,), layers=(0,), floor=theme.LEAST_ERROR / 2))
    part = trust.section(View.of(run))
    assert "That is below every axis of output error." in part.text[2]


# ---------------------------------------------------------------------------------------------- what does not fit
@pytest.fixture
def cap(monkeypatch):
    """Lowers the row cap, so that a small run is too large to draw."""
    return lambda rows: monkeypatch.setattr(theme, "ROW_CAP", rows)


def test_a_run_too_large_to_draw_is_aggregated_and_says_so(runs, cap):
    view = View.of(open_run(runs["plain"]))
    cap(190)
    for module in (explore, heads, steps, one_head, loss, keeping, traffic, index):
        assert all(0 < rows(spec) <= 190 for spec in specifications([module.section(view)]).values())
    cap(54)
    assert "Each point is 2 steps together" in captions(steps.section(view))["steps"]
    cap(40)
    assert "it has 5 of 6 policies; without random_read 8" in captions(explore.section(view))["explore"]


def test_too_many_heads_are_taken_together_and_say_so(tmp_path, cap):
    path = write_run(tmp_path / "wide", policies=(FULL,))
    cap(7)
    part = explore.section(View.of(open_run(path)))
    assert "Query heads are taken 2 by 2" in captions(part)["explore"]
    assert rows(specifications([part])["explore"]) <= 7


def test_positions_of_more_heads_than_fit_are_left_out_and_say_so(runs, monkeypatch):
    """8 heads of 5 policies whose pages are known: the heads with the largest error stay, and the others say which option shows them."""
    monkeypatch.setattr(explore, "LETTERS", 6 * 3 * 8)
    monkeypatch.setattr(explore, "GRIDS", ((96, 48), (2, 3)))
    figure = explore.section(View.of(open_run(runs["plain"]))).blocks[0]
    assert "Positions are here for 8 of 8 heads" not in figure.caption
    monkeypatch.setattr(explore, "LETTERS", 6 * 3 * 3)
    figure = explore.section(View.of(open_run(runs["plain"]))).blocks[0]
    assert "Positions are here for 3 of 8 heads" in figure.caption
    data = figure.spec["datasets"].values()
    assert sorted(len(d) for d in data if "cells" in d[0]) == [3 * 5]
    assert sum(row["said"].endswith("kvsim report --layers shows its layer") for d in data for row in d if "said" in row) == 5


def test_a_run_without_plans_says_whose_pages_are_not_known(runs):
    figure = explore.section(View.of(open_run(runs["roles, no plans"]))).blocks[0]
    told = [row["policy"] for d in figure.spec["datasets"].values() for row in d if "said" in row]
    assert sorted(told) == ["kivi", "oracle 8", "quest 8", "random_read 8"]  # the others read all that they hold
    alone = explore.section(View.of(part_of(open_run(runs["roles, no plans"]), policies=[QUEST]))).blocks[0]
    assert "kvsim replay --plans does" in alone.caption
    assert not any("cells" in d[0] for d in alone.spec["datasets"].values())


def test_too_many_steps_are_sampled_and_say_so(tmp_path):
    path = write_run(tmp_path / "long", policies=(H2O,), layers=(0,), q_heads=1, kv_heads=1, steps=200)
    assert "decode steps down (50 of 200)" in one_head.section(View.of(open_run(path))).blocks[0].how


def test_too_many_layers_are_cut_and_say_so(tmp_path):
    path = write_run(tmp_path / "deep", policies=(QUEST, KIVI), layers=range(50), q_heads=1, kv_heads=1, prompt=8, steps=2)
    view = View.of(open_run(path))
    data, said = view.few_layers(pl.DataFrame({"policy": ["p"] * 50, "layer": range(50)}))
    assert (data.height, said) == (25, [f"Layers {', '.join(map(str, range(0, 50, 2)))}: 25 of 50."])
    assert "25 of 50." in figures([index.section(view)])["promised"].caption


def test_more_policies_than_a_page_can_tell_apart_are_cut_and_said(tmp_path):
    quests = [QUEST.replace("tokens(8)", f"tokens({n})") for n in range(4, 40)]
    run = open_run(write_run(tmp_path / "sweep", policies=[FULL, *quests], layers=(0,), q_heads=1, kv_heads=1, prompt=8, steps=2))
    view = View.of(run)
    assert [s.label for s in view.look] == [*(f"quest {n}" for n in range(4, 34)), "full"]
    assert "The page shows 31 of 37 policies, the first of them." in trust.section(view).text
    assert all(len(f.spec["description"]) for f in figures([heads.section(view)]).values())


def test_the_same_run_gives_the_same_charts(runs, drawn):
    assert json.dumps(specifications(sections(open_run(runs["bare"])))) == json.dumps(drawn["bare"])
