"""What a running model answered stands beside the method that it ran, also when a replay bills its budget a little otherwise today."""

from __future__ import annotations

import re

from analyses.contexts import identity
from analyses.frontier.live import NEAR, labels, policies
from analyses.frontier.question import QUESTION
from analyses.frontier.table import _live

KEPT = QUESTION.kept


def moved(policy, by):
    return re.sub(r"share\(([\d.]+)", lambda m: f"share({round(float(m[1]) + by, 3)}", identity(policy))


def test_a_budget_that_moved_a_little_is_the_same_method():
    ran = {moved(e, 0.004): label for e, label in policies(KEPT).items()}
    assert labels(KEPT, ran) == ran


def test_another_budget_is_not():
    quest = next(e for e, label in policies(KEPT).items() if label == ("quest", "25%"))
    assert labels(KEPT, [moved(quest, 2 * NEAR), "full()"]) == {}


def test_every_method_that_can_run_in_a_model_has_an_answer():
    assert set(_live()[0]) == set(policies(KEPT).values())
