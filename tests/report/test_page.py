"""The page is one file that runs nothing but its own two scripts, whatever the names in it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import polars as pl
import pytest

from kvsim.cli import main
from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.run import open_run
from kvsim.report import html
from kvsim.report import page as module
from kvsim.report.facts import other_forced, spans, which
from kvsim.report.page import report
from kvsim.report.sections import trust
from kvsim.report.theme import styles
from kvsim.report.view import View
from tests.report.conftest import CASES, HOSTILE
from tests.report.runs import H2O, QUEST, RANDOM, edit, write_run


class Reader(HTMLParser):
    """Tags with their attributes, the text outside scripts, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text, self._open = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1][1] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def pages(composed):
    return {name: html.render("Title", ["Lead."], parts) for name, parts in composed.items()}


def words(page):
    return " ".join(Reader(page).text.split())


def test_nothing_is_fetched(pages, hostile_page):
    for page in [*pages.values(), hostile_page.read_text()]:
        for tag, attributes in Reader(page).tags:
            links = [v for k, v in attributes.items() if k in ("src", "href", "action", "data", "poster", "srcset")]
            assert all(v.startswith("#") for v in links), tag
            assert tag not in ("link", "iframe", "img", "object", "embed", "form", "base")


def test_the_policy_admits_exactly_the_two_scripts(pages, hostile_page):
    for page in [*pages.values(), hostile_page.read_text()]:
        reader = Reader(page)
        rule = next(a["content"] for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
        run = [text for attributes, text in reader.scripts if attributes.get("type") != "application/json"]
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run]
        assert len(run) == 2
        assert re.findall(r"script-src ([^;]*);", rule) == [" ".join(hashes)]
        assert "default-src 'none'" in rule
        assert "unsafe-eval" not in rule
        assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)


def test_hostile_names_are_text(hostile_page):
    reader = Reader(hostile_page.read_text())
    assert {t for t, _ in reader.tags}.isdisjoint({"img", "b"})
    assert len([t for t, _ in reader.tags if t == "script"]) == 6
    assert HOSTILE in reader.text
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", hostile_page.read_text())[0]


def test_data_in_scripts_has_no_markup(hostile_page):
    for attributes, text in Reader(hostile_page.read_text()).scripts:
        if attributes.get("type") == "application/json":
            assert not set("<>&\u2028") & set(text)
            assert "NaN" not in text


def test_the_bundle_may_stand_inside_a_script(pages):
    bundle = html._bundle()
    assert len(bundle) > 500_000
    assert not any(mark in bundle.lower() for mark in ("</script", "<script", "<!--"))
    assert pages["plain"].count(bundle) == 1


def test_equal_data_is_kept_once(composed, pages):
    figures = [b for s in composed["plain"] for b in s.blocks if isinstance(b, html.Figure)]
    data = next(text for a, text in Reader(pages["plain"]).scripts if a.get("id") == "kvsim-data")
    used = [name for f in figures for name in f.spec["datasets"]]
    assert len(json.loads(data)) == len(set(used)) < len(used)


@pytest.mark.parametrize("case", CASES)
def test_what_a_reader_must_know_is_said(pages, case):
    text = words(pages[case])
    assert "Replay is open-loop: at every step the query comes from the run with full attention" in text
    for term in (
        "Model",
        "Weight format",
        "KV dtype billed",
        "Head dim",
        "Query heads per KV head",
        "Contexts",
        "Loop",
        "forced reads",
        "dense layers",
    ):
        assert term in text
    assert "mass recall" not in "".join(
        re.findall(r"<thead>.*?</thead>", pages[case].split("<figure>")[0], re.DOTALL)
    )  # no table ranks by it


def test_columns_of_words_are_told_apart():
    table = html.Table("c", ("name", "number", "why"), [("a", "1", "a sentence")], words=("why",))
    page = html.render("t", [], [html.Section("s", blocks=[table])])
    assert '<th scope="row">a</th><td>1</td><td class="words">a sentence</td>' in page
    assert '<th scope="col">number</th><th scope="col" class="words">why</th>' in page


def test_the_page_says_what_it_is(hostile_page):
    assert "kvsim replayed 9 KV-cache policies on attention captured from a model" in words(hostile_page.read_text())


def test_missing_facts_are_not_recorded(pages):
    assert words(pages["nothing said"]).count("not recorded") >= 12


def test_missing_baselines_and_tables_are_named(pages):
    assert "Not in this run: full, oracle, random_read, recency" in words(pages["bare"])
    assert "Not in this run: recency;" in words(pages["plain"])
    assert "This run has no curves" in words(pages["bare"])
    assert "No prompt of this run marks evidence" in words(pages["bare"])
    assert "pages read not recorded (replay with --plans)" in pages["roles, no plans"]


def test_few_contexts_get_no_interval_and_eight_do(pages):
    assert "2 contexts: no interval" in words(pages["plain"])
    assert "95 % bootstrap interval over 8 contexts" in words(pages["roles, no plans"])


def test_roles_are_split_in_tables_and_charts(pages):
    text = words(pages["roles, no plans"])
    assert "evidence recall, question" in text
    assert "output error, free answer" in text
    assert '"options":["all decode steps","question","forced answer","free answer"]' in pages["roles, no plans"]
    assert "evidence recall, free answer" not in words(pages["plain"])


def test_baselines_forced_to_read_other_tokens_are_no_pair(tmp_path):
    free = "full() >> random_read(read=tokens(8), page=4, sinks=0, recent=0, tail='free', refresh=1, seed=0)"
    path, look = write_run(tmp_path / "run", policies=(QUEST, free, RANDOM)), styles((QUEST, free, RANDOM))
    asked = edit(path, policies=[{"id": p, "role": "asked"} for p in (QUEST, free, RANDOM)])
    assert other_forced(open_run(asked), look) == []  # nobody said that one stands beside another

    def kinds(beside):
        return [{"id": QUEST, "role": "asked"}, *({"id": p, "role": "baseline", "beside": beside} for p in (free, RANDOM))]

    for beside in (QUEST, None):
        (said,) = other_forced(open_run(edit(path, policies=kinds(beside))), look)
        assert said == "random_read 8, tail='free' and quest 8 are no like-for-like pair: forced to read none; newest page."
    assert other_forced(open_run(edit(path, policies=kinds(H2O))), look) == []


def test_several_runs_stand_one_after_the_other(hostile_page):
    reader = Reader(hostile_page.read_text())
    names = [a["id"] for t, a in reader.tags if a.get("class") == "chart"]
    assert len(names) == len(set(names)) > 50
    assert [n.split("-")[0] for n in names] == sorted(n.split("-")[0] for n in names)
    assert {n.split("-")[0] for n in names} == {"run1", "run2"}


def test_the_contents_lead_to_every_section_and_figure(pages, hostile_page):
    for page in [*pages.values(), hostile_page.read_text()]:
        tags = Reader(page).tags
        there = {a["id"] for _, a in tags if "id" in a}
        links = {a["href"][1:] for t, a in tags if t == "a" and "data-of" not in a}
        figures = {a["id"] for t, a in tags if t == "figure"}
        assert links <= there
        assert figures <= links
        labels = {a["aria-labelledby"] for t, a in tags if t in ("figure", "section")}
        assert labels <= there


def test_every_figure_has_its_numbers_and_a_download(composed, pages):
    figures = {b.name: b for s in composed["plain"] for b in s.blocks if isinstance(b, html.Figure)}
    reader = Reader(pages["plain"])
    tables = json.loads(next(text for a, text in reader.scripts if a.get("id") == "kvsim-tables"))
    downloads = {a["data-of"]: a["download"] for t, a in reader.tags if t == "a" and "data-of" in a}
    assert tables.keys() == downloads.keys() == figures.keys()
    assert all(name == f"{of}.csv" for of, name in downloads.items())
    assert all(tables[n]["rows"] == f.data.height and list(tables[n]["columns"]) == f.data.columns for n, f in figures.items())


def test_packed_columns_come_back():
    frame = pl.DataFrame(
        {
            "p": ["b", "a", None, "b"],
            "n": [1, 2, 3, None],
            "x": [0.1234567891, None, math.nan, math.inf],
            "t": [True, None, False, True],
        }
    )
    assert html.packed(frame) == {
        "rows": 4,
        "columns": {
            "p": {"words": ["b", "a", None], "at": [0, 1, 2, 0]},
            "n": [1, 2, 3, None],
            "x": [0.123457, None, None, None],
            "t": [True, None, False, True],
        },
    }


def test_pages_stay_small(pages):
    assert all(len(page.encode()) < 2_000_000 for page in pages.values())


def test_images_beside_the_page(composed, tmp_path, monkeypatch):
    some = [b for s in composed["bare"] for b in s.blocks if isinstance(b, html.Figure) and b.name in ("fate", "resident")]
    monkeypatch.setattr(module, "sections", lambda run, name="", costs=None: [html.Section("Two", blocks=some)])
    path = write_run(tmp_path / "run", policies=(H2O,))
    assert (
        main(
            ["report", str(path), "-o", str(tmp_path / "x.html"), "--png", str(tmp_path / "png"), "--svg", str(tmp_path / "svg")]
        )
        == 0
    )
    pngs, svgs = sorted((tmp_path / "png").iterdir()), sorted((tmp_path / "svg").iterdir())
    assert [p.name for p in pngs] == ["fate.png", "resident.png"]
    assert [s.name for s in svgs] == ["fate.svg", "resident.svg"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5_000 for p in pngs)
    text = svgs[0].read_text()
    assert "Where did the attention mass go?" in text  # an image brings its title and how to read it
    assert "evicted mass is gone" in text


def test_bad_input_leaves_no_page(tmp_path):
    with pytest.raises(BadTrace, match="not a finished run"):
        report(tmp_path / "nothing", tmp_path / "page.html")
    with pytest.raises(WrongUse, match="no run"):
        report([], tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_the_plan_without_rows_is_named(tmp_path):
    path = edit(write_run(tmp_path / "run", policies=(H2O,), layers=(0,)), policies=[{"id": H2O}, {"id": "later()"}])
    table = trust.section(View.of(open_run(path))).blocks[0]
    assert isinstance(table, html.Table)
    assert "Without rows in the tables: later()." in table.notes
    assert [row[0] for row in table.rows] == ["h2o 12"]


def test_budgets_that_differ_by_layer_are_a_range(tmp_path):
    path = write_run(tmp_path / "run", policies=(QUEST, H2O))
    ledger = pl.read_parquet(path / "ledger.parquet").with_columns(asked=pl.when(pl.col("layer") == 3).then(0.25).otherwise(0.5))
    ledger.with_columns(asked_unit=pl.lit("share")).write_parquet(path / "ledger.parquet")
    table = trust.section(View.of(open_run(path))).blocks[0]
    assert isinstance(table, html.Table)
    quest, h2o = table.rows
    assert (quest[2], h2o[5]) == ("25% to 50%", "12")


def test_dense_layers_are_not_taken_for_a_count(tmp_path):
    path = write_run(tmp_path / "run", policies=(QUEST, H2O))
    whole = (pl.col("layer") == 0) & (pl.col("policy") == QUEST)
    pl.read_parquet(path / "heads.parquet").with_columns(dense=whole).write_parquet(path / "heads.parquet")
    table = trust.section(View.of(open_run(path))).blocks[0]
    assert isinstance(table, html.Table)
    assert [row[8] for row in table.rows] == ["layer 0", "none"]
    assert [which(layers) for layers in ([], [0], [0, 1, 2, 5])] == ["none", "layer 0", "layers 0–2, 5"]


def test_spans():
    assert spans([5, 0, 1, 2]) == "0–2, 5"
    assert spans([]) == ""
