"""The page of choices follows from numbers: the least error is named, and two where an interval does not tell them apart."""

from __future__ import annotations

import numpy as np

from analyses.decision.question import BRANCHES, Choice, choices


def choice(one, other, read=None):
    return Choice(BRANCHES[0], "needle/short/x: answer", 8, {"a": np.array(one), "b": np.array(other)}, read or {})


def test_the_least_is_advised():
    made = choice([0.2, 0.2, 0.2], [0.1, 0.1, 0.1])
    assert made.advice == "b"
    assert "0.100" in made.evidence
    assert "a has 2.00 [2.00, 2.00] times" in made.evidence


def test_two_are_named_when_the_interval_reaches_1():
    made = choice([0.2, *np.linspace(0.1, 0.3, 50)], [0.21, *[0.21] * 50])
    assert not made.apart
    assert made.advice == "a or b: 8 contexts do not tell them apart"


def test_who_reads_the_evidence_is_told():
    made = choice([0.1, 0.1], [0.2, 0.2], {"a": np.array([0.0]), "b": np.array([0.7])})
    assert "a 0%, b 70%" in made.evidence


def test_every_branch_is_decided_somewhere():
    assert {c.branch.budget for c in choices()} == {b.budget for b in BRANCHES}
