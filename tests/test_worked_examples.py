"""docs/worked-examples.md is run, block by block, and its text has the numbers that its blocks assert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "worked-examples.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[int, str]]:
    """(line that it starts on, text) of every block of Python."""
    return [(page[: found.start(1)].count("\n"), found[1]) for found in BLOCK.finditer(page)]


def carry_out(page: str, name: str) -> None:
    """Runs the blocks in one namespace; errors name the page's own lines."""
    space: dict[str, object] = {}
    for line, text in blocks(page):
        exec(compile("\n" * line + text, name, "exec"), space)


def test_every_block_runs_and_asserts_something():
    page = PAGE.read_text("utf-8")
    assert all("assert " in text for _, text in blocks(page))
    assert page.count("```") == 2 * len(blocks(page)) > 10  # no block is left out
    carry_out(page, PAGE.name)


@pytest.mark.parametrize("number", ["== (30, 271)", "[1, 3, 5, 9, 10, 11]", "{-1: 1, 23: 6, 39: 1, 63: 6}"])
def test_a_wrong_number_is_found(number):
    page = PAGE.read_text("utf-8")
    assert number in page
    start = page.index("## QEvict: window") if "{" in number else 0
    wrong = page.replace(number, number.replace("1", "2", 1), 1)
    keep = wrong if not start else wrong[:start] + wrong[start : wrong.index("*In the notes* a promoted")]
    with pytest.raises(AssertionError):
        carry_out(keep, "page")
