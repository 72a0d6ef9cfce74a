"""Dot products of a block's queries with the keys that observers hold, in float64: near ties of accumulated scores cannot be decided
again later. Observers that read the captured keys share them: what several hold is multiplied once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.source import Source
from kvsim.kernels.dense import TILE, padded
from kvsim.kernels.product import GRID, product, strips


class Logits:
    """dots f64[Hkv, R, columns], rows r = place in the block * G + g; keys f64[Hkv, columns, d]; column i64[Hkv, T]: that of a position."""

    def __init__(self, source: Source, rows: int):
        lay = source.layer
        self.source = source
        self.q = np.empty((lay.kv_heads, padded(max(rows, lay.group), GRID), lay.key_dim))
        self.column = np.zeros((lay.kv_heads, source.request.total), np.int64)
        self.keys = np.empty((lay.kv_heads, 0, lay.key_dim))
        self.dots = np.empty((lay.kv_heads, self.q.shape[1], 0))
        self.start = self.width = 0

    def gather(self, start: int, count: int, wanted: NDArray[np.bool_]) -> None:
        """The queries of the `count` captured steps from `start` on, and the keys at the positions wanted, bool[Hkv, T]."""
        self.start, self.q[:] = start, 0
        self.width = width = padded(int(wanted.sum(1).max()), TILE)
        if width > self.keys.shape[1]:
            self.keys = np.empty((len(self.keys), width, self.keys.shape[2]))
            self.dots = np.empty((len(self.dots), self.dots.shape[1], width))
        for h, mine in enumerate(wanted):
            pos = np.flatnonzero(mine)
            self.column[h, pos] = np.arange(len(pos))
            self.source.rows("k", h, pos, self.keys[h, : len(pos)])
            self.keys[h, len(pos) : width] = 0
            q = self.source.queries(h, slice(start, start + count))
            self.q[h, : q.shape[0] * q.shape[1]] = q.reshape(-1, q.shape[2])

    def multiply(self, h: int, columns: Sequence[int] | NDArray[np.int64] | None = None) -> None:
        """The products of a kv head, or of the tiles that some columns lie in."""
        starts = range(0, self.width, TILE) if columns is None else sorted({int(x) // TILE * TILE for x in columns})
        for x in starts:
            product(self.q[h], strips(self.keys[h, x : x + TILE].T), self.dots[h, :, x : x + TILE])
