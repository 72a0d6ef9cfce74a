"""For a moment, what `make fuzz` does for minutes; and it finds what is broken on purpose."""

from __future__ import annotations

from importlib import import_module
from itertools import cycle
from random import Random

import pytest
from polars.exceptions import PolarsError

from kvsim.errors import LONGEST, KvsimError
from tools.fuzz.__main__ import main
from tools.fuzz.surface import Finding
from tools.fuzz.surfaces import SURFACES

CASES = {
    "damaged-trace": 25,
    "forged-trace": 25,
    "run": 40,
    "profile": 150,
    "cost-file": 100,
    "calibration": 60,
    "kit": 20,
    "numbers": 25,
}

TURNS = cycle(("full()", "tova(hold=tokens(1))"))


def attempts(name, folder, cases):
    surface = SURFACES[name]
    (folder / "good").mkdir()
    good = surface.prepare(folder / "good")
    for n in range(cases):
        place = folder / str(n)
        place.mkdir()
        yield surface.attempt, Random(f"{name} 0 {n}"), good, place


def refusals(name, folder, cases):
    """What kvsim said, each a line."""
    said = []
    for attempt, *args in attempts(name, folder, cases):
        try:
            attempt(*args)
        except KvsimError as e:
            said.append(str(e))
    return said


@pytest.mark.parametrize("name", [s for s in SURFACES if s != "labels"])
def test_odd_input_is_refused_or_read_as_what_it_is(name, tmp_path):
    said = refusals(name, tmp_path, CASES.get(name, 300))
    assert said or name.endswith("trace")  # those ask several things of each case, and see to refusals themselves
    assert all(len(line) < 2 * LONGEST and "\n" not in line for line in said)


@pytest.mark.parametrize(
    ("name", "where", "broken", "by"),
    [
        (
            "policy",
            "kvsim.policies.language",
            "canonical",
            lambda p: next(TURNS),
        ),
        ("damaged-trace", "kvsim.trace.check", "check_trace", lambda p: iter(())),
        ("run", "kvsim.metrics.run", "_check_files", lambda *a: None),
        ("forged-trace", "kvsim.trace.folder", "_check_file", lambda *a: None),
    ],
)
def test_what_is_broken_is_found(name, where, broken, by, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module(where), broken, by)
    with pytest.raises((Finding, PolarsError)):
        refusals(name, tmp_path, 60)


def test_the_watcher_counts(capfd):
    assert main(["policy", "--cases", "50", "--minutes", "2", "--seed", "0"]) == 0
    assert "50 cases" in capfd.readouterr().out
