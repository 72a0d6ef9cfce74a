"""Two runs beside each other as a page: what got worse is said first, and drawn as what it is."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.cli import main
from kvsim.metrics.compare import MEASURES, SCHEMA, compare
from kvsim.metrics.run import open_run
from kvsim.report.charts.comparison import RATIOS, SHARES, paired_differences, verdict
from tests.report.runs import H2O, QUEST, write_run


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Before and after: the same trace, other numbers."""
    root = tmp_path_factory.mktemp("pair")
    return [write_run(root / name, contexts=9, policies=(QUEST, H2O), seed=seed) for name, seed in (("before", 0), ("after", 5))]


def row(measure, before, after, low=None, high=None, worse=False):
    return pl.DataFrame([("p", "p", measure, 9, before, after, after - before, low, high, worse)], SCHEMA, orient="row")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (row("rel_l2", 0.2, 0.1, -0.12, -0.08), "better"),
        (row("rel_l2", 0.2, 0.1, -0.12, 0.01), "no change that counts"),  # not sure
        (row("rel_l2", 0.2, 0.1), "better"),  # few contexts: the difference alone
        (row("rel_l2", 0.2, 0.3, 0.05, 0.15, worse=True), "worse"),
        (row("far_recall", 0.8, 0.9, 0.05, 0.15), "better"),
        (row("far_recall", 0.8, 0.8001, 0.00005, 0.00015), "no change that counts"),  # below the tolerance
        (row("read_bytes", 100, 100), "no change that counts"),
    ],
)
def test_a_verdict_is_about_the_better_side_of_a_measure(found, said):
    assert found.select(verdict(1e-3)).item() == said


def test_every_measure_of_compare_has_a_panel(pair):
    assert {*SHARES, *RATIOS} == set(MEASURES)
    found = compare(*map(open_run, pair)).with_columns(pair=pl.col("first"))
    spec = paired_differences(found, [QUEST, H2O], 1e-3).to_dict()
    assert len(spec["concat"]) == len(MEASURES)
    assert len(spec["description"]) > 30


def test_the_page_says_what_got_worse_and_the_gate_fails(pair, tmp_path, capsys):
    out = tmp_path / "page.html"
    code = main(["compare", *map(str, pair), "-o", str(out), "--gate"])
    worse = capsys.readouterr().out.count("WORSE")
    assert code == (1 if worse else 0)
    page = out.read_text()
    assert f"{worse} of 12 measures got worse" in page
    assert f"exits with {code}" in page
    assert "before against after: what changed" in page
    assert page.count("<script>") == 2


def test_the_same_run_twice_has_no_difference(pair, tmp_path):
    out = tmp_path / "page.html"
    assert main(["compare", str(pair[0]), str(pair[0]), "-o", str(out), "--gate"]) == 0
    assert "0 of 12 measures got worse: none. kvsim compare --gate exits with 0." in out.read_text()
