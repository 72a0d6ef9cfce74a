"""The page of choices follows from numbers: who loses least of what decides is named, and two where an interval does not tell them apart."""

from __future__ import annotations

import numpy as np

from analyses.decision.question import BRANCHES, Choice, choices


def choice(one, other, read=None):
    return Choice(BRANCHES[0], "needle/short/x: answer", 8, {"a": np.array(one), "b": np.array(other)}, read or {})


def test_without_evidence_the_least_error_is_advised():
    made = choice([0.2, 0.2, 0.2], [0.1, 0.1, 0.1])
    assert made.advice == "b"
    assert "output error: b 0.100 [0.100, 0.100]; a 0.200" in made.evidence


def test_two_are_named_when_the_interval_of_their_difference_reaches_0():
    made = choice([0.2, *np.linspace(0.1, 0.3, 50)], [0.21, *[0.21] * 50])
    assert not made.apart
    assert made.advice == "a or b: 8 contexts do not tell them apart"


def test_where_there_is_evidence_who_reads_it_is_advised_whatever_the_error():
    made = choice([0.1, 0.1, 0.1], [0.2, 0.2, 0.2], {"a": np.array([0.0, 0.0, 0.1]), "b": np.array([0.7, 0.6, 0.8])})
    assert made.advice == "b"
    assert "attention on the evidence that is read: b 70%" in made.evidence
    assert "Output error: b 0.200, a 0.100" in made.evidence


def test_where_nobody_finds_the_evidence_nobody_is_advised():
    made = choice([0.1] * 3, [0.2] * 3, {"a": np.array([0.0] * 3), "b": np.array([0.03] * 3)})
    assert made.advice.startswith("a larger budget")
    assert "b reads most" in made.advice


def test_who_reads_it_all_is_told_from_who_does_not():
    """Nothing is divided by what the best one misses."""
    made = choice([0.3] * 3, [0.2] * 3, {"a": np.array([1.0] * 3), "b": np.array([0.5] * 3)})
    assert made.apart
    assert made.order == ["a", "b"]


def test_every_branch_is_decided_somewhere():
    assert {c.branch.budget for c in choices()} == {b.budget for b in BRANCHES}
