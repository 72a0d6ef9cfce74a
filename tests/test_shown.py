"""What pages say that commands print is what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.shown import ROOT, STEP, Step, alike, inside, run, steps

PAGES = {
    "docs/cost.md": 4,
    "docs/policies.md": 4,
    "docs/what-if.md": 23,
}  # and how many commands each shows, so that none is passed over


@pytest.mark.parametrize("page", PAGES)
def test_the_docs_print_what_the_commands_print(page, tmp_path):
    shown = [s for s in steps((ROOT / page).read_text()) if s.said is not None]
    assert len(shown) == PAGES[page]
    with inside(tmp_path, "traces", "kvsim"):
        for words, said, _ in shown:
            assert alike(printed := run(words), said), f"kvsim {' '.join(words)}\n{printed}"


def test_the_readme_runs_in_an_empty_folder(tmp_path, capsys):
    ran = steps((ROOT / "README.md").read_text())
    assert [s.words[0] for s in ran if s.words] == ["demo", "replay", "show", "report", "show"]
    with inside(tmp_path):
        for words, said, code in ran:
            if code:
                exec(code, {})
                assert "evidence_recall" in capsys.readouterr().out
            else:
                printed = run(words)
                assert said is None or alike(printed, said), printed
        assert {"demo.html", "first.html"} <= {p.name for p in Path().iterdir()}


def test_the_chinese_readme_runs_the_same():
    assert steps((ROOT / "README.zh-CN.md").read_text()) == steps((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/tutorial.md"])
def test_what_is_not_run_is_how_to_install(page):
    rest = STEP.sub("", (ROOT / page).read_text())
    assert "```" not in rest
    assert [line for line in rest.splitlines() if line.startswith("    ") and not line.startswith("    pip install ")] == []


def test_commands_of_a_page_are_found_in_order():
    text = (
        'Text.\n\n    $ kvsim one "a b" \\\n        -p two\n    said 1\n    said 2\n    kvsim three -x\n    kvsim four\n\n'
        "```python\nprint(1)\n```\n\n    pip install kvsim\n\n    $ kvsim five\n\nMore.\n"
    )
    assert steps(text) == [
        Step(["one", "a b", "-p", "two"], "said 1\nsaid 2\n"),
        Step(["three", "-x"]),
        Step(["four"]),
        Step([], code="print(1)\n"),
        Step(["five"], ""),
    ]


def test_numbers_may_differ_in_the_last_digit_or_by_a_part_and_nothing_else():
    assert alike("a 0.123 of 7", "a 0.124  of 7")
    assert not alike("a 0.123", "a 0.125")
    assert not alike("a 0.123", "b 0.123")
    assert not alike("a 12", "a 10")
    assert not alike("a 1 2", "a 1")
    assert alike("717.7 KiB", "710 KiB", within=0.02)
    assert not alike("717.7 KiB", "690.1 KiB", within=0.02)
    assert alike("mine@0123456789ab 5", "mine@ba9876543210 5")


def test_work_is_done_in_a_folder_of_its_own(tmp_path):
    before = Path.cwd()
    with inside(tmp_path, "traces"):
        assert [p.name for p in Path().iterdir()] == ["traces"]
    assert Path.cwd() == before
