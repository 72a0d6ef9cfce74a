"""The scripts of tools/ that decide something."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import history
from tools.cases import policies_used, unbuilt
from tools.changelog import main as assemble

BOOK: list[dict[str, Any]] = [
    {"expect": "tables", "policy": "full() >> quest(read=exact(r=5))"},
    {"expect": "tables", "policy": ["snapkv(hold=tokens(4))", "full()"]},
    {"expect": "refuse", "policy": "full() >> qest(read=tokens(32))"},
]


def test_policies_are_those_of_cases_that_expect_tables():
    assert policies_used(BOOK) == {"full", "quest", "exact", "snapkv", "tokens"}


@pytest.mark.parametrize(
    ("expect", "code", "line", "is_unbuilt"),
    [
        ("tables", 2, "kvsim: unknown unit, rule or index 'shards', did you mean 'share'?", True),
        ("tables", 2, "quest: unknown parameter 'private' of quest", True),
        ("tables", 1, "unknown rule 'exact'", False),
        ("tables", 2, "h2o needs prefill_mass", False),
        ("refuse", 2, "unknown policy 'snapkv': one of full, quest", True),
        ("refuse", 2, "unknown policy 'qest', did you mean 'quest'?", False),
        ("refuse", 2, "unknown parameter 'pages' of quest", False),
    ],
)
def test_a_case_is_not_yet_built_only_for_want_of_a_word(expect, code, line, is_unbuilt):
    assert unbuilt({"expect": expect}, code, line, policies_used(BOOK)) is is_unbuilt


def test_fragments_become_a_section_and_leave(tmp_path):
    changes = tmp_path / "changes"
    changes.mkdir()
    (changes / "README.md").write_text("how")
    (changes / "one.fixed.md").write_text("One\nthing.\n")
    assemble("0.1.0", tmp_path)
    (changes / "two.added.md").write_text("Two.")
    assemble("0.2.0", tmp_path)
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## 0.2.0\n\n### Added\n\n* Two.\n\n## 0.1.0\n\n### Fixed\n\n* One thing.\n"
    )
    assert [p.name for p in changes.iterdir()] == ["README.md"]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Two machines; the first has an older run, too."""
    runs = [("aaaaaaaaa", "old, 2 cores", 3.0), ("bbbbbbbbb", "new, 2 cores", 3.5), ("ccccccccc", "old, 2 cores", 4.25)]
    content = [
        {
            "commit": c,
            "machine": m,
            "date": "2026-12-01",
            "gates": {"truth": {"times numpy": [x, 4], "nobody asked": [0.5, None]}},
        }
        for c, m, x in runs
    ]
    for name, text in (
        ("FILE", json.dumps(content)),
        ("PAGE", f"# Races\n\n{history.BEGIN}\nold\n{history.END}\n\nWords.\n"),
        ("PICTURE", ""),
    ):
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(history, name, path.with_suffix(".svg") if name == "PICTURE" else path)
    return content


def test_the_page_of_races_has_the_newest_run_of_each_machine(told):
    history.publish()
    page = history.PAGE.read_text()
    assert "| `truth` | times numpy | 4 | 4.25 | 3.5 (missed) |" in page
    assert "| `truth` | nobody asked |  | 0.5 | 0.5 |" in page
    assert "ccccccccc" in page
    assert "aaaaaaaaa" not in page
    assert page.startswith("# Races")
    assert page.endswith("\n\nWords.\n")
    assert "old\n" not in page
    assert history.PICTURE.read_text().startswith("<svg")


def test_the_chart_of_races_has_what_was_asked(told):
    rows = history.rows(told)
    assert rows["part"].to_list() == [3 / 4, 3.5 / 4, 4.25 / 4]
    assert {*rows["gate"]} == {"truth: times numpy"}


def test_a_later_run_of_a_commit_replaces_its_races(told, monkeypatch):
    monkeypatch.setattr(history, "_commit", lambda: "ccccccccc")
    history.keep("truth", {"times numpy": (5.0, 4)}, "old, 2 cores")
    history.keep("h2o", {"times numpy": (9.0, None)}, "old, 2 cores")
    found = json.loads(history.FILE.read_text())
    assert [e["commit"] for e in found] == ["aaaaaaaaa", "bbbbbbbbb", "ccccccccc"]
    assert found[-1]["gates"] == {"truth": {"times numpy": [5.0, 4]}, "h2o": {"times numpy": [9.0, None]}}
