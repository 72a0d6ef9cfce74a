"""The levels of least squared error for normal numbers (Lloyd 1982, Max 1960): a grid for rows that were brought to norm 1 and rotated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.pipeline import grouped

Floats = NDArray[np.float64]
ROUNDS, REST = 20_000, 1e-12  # of the fixed point, and when it has come to rest


@dataclass(frozen=True)
class lloyd_max:
    """Every number becomes the nearest level of N(0, 1/d), of two as near the higher. Levels are known without data: nothing is stored."""

    bits: int
    scale_bytes = 0

    def code(self, x: Floats, group: grouped) -> tuple[Floats, int]:
        """[m, rows, d] -> what a reader decodes, same shape."""
        level = levels(self.bits) / math.sqrt(x.shape[-1])
        return level[np.searchsorted((level[1:] + level[:-1]) / 2, x, side="right")], 0


@cache
def levels(bits: int) -> Floats:
    """f64[2**bits], ascending: each is the mean of the normal numbers that are nearer to it than to any other."""
    many = 2**bits
    level = [6 * (i + 0.5) / many - 3 for i in range(many)]
    for _ in range(ROUNDS):
        cut = [-math.inf, *((a + b) / 2 for a, b in pairwise(level)), math.inf]
        new = [_mean(a, b) for a, b in pairwise(cut)]
        moved = max(abs(a - b) for a, b in zip(new, level, strict=True))
        level = new
        if moved < REST:
            break
    return (np.array(level) - level[::-1]) / 2  # the same on both sides of 0


def _mean(low: float, high: float) -> float:
    """Of a normal number between two others."""
    density = [0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (low, high)]
    below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in (low, high)]
    return (density[0] - density[1]) / (below[1] - below[0])
