"""Allocations against brute force, the best uniform choice and the dual bound."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.advise.allocate import allocate, bound, uniform


def menu(rng, units, choices):
    """Costs rise; losses fall, or (every other time) do as they like."""
    cost = np.cumsum(rng.integers(1, 9, (units, choices)), 1).astype(float)
    loss = np.sort(rng.integers(0, 12, (units, choices)), 1)[:, ::-1].astype(float)
    if rng.random() < 0.5:
        loss = rng.permuted(loss, axis=1)
    return cost, loss


def brute(cost, loss, limit):
    """The least cost of all combinations within the limit."""
    each = range(cost.shape[1])
    sums = (
        (sum(c[i] for c, i in zip(cost, x, strict=True)), sum(c[i] for c, i in zip(loss, x, strict=True)))
        for x in product(each, repeat=len(cost))
    )
    return min((c for c, lost in sums if lost <= limit), default=None)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_between_the_bound_and_one_change_above_the_best(seed):
    rng = np.random.default_rng(seed)
    cost, loss = menu(rng, int(rng.integers(1, 6)), int(rng.integers(1, 5)))
    limit = float(rng.integers(0, 30))
    best, found = brute(cost, loss, limit), allocate(cost, loss, limit)
    assert (best is None) == (found is None)
    if found is None:
        return
    at = np.arange(len(cost))
    assert found.loss == loss[at, found.choice].sum() <= limit
    assert found.cost == cost[at, found.choice].sum() >= best
    assert found.bound <= best + 1e-9
    assert found.cost - found.bound <= np.ptp(cost, axis=1).max() + 1e-9
    same = uniform(cost, loss, limit)
    assert same is None or found.cost <= cost[:, same].sum()


def test_mostly_it_is_the_best():
    rng = np.random.default_rng(0)
    hit = []
    for _ in range(200):
        cost, loss = menu(rng, 4, 4)
        limit = 0.4 * loss.max(1).sum()
        if (found := allocate(cost, loss, limit)) is not None:
            hit.append(found.cost == brute(cost, loss, limit))
    assert np.mean(hit) > 0.8


def test_units_that_are_alike_do_not_all_change():
    """One price separates nobody: as many change as the limit needs, and no more."""
    cost, loss = np.tile([1.0, 2.0], (10, 1)), np.tile([1.0, 0.0], (10, 1))
    found = allocate(cost, loss, 6.5)
    assert found is not None
    assert (found.cost, found.loss, found.bound) == (14.0, 6.0, pytest.approx(13.5))


def test_a_dear_choice_that_loses_more_is_never_taken():
    cost, loss = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), np.array([[5.0, 2.0, 4.0], [5.0, 2.0, 4.0]])
    found = allocate(cost, loss, 4)
    assert found is not None
    assert found.choice.tolist() == [1, 1]
    assert allocate(cost, loss, 3.9) is None
    assert uniform(cost, loss, 8) == 1


def test_what_is_not_on_offer_is_not_taken():
    cost, loss = np.array([[1.0, np.inf, 9.0]]), np.array([[5.0, 0.0, 1.0]])
    found = allocate(cost, loss, 2)
    assert found is not None
    assert found.choice.tolist() == [2]
    assert allocate(cost, loss, 0.5) is None


def test_the_bound_falls_as_more_may_be_lost():
    cost, loss = menu(np.random.default_rng(3), 6, 5)
    least = loss.min(1).sum()
    bounds = [bound(cost, loss, least + x) for x in range(0, 20, 2)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_where_single_changes_stop_short_the_same_choice_for_all_is_taken():
    cost = np.array([[3.0, 6.0, 12.0], [2.0, 3.0, 9.0], [1.0, 6.0, 8.0]])
    loss = np.array([[7.0, 0.0, 0.0], [10.0, 8.0, 3.0], [8.0, 4.0, 3.0]])
    found = allocate(cost, loss, 13.5)
    assert found is not None
    assert found.choice.tolist() == [1, 1, 1]
    assert found.cost == cost[:, uniform(cost, loss, 13.5)].sum() == 15
