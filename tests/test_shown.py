"""What pages say that commands print is what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.shown import ROOT, alike, checkout, run, shown

PAGES = {"docs/cost.md": 4, "docs/what-if.md": 22}  # and how many commands each shows, so that none is passed over


@pytest.mark.parametrize("page", PAGES)
def test_the_docs_print_what_the_commands_print(page, tmp_path):
    commands = shown((ROOT / page).read_text())
    assert len(commands) == PAGES[page]
    with checkout(tmp_path):
        for words, said in commands:
            assert alike(printed := run(words), said), f"kvsim {' '.join(words)}\n{printed}"


def test_a_command_may_go_on_after_a_backslash():
    text = 'Text.\n\n    $ kvsim one "a b" \\\n        -p two\n    said 1\n    said 2\n    $ kvsim three\n\nMore.\n'
    assert shown(text) == [(["one", "a b", "-p", "two"], "said 1\nsaid 2\n"), (["three"], "")]


def test_numbers_may_differ_in_the_last_digit_and_nothing_else():
    assert alike("a 0.123 of 7", "a 0.124  of 7")
    assert not alike("a 0.123", "a 0.125")
    assert not alike("a 0.123", "b 0.123")
    assert not alike("a 12", "a 1")
    assert not alike("a 1 2", "a 1")


def test_work_is_done_in_a_folder_of_its_own(tmp_path):
    before = Path.cwd()
    with checkout(tmp_path):
        assert sorted(p.name for p in Path().iterdir()) == ["kvsim", "traces"]
    assert Path.cwd() == before
