"""CAOTE: the error of one eviction, exactly; and what that means for who stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim import check_policy, parse
from kvsim.policies.keep.caote import error_without
from tests.engine.lanes import lane, placement, run


def brute(a, v):
    """The output with and without each token, weights renormalised."""
    out = a @ v
    moved = []
    for j in range(len(a)):
        rest = np.delete(a, j)
        moved.append(np.linalg.norm(rest / rest.sum() @ np.delete(v, j, 0) - out))
    return np.array(moved)


def test_the_error_of_one_eviction_is_exact():
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        n, d = rng.integers(2, 24), rng.integers(1, 9)
        a = rng.dirichlet(np.full(n, rng.choice([0.2, 1.0, 5.0])))
        v = rng.standard_normal((n, d)) * rng.choice([0.1, 1.0, 30.0])
        assert error_without(a[None], v[None])[0] == pytest.approx(brute(a, v), rel=2e-8, abs=1e-12)


def test_the_papers_point():
    """The token of least attention is not the one that is missed least: its value lies far from all others."""
    a, v = np.array([[0.5, 0.3, 0.15, 0.05]]), np.array([[(1.0, 0), (1, 0.2), (0.9, 0), (-4, 3)]])
    found = error_without(a, v)[0]
    assert found == pytest.approx([0.3381, 0.1137, 0.0471, 0.2893], abs=1e-4)
    assert found.argmin() == 2 != a.argmin()


def test_scores_need_not_sum_to_one_and_nothing_is_worth_nothing():
    a, v = np.array([[2.0, 1.0, 1.0]]), np.random.default_rng(1).standard_normal((1, 3, 4))
    assert np.array_equal(error_without(a, v), error_without(a * 8, v))
    assert np.array_equal(error_without(np.zeros((1, 3)), v), np.zeros((1, 3)))
    assert error_without(np.array([[0.0, 3.0]]), v[:, :2])[0].tolist() == [0.0, np.inf]


@pytest.mark.parametrize("base", ["h2o", "tova", "snapkv"])
def test_it_keeps_the_laws(base):
    hold = 40 if base == "snapkv" else 24
    assert check_policy(parse(f"caote(hold=tokens({hold}), base='{base}')")) == []


def test_a_value_far_from_all_others_stays():
    source = lane(prompt=40, steps=6)
    values = np.array(source.v)
    values[:, 11] = 1000.0
    far = replace(source, v=values)
    tables = run(far, "caote(hold=tokens(8), base='tova')")
    assert (placement(far, tables["tiers"])[:, :, 11] > 0).all()
    assert (placement(far, tables["tiers"])[:, :, 12] == 0).any()


def test_every_number_of_a_value_counts_however_few_tokens_are_held():
    source = lane(prompt=24, steps=6, value_dim=40)
    values = np.array(source.v)
    values[:, 11, 39] = 1000.0
    far = replace(source, v=values)
    tables = run(far, "caote(hold=tokens(8), base='tova')")
    assert (placement(far, tables["tiers"])[:, :, 11] > 0).all()
