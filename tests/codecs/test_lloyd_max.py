"""Levels for normal numbers: Max's table, the two conditions of an optimum, a twin without integrals."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from kvsim.codecs.lloyd_max import levels, lloyd_max
from kvsim.codecs.pipeline import grouped
from tests import naive


def test_the_table_of_max():
    """IRE Trans. Inf. Theory 6 (1960), table I: the positive levels for 2, 4 and 8 of them."""
    for bits, table in ((1, [0.7980]), (2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])):
        assert levels(bits)[2**bits // 2 :] == pytest.approx(table, abs=5e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_level_is_the_mean_of_what_is_nearest_to_it(bits):
    level, normal = levels(bits), NormalDist()
    assert np.array_equal(level, -level[::-1])
    cut = [-math.inf, *((level[1:] + level[:-1]) / 2), math.inf]
    for x, low, high in zip(level, cut, cut[1:], strict=False):
        density = [0.0 if math.isinf(c) else normal.pdf(c) for c in (low, high)]
        part = (1.0 if high == math.inf else normal.cdf(high)) - (0.0 if low == -math.inf else normal.cdf(low))
        assert x == pytest.approx((density[0] - density[1]) / part, abs=1e-9)


@pytest.mark.parametrize("bits", [2, 3])
def test_like_k_means_on_the_quantiles(bits):
    assert levels(bits) == pytest.approx(naive.normal_levels(bits, 20_000), abs=2e-3)


def test_the_error_on_normal_numbers_is_the_published_one():
    """Max's table again: .1175 of the variance at 4 levels, .03454 at 8."""
    x = np.random.default_rng(0).standard_normal((1, 400, 256)) / 16
    for bits, part in ((2, 0.1175), (3, 0.03454)):
        got, more = lloyd_max(bits).code(x, grouped())
        assert more == 0
        assert ((got - x) ** 2).mean() / (x * x).mean() == pytest.approx(part, rel=0.02)


def test_half_way_is_the_higher_level():
    got, _ = lloyd_max(1).code(np.zeros((1, 1, 4)), grouped())
    assert (got > 0).all()
