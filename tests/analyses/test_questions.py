"""Every question: its README is what its numbers say, its numbers rest on enough contexts, and a small part of them is measured again."""

from __future__ import annotations

import html

import polars as pl
import pytest

from analyses import page, words
from analyses.__main__ import questions
from analyses.contexts import small
from analyses.figures import judge
from analyses.question import Numbers, Question
from kvsim.metrics.interval import FEWEST

EVERY = {q.name: q for q in questions([]) if isinstance(q, Question)}


@pytest.fixture(params=sorted(EVERY))
def question(request):
    return EVERY[request.param]


def test_the_readme_is_written_from_the_numbers(question):
    assert words.block(question, question.kept.figures()) in (question.folder / "README.md").read_text("utf-8")


def test_every_verdict_rests_on_enough_contexts_of_the_study(question):
    for claim in question.claims:
        found = judge(claim, question.kept.figures())
        assert found, claim.notes
        for v in found:
            assert v.contexts >= FEWEST
            assert v.cell.startswith(question.cells)
            assert v.low <= v.value <= v.high


def test_the_small_part_is_measured_again(question):
    again = Numbers.measured(question, [small()])
    assert again.table.height > 0
    assert question.kept.moved(again) == []


def test_the_page_draws_all_and_says_what_it_rests_on(question, tmp_path):
    measured = set(question.kept.table["figure"])
    for chart in question.charts:
        assert set(chart.figures) <= measured
        assert "ull attention" in chart.how  # drawn, or named as absent
        lines = question.kept.table.filter(pl.col("figure").is_in(chart.figures))["line"].unique()
        assert "racle" in chart.how or lines.str.starts_with("oracle").any(), chart.name  # the same
    page.write(question, question.kept, tmp_path / "page.html", question.command)
    told = (tmp_path / "page.html").read_text("utf-8")
    for f in question.kept.figures():
        assert f'<th scope="row">{f.cell}</th><td>{len(f.contexts)}</td>' in told
    for word in (question.command, "open loop", "SmolLM2-135M-Instruct", *(c.title for c in question.charts)):
        assert html.escape(word) in told
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in told  # nothing is fetched
