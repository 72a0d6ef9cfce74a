"""Odd input at the edges of kvsim gets one line that names it, and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace as replaced

import numpy as np
import pytest

from kvsim.cli import main
from kvsim.errors import BadTrace, WrongUse
from kvsim.geometry import rope_problem
from kvsim.metrics.run import open_run
from kvsim.policies.language import load_file
from kvsim.replay.run import replay
from kvsim.report.page import report
from kvsim.synth.generate import synthesize


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "one", prompt=40, steps=4, layers=1)


@pytest.fixture
def run(trace, tmp_path):
    return replay(trace, "quest(read=pages(2), page=4)", tmp_path / "run", workers=1).path


@pytest.mark.parametrize(
    "odd",
    [
        {"stride": 0}, {"stride": -1}, {"seed": -1}, {"needles": -1}, {"steps": -1}, {"prompt": 10**12}, {"layers": 40_000}, {"layers": 0},
        {"requests": 0}, {"q_heads": 3, "kv_heads": 2},
    ],
)  # fmt: skip
def test_a_synthetic_trace_that_cannot_be_is_refused_before_it_is_begun(tmp_path, odd):
    with pytest.raises(WrongUse, match=next(iter(odd))):
        synthesize(tmp_path / "t", **odd)
    assert not list(tmp_path.iterdir())


def test_what_was_taken_for_something_else_is_named(trace, run, tmp_path, monkeypatch, capsys):
    """A trace for a run, a run for a trace, a file of policies for one, and a file of one's own that nobody named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    for words, said in {
        f"show {trace.path}": f"a trace, and no run of one; kvsim replay {trace.path} -p POLICY -o RUN",
        f"trace info {run}": f"a run, and no trace; kvsim show {run}",
        f"replay {trace.path} -o out -p policy.toml": "a policy file is written with an @ before it, @policy.toml",
        f"replay {trace.path} -o out -p mine(hold=tokens(9))": "a policy of your own takes --policy-file mine.py",
        "policies mine": "--policy-file mine.py",
        "policies yours": "unknown policy 'yours'",
    }.items():
        assert main(words.split()) in (1, 2)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0-99999999999", "²", "3-1", ""])
def test_lists_of_numbers_have_an_end(text, capsys):
    assert main(["replay", "nowhere", "-p", "full()", "-o", "out", "--steps", text]) == 2
    assert "expected numbers" in capsys.readouterr().err


def test_a_layer_without_decode_steps_is_not_replayed(trace, tmp_path, monkeypatch):
    real = type(trace).supplies
    monkeypatch.setattr(
        type(trace), "supplies", lambda self, r, layer: replaced(real(self, r, layer), steps=np.zeros(0, np.int64))
    )
    with pytest.raises(WrongUse, match="no decode step is captured"):
        replay(trace, "full()", tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage", [lambda b: b[:200], lambda b: b"no table", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], lambda b: b + b]
)
def test_a_table_that_was_altered_is_not_believed(run, damage):
    file = run / "heads.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadTrace, match=r"heads\.parquet"):
        open_run(run)


def test_run_json_cannot_name_files_elsewhere(run):
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"tables": {"../x": {"bytes": 1, "sha256": ""}}}))
    with pytest.raises(BadTrace, match="x"):
        open_run(run)


def test_a_page_is_not_written_over_a_folder(run, tmp_path):
    (tmp_path / "pages").mkdir()
    with pytest.raises(WrongUse, match="is a folder"):
        report(run, tmp_path / "pages")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pages", "run"]


def test_a_policy_file_cannot_end_kvsim(tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text("raise SystemExit(0)")
    with pytest.raises(WrongUse, match="SystemExit"):
        load_file(file)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (None, None),
        ('{"theta": 1e4, "rotary_dim": 8}', None),
        ('{"kind": "x"}', "theta"),
        ('{"theta": "x", "rotary_dim": 8}', "theta"),
        ('{"theta": 1e4, "rotary_dim": 7}', "rotary_dim"),
        ('{"theta": 1e4, "rotary_dim": 8, "layout": "interleaved"}', "interleaved"),
        ('{"theta": 1e4, "rotary_dim": 8, "scaling": {"factor": 8}}', "scaling"),
    ],
)
def test_a_rope_that_cannot_be_applied_again_is_told(rope, said):
    problem = rope_problem(rope)
    assert (problem is None) == (said is None)
    assert said is None or said in problem
