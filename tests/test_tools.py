"""The scripts of tools/ that decide something."""

from __future__ import annotations

from typing import Any

import pytest

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
