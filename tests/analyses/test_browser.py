"""Every page of analyses in Chromium with the network off, made from the numbers that are kept: all of its charts are drawn, nothing fails."""

from __future__ import annotations

import pytest

from analyses import page
from analyses.__main__ import questions
from analyses.closed_loop import run
from analyses.question import Question
from kvsim.report.page import report
from tests.browser import browser, severe, until  # noqa: F401  (a fixture)

pytestmark = pytest.mark.browser
EVERY = {q.name: q for q in questions([])}


def written(name, file):
    if name == "closed_loop":  # a report, as its run.py writes it
        report(run.TABLES / "512", file)
    elif isinstance(question := EVERY[name], Question):
        page.write(question, question.kept, file, question.command)
    else:
        question.page(file)


@pytest.mark.parametrize("name", sorted([*EVERY, "closed_loop"]))
def test_a_page_draws_all_and_asks_nobody(browser, name, tmp_path):  # noqa: F811  (the fixture)
    file = tmp_path / f"{name}.html"
    written(name, file)
    browser.get(f"file://{file}#all")
    until(browser, "kvsim.errors.length || Object.keys(kvsim.views).length === kvsim.names.length")
    assert browser.execute_script("return kvsim.errors") == []
    assert (
        browser.execute_script("return kvsim.names.length") == len(browser.find_elements("css selector", ".chart svg.marks")) > 0
    )
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert severe(browser) == []
