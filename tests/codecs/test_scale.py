"""Channel divisors before a grid: the paper's order of operations written out, and sizes."""

from __future__ import annotations

import math

import numpy as np

from kvsim.codecs.minmax import minmax, uniform
from kvsim.codecs.pipeline import pipeline
from kvsim.codecs.scale import channel_divisor
from tests import naive


def channel_scaled(bits):
    return pipeline(scale=channel_divisor(), grid=uniform(bits))


def test_divide_code_each_row_and_multiply_back():
    x = np.random.default_rng(0).standard_normal((1, 6, 5)) * [1, 10, 0.1, 0, 3]
    divisor = [float(np.float16(math.sqrt(max(abs(v) for v in x[0, :, j])))) or 1.0 for j in range(5)]
    want = [np.array(naive.minmax_roundtrip((row / divisor).tolist(), 4)) * divisor for row in x[0]]
    assert np.array_equal(channel_scaled(4).encode(x).values[0], want)


def test_a_loud_channel_spoils_its_row_less():
    """What the divisors are for."""
    x = np.random.default_rng(1).standard_normal((1, 64, 16))
    x[..., 3] *= 50
    quiet = [j for j in range(16) if j != 3]
    plain, scaled = minmax(4, "channels").roundtrip(x), channel_scaled(4).encode(x).values
    assert np.abs(scaled - x)[..., quiet].mean() < np.abs(plain - x)[..., quiet].mean() / 2


def test_sizes():
    coded = channel_scaled(2).encode(np.ones((1, 10, 128)))
    assert coded.bits.tolist() == [[256] * 10]
    assert coded.row_meta.tolist() == [[4] * 10]  # zero and step
    assert coded.group_meta.tolist() == [256]  # a divisor per channel
